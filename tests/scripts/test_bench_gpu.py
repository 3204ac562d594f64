"""scripts/bench_gpu.py without a GPU: its plan, its figures, engines that fail, and a run on the CPU."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from scripts.gpu import engine, run
from scripts.gpu import ours as ours_module
from scripts.gpu.cases import MODELS, PREFILL, Case, Job
from scripts.gpu.check import GREEDY_TOKENS, Agreement, Evidence
from scripts.gpu.ours import Ours
from scripts.gpu.plan import DTYPES, ENGINES, Choice, plan
from scripts.gpu.report import Bar, Results, Row, bars, closing, table_line
from support.paths import ROOT
from support.recorded import HAS_TRANSFORMERS, needs_transformers
from tinygpt.weights.config import ModelConfig

if HAS_TRANSFORMERS:
    import torch

    from scripts.gpu.torch_engines import Eager, build_model
    from scripts.gpu.torch_graph import Graph

DECODE_1, DECODE_8, DECODE_32 = map(Case.decode, (1, 8, 32))
LIMITS = {"bandwidth": 4.3e12, "bfloat16": 790e12, "float32": 50e12}
RUN = (("ours", DECODE_1), ("ours", PREFILL))


def row(case: Case, ms: float, engine: str = "ours", model: str = "124M", dtype: str = "bfloat16") -> Row:
    return Row(model, dtype, engine, case, (ms, 2 * ms, ms / 2))


def verdicts(results: Results) -> dict[str, str]:
    return {bar.what: bar.verdict for bar in bars(results)}


# Known for GPT-2 124M in bfloat16: 57.5 microseconds a token, 198 for 32 sequences at 512, 245 for a prefill of 1024.
def test_shares_are_of_what_the_gpu_can_do_at_most():
    results = Results(limits=LIMITS)
    assert results.share(row(DECODE_1, 0.0575)) == (pytest.approx(1, rel=0.03), None)
    assert results.share(row(DECODE_32, 0.198)) == (pytest.approx(1, rel=0.01), None)
    assert results.share(row(PREFILL, 0.245)) == (None, pytest.approx(1, rel=0.03))
    assert results.share(row(PREFILL, 245, dtype="float32")) == (None, pytest.approx(0.0158, rel=0.03))
    assert Results().share(row(PREFILL, 1)) == (None, None)


def test_a_line_of_the_table():
    results = Results([row(DECODE_8, 0.5)], LIMITS)
    cells = table_line(row(DECODE_8, 2.0, "eager"), results).strip("| ").split(" | ")
    name = "decode, batch 8, context 512"
    assert cells == ["124M", "bfloat16", name, "eager", "2.000 (1.000)", "4,000", "5%", "-", "4.00"]


def test_nothing_measured_meets_no_bar():
    found = verdicts(Results())
    assert set(found.values()) == {"not measured"}
    assert {f"{model}, batch 1" for model in MODELS} <= found.keys()
    assert {f"124M, batch 1, against torch {name}" for name in ("eager", "compiled", "graph")} <= found.keys()


@pytest.mark.parametrize(("factor", "verdict"), [(0.99, "met"), (1.01, "not met")])
def test_bars_are_met_up_to_their_limit(factor, verdict):
    half_of_bandwidth = DECODE_1.bytes_read(ModelConfig(n_layer=24, n_embd=1024, n_head=16), "bfloat16") / 4.3e9 / 0.5
    rows = [
        row(DECODE_1, 0.25 * factor),
        row(DECODE_32, 0.4 * factor),
        row(PREFILL, 1.0 * factor),
        row(DECODE_1, half_of_bandwidth * factor, model="355M"),
        row(DECODE_1, 2.5, "eager"),
        row(DECODE_1, 0.5, "compiled"),
        row(DECODE_1, 0.3, "graph"),
    ]
    logits, tokens = np.zeros((2, 3)), np.arange(GREEDY_TOKENS)
    other = np.where(tokens < (200 if verdict == "met" else 150), tokens, 0)
    agreement = Agreement.of("float32", Evidence(logits + factor * 1e-4, other), Evidence(logits, tokens, tokens / 7))
    found = verdicts(Results(rows, LIMITS, [agreement]))
    assert found.pop("774M, batch 1") == found.pop("1.5B, batch 1") == "not measured"
    assert found == dict.fromkeys(found, verdict)
    assert len(found) == 9


def test_leads_over_torch_are_shown_for_every_model_that_has_both():
    rows = [row(DECODE_1, 1.0, model="774M"), row(DECODE_1, 12.0, "eager", "774M"), row(DECODE_1, 9, "graph", "355M")]
    bar = next(bar for bar in bars(Results(rows)) if bar.what.startswith("774M, batch 1, against"))
    assert bar == Bar("774M, batch 1, against torch eager", "≥ 10x", "12.00x", "met")
    assert not any(bar.what.startswith("355M, batch 1, against") for bar in bars(Results(rows)))


def test_agreement_says_where_the_tokens_part_and_how_near_a_tie_was():
    tokens = np.arange(GREEDY_TOKENS)
    other = np.where(tokens < 57, tokens, -1)
    logits = np.array([[1.0, 2.0, 0.0], [3.0, 1.0, 0.0]])
    shifted = logits + np.array([[2.0, 0.0, 0.0], [0.0, 0.0, 0.5]])
    found = Agreement.of("float32", Evidence(shifted, other), Evidence(logits, tokens, tokens * 1e-6))
    assert (found.largest_difference, found.same_top_1, found.same_tokens) == (2.0, 0.5, 57)
    assert "differ after 57 of 200 steps, where transformers' best two logits are 5.7e-05 apart" in str(found)


def test_nan_is_no_agreement():
    logits, tokens = np.zeros((2, 3)), np.arange(GREEDY_TOKENS)
    agreement = Agreement.of("float32", Evidence(logits * np.nan, tokens), Evidence(logits, tokens))
    assert verdicts(Results(agreements=[agreement]))["float32 logits against transformers"] == "not met"


def test_plan_begins_with_what_the_bars_need(tmp_path):
    jobs = plan(Choice(MODELS, (1, 8, 32, 128), ENGINES, DTYPES, "cuda", 128, 9), tmp_path)
    assert [(job.side, job.model, job.dtype) for job in jobs[:5]] == [
        ("limits", "124M", "bfloat16"),
        ("ours", "124M", "bfloat16"),
        ("torch", "124M", "bfloat16"),
        ("ours", "124M", "float32"),
        ("torch", "124M", "float32"),
    ]
    done = [(job.model, job.dtype, engine, case) for job in jobs for engine, case in job.runs]
    cases = (*map(Case.decode, (1, 8, 32, 128)), PREFILL)
    wanted = [
        (model, dtype, engine, case)
        for dtype, models in (("bfloat16", MODELS), ("float32", ("124M",)), ("int8", MODELS))
        for model in models
        for engine in (ENGINES if dtype != "int8" else ("ours",))
        for case in cases
    ]
    assert sorted(map(str, done)) == sorted(map(str, wanted))
    assert done.index(("1.5B", "bfloat16", "graph", DECODE_1)) < done.index(("355M", "bfloat16", "compiled", DECODE_1))
    checks = {(job.side, job.dtype) for job in jobs if job.check}
    assert checks == {("ours", "bfloat16"), ("ours", "float32"), ("ours", "int8"), ("torch", "float32")}
    assert all(job.model == "124M" for job in jobs if job.check)
    small = plan(Choice(("355M",), (1,), ENGINES, DTYPES, "cuda", 128, 9), tmp_path)
    assert {job.dtype for job in small} == {"bfloat16", "int8"}
    assert all(Job.from_json(json.loads(json.dumps(job.as_json()))) == job for job in jobs)


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=clock))


class Stepping:
    """An engine on a clock of its own: a prompt token takes 1 ms, a step 5 ms, and nothing happens before `wait`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = self.begun = 0.0
        self.positions: list[int] = []
        set_clock(monkeypatch, lambda: self.now)

    def start(self, token_ids, num_steps):
        self.position, self.room = len(token_ids[0]), len(token_ids[0]) + num_steps
        self.begun += 1e-3 * self.position

    def step(self):
        self.position += 1
        assert self.position <= self.room
        self.positions.append(self.position)
        self.begun += 5e-3

    def wait(self):
        self.now, self.begun = self.now + self.begun, 0.0


