"""`tinygpt generate` with one prompt: what it prints where."""

import io
import json
import re
import shutil
import sys
from dataclasses import fields

import pytest

from support.commands import STATS
from support.demo import EOS
from tinygpt import SamplingParams
from tinygpt.cli import loading
from tinygpt.cli import main as cli
from tinygpt.kernels import cpu as kernels
from tinygpt.outputs import RequestOutput

PROMPT = ["Once", "upon", "a", "time"]
pytestmark = pytest.mark.usefixtures("llm")  # its kernels are compiled: stderr is free of the notice of a first run


@pytest.mark.parametrize("how", [[], ["--no-stream"]], ids=["stream", "no-stream"])
def test_text_on_stdout_and_stats_on_stderr(run, llm, how):
    result = run([*PROMPT, "--seed", "7", "--max-tokens", "24", *how])
    params = SamplingParams(max_tokens=24, temperature=0.8, top_k=40, top_p=0.95, seed=7)
    assert result.out == llm.generate("Once upon a time", params)[0].outputs[0].text + "\n"
    assert STATS.fullmatch(result.err).groups() == ("23", "7")
    assert result.code == 0


def test_equal_samples_are_computed_once_and_count_once(run):
    assert STATS.search(run("Once --temperature 0 --max-tokens 8 --n 4").err)[1] == "7"
    assert STATS.search(run("Once --temperature 0 --max-tokens 1").err)[1] == "0"


def test_the_reported_seed_repeats_the_run(run):
    first = run([*PROMPT, "--max-tokens", "24"])
    seed = STATS.fullmatch(first.err)[2]
    again = run([*PROMPT, "--max-tokens", "24", "--seed", seed])
    assert again.out == first.out
    assert STATS.fullmatch(run([*PROMPT, "--max-tokens", "1"]).err)[2] != seed


@pytest.mark.parametrize(("how", "streams"), [([], True), (["--no-stream"], False)], ids=["stream", "no-stream"])
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


def test_echo_puts_the_prompt_in_front(run):
    plain = run("Once --seed 7 --max-tokens 8").out
    assert run("Once --seed 7 --max-tokens 8 --echo").out == "Once" + plain
    assert run("Once --seed 7 --max-tokens 8 --echo --no-stream").out == "Once" + plain


def test_several_samples(run, llm):
    result = run("Once --seed 7 --max-tokens 8 --n 3 --echo")
    params = SamplingParams(max_tokens=8, temperature=0.8, top_k=40, top_p=0.95, seed=7, n=3)
    samples = llm.generate("Once", params)[0].outputs
    assert len({sample.text for sample in samples}) == 3
    assert result.out == "".join(f"Once{sample.text}\n" for sample in samples)
    assert "sample 3 of 3" in result.err
    assert STATS.search(result.err)[1] == "21"


def test_stop_ends_the_text_before_it(run):
    arguments = ["Once", "--temperature", "0", "--max-tokens", "24"]
    whole = run(arguments).out
    stop = whole[20:26]
    stopped = run([*arguments, "--stop", "never there", "--stop", stop])
    assert stopped.out == whole[: whole.index(stop)] + "\n"


