"""Schemathesis makes requests of what /openapi.json says, right ones and wrong ones, and finds no fault."""

import os
import subprocess

import pytest

from support.serving import served
from tinygpt import LLM
from tinygpt.text.chat_template import ChatTemplate

COMMAND = os.environ.get("SCHEMATHESIS")  # it has dependencies of its own, so an environment of its own
SECONDS = os.environ.get("SCHEMATHESIS_SECONDS", "60")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SETTINGS = "[output.sanitization]\nenabled = false\n"
# What JSON Schema cannot say: prompt and max_tokens together, best_of and n, as many texts here as there, whether a
# text is a grammar, what the queue has room for.
COMPUTING = """[[operations]]
include-path = "{}"
checks.positive_data_acceptance.expected-statuses = [200, 400, 404, 429]
"""


@pytest.mark.skipif(not COMMAND, reason="SCHEMATHESIS names no command to run")
@pytest.mark.parametrize("keys", [(), ("a-key",)], ids=["no key", "key"])
def test_nothing_is_found(tmp_path, keys):
    settings = tmp_path / "schemathesis.toml"
    with (
        LLM("demo", max_num_seqs=8, max_queue=64, max_model_len=64, split_special_tokens=True) as llm,
        served(llm, api_keys=keys, chat_template=ChatTemplate(TEMPLATE, {})) as server,
    ):
        computing = [
            COMPUTING.format(route.path)
            for route in server.app.routes
            if "POST" in route.methods and "tokenize" not in route.path
        ]
        settings.write_text(SETTINGS + "".join(computing))
        address = f"http://127.0.0.1:{server.port}/openapi.json"
        command = [COMMAND, "--config-file", str(settings), "run", address, "--checks", "all", "--seed", "1"]
        command += ["--max-time", SECONDS, *(f"--header=Authorization: Bearer {key}" for key in keys)]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:]