def test_torch_steps_are_timed_around_the_context_without_the_prompt(monkeypatch):
    stepping = Stepping(monkeypatch)
    times = engine.measure(stepping, DECODE_8, 100, steps=32, repeats=2)
    assert times == pytest.approx([5.0, 5.0])
    timed = stepping.positions[-32:]
    assert np.mean(timed) == pytest.approx(512, abs=1)
    assert engine.measure(stepping, PREFILL, 100, steps=32, repeats=1) == pytest.approx([1023.0])


def test_ours_is_measured_as_the_bench_command_does(monkeypatch):
    """Of a step, the mean of those in which the whole batch decodes; of a prefill, the wait for its token."""
    asked = []

    def run_case(llm, case, repetitions, meter):
        asked.append((llm, case.batch_size, case.prompt_length, case.new_tokens, repetitions, meter))
        return SimpleNamespace(runs=[SimpleNamespace(together=0.128, num_together=64, first_token=0.5)])

    monkeypatch.setattr(ours_module, "run_case", run_case)
    ours = object.__new__(Ours)
    ours.llm, ours.steps, ours.repeats, ours.meter = "llm", 64, 2, "meter"
    assert ours.measure("ours", Case.decode(128)) == [2.0]
    assert ours.measure("ours", PREFILL) == [500.0]
    # 480 to 543 positions are attended to by the 64 steps, the first of which has the token that came with the prompt.
    assert asked == [("llm", 128, 480, 65, 2, "meter"), ("llm", 1, 1023, 0, 2, "meter")]


