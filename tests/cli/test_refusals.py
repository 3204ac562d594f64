"""What is impossible, malformed or goes wrong ends `generate` with a sentence and an exit code."""

import json

import pytest

from support import tiny_checkpoint
from tinygpt.cli.commands import generate
from tinygpt.errors import CheckpointError, LostFileError, TinyGPTError

pytestmark = pytest.mark.usefixtures("llm")  # its kernels are compiled: stderr is free of the notice of a first run


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("Once --top-k -2", 2, "--top-k -2 is not possible"),
        ("Once --temperature nan", 2, "--temperature nan"),
        ("Once --top-p 0 --max-tokens 0", 2, "--max-tokens 0"),
        (
            "Once --seed -2",
            2,
            "--seed -2 is not possible: it must be a whole number from -1 (one is drawn) to 1844674407",
        ),
        ("Once --n 0", 2, "--n 0"),
        (["Once", "--stop", ""], 2, "--stop ''"),
        ("Once --threads 0", 2, "threads is 0"),
        ("Once --max-num-seqs 0", 2, "--max-num-seqs is 0"),
        ("Once --max-model-len 513", 2, "has 512 positions"),
        ("Once --dtype float8", 2, "--dtype is 'float8', in which weights are kept in files"),
        ("Once --kv-cache-dtype int4", 2, "--kv-cache-dtype is 'int4'"),
        ("Once --max-tokens 600", 2, "512 positions"),
        ("Once --output out.jsonl", 2, "--output needs --input"),
        ("Once --input in.jsonl", 2, "both a PROMPT and --input"),
        ("Once --echo --json", 2, "--echo is for text"),
        ("Once --logprobs 2", 2, "--logprobs is for records"),
        ("Once --prompt-logprobs 2 --no-stream", 2, "--prompt-logprobs is for records"),
        ("Once --interactive --json", 2, "--json is not possible with --interactive"),
        ("Once --soft-prompt a=x --soft-prompt b=y", 2, "several --soft-prompt"),
        ("Once --num-beams 2", 2, "--num-beams 2 is not possible with --temperature 0.8"),
        ("Once --stride 4", 2, "--stride 4 is for --overflow slide"),
        ("Once --repetition-detection 2,1", 2, "--repetition-detection 2,1,1 is not possible"),
        ("Once --logit-bias 9999=1", 2, "--logit-bias holds token id 9999"),
        ("Once --max-num-batched-tokens 4", 2, "--max-num-batched-tokens is 4 and --max-num-seqs is 32"),
        ("Once --prefix-cache-seqs -1", 2, "--prefix-cache-seqs is -1"),
        ("Once --num-speculative-tokens 0", 2, "--num-speculative-tokens is 0"),
        ("Once --soft-prompt a=./nowhere", 2, "nowhere"),
        ("Once --lora ./nowhere", 2, "nowhere"),
        ("Once --draft-model ./nowhere", 2, "nowhere"),
        (["half a character: \ud83d"], 2, "lone surrogate"),
        ("Once --model ./nowhere", 2, "nowhere"),
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
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("tinygpt: error: ")
        assert "tokenizer" in result.err
    record = json.loads(run(["", "--model", folder, "--max-tokens", "2", "--json"]).out)
    assert record["outputs"][0]["text"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--max-tokens many", "--max-tokens is 'many' and must be a whole number."),
        ("--max-num-seqs 1.5", "--max-num-seqs is '1.5' and must be a whole number."),
        ("--top-p x", "--top-p is 'x' and must be a number."),
        ("--stop-token-ids 1,x", "--stop-token-ids is '1,x' and must be token ids, such as 11,262."),
        ("--logit-bias 11", "--logit-bias is '11' and must be a token id and a number, such as 11=-2.5."),
        ("--device tpu", "--device is 'tpu' and must be one of cpu, cuda, reference."),
        (
            "--overflow slid",
            "--overflow is 'slid' and must be one of refuse, clamp, truncate, slide: did you mean slide?",
        ),
        ("--early-stopping maybe", "--early-stopping is 'maybe' and must be true, false or never."),
        (
            "--soft-prompt x",
            "--soft-prompt is 'x' and must be NAME=PATH, a name of your choice and the folder or file.",
        ),
    ],
)
def test_a_malformed_value_is_answered_by_what_is_allowed(run, arguments, says):
    result = run(arguments)
    assert result.code == 2
    assert result.err.endswith(f"error: {says}\n")


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
    assert "--max-token (did you mean --max-tokens 3?)" in result.err
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
        (CheckpointError("a \x1b[2J\x07\x9b\nb"), 2, "a \\x1b[2J\\x07\\x9b\nb\n"),
        (CheckpointError("a \u202eb\u2066"), 2, "a \\u202eb\\u2066\n"),
        (LostFileError("model.safetensors was cut short"), 1, "error: model.safetensors was cut short\n"),
        (TinyGPTError("no parity"), 1, "error: no parity\n"),
        (ValueError("a \x1b[2J"), 1, "unexpected ValueError: a \\x1b[2J (run it again"),
        (CheckpointError("a" * 10_000), 2, f"{'a' * 8000} [...] and 2000 characters more\n"),
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