def test_ignore_eos_goes_on(run, llm, small_demo, tmp_path):
    third = llm.generate("Once", SamplingParams(max_tokens=3))[0].outputs[0].token_ids[2]
    folder = shutil.copytree(small_demo, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": third}))
    arguments = ["Once", "--model", str(folder), "--temperature", "0", "--max-tokens", "8"]
    assert int(STATS.search(run(arguments).err)[1]) <= 2
    assert STATS.search(run([*arguments, "--ignore-eos"]).err)[1] == "7"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_both_backends_say_the_same(run, backend):
    assert (
        run(f"Once --temperature 0 --max-tokens 6 --device {backend}").out
        == run("Once --temperature 0 --max-tokens 6").out
    )


@pytest.mark.parametrize("how", ["", "--no-stream", "--json", "--overflow truncate"])
def test_the_prompt_is_encoded_once(run, encoded, how):
    assert run(f"Once upon --max-tokens 2 {how}").code == 0
    assert encoded == ["Once upon"]


# --- stdin


def test_stdin_is_the_prompt_as_it_is(run, give_stdin):
    give_stdin("Il était\r\nune fois 🦊\n".encode())
    result = run("--max-tokens 1 --json")
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


# --- JSON


def test_json_is_one_record(run, llm):
    result = run("Once --seed 7 --n 2 --max-tokens 4 --json")
    params = SamplingParams(max_tokens=4, temperature=0.8, top_k=40, top_p=0.95, seed=7, n=2)
    expected = llm.generate("Once", params)[0]
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


# --- flags at work


def test_flags_reach_the_engine(run, llm):
    record = json.loads(run("Once --seed 7 --max-tokens 8 --json --logit-bias 11=9 --min-p 0.1 --logprobs 1").out)
    base = {"max_tokens": 8, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 7}
    (expected,) = llm.generate("Once", SamplingParams(**base, logit_bias={11: 9.0}, min_p=0.1, logprobs=1))
    assert record["outputs"] == json.loads(json.dumps([vars(sample) for sample in expected.outputs]))


@pytest.mark.parametrize("arguments", ["--temperature 0 --num-beams 3", "--best-of 3"])
def test_what_is_chosen_among_several_is_not_streamed(run, arguments):
    result = run(f"Once --seed 7 --max-tokens 8 {arguments}")
    record = json.loads(run(f"Once --seed 7 --max-tokens 8 --json {arguments}").out)
    assert result.out == record["outputs"][0]["text"] + "\n"


@pytest.mark.parametrize("how", [[], ["--no-stream"], ["--json"]], ids=str)
def test_what_is_cut_off_the_prompt_is_said(run, how):
    arguments = ["Once upon a time " * 30, "--max-model-len", "32", "--max-tokens", "8", "--overflow", "truncate", *how]
    result = run(arguments)
    assert result.code == 0
    assert re.match(r"tinygpt: the first \d+ tokens of the prompt had no room .*: left out\n", result.err)
    assert "not read" not in run([*arguments, "--overflow", "slide", "--max-model-len", "512"]).err


def test_time_that_is_over_before_the_first_token(run):
    for how in ("--no-stream", ""):
        result = run(f"Once --seed 7 --max-time 1e-9 {how}")
        assert (result.code, result.out) == (0, "\n")
        assert result.err.startswith("tinygpt: prompt 0 tokens; generation 0 tokens; load ")


def test_a_seed_that_decides_nothing_is_not_reported(run):
    assert "seed" not in run("Once --temperature 0 --max-tokens 4").err


@pytest.mark.parametrize("name", ["bfloat16", "float32", "int8"])
def test_the_kv_cache_has_the_dtype_that_is_asked_for(run, monkeypatch, name):
    """It is given one of float32, for which the step is compiled already."""
    made, new_kv_cache = [], kernels.new_kv_cache
    monkeypatch.setattr(
        kernels, "new_kv_cache", lambda *sizes: made.append(sizes) or new_kv_cache(*sizes[:-1], "float32")
    )
    assert run(f"Once --max-tokens 1 --kv-cache-dtype {name}").code == 0
    assert [sizes[-1] for sizes in made] == [name]


@pytest.mark.parametrize(("flags", "is_split"), [([], False), (["--no-special-tokens"], True)])
def test_special_tokens_in_a_prompt(run, llm, flags, is_split):
    result = run(["The end.<|endoftext|>", "--max-tokens", "1", "--json", *flags])
    prompt = llm.read_prompt("The end.<|endoftext|>", split_special_tokens=is_split)
    assert json.loads(result.out)["prompt_token_ids"] == prompt.token_ids
    assert (prompt.token_ids[-1] == EOS) != is_split


def test_more_threads_than_cores_are_said_to_be_slower(run, monkeypatch):
    monkeypatch.setattr(loading, "logical_cores", lambda: 2)
    said = "tinygpt: --threads is 3 and there are 2 cores: more threads than cores are slower\n"
    assert run("Once --max-tokens 1 --threads 3").err.count(said) == 1
    for flags in ("", "--threads 2", "--threads 5000"):  # the last is refused by itself
        assert "slower" not in run(f"Once --max-tokens 1 {flags}").err
