"""`tinygpt generate` with one prompt: stdout, stderr, stdin, JSON and guided texts."""

import io
import json
import re
import sys
from dataclasses import fields, replace

import numpy as np
import pytest

from support.engines import sample_of
from support.gate import noting
from support.processes import STATS
from support.tables import rows
from tinygpt import LLM, ControlVector, SamplingParams
from tinygpt.cli import main as cli
from tinygpt.kernels.cpu import compiler
from tinygpt.outputs import RequestOutput

BASE = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 7}
pytestmark = pytest.mark.usefixtures("llm")  # its kernels are compiled


@pytest.mark.parametrize("how", [[], ["--no-stream"]], ids=["stream", "no-stream"])
def test_text_on_stdout_and_stats_on_stderr(run, llm, how):
    result = run(["Once", "upon", "a", "time", "--seed", "7", "--max-tokens", "24", *how])
    params = SamplingParams(max_tokens=24, **BASE)
    assert result.out == sample_of(llm, "Once upon a time", params).text + "\n"
    assert STATS.fullmatch(result.err).groups() == ("23", "7")
    assert result.code == 0


def test_the_reported_seed_repeats_the_run(run):
    first = run("Once upon --max-tokens 24")
    seed = STATS.fullmatch(first.err)[2]
    assert run(f"Once upon --max-tokens 24 --seed {seed}").out == first.out
    assert STATS.fullmatch(run("Once upon --max-tokens 1").err)[2] != seed
    assert "seed" not in run("Once --temperature 0 --max-tokens 4").err


@pytest.mark.parametrize(
    ("how", "streams"), [([], True), (["--no-stream"], False)], ids=["stream", "no-stream"]
)
def test_text_appears_as_it_is_made(monkeypatch, how, streams):
    class Screen(io.StringIO):
        def flush(self):
            shown.add(self.getvalue())

    shown = set()
    monkeypatch.setattr(sys, "stdout", Screen())
    cli.main(["generate", "Once upon a time", "--seed", "7", "--max-tokens", "24", *how])
    shown -= {"", max(shown).rstrip("\n")}
    assert (len(shown) > 8) == streams
    assert len(shown) >= 1
    assert all(max(shown).startswith(text) for text in shown)


def test_a_message_in_the_middle_of_a_text_has_its_own_line(monkeypatch):
    from tinygpt.cli.streams import emit, log, logging_to_stderr

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    with logging_to_stderr():
        emit("Once upon", end="")
        log("compiling")
        emit(" a time")
        log("done")
    assert terminal.getvalue() == "Once upon\ntinygpt: compiling\n a time\ntinygpt: done\n"


def test_echo_puts_the_prompt_in_front(run):
    plain = run("Once --seed 7 --max-tokens 8").out
    assert run("Once --seed 7 --max-tokens 8 --echo").out == "Once" + plain
    assert run("Once --seed 7 --max-tokens 8 --echo --no-stream").out == "Once" + plain


def test_several_samples(run, llm):
    result = run("Once --seed 7 --max-tokens 8 --n 3 --echo")
    samples = llm.generate("Once", max_tokens=8, n=3, **BASE)[0].outputs
    assert len({sample.text for sample in samples}) == 3
    assert result.out == "".join(f"Once{sample.text}\n" for sample in samples)
    assert "sample 3 of 3" in result.err
    assert STATS.search(result.err)[1] == "21"


def test_the_reference_says_the_same(run):
    arguments = "Once --temperature 0 --max-tokens 6"
    assert run(f"{arguments} --device reference").out == run(arguments).out


@pytest.mark.parametrize("how", ["", "--no-stream", "--json", "--overflow truncate"])
def test_the_prompt_is_encoded_once(run, encoded, how):
    assert run(f"Once upon --max-tokens 2 {how}").code == 0
    assert encoded == ["Once upon"]


@pytest.mark.parametrize("flag", ["-f", "--file"])
def test_a_file_is_the_prompt_as_it_is(run, tmp_path, flag):
    (path := tmp_path / "text").write_bytes("Il était\r\n".encode())
    assert json.loads(run([flag, str(path), "-n", "1", "--json"]).out)["prompt"] == "Il était\r\n"


@pytest.mark.parametrize("num_compiled", [0, 1])
def test_a_first_run_compiles_before_rates_are_measured(run, monkeypatch, num_compiled):
    given = noting(monkeypatch, LLM, "generate", lambda llm, prompts, *_: prompts)
    monkeypatch.setattr(compiler.kernel_cache(), "num_compiled", num_compiled)
    monkeypatch.setattr(compiler.kernel_cache(), "seconds", 3.25)
    result = run("Once --seed 7 --max-tokens 8")
    assert given == num_compiled * [[[0]]]
    told = "; compiling 1 kernel 3.25 s" * num_compiled
    assert STATS.fullmatch(result.err.replace(told, "")).groups() == ("7", "7")
    assert told in result.err


def test_stdin_is_the_prompt_as_it_is(run, give_stdin):
    for words in ("", "-"):
        give_stdin("Il était\r\nune fois 🦊\n".encode())
        result = run(f"--max-tokens 1 --json {words}")
        assert json.loads(result.out)["prompt"] == "Il était\r\nune fois 🦊\n"


