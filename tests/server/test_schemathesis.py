"""Schemathesis makes requests of what /openapi.json says, right ones and wrong ones, and finds no fault."""

import os
import subprocess

import pytest

from support.serving import served
from tinygpt import LLM
from tinygpt.text.chat_template import ChatTemplate

COMMAND = os.environ.get("SCHEMATHESIS")  # it has dependencies of its own, so an environment of its own
SECONDS = os.environ.get("SCHEMATHESIS_SECONDS", "60")
# What JSON Schema cannot say: prompt and max_tokens together, best_of and n, as many texts here as there, whether a
# text is a grammar, what the queue has room for.
COMPUTING = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/generate",
    "/v1/embeddings",
    "/v1/score",
    "/classify",
    "/lens",
    "/score_continuations",
)
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SETTINGS = "[output.sanitization]\nenabled = false\n" + "".join(
    f'[[operations]]\ninclude-path = "{path}"\n'
    "checks.positive_data_acceptance.expected-statuses = [200, 400, 404, 429]\n"
    for path in COMPUTING
)


@pytest.mark.skipif(not COMMAND, reason="SCHEMATHESIS names no command to run")
@pytest.mark.parametrize("keys", [(), ("a-key",)], ids=["no key", "key"])
def test_nothing_is_found(tmp_path, keys):
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(SETTINGS)
    with (
        LLM("demo", max_num_seqs=8, max_queue=64, max_model_len=64, split_special_tokens=True) as llm,
        served(llm, api_keys=keys, chat_template=ChatTemplate(TEMPLATE, {})) as server,
    ):
        address = f"http://127.0.0.1:{server.port}/openapi.json"
        command = [COMMAND, "--config-file", str(settings), "run", address, "--checks", "all", "--seed", "1"]
        command += ["--max-time", SECONDS, *(f"--header=Authorization: Bearer {key}" for key in keys)]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:]
