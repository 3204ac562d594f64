"""`tinygpt serve`: flags, and refusals before the model is loaded: one sentence and exit code 2."""

import json
import logging
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

from support.gate import noting
from support.paths import ROOT
from support.processes import Result
from support.tiny_checkpoint import write_checkpoint
from tinygpt import LLM, ControlVector
from tinygpt.engine.input_processor import InputProcessor
from tinygpt.server.config import ServerConfig
from tinygpt.text.chat import PlainTemplate


@pytest.fixture
def run(capsys):
    """The command writes its log to this test's stderr, which is gone when others log."""
    logs = [logging.getLogger(name) for name in ("tinygpt.server", "uvicorn", "asyncio")]
    before = [(log.handlers, log.level, log.propagate) for log in logs]
    yield lambda arguments: Result(capsys, "serve", arguments)
    for log, kept in zip(logs, before, strict=True):
        log.handlers, log.level, log.propagate = kept


@pytest.fixture
def started(monkeypatch):
    """What would have been served, and where."""
    found = []

    def serve(app, listener, drain_seconds, on_start):
        on_start()
        found.append((app.state.api, listener.getsockname(), drain_seconds))

    monkeypatch.setattr("tinygpt.server.app.serve", serve)
    return found


# Requests of many kinds after the first ones; prints the kernels that they load or compile.
KINDS = """
import argparse
from tinygpt import LLM, Edit
from tinygpt.cli.serve import _try_first
from tinygpt.kernels.kernel_cache import KernelCache
names, load = [], KernelCache.load
KernelCache.load = lambda self, name, rebuild: (names.append(name), load(self, name, rebuild))[1]
llm = LLM("demo", max_num_seqs=4, dtype=DTYPE)
_try_first(llm, argparse.Namespace(device="cpu", look=True))
drawn = {"temperature": 1.0, "max_tokens": 3, "seed": 0}
for fields in (
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, {"guided_regex": "a+"}, {"n": 3, **drawn},
    {"best_of": 3, **drawn}, {"dry_multiplier": 0.8}, {"typical_p": 0.9, **drawn}, {"min_p": 0.1, **drawn},
    {"xtc_probability": 0.5, **drawn}, {"logit_bias": {5: 2.0}}, {"repetition_penalty": 1.2}, {"bad_words_ids": [[5]]},
    {"logprobs": 3, "logprobs_mode": "processed", **drawn}, {"capture": ["q", "attn_scores"]},
    {"edits": [Edit("resid_post", keep=0.5)]},
):
    llm.generate([[5] * 300, [7]], **{"max_tokens": 3, **fields})
llm.embed([[1, 2]])
llm.score([1, 2], [[3, 4], [5]])
print(names)
"""


def expect_sentence(result, *parts: str) -> None:
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("tinygpt: error: ")
    assert result.err.count("\n") == 1
    assert all(part in result.err for part in parts)


def test_a_taken_port(run, monkeypatch):
    monkeypatch.setattr("tinygpt.cli.serve.load_llm", None)  # nothing is loaded
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expect_sentence(run(f"--port {port}"), f"127.0.0.1:{port}", "in use", "--port")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("--host 192.0.2.1", "192.0.2.1:8000 cannot be listened on"),
        ("--host no.such.host.invalid", "a --host of this machine"),
        ("--host a\u202eb", "cannot be listened on (encoding of hostname failed)"),
    ],
)
def test_what_cannot_be_served(run, arguments, part):
    expect_sentence(run(arguments), part)


@pytest.mark.parametrize(
    ("file", "data", "part"),
    [
        ("model.safetensors", b"\x08", "model.safetensors"),
        ("tokenizer.json", b'{"model":', "tokenizer.json is not valid JSON"),
    ],
)
def test_a_damaged_checkpoint(run, tmp_path, file, data, part):
    folder = write_checkpoint(tmp_path / "damaged")
    (folder / file).write_bytes(data)
    expect_sentence(run(f"--port 0 --model {folder}"), part)