def test_no_more_repeats_than_there_is_time_for(monkeypatch):
    done = []
    set_clock(monkeypatch, lambda: 10.0 * len(done))
    engine.repeated(done.append, repeats=9)
    assert done == [0, 1, 2, 3]
    set_clock(monkeypatch, lambda: 0.0)
    assert engine.repeated(float, repeats=9) == [float(i) for i in range(1, 10)]


@needs_transformers
def test_torch_has_our_tensors_and_its_graph_does_what_transformers_does():
    model = build_model("random:tiny", "float32", "cpu")
    ours = Ours(Job("ours", "tiny", "float32", "cpu", (("ours", DECODE_1),)))
    agreement = Agreement.of("float32", ours.evidence(), Eager(model).evidence())
    assert agreement.largest_difference < 1e-5
    assert agreement.are_tokens_identical
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.mul_(8)  # what is attended to decides which token comes
    eager, graph = Eager(model), Graph(model, is_captured=False)
    token_ids = Case(3, 100).prompts(2, 50257)
    for stepping in (eager, graph):
        stepping.start(token_ids, 10)
    for _ in range(10):
        assert torch.equal(eager.tokens, graph.tokens)
        eager.step()
        graph.step()


def answers_of(program: str, monkeypatch, tmp_path, seconds: float = 30, patience: float = 30) -> Results:
    """What a job comes to whose process runs `program`."""
    monkeypatch.setattr(run, "_patience", lambda job: patience)
    monkeypatch.setattr(run, "_seconds_to_begin", lambda job: 0)

    def start(job, deadline, log):
        with log.open("a") as errors:
            command = [sys.executable, "-c", program]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

    monkeypatch.setattr(run, "_start", start)
    results = Results()
    rows = list(run.run_jobs([Job("ours", runs=RUN)], time.time() + seconds, tmp_path / "log", results))
    assert [row for row in rows if row is not None] == results.rows
    return results


FIRST_ANSWER = f"""
import json, sys, time
print(json.dumps({{"engine": "ours", "case": {DECODE_1.name!r}, "ms": [1.0]}}), flush=True)
"""
PREFILL_NAME = f"124M, bfloat16, ours, {PREFILL.name}"


