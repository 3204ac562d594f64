"""`python -m tinygpt warmup`: after it, no request compiles a kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import run_process
from support.paths import ROOT
from tinygpt.cli import main as cli
from tinygpt.cli.commands import warmup
from tinygpt.kernels.cpu import jit
from tinygpt.kernels.kernel_files import KernelFiles

REQUESTS = """
from tinygpt import LLM, SamplingParams
with LLM({model!r}, {dtype!r}, threads=2) as llm:
    filtered = SamplingParams(max_tokens=3, temperature=0.9, top_k=5, top_p=0.8, seed=1, n=2, logprobs=2)
    llm.generate(["Once upon a time", "The"], [filtered, SamplingParams(max_tokens=4)])
    llm.generate("It was", SamplingParams(max_tokens=2, temperature=1.0, top_p=0.5, seed=2, stop=["x"]))
    llm.generate("It was", SamplingParams(temperature=1.0, min_p=0.1, eta_cutoff=1e-3, top_p_rule="openai", top_p=0.9))
    llm.generate("It was", SamplingParams(presence_penalty=0.5, no_repeat_ngram_size=2, bad_words_ids=[[5, 6]]))
    llm.generate("It was", SamplingParams(num_beams=2))
    llm.generate("It was", SamplingParams(temperature=0.9, logprobs=1, logprobs_mode="processed", prompt_logprobs=1))
    llm.logits([1, 2, 3])
    llm.hidden_states([1, 2, 3])
    llm.score("It was", [" a", " the king"])
"""


def python(*arguments: str, cache: Path) -> subprocess.CompletedProcess:
    # Below the temporary folder, kernels may lie that a full disk did not take.
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "TMPDIR": str(cache)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )


def kernels(cache: Path) -> dict[str, int]:
    """The compiled kernels, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in cache.rglob("*.kernel")}


@pytest.mark.slow  # two processes that have no kernel yet
@pytest.mark.parametrize("dtype", ["int8"])
def test_after_warmup_nothing_compiles(tmp_path, dtype):
    first = python("-m", "tinygpt", "warmup", "--dtype", dtype, "--threads", "2", cache=tmp_path)
    made = kernels(tmp_path)
    assert f"{len(made)} kernels compiled" in first.stderr
    assert str(tmp_path) in first.stderr
    assert first.stdout == ""
    python("-c", REQUESTS.format(model="demo", dtype=dtype), cache=tmp_path)
    assert kernels(tmp_path) == made
    second = python("-m", "tinygpt", "warmup", "--dtype", dtype, cache=tmp_path)
    assert "nothing was left to compile" in second.stderr
    assert kernels(tmp_path) == made


def test_the_folder_that_is_named_is_the_one_that_has_them(monkeypatch, tmp_path, capsys):
    """As where the disk of the first one is full."""
    (spare := tmp_path / "spare").mkdir()
    files = KernelFiles(tmp_path / "first", lambda is_made: spare)
    KernelFiles(spare).save("one.kernel", b"code")
    monkeypatch.setattr(warmup, "REQUESTS", {})
    monkeypatch.setattr(jit, "kernel_files", lambda: files)
    assert cli.main(["warmup"]) == 0
    assert capsys.readouterr().err.endswith(f"the kernels are kept in {spare}\n")


def test_kernels_that_cannot_be_kept_are_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(warmup, "REQUESTS", {})
    monkeypatch.setattr(jit, "kernel_files", lambda: KernelFiles(None))
    assert cli.main(["warmup"]) == 1
    error = capsys.readouterr().err
    assert "could not be kept" in error
    assert "nothing was left to compile" not in error


def test_an_impossible_dtype_is_a_sentence():
    result = run_process("warmup", "--dtype", "float16", text=True)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("tinygpt: error: dtype is 'float16'")
