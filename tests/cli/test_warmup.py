"""`tinygpt warmup`: after it, no request compiles a kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT
from tinygpt import llm as llm_module
from tinygpt.cli import main as cli
from tinygpt.kernels.cpu import compiler, jit
from tinygpt.kernels.kernel_cache import KernelCache

REQUESTS = """
from support.kernel_tools import compiled_kernels
from tinygpt import LLM, SamplingParams
words = "It was the king and it was the king and it was"
with compiled_kernels() as compiled:
    with LLM("demo", "int8", threads=2) as llm:
        filtered = SamplingParams(max_tokens=3, temperature=0.9, top_k=5, top_p=0.8, seed=1, n=2, logprobs=2)
        llm.generate(["Once upon a time", "The"], [filtered, SamplingParams(max_tokens=4)])
        llm.generate("It was", max_tokens=2, temperature=1.0, top_p=0.5, seed=2, stop=["x"])
        rare = dict(min_p=0.1, eta_cutoff=1e-3, top_p_rule="openai", top_p=0.9, repetition_penalty=1.1)
        llm.generate("It was", temperature=1.0, **rare)
        llm.generate("It was", presence_penalty=0.5, no_repeat_ngram_size=2, bad_words_ids=[[5, 6]])
        llm.generate("It was", num_beams=4, num_beam_groups=2, diversity_penalty=0.5)
        reported = dict(logprobs=1, logprobs_mode="processed", prompt_logprobs=1)
        llm.generate("It was", temperature=0.9, **reported)
        for temperature in (0.0, 0.7):
            lookup = SamplingParams(max_tokens=20, temperature=temperature, prompt_lookup_num_tokens=4)
            llm.generate(words, lookup)
        llm.logits([1, 2, 3])
        llm.embed(["It was"])
        llm.score("It was", [" a", " the king"])
        session = llm.session()
        session.extend(words)
        session.generate(SamplingParams(max_tokens=2))
    with LLM("demo", "int8", threads=2, draft_model="demo") as llm:
        llm.generate("It was", max_tokens=6, temperature=1.0, min_p=0.1)
print(compiled.names)
"""


def python(*arguments: str, cache: Path) -> subprocess.CompletedProcess:
    places = {"NUMBA_CACHE_DIR": str(cache), "TMPDIR": str(cache), "TINYGPT_KERNELS": "compile"}
    environment = os.environ | places | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )


def kernels(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in cache.rglob("*.kernel")}


@pytest.mark.slow  # two processes without a compiled kernel
def test_after_warmup_nothing_compiles(tmp_path):
    first = python("-m", "tinygpt", "warmup", "--dtype", "int8", "--threads", "2", cache=tmp_path)
    made = kernels(tmp_path)
    assert "compiling kernels" in first.stderr
    assert made
    assert f"the kernels are kept in {tmp_path}" in first.stderr
    assert first.stdout == ""
    later = python("-c", REQUESTS, cache=tmp_path)
    assert (later.stdout, later.stderr) == ("[]\n", "")
    assert kernels(tmp_path) == made
    second = python("-m", "tinygpt", "warmup", "--dtype", "int8", cache=tmp_path)
    assert "nothing was left to compile" in second.stderr
    assert kernels(tmp_path) == made


def test_kernels_that_cannot_be_kept_are_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(llm_module, "WARMUP_REQUESTS", ())
    counts = iter([(0, 0.0), (1, 0.0)])
    monkeypatch.setattr(jit, "compile_times", lambda: next(counts))
    monkeypatch.setattr(compiler, "kernel_cache", lambda: KernelCache(None))
    assert cli.main(["warmup"]) == 1
    error = capsys.readouterr().err
    assert "could not be kept" in error
    assert "nothing was left to compile" not in error