def test_process_that_dies_says_why_and_what_it_had_measured_stays(monkeypatch, tmp_path):
    results = answers_of(f"{FIRST_ANSWER}sys.exit('no memory left')", monkeypatch, tmp_path)
    assert [row.case for row in results.rows] == [DECODE_1]
    assert results.failed == {PREFILL_NAME: "its process ended with 1: no memory left"}


def test_process_that_hangs_is_stopped(monkeypatch, tmp_path):
    begin = time.time()
    results = answers_of(f"{FIRST_ANSWER}time.sleep(300)", monkeypatch, tmp_path, patience=2)
    assert time.time() - begin < 60
    assert len(results.rows) == 1
    assert results.failed == {PREFILL_NAME: "it hung, and was stopped"}


def test_process_is_stopped_at_the_time_bound(monkeypatch, tmp_path):
    results = answers_of(f"{FIRST_ANSWER}time.sleep(300)", monkeypatch, tmp_path, seconds=2, patience=100)
    assert results.failed == {PREFILL_NAME: "it was stopped at the time bound"}


def test_job_that_cannot_begin_fails_with_its_sentence(monkeypatch, tmp_path):
    program = """import json; print(json.dumps({"error": "RequestError: device is 'cuda'"}))"""
    results = answers_of(program, monkeypatch, tmp_path)
    names = [f"124M, bfloat16, ours, {case.name}" for _, case in RUN]
    assert results.failed == dict.fromkeys(names, "RequestError: device is 'cuda'")


def bench(tmp_path: Path, *arguments: str, path: str = ".") -> tuple[subprocess.CompletedProcess, dict]:
    """A run of the script, and its JSON."""
    file = tmp_path / "results.json"
    command = [sys.executable, "scripts/bench_gpu.py", "--models", "tiny", "--json", str(file), *arguments]
    environment = {"PYTHONPATH": path, "HOME": str(Path.home())}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return result, json.loads(file.read_text(encoding="utf-8"))


@needs_transformers
def test_runs_to_its_end_without_a_gpu(tmp_path):
    small = "--device cpu --batches 1 --dtypes float32 --steps 4 --repeats 1 --engines ours eager graph"
    result, found = bench(tmp_path, *small.split())
    assert result.returncode == 0, result.stderr
    assert [(row["engine"], row["case"]) for row in found["rows"]] == [
        (engine, case.name) for engine in ("ours", "eager") for case in (DECODE_1, PREFILL)
    ]
    assert all(len(row["ms"]) == 1 for row in found["rows"])  # what they say is noise at this size, below 0 included
    assert len(found["failed"]) == 2
    assert all("graph" in name and "needs device cuda" in why for name, why in found["failed"].items())
    assert "Traceback (most recent call last)" in result.stderr  # no --log keeps what the engines said
    verdict = {bar["what"]: bar["verdict"] for bar in found["bars"]}
    assert verdict["float32 logits against transformers"] == verdict["float32 greedy tokens"] == "met"
    assert "| tiny | float32 | prefill of 1023 | eager |" in result.stdout
    assert "| float32 greedy tokens | identical over 200 steps | 200 the same | met |" in result.stdout


def test_without_torch_ours_is_measured_and_the_others_say_what_is_missing(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')")
    small = "--device cpu --batches 1 --dtypes float32 --steps 4 --repeats 1 --engines ours eager"
    result, found = bench(tmp_path, *small.split(), path=f"{tmp_path}:{ROOT}")
    assert result.returncode == 0, result.stderr
    assert {row["engine"] for row in found["rows"]} == {"ours"}
    assert all("torch is not installed: pip install torch transformers." in why for why in found["failed"].values())
    assert any("eager" in name for name in found["failed"])


def test_no_time_leaves_everything_out_and_says_so(tmp_path):
    result, found = bench(tmp_path, "--device", "cpu", "--seconds", "1")
    assert result.returncode == 1
    assert found["rows"] == []
    assert f"tiny, float32, eager, {PREFILL.name}" in found["left_out"]
    assert "Left out:" in closing(Results(left_out=found["left_out"]))
    assert "Left out:" in result.stdout
