"""`python -m tinygpt generate` with one prompt: what it prints where, and how it ends."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields

import numba
import pytest

from support import tiny_checkpoint
from support.paths import ROOT
from tinygpt import LLM, SamplingParams
from tinygpt.cli import loading
from tinygpt.cli import main as cli
from tinygpt.cli import sampling_flags as sampling
from tinygpt.cli.commands import generate
from tinygpt.cli.messages import elapsed
from tinygpt.kernels import cpu as kernels
from tinygpt.kernels.cpu import jit
from tinygpt.outputs import RequestOutput

PROMPT = ["Once", "upon", "a", "time"]
# A function and an array have no place on a command line; soft_prompt is a flag that loads it too.
NOT_FLAGS = ("logits_processors", "prompt_embeds", "soft_prompt")
STATS = re.compile(
    r"tinygpt: (\d+) tokens? in [\d.]+ s, [\d.]+ tokens/s, first token after [\d.]+ s(?:, seed (\d+))?\n"
)


class Result:
    """How an in-process run ended. `arguments` may be one string of words without spaces."""

    def __init__(self, capsys, arguments):
        capsys.readouterr()
        arguments = arguments.split() if isinstance(arguments, str) else arguments
        try:
            self.code = cli.main(["generate", *arguments])
        except SystemExit as exit_:  # argparse
            self.code = exit_.code
        self.out, self.err = capsys.readouterr()


@pytest.fixture
def run(capsys):
    return lambda arguments: Result(capsys, arguments)


@pytest.fixture
def give_stdin(monkeypatch):
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.fixture(scope="module", autouse=True)
def llm():
    """The demo, its kernels compiled: stderr is then free of the notice of a first run."""
    with LLM("demo") as llm:
        llm.generate("Once", SamplingParams(max_tokens=1))
        jit.mark_warm(llm.dtype)
        yield llm


def tinygpt(*arguments, **options) -> subprocess.CompletedProcess:
    """A real process, as a user starts it."""
    return subprocess.run([sys.executable, "-m", "tinygpt", *arguments], cwd=ROOT, capture_output=True, **options)


# --- flags


def test_defaults_are_the_contract():
    args = vars(cli.build_parser().parse_args(["generate", *PROMPT]))
    own = {field.name: field.default for field in fields(SamplingParams)}
    assert args == {
        **{name: default for name, default in own.items() if name not in NOT_FLAGS},
        "command": "generate",
        "prompt": PROMPT,
        "model": "demo",
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "device": "cpu",
        "threads": None,
        "max_num_seqs": 32,
        "max_model_len": None,
        "max_num_batched_tokens": None,
        "prefix_cache_seqs": 4,
        "draft_model": None,
        "num_speculative_tokens": 4,
        "lora": None,
        "soft_prompt": None,
        "interactive": False,
        "max_tokens": 128,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "seed": None,
        "n": 1,
        "stop": None,
        "ignore_eos": False,
        "input": None,
        "output": None,
        "json": False,
        "no_stream": False,
        "echo": False,
        "debug": False,
    }


def test_help_shows_the_default_of_every_flag(run):
    result = run("--help")
    assert result.code == 0
    described = re.split(r"\n  (?=-|PROMPT)", result.out.split("positional arguments:")[1])
    flags = {text.split()[0]: " ".join(text.split()) for text in described[1:]}
    assert len(flags) > 20
    assert [flag for flag, text in flags.items() if "(default: " not in text] == ["-h,"]


def test_help_of_a_command_imports_nothing_heavy():
    code = (
        "import sys; from tinygpt.cli.main import main\ntry: main(['generate', '--help'])\nfinally: print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "tinygpt.cli.commands.generate" in result.stdout
    assert not {"numpy", "numba", "tiktoken", "tqdm", "safetensors"} & set(result.stdout.split())


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert re.fullmatch(r"tinygpt \d+\.\d+\.\d+\n", capsys.readouterr().out)


# --- one prompt as text


@pytest.mark.parametrize("how", [[], ["--no-stream"]], ids=["stream", "no-stream"])
def test_text_on_stdout_and_stats_on_stderr(run, llm, how):
    result = run([*PROMPT, "--seed", "7", "--max-tokens", "24", *how])
    params = SamplingParams(max_tokens=24, temperature=0.8, top_k=40, top_p=0.95, seed=7)
    assert result.out == llm.generate("Once upon a time", params)[0].outputs[0].text + "\n"
    assert STATS.fullmatch(result.err).groups() == ("24", "7")
    assert result.code == 0


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
    assert STATS.search(result.err)[1] == "24"


def test_stop_ends_the_text_before_it(run):
    arguments = ["Once", "--temperature", "0", "--max-tokens", "24"]
    whole = run(arguments).out
    stop = whole[20:26]
    stopped = run([*arguments, "--stop", "never there", "--stop", stop])
    assert stopped.out == whole[: whole.index(stop)] + "\n"


def test_ignore_eos_goes_on(run, llm, tmp_path):
    third = llm.generate("Once", SamplingParams(max_tokens=3))[0].outputs[0].token_ids[2]
    folder = shutil.copytree(ROOT / "weights" / "demo", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": third}))
    arguments = ["Once", "--model", str(folder), "--temperature", "0", "--max-tokens", "8"]
    assert int(STATS.search(run(arguments).err)[1]) <= 3
    assert STATS.search(run([*arguments, "--ignore-eos"]).err)[1] == "8"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_both_backends_say_the_same(run, backend):
    assert (
        run(f"Once --temperature 0 --max-tokens 6 --device {backend}").out
        == run("Once --temperature 0 --max-tokens 6").out
    )


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


# --- every other field


FLAGS = {
    "--best-of 3 --temperature 1": {"best_of": 3, "temperature": 1.0},
    "--include-stop-str-in-output --stop e": {"include_stop_str_in_output": True, "stop": ("e",)},
    "--stop-token-ids 11,13": {"stop_token_ids": (11, 13)},
    "--eos-token-id 11": {"eos_token_id": (11,)},
    "--min-tokens 3 --max-time 60": {"min_tokens": 3, "max_time": 60.0},
    "--repetition-detection 2,3": {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}},
    "--repetition-detection 4,3,2": {
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3, "min_pattern_size": 2}
    },
    "--logit-bias 11=-4 --logit-bias 13=2.5": {"logit_bias": {11: -4.0, 13: 2.5}},
    "--repetition-penalty 1.3 --frequency-penalty -0.5 --presence-penalty 1": {
        "repetition_penalty": 1.3,
        "frequency_penalty": -0.5,
        "presence_penalty": 1.0,
    },
    "--no-repeat-ngram-size 2": {"no_repeat_ngram_size": 2},
    "--bad-words the --bad-words and --bad-words-ids 11,12 --bad-words-ids 13": {
        "bad_words": ("the", "and"),
        "bad_words_ids": ((11, 12), (13,)),
    },
    "--allowed-token-ids 11,13,15 --suppress-tokens 13": {"allowed_token_ids": (11, 13, 15), "suppress_tokens": (13,)},
    "--top-p-rule openai --top-p-decay 0.9 --top-p-min 0.1 --top-p-reset-ids 11": {
        "top_p_rule": "openai",
        "top_p_decay": 0.9,
        "top_p_min": 0.1,
        "top_p_reset_ids": (11,),
    },
    "--min-p 0.1 --typical-p 0.9": {"min_p": 0.1, "typical_p": 0.9},
    "--epsilon-cutoff 0.001 --eta-cutoff 0.002": {"epsilon_cutoff": 0.001, "eta_cutoff": 0.002},
    "--temperature 0 --num-beams 4 --length-penalty 2 --early-stopping never": {
        "temperature": 0.0,
        "num_beams": 4,
        "length_penalty": 2.0,
        "early_stopping": "never",
    },
    "--temperature 0 --num-beams 4 --num-beam-groups 2 --diversity-penalty 0.5 --early-stopping true": {
        "temperature": 0.0,
        "num_beams": 4,
        "num_beam_groups": 2,
        "diversity_penalty": 0.5,
        "early_stopping": True,
    },
    "--prompt-lookup-num-tokens 3 --max-matching-ngram-size 1": {
        "prompt_lookup_num_tokens": 3,
        "max_matching_ngram_size": 1,
    },
    "--overflow slide --stride 9": {"overflow": "slide", "stride": 9},
    "--logprobs 2 --prompt-logprobs 1 --logprobs-mode processed": {
        "logprobs": 2,
        "prompt_logprobs": 1,
        "logprobs_mode": "processed",
    },
}


def test_every_field_has_a_flag_that_is_tried():
    plain = {"max_tokens", "temperature", "top_k", "top_p", "seed", "n", "stop", "ignore_eos"}
    tried = plain.union(*FLAGS.values())
    assert tried == {field.name for field in fields(SamplingParams)} - set(NOT_FLAGS)


@pytest.mark.parametrize("arguments", FLAGS)
def test_a_flag_is_its_field(arguments):
    args = cli.build_parser().parse_args(["generate", *arguments.split()])
    base = {"max_tokens": 128, "temperature": 0.8, "top_k": 40, "top_p": 0.95}
    assert sampling.params_of(args) == SamplingParams(**{**base, **FLAGS[arguments]})


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
    assert re.match(r"tinygpt: the first \d+ tokens of the prompt .* was not read\n", result.err)
    assert "not read" not in run([*arguments, "--overflow", "slide", "--max-model-len", "512"]).err


def test_time_that_is_over_before_the_first_token(run):
    for how in ("--no-stream", ""):
        result = run(f"Once --seed 7 --max-time 1e-9 {how}")
        assert (result.code, result.out) == (0, "\n")
        assert result.err.startswith("tinygpt: 0 tokens in ")


def test_the_flags_of_the_model_reach_it(run, monkeypatch):
    given = {}

    def stop(**arguments):
        given.update(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr("tinygpt.llm.LLM", stop)
    flags = "--max-num-seqs 3 --max-num-batched-tokens 9 --prefix-cache-seqs 2 --max-model-len 64 --lora a"
    more = "--soft-prompt n=p=q --draft-model d --num-speculative-tokens 7 --dtype int8 --kv-cache-dtype float32"
    assert run(f"Once --threads 1 {flags} {more}").code == cli.INTERRUPTED
    assert given == {
        "model": "demo",
        "dtype": "int8",
        "device": "cpu",
        "threads": 1,
        "max_num_seqs": 3,
        "max_model_len": 64,
        "kv_cache_dtype": "float32",
        "max_num_batched_tokens": 9,
        "prefix_cache_seqs": 2,
        "draft_model": "d",
        "num_speculative_tokens": 7,
        "lora": "a",
        "soft_prompts": {"n": "p=q"},
    }


# --- refused


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("Once --top-k -1", 2, "top_k=-1"),
        ("Once --temperature nan", 2, "temperature=nan"),
        ("Once --top-p 0 --max-tokens 0", 2, "max_tokens=0"),
        ("Once --seed -1", 2, "seed=-1"),
        ("Once --n 0", 2, "n=0"),
        (["Once", "--stop", ""], 2, "stop="),
        ("Once --threads 0", 2, "threads is 0"),
        ("Once --max-num-seqs 0", 2, "max_num_seqs is 0"),
        ("Once --max-model-len 513", 2, "has 512 positions"),
        ("Once --device tpu", 2, "'cpu', 'cuda', 'reference'"),
        ("Once --dtype float16", 2, "'int4' only"),
        ("Once --kv-cache-dtype int8", 2, "kv_cache_dtype is 'int8'"),
        ("Once --max-tokens 600", 2, "512 positions"),
        ("Once --output out.jsonl", 2, "--output needs --input"),
        ("Once --input in.jsonl", 2, "both a PROMPT and --input"),
        ("Once --echo --json", 2, "--echo is for text"),
        ("Once --logprobs 2", 2, "--logprobs is for records"),
        ("Once --prompt-logprobs 2 --no-stream", 2, "--prompt-logprobs is for records"),
        ("Once --interactive --json", 2, "--json is not possible with --interactive"),
        ("Once --soft-prompt a=x --soft-prompt b=y", 2, "several --soft-prompt"),
        ("Once --num-beams 2", 2, "num_beams=2 is not possible with temperature=0.8"),
        ("Once --overflow ring", 2, "overflow='ring'"),
        ("Once --stride 4", 2, "stride=4 is for overflow='slide'"),
        ("Once --repetition-detection 2,1", 2, "repetition_detection="),
        ("Once --logit-bias 9999=1", 2, "logit_bias holds token id 9999"),
        ("Once --max-num-batched-tokens 4", 2, "max_num_batched_tokens is 4 and max_num_seqs is 32"),
        ("Once --prefix-cache-seqs -1", 2, "prefix_cache_seqs is -1"),
        ("Once --num-speculative-tokens 0", 2, "num_speculative_tokens is 0"),
        ("Once --soft-prompt a=./nowhere", 1, "nowhere"),
        ("Once --lora ./nowhere", 1, "nowhere"),
        ("Once --draft-model ./nowhere", 1, "nowhere"),
        (["half a character: \udce9"], 2, "lone surrogate"),
        ("Once --model ./nowhere", 1, "nowhere"),
    ],
)
def test_an_error_is_a_sentence(run, arguments, code, says):
    result = run(arguments)
    assert result.code == code
    assert result.err.startswith("tinygpt: error: ")
    assert says in result.err
    assert result.err.rstrip().endswith((".", ")"))
    assert "Traceback" not in result.err
    assert result.out == ""


def test_text_needs_a_tokenizer(run, tmp_path):
    folder = str(tiny_checkpoint.write_checkpoint(tmp_path / "tiny"))
    for flags in (["--n", "2"], ["--no-stream"], []):
        result = run(["", "--model", folder, "--max-tokens", "2", *flags])
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("tinygpt: error: ")
        assert "tokenizer" in result.err
    record = json.loads(run(["", "--model", folder, "--max-tokens", "2", "--json"]).out)
    assert record["outputs"][0]["text"] is None


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_the_kv_cache_has_the_dtype_that_is_asked_for(run, monkeypatch, name):
    made, new_kv_cache = [], kernels.new_kv_cache
    monkeypatch.setattr(kernels, "new_kv_cache", lambda *sizes: made.append(sizes) or new_kv_cache(*sizes))
    assert run(f"Once --max-tokens 1 --kv-cache-dtype {name}").code == 0
    assert [sizes[-1] for sizes in made] == [name]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--max-tokens many", "--max-tokens: it is 'many' and must be a whole number."),
        ("--max-num-seqs 1.5", "--max-num-seqs: it is '1.5' and must be a whole number."),
        ("--top-p x", "--top-p: it is 'x' and must be a number."),
        ("--stop-token-ids 1,x", "--stop-token-ids: it is '1,x' and must be token ids, such as 11,262."),
        ("--logit-bias 11", "--logit-bias: it is '11' and must be a token id and a number, such as 11=-2.5."),
        ("--early-stopping maybe", "--early-stopping: it is 'maybe' and must be true, false or never."),
        ("--soft-prompt x", "--soft-prompt: it is 'x' and must be NAME=PATH."),
    ],
)
def test_a_malformed_value_is_answered_by_what_is_allowed(run, arguments, says):
    result = run(arguments)
    assert result.code == 2
    assert result.err.endswith(f"error: argument {says}\n")


def test_a_seed_that_decides_nothing_is_not_reported(run):
    assert "seed" not in run("Once --temperature 0 --max-tokens 4").err


@pytest.mark.parametrize(
    "arguments",
    [
        "--temp 1",
        "--top-k",
        "--bad-words-ids a",
        "--repetition-detection 4",
        "--repetition-detection 1,2,3,4",
    ],
)
def test_malformed_flags_are_usage_errors(run, arguments):
    result = run(arguments)
    assert result.code == 2
    assert result.err.startswith("usage: tinygpt ")


def test_an_unknown_flag_is_answered_by_its_command(run):
    result = run("--max-token 3 --frobnicate")
    assert result.code == 2
    assert result.err.splitlines()[0] == "usage: tinygpt generate [flags] [PROMPT ...]"
    assert "--max-token (did you mean --max-tokens?)" in result.err
    assert "--frobnicate" in result.err


def test_stdin_that_is_no_text(run, give_stdin):
    give_stdin(b"caf\xe9")
    result = run("--max-tokens 1")
    assert (result.code, result.out) == (2, "")
    assert "byte 3" in result.err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (MemoryError(), 1, "not enough memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "out.jsonl"), 1, "No space left on device: 'out.jsonl'"),
        (ZeroDivisionError("division by zero"), 1, "unexpected ZeroDivisionError: division by zero"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_other_error_is_a_sentence_too(run, monkeypatch, error, code, says):
    def fail(args):
        raise error

    monkeypatch.setattr(generate, "run", fail)
    result = run("Once")
    assert result.code == code
    assert says in result.err
    assert "Traceback" not in result.err
    with pytest.raises(type(error)):
        run("Once --debug")


# --- the first run, and threads


def compile_a_kernel() -> None:
    numba.njit(lambda x: x)(1)


def test_the_first_run_says_that_it_compiles(run, monkeypatch):
    """From the loading on, where the weights are packed."""
    warm = run("Once --seed 7 --max-tokens 8")
    assert "compiling" not in warm.err
    forward, pack = kernels.forward, kernels.load_params
    monkeypatch.setattr(kernels, "load_params", lambda *weights: compile_a_kernel() or pack(*weights))
    cold = run("Once --seed 7 --max-tokens 8 --dtype float32")
    assert cold.err.startswith("tinygpt: compiling float32 kernels for this machine, once (10 to 20 s)\n")
    assert cold.err.count("compiling") == 1
    assert cold.out == warm.out
    monkeypatch.setattr(kernels, "load_params", pack)
    monkeypatch.setattr(kernels, "forward", lambda *step: compile_a_kernel() or forward(*step))
    monkeypatch.setattr(jit, "cache_is_cold", lambda name: True)
    assert run("Once --seed 7 --max-tokens 8").err.startswith("tinygpt: compiling kernels for this machine, once")
    assert "compiling" not in run("Once --max-tokens 600").err  # refused before


def test_no_notice_where_nothing_compiles(run, monkeypatch):
    monkeypatch.setattr(jit, "cache_is_cold", lambda name: True)
    assert "compiling" not in run("Once --max-tokens 2").err
    assert "compiling" not in run("Once --max-tokens 2 --device reference").err


def test_a_mark_that_cannot_be_kept_is_no_error(run, monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "cache_folder", lambda: jit.CacheFolder(tmp_path / "absent"))
    assert run("Once --max-tokens 1").code == 0


def test_a_cache_in_an_unusual_place_is_mentioned(run, monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "cache_folder", lambda: jit.CacheFolder(tmp_path, "kept elsewhere"))
    assert "tinygpt: kept elsewhere\n" in run("Once --max-tokens 1").err


def test_a_terminal_shows_the_seconds(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with elapsed("waiting"):
        pass
    assert re.fullmatch(r"(\rtinygpt: waiting: [\d.]+ s)+\n", terminal.getvalue())


def test_threads_own_every_pool(monkeypatch):
    monkeypatch.delitem(sys.modules, "numba")
    for name in loading.THREAD_POOLS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    loading.set_thread_pools(None)
    pools = {name: os.environ[name] for name in loading.THREAD_POOLS}
    assert pools.pop("OMP_NUM_THREADS") == "3"
    assert set(pools.values()) == {str(loading.thread_count())}
    loading.set_thread_pools(7)
    assert {os.environ[name] for name in loading.THREAD_POOLS} == {"7"}


# --- as a process


def test_a_process_separates_stdout_and_stderr():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    threads = str((os.cpu_count() or 1) + 3)
    arguments = ["generate", "--echo", "--seed", "7", "--max-tokens", "8"]
    options = {"env": environment, "input": "Été 🦊".encode()}
    result = tinygpt(*arguments, "--threads", threads, **options)
    assert result.returncode == 0
    assert result.stdout.decode().startswith("Été 🦊")
    assert STATS.fullmatch(result.stderr.decode().replace(os.linesep, "\n"))
    assert tinygpt(*arguments, "--threads", "1", **options).stdout == result.stdout


def test_a_process_ends_with_the_exit_code():
    result = tinygpt("generate", "Once", "--n", "0")
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.startswith(b"tinygpt: error: ")


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes the descriptors")
@pytest.mark.parametrize(
    ("arguments", "closed", "code", "out", "says"),
    [
        (["--max-tokens", "1"], "<&-", 2, "", "no PROMPT was given and stdin is closed"),
        (["Once", "--temperature", "0", "--max-tokens", "1"], "2>&-", 0, ",\n", ""),
        (["Once", "--n", "0"], "2>&-", 2, "", ""),
        (["--nonsense"], "2>&-", 2, "", ""),
    ],
)
def test_a_closed_stream(arguments, closed, code, out, says):
    command = shlex.join([sys.executable, "-m", "tinygpt", "generate", *arguments])
    result = subprocess.run(f"{command} {closed}", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (code, out)
    assert says in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no names that are no text")
def test_a_name_that_is_no_text_is_still_reported():
    result = tinygpt("generate", "Once", "--model", b"./caf\xe9")
    assert (result.returncode, result.stdout) == (1, b"")
    assert rb"caf\udce9" in result.stderr
    assert b"Traceback" not in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE")
def test_a_closed_pipe_ends_the_run_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tinygpt", "generate", "Once", "--max-tokens", "8"]
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (result.returncode, result.stderr) == (cli.BROKEN_PIPE, b"")