def test_each_line_of_a_json_log_is_json(run, started, monkeypatch):
    lines = [json.loads(line) for line in run("--port 0 --log-format json").err.splitlines()]
    assert [line["message"].split()[0] for line in lines][-1:] == ["serving"]
    monkeypatch.setattr("tinygpt.cli.serve.load_llm", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        [error] = run(f"--log-format json --port {taken.getsockname()[1]}").err.splitlines()
    assert json.loads(error)["level"] == "error"
    assert all(line["time"] > 0 for line in lines)


def test_a_checkpoint_without_a_tokenizer_takes_token_ids_and_says_so(run, started, tmp_path):
    folder = write_checkpoint(tmp_path / "tiny")
    (folder / "vocab.json").write_text("{}")
    result = run(f"--port 0 --model {folder}")
    assert (result.code, len(started)) == (0, 1)
    tokenizer, _, address = result.err.splitlines()[-3:]
    assert address.startswith(f"tinygpt: serving {folder} on http://127.0.0.1:")
    assert tokenizer.startswith(
        f"tinygpt: only token ids are served: {folder} has no tokenizer that can be used: "
    )
    assert "only vocab.json is there" in tokenizer


def test_an_extra_that_is_not_installed():
    code = "import sys; sys.modules['uvicorn'] = None; from tinygpt.__main__ import main; sys.exit(main(['serve']))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    sentence = 'serve needs uvicorn, which comes with: pip install "tinygpt[serve]".'
    assert result.stderr == f"tinygpt: error: {sentence}\n"


def test_one_line_says_where(run, started):
    result = run("--port 0")
    [(state, (host, port), drain_seconds)] = started
    assert result.code == 0
    assert result.err.splitlines()[-1] == f"tinygpt: serving demo on http://127.0.0.1:{port}"
    assert (host, drain_seconds) == ("127.0.0.1", 30)
    hosts = frozenset({"localhost", "127.0.0.1", "::1"})
    assert state.config == ServerConfig(port=0, served_model_names=("demo",), allowed_hosts=hosts)


def test_what_clients_send_is_tried_first(run, started, monkeypatch):
    """Whatever the cache of kernels holds: no client waits for a compiler."""
    looked = noting(monkeypatch, LLM, "run_with_cache", lambda *_: "looked")
    tried = noting(monkeypatch, InputProcessor, "request", lambda self, prompt, params, *_: params)
    told = run("--port 0 --look").err.splitlines()
    assert re.fullmatch(
        r"tinygpt: tried 7 kinds of requests in \d+\.\d\d s(; compiling \d+ kernels? \d+\.\d\d s)?", told[-3]
    )
    assert "plain" in told[-2]
    assert [params.temperature > 0 for params in tried] == [False, True, True, False, False, False]
    assert [params.prompt_logprobs for params in tried] == [None, None, None, 1, -1, None]
    assert (tried[2].presence_penalty, looked) == (0.5, ["looked"])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_no_later_request_compiles(dtype):
    code = KINDS.replace("DTYPE", repr(dtype))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done


def test_flags_reach_the_server_and_the_engine(run, started, monkeypatch):
    monkeypatch.setenv("TINYGPT_API_KEY", " from the environment\n")
    result = run(
        "--port 0 --served-model-name a b/c --max-model-len 64 --max-num-seqs 3 --max-queue 7 --drain-seconds 2 "
        "--allowed-hosts Model.example --allowed-origins https://x --max-logprobs 4 "
        "--chat-template plain --unknown-fields ignore"
    )
    assert result.code == 0
    [(state, _, drain_seconds)] = started
    sizes = state.llm.engine.engine_config
    assert (sizes.max_model_len, sizes.max_num_seqs, sizes.max_queue) == (64, 3, 7)
    names = ("a", "b/c")
    keys = ("from the environment",)
    hosts = frozenset({"model.example"})
    others = {
        "allowed_origins": ("https://x",),
        "max_logprobs": 4,
        "unknown_fields": "ignore",
        "drain_seconds": 2,
    }
    named = {"served_model_names": names, "api_keys": keys, "allowed_hosts": hosts}
    assert state.config == ServerConfig(port=0, **named, **others)
    assert isinstance(state.chat_template, PlainTemplate)
    assert drain_seconds == 2
    run("--port 0 --api-key one --api-key two")
    assert started[-1][0].config.api_keys == ("one", "two")


def test_control_vectors_are_named_and_fit_the_model(run, started, tmp_path):
    with LLM("demo", device="reference") as llm:
        size = llm.config.n_embd
    fits = ControlVector({1: np.ones(size, np.float32)}).save(tmp_path / "fits.gguf")
    assert run(f"--port 0 --device reference --look --control-vector happy={fits}").code == 0
    [(api, *_)] = started
    assert (api.config.look, [*api.config.control_vectors]) == (True, ["happy"])
    assert api.llm.engine.engine_config.max_capture_bytes == 64 * 2**20
    misfit = ControlVector({1: np.ones(size + 1, np.float32)}).save(tmp_path / "misfit.gguf")
    result = run(f"--port 0 --device reference --control-vector happy={misfit}")
    expect_sentence(result, "does not fit blocks.1.hook_resid_post")


def test_who_opens_it_to_the_network_without_a_key_is_warned(run, started):
    assert "--api-key" in run("--port 0 --host 0.0.0.0").err
    assert started[-1][0].config.allowed_hosts is None
    assert "--api-key" not in run("--port 0 --host 0.0.0.0 --api-key x").err
    assert "--api-key" not in run("--port 0").err


@pytest.mark.parametrize("host", ["127.0.0.2", "LOCALHOST", "127.1"])
def test_this_machine_by_any_spelling(run, started, host):
    assert "--api-key" not in run(f"--port 0 --host {host}").err
    [(state, (address, _), _)] = started
    assert state.config.allowed_hosts == {"localhost", "127.0.0.1", "::1", host.lower(), address}


@pytest.mark.parametrize("key", ["", " ", "\n"])
def test_an_empty_key_is_no_key(run, monkeypatch, key):
    expect_sentence(run(["--port", "0", "--api-key", key]), "--api-key")
    if key:
        monkeypatch.setenv("TINYGPT_API_KEY", key)
        expect_sentence(run("--port 0"), "TINYGPT_API_KEY")