@pytest.mark.parametrize("arguments", [["--json"], ["", "--json"]], ids=["stdin", "word"])
def test_an_empty_prompt_starts_at_bos(run, llm, give_stdin, arguments):
    give_stdin(b"not read" if "" in arguments else b"")
    record = json.loads(run([*arguments, "--max-tokens", "1"]).out)
    assert record["prompt_token_ids"] == [llm.config.bos_token_id]


def test_a_terminal_is_told_how_to_end_the_prompt(run, give_stdin, monkeypatch):
    give_stdin(b"Once")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert "Ctrl-D" in run("--max-tokens 1").err


def test_json_is_one_record(run, llm):
    result = run("Once --seed 7 --n 2 --max-tokens 4 --json")
    (expected,) = llm.generate("Once", max_tokens=4, n=2, **BASE)
    record = json.loads(result.out)
    assert list(record) == ["id", "model", "dtype", *(field.name for field in fields(RequestOutput))]
    assert (record["id"], record["prompt"]) == (None, "Once")
    assert (record["model"], record["dtype"]) == ("demo", "float32")
    assert record["prompt_token_ids"] == expected.prompt_token_ids
    assert record["outputs"] == [vars(sample) for sample in expected.outputs]
    assert [sample["seed"] for sample in record["outputs"]] == [7, 7]
    assert 0 < record["metrics"]["time_to_first_token"] <= record["metrics"]["time_to_finish"]
    assert result.out.count("\n") == 1
    assert STATS.fullmatch(result.err)


@pytest.mark.parametrize("arguments", ["--temperature 0 --num-beams 3", "--best-of 3"])
def test_a_choice_among_several_samples_is_not_streamed(run, arguments):
    result = run(f"Once --seed 7 --max-tokens 8 {arguments}")
    record = json.loads(run(f"Once --seed 7 --max-tokens 8 --json {arguments}").out)
    assert result.out == record["outputs"][0]["text"] + "\n"


@pytest.mark.parametrize("how", [[], ["--no-stream"], ["--json"]], ids=str)
def test_a_truncated_prompt_is_reported(run, how):
    arguments = [
        "Once upon a time " * 30,
        "--max-model-len",
        "32",
        "--max-tokens",
        "8",
        "--overflow",
        "truncate",
        *how,
    ]
    result = run(arguments)
    assert result.code == 0
    assert re.match(r"tinygpt: the first \d+ tokens of the prompt exceed .* truncated\n", result.err)


def test_time_that_is_over_before_the_first_token(run):
    for how in ("--no-stream", ""):
        result = run(f"Once --seed 7 --max-time 1e-9 {how}")
        assert (result.code, result.out) == (0, "\n")
        assert result.err.startswith("tinygpt: prompt 0 tokens; generation 0 tokens; load ")


@pytest.mark.parametrize(("how", "count"), [("", 1), ("--json", 1), ("--n 2", 2)])
def test_a_guided_text_that_a_limit_ends_is_reported(run, how, count):
    pytest.importorskip("llguidance", reason="llguidance, the extra `guided`, is not installed")
    assert f"{count} guided text" in run(f"Once -n 3 --guided-regex [a-c]{{9}}[d-f]{{9}} {how}").err
    assert "cut short" not in run(f"Once -n 30 --guided-regex [a-c]{{3}} {how}").err


@pytest.fixture(scope="module")
def vector(llm):
    rows = np.random.default_rng(0).normal(size=(llm.config.n_layer, llm.config.n_embd)).astype(np.float32)
    return ControlVector({i: rows[i] for i in range(1, llm.config.n_layer)})


STEERED = rows("""
--steer {} | [[]]
--steer {}:-0.5 | [[-0.5]]
--steer {}:2:1-1 --steer {}:.5:0-9 | [[2, [1]], [0.5]]
--control-vector-scaled {}:2 | [[2]]
--control-vector={} | [[]]
""")


@pytest.mark.parametrize(("flags", "how"), STEERED)
def test_control_vectors_steer_the_text(run, llm, vector, tmp_path, flags, how):
    file = vector.save(tmp_path / "a b.gguf")
    result = run(["Once", "-s", "7", "-n", "8", *(word.format(file) for word in flags.split())])
    edits = [edit for each in how for edit in vector.edits(*each)]
    params = SamplingParams(max_tokens=8, **BASE)
    steered = sample_of(llm, "Once", replace(params, edits=edits)).text
    assert result.out == steered + "\n"
    assert steered != sample_of(llm, "Once", params).text


def test_control_vectors_steer_each_line(run, llm, vector, tmp_path):
    (lines := tmp_path / "lines.jsonl").write_text('{"prompt": "Once", "temperature": 0}')
    file = vector.save(tmp_path / "v.gguf")
    record = json.loads(run(["--input", str(lines), "-n", "8", "--steer", str(file)]).out)
    expected = sample_of(llm, "Once", max_tokens=8, edits=vector.edits()).token_ids
    assert record["outputs"][0]["token_ids"] == expected


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (":1:7-9", "has directions of layers 1 alone"),
        (":x", "v.gguf:x cannot be read"),
        ("x", "v.ggufx cannot be read"),
    ],
)
def test_what_steers_nothing(run, vector, tmp_path, how, says):
    file = vector.save(tmp_path / "v.gguf")
    result = run(["Once", "--steer", f"{file}{how}"])
    assert (result.code, result.out) == (2, "")
    assert says in result.err
