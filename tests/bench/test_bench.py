"""`python -m tinygpt bench` and what it is made of: counts, figures and formats, never how long anything took."""

import csv
import io
import json
import math
import subprocess
import sys
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tinygpt
from support.paths import ROOT
from tinygpt import LLM, SamplingParams
from tinygpt.bench import machine_limits as limits
from tinygpt.bench import measure, plan, work
from tinygpt.bench.build import Build
from tinygpt.bench.formats import COLUMNS, FORMATS, to_markdown
from tinygpt.bench.machine_limits import MachineLimits
from tinygpt.bench.measure import Measurement, Run
from tinygpt.bench.plan import make_plan
from tinygpt.bench.presets import rerun
from tinygpt.bench.records import Setup, record_of
from tinygpt.bench.sweep import Case, cases_of, prompts_to_continue, prompts_to_read, run_case
from tinygpt.cli import main as cli
from tinygpt.cli.results_file import check_writable
from tinygpt.config import ModelConfig
from tinygpt.errors import RequestError
from tinygpt.hardware import memory
from tinygpt.kernels.cpu.simd import peak
from tinygpt.kernels.cpu.simd.tiles import PANEL, TILE_ROWS

# What llama-bench writes in any case, and what llama.cpp's compare-llama-bench.py refuses to read a file without.
LLAMA_BENCH_KEYS = """
    build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params
    n_batch n_ubatch n_threads type_k type_v n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts
"""
SAMPLES = ["samples_ns", "samples_ts"]
COMPARE_KEYS = """
    cpu_mask cpu_strict poll n_gpu_layers split_mode main_gpu no_kv_offload flash_attn tensor_split
    tensor_buft_overrides use_mmap embeddings
"""
LIMITS = MachineLimits(bandwidth=40e9, tile_rates={"float32": 200e9, "int4": 200e9, "int8": 100e9})


@pytest.fixture(scope="module")
def llm():
    with LLM("random:tiny", threads=1, max_num_seqs=8, prefix_cache_seqs=0) as llm:
        yield llm


# Where the time went.


SECONDS = {"forward": 10, "sample": 1, "process_logits": 2, "filter_logits": 3, "top_logprobs": 4, "trace": 100}


class FakeBackend:
    """Each call moves a clock on by SECONDS."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def __getattr__(self, name):
        def call(*arguments):
            self.now += SECONDS[name]
            return name

        return call


def batch(num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(token_ids=np.zeros(num_tokens, np.int32))


def test_passes_and_choices_are_told_apart(monkeypatch):
    decoding, reading = (SimpleNamespace(num_cached=n, prompt_token_ids=[0] * 4) for n in (4, 3))
    scheduler = SimpleNamespace(running=[decoding, reading])
    timed = measure.TimedBackend(FakeBackend(monkeypatch), scheduler, batch_size=2)
    assert timed.forward(None, batch(2), None, None) == "forward"
    scheduler.running = [decoding, decoding]
    for _ in range(2):
        timed.forward(None, batch(2), None, None)
    scheduler.running = [decoding]
    timed.forward(None, batch(1), None, None)
    assert timed.sample(1, 2) == "sample"
    assert [timed.process_logits(), timed.filter_logits(), timed.top_logprobs()] == list(SECONDS)[2:5]
    timed.trace()
    assert (timed.prompt, timed.generation, timed.together, timed.sampling) == (10, 30, 20, 1 + 2 + 3 + 4)
    assert (timed.num_steps, timed.num_prompt_steps, timed.num_together) == (4, 1, 2)


def test_no_step_is_taken_unseen(monkeypatch):
    """A backend that runs ahead takes several steps at once."""
    monkeypatch.setitem(SECONDS, "run_ahead", 5)
    backend = FakeBackend(monkeypatch)
    assert hasattr(backend, "run_ahead")
    assert not hasattr(measure.TimedBackend(backend, SimpleNamespace(running=[]), 1), "run_ahead")


def test_counts_of_one_prompt(llm):
    measurement = measure.measure(llm, [[1, 2, 3]], 6, repetitions=3)
    assert (measurement.batch_size, measurement.prompt_length, measurement.new_tokens) == (1, 3, 6)
    assert [(run.num_steps, run.num_prompt_steps, run.num_together) for run in measurement.runs] == [(6, 1, 5)] * 3
    for run in measurement.runs:
        assert 0 < run.prompt < run.first_token < run.total
        assert run.prompt + run.generation + run.sampling < run.total
    assert measurement.peak_memory > 0 or sys.platform == "win32"


def test_every_repetition_and_warmup_is_a_generate(llm, monkeypatch):
    calls = []
    generate = llm.generate
    monkeypatch.setattr(llm, "generate", lambda *given: calls.append(given) or generate(*given))
    params = SamplingParams(max_tokens=2, temperature=1.0, seed=1, ignore_eos=True)
    assert len(measure.measure(llm, [[1]], 2, repetitions=2, warmups=3, params=params).runs) == 2
    assert [given[1] for given in calls] == [params] * 5


def test_prompts_longer_than_a_step_are_read_in_several(llm):
    measurement = run_case(llm, Case(batch_size=4, prompt_length=300), 1)
    assert measurement.new_tokens == 1
    assert [(run.num_steps, run.num_prompt_steps, run.num_together) for run in measurement.runs] == [(3, 3, 0)]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("new_tokens", [2, 6])
@pytest.mark.parametrize("prompt_length", [1, 10, 16, 17, 300])
def test_a_batch_decodes_together(llm, batch_size, new_tokens, prompt_length):
    """The first prompt is read first where the others wait for it, and no pass is counted before they are read."""
    measurement = run_case(llm, Case(batch_size, prompt_length, new_tokens), 1)
    (run,) = measurement.runs
    assert run.num_prompt_steps == (2 if prompt_length > 16 and batch_size > 1 else 1)
    assert run.num_together == new_tokens - 1
    assert 0 < run.together <= run.generation
    assert (measurement.prompt_length, measurement.new_tokens) == (prompt_length, new_tokens)


def test_a_pass_beside_a_prompt_is_no_time_between_tokens(llm):
    """2 x 32 + 2: the first sequence gets a token while the second reads its prompt; both get the next in one pass."""
    measurement = run_case(llm, Case(2, 32, 2), 1)
    (run,) = measurement.runs
    record = record_of(setup(), measurement, True, ENDED)
    assert (run.num_steps, run.num_prompt_steps, run.num_together) == (3, 2, 1)
    assert record["ms_per_token"] == pytest.approx(1e3 * run.together)
    assert record["samples_ts"] == pytest.approx([2 / run.together])


def test_short_prompts_of_a_batch_are_read_in_one_step():
    """They do not wait for one another: read in several, the first would have ended before the last began."""
    found = planned(batch_sizes=[64], prompt_lengths=[16], new_tokens=[2])
    assert found.step_tokens == 64 * 16
    assert planned(batch_sizes=[64], prompt_lengths=[16], new_tokens=[0]).step_tokens == 512
    sizes = {"max_num_seqs": 64, "max_model_len": 18, "max_num_batched_tokens": found.step_tokens}
    with LLM("random:tiny", threads=1, prefix_cache_seqs=0, **sizes) as llm:
        (run,) = run_case(llm, found.cases[1], 1).runs
    assert (run.num_prompt_steps, run.num_together) == (1, 1)


def test_the_engine_gets_its_backend_back(llm):
    backend = llm._engine._backend
    with pytest.raises(RequestError):
        measure._run(llm, [[10**9]], None)
    assert llm._engine._backend is backend


def test_impossible_prompts_are_refused(llm):
    with pytest.raises(RequestError, match="1024"):
        measure.measure(llm, [[1] * 1000], 25, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_the_peak_of_memory_is_that_of_the_time_since():
    before = memory.peak_memory()
    held = np.ones(50_000_000)
    with_held = memory.peak_memory()
    del held
    memory.forget_peak()
    assert with_held >= before + 300_000_000 or with_held >= 400_000_000
    assert memory.peak_memory() < with_held - 300_000_000


# The cases.


def test_cases_go_from_small_to_large():
    found = cases_of([8, 1, 8], [32], [16, 0, 4])
    assert found == tuple(Case(size, 32, new) for size in (1, 8) for new in (0, 4, 16))


def test_prompts_to_read_have_nothing_in_common():
    prompts = prompts_to_read(50, Case(40, 7))
    assert len({prompt[0] for prompt in prompts}) == 40
    assert {len(prompt) for prompt in prompts} == {7}
    assert prompts == prompts_to_read(50, Case(40, 7))


def test_prompts_to_continue_are_distinct():
    prompts = prompts_to_continue(50257, Case(40, 7, 5))
    assert len(set(map(tuple, prompts))) == 40
    first, *others = prompts
    assert len(first) == 6
    assert {tuple(prompt[:-1]) for prompt in others} == {tuple(first)}
    assert {len(prompt) for prompt in others} == {7}
    assert [len(prompt) for prompt in prompts_to_continue(50257, Case(1, 7, 5))] == [7]


# The work of a pass, counted by hand for GPT-2 124M and a tiny model.

TINY = ModelConfig(vocab_size=10, n_positions=5, n_embd=4, n_layer=2, n_head=1, n_inner=6)


def test_work_of_a_tiny_model():
    # A layer: 4 x 12 + 4 x 4 + 4 x 6 + 6 x 4 weights, 12 + 4 + 6 + 4 biases, 2 norms of 8.
    assert work.block_weights(TINY) == 2 * 112
    assert work.num_parameters(TINY) == 2 * (112 + 26 + 16) + 10 * 4 + 5 * 4 + 8
    assert work.weight_bytes(TINY, "float32") == 4 * (224 + 40)
    assert work.weight_bytes(TINY, "int4", 3, 2) == 3 * 0.625 * 224 + 2 * 40
    assert work.model_bytes(TINY, "bfloat16") == 2 * (224 + 40) + 4 * (2 * 42 + 20 + 8)
    assert work.kv_cache_bytes(TINY, "int8", 7) == 7 * 2 * 2 * 4 * 2
    assert work.block_operations(TINY, 3, 5) == 3 * (2 * 224 + 2 * 5 * 2 * 4 * 2)
    assert work.head_operations(TINY, 3) == 3 * 2 * 40


def test_work_of_gpt2():
    assert work.weight_bytes(ModelConfig(), "float32") == 4 * (124_439_808 - 1024 * 768 - 121_344)
    assert work.block_operations(ModelConfig(), 1, 0) == 2 * 84_934_656


def test_an_untied_head_is_counted():
    untied = ModelConfig(**{**vars(TINY), "tie_word_embeddings": False})
    assert work.num_parameters(untied) - work.num_parameters(TINY) == 40
    assert work.model_bytes(untied, "int4") - work.model_bytes(TINY, "int4") == 40
    assert work.weight_bytes(untied, "int4") == work.weight_bytes(TINY, "int4")


# The machine's limits.


def test_limits_are_of_the_dtypes_tiles(monkeypatch):
    rates = {"int4": 3.0, "int8": 5.0}
    monkeypatch.setattr(limits, "tile_rate", lambda kind, threads: rates[kind] * threads)
    monkeypatch.setattr(limits, "read_bandwidth", lambda threads: 7.0)
    assert limits.measure_limits("int4", 2) == MachineLimits(7.0, {"int4": 6.0, "int8": 10.0})


def test_dtypes_with_a_tile_in_common_have_one_limit_of_it():
    of_int4, of_int8 = MachineLimits(9, {"int4": 2, "int8": 5}), MachineLimits(7, {"int8": 4})
    of_float32 = MachineLimits(8, {"float32": 1})
    for found in (of_int4.best(of_int8).best(of_float32), of_float32.best(of_int8).best(of_int4)):
        assert found == MachineLimits(9, {"int4": 2, "int8": 5, "float32": 1})


def test_the_tile_loop_multiplies():
    run, _, make_arguments = peak.LOOPS["float32"]
    a, b, c = make_arguments(8)
    run(a, b, c, 1)
    expected = a.astype(float) @ b.reshape(8, PANEL).astype(float)
    assert a.shape == (TILE_ROWS, 8)
    np.testing.assert_allclose(c, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", peak.LOOPS)
def test_rate_of_tiles(kind, monkeypatch):
    clock = iter([0.0, 4.0, 4.0, 6.0])
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(clock))
    rows = peak.LOOPS[kind][1]
    assert peak.tile_rate(kind, 3, repetitions=2, tiles=5) == 3 * 5 * 2 * rows * PANEL * peak.K[kind] / 2.0


# The build.


def git(folder, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_build_is_the_commit(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    for message in ("one", "two"):
        git(tmp_path, "commit", "--allow-empty", "-m", message)
    clean = Build.find(tmp_path)
    assert len(clean.commit) == 8
    assert clean.number == 2
    (tmp_path / "file").write_text("2")
    assert Build.find(tmp_path) == Build(f"{clean.commit}+", 2)


def test_without_a_checkout_the_build_is_the_version(tmp_path):
    assert Build.find(tmp_path) == Build(tinygpt.__version__, 0)
    (tmp_path / ".git").mkdir()  # none that git knows
    assert Build.find(tmp_path) == Build(tinygpt.__version__, 0)


# Records.


def setup(dtype: str = "float32") -> Setup:
    return Setup(Build("abcdef01", 7), "A CPU", "tiny", TINY, dtype, 2, 512, LIMITS)


ENDED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def run_of(**values: float) -> Run:
    fields = {"prompt": 1, "generation": 1, "sampling": 0, "first_token": 1, "total": 10, "num_steps": 1}
    return Run(**{**fields, **values})


def prompt_record(dtype: str = "float32") -> dict:
    """4 prompts of 3 tokens, read in two passes."""
    seconds = [2e-6, 1e-6, 4e-6]
    runs = tuple(
        run_of(prompt=s, first_token=2 * s, sampling=s, total=10 * s, num_steps=2, num_prompt_steps=2) for s in seconds
    )
    return record_of(setup(dtype), Measurement(runs, 4, 3, 1, 5_000_000), False, ENDED)


def generation_record() -> dict:
    """4 sequences after 3 tokens: 6 new ones each, of which a pass of all decodes 5; and a pass of fewer."""
    times = {"generation": 12e-6, "together": 10e-6, "sampling": 1, "total": 4}
    run = run_of(**times, num_steps=7, num_prompt_steps=1, num_together=5)
    return record_of(setup("int4"), Measurement((run,), 4, 3, 6, 0), True, ENDED)


def test_a_record_has_llama_benchs_keys():
    for record in (prompt_record(), generation_record()):
        assert {*LLAMA_BENCH_KEYS.split(), *SAMPLES, *COMPARE_KEYS.split()} <= record.keys()
        assert record["test_time"] == "2026-01-02T03:04:05Z"
        assert (record["n_batch"], record["n_threads"], record["build_number"]) == (512, 2, 7)
        assert record["model_n_params"] == work.num_parameters(TINY)


def test_record_of_prompts():
    record = prompt_record()
    assert (record["n_prompt"], record["n_gen"], record["n_depth"], record["test"]) == (3, 0, 0, "pp3")
    assert (record["batch_size"], record["dtype"], record["type_k"], record["peak_memory"]) == (
        4,
        "float32",
        "f32",
        5_000_000,
    )
    assert record["samples_ns"] == [2000, 1000, 4000]
    assert record["avg_ns"] == 2333
    assert record["stddev_ns"] == 1528
    assert record["samples_ts"] == pytest.approx([6e6, 12e6, 3e6])
    assert [record[name] for name in ("median_ts", "low_ts", "high_ts")] == pytest.approx([6e6, 3e6, 12e6])
    assert record["avg_ts"] == pytest.approx(7e6)
    assert record["ms_per_token"] == pytest.approx(2e-3 / 12)
    assert record["first_token_ms"] == pytest.approx(4e-3)
    assert record["sampling_share"] == pytest.approx(0.1)
    assert record["read_gbs"] == pytest.approx(2 * 4 * (224 + 40) / 2e-6 / 1e9)
    assert record["bandwidth_share"] == pytest.approx(record["read_gbs"] / 40)
    in_blocks, in_head = 12 * (2 * 224 + 4 * 2 * 2 * 4), 4 * 80  # a token attends to 2 positions on average
    assert record["gflops"] == pytest.approx((in_blocks + in_head) / 2e-6 / 1e9)
    assert record["peak_share"] == pytest.approx((in_blocks + in_head) / 200e9 / 2e-6)


def test_a_long_prompts_logits_are_wanted_once():
    run = run_of(prompt=1e-6, num_steps=5, num_prompt_steps=5)
    record = record_of(setup(), Measurement((run,), 1, 5, 1, 0), False, ENDED)
    assert record["read_gbs"] == pytest.approx(4 * (5 * 224 + 40) / 1e-6 / 1e9)
    assert record["stddev_ns"] == record["stddev_ts"] == 0


def test_record_of_generation():
    record = generation_record()
    assert (record["n_prompt"], record["n_gen"], record["n_depth"], record["test"]) == (0, 6, 3, "tg6 @ d3")
    assert record["samples_ts"] == pytest.approx([2e6])
    assert record["samples_ns"] == [12000]  # 24 tokens at that rate
    assert record["ms_per_token"] == pytest.approx(2e-3)  # a pass
    assert record["first_token_ms"] is None
    assert record["peak_memory"] is None
    assert record["sampling_share"] == 0.25
    assert record["outside_share"] == pytest.approx(1 - (1 + 12e-6) / 4)  # prompts took 1 of 4 seconds
    assert (record["model_type"], record["type_v"]) == ("gpt2 0M Q4", "bf16")
    # Five passes; 20 tokens, each of which attends to 4 to 8 positions.
    read = 5 * (0.625 * 224 + 40) + 20 * 6 * 2 * 2 * 4 * 2
    assert record["read_gbs"] == pytest.approx(read / 10e-6 / 1e9)
    in_blocks, in_head = 20 * (2 * 224 + 4 * 6 * 2 * 4), 20 * 80
    assert record["gflops"] == pytest.approx((in_blocks + in_head) / 10e-6 / 1e9)
    assert record["peak_share"] == pytest.approx((in_blocks / 200e9 + in_head / 100e9) / 10e-6)


# Formats.


@pytest.fixture
def records():
    return [prompt_record(), generation_record()]


def test_json_is_an_array_and_jsonl_a_line_each(records):
    assert json.loads(FORMATS["json"](records)) == records
    assert [json.loads(line) for line in FORMATS["jsonl"](records).split("\n")] == records


def test_csv_has_a_header_and_no_samples(records):
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](records))))
    assert len(rows) == 2
    assert set(rows[0]) == set(records[0]) - set(SAMPLES)
    assert set(rows[0]) >= {*LLAMA_BENCH_KEYS.split(), *COMPARE_KEYS.split()}
    assert float(rows[0]["avg_ts"]) == records[0]["avg_ts"]
    assert rows[0]["cpu_strict"] == "0"
    assert rows[1]["first_token_ms"] == ""


def test_csv_has_every_field_of_any_record():
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"]([{"a": 1}, {"b": "x,y"}]))))
    assert rows == [{"a": "1", "b": ""}, {"a": "", "b": "x,y"}]


def test_markdown_has_a_row_for_each_record(records):
    header, rule, *rows = to_markdown(records).split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (header, rule, *rows)]
    assert {len(row) for row in cells} == {len(COLUMNS)}
    assert cells[0] == list(COLUMNS)
    assert cells[2][:7] == ["tiny", "float32", "2", "4", "pp3", "6000000.0 (3000000.0 to 12000000.0)", "0.000"]
    assert cells[2][-1] == "5"
    assert cells[3][4] == "tg6 @ d3"
    assert cells[3][7] == cells[3][-1] == ""


def test_a_single_run_is_no_median(records):
    assert "; single runs.\n" in to_markdown(records[1:])


def test_what_is_outside_the_model_has_a_column(records):
    assert to_markdown(records).splitlines()[3].split("|")[-3].strip() == "75.0%"


def test_markdown_names_the_machine_and_its_limits(records):
    text = to_markdown(records)
    assert "A CPU, build abcdef01; medians of 3 runs" in text
    assert "40.0 GB/s with 2 threads." in text
    both = "200 in the blocks and 100 in the head"
    assert f"200 in float32 with 2 threads, {both} in int4 with 2 threads." in text
    alike = [record | {"head_peak_gflops": 200} for record in records]
    assert "200 in float32 with 2 threads, 200 in int4 with 2 threads." in to_markdown(alike)


def test_a_share_above_all_is_shown_as_it_is(records):
    text = to_markdown([record | {"bandwidth_share": 1.234} for record in records])
    assert "(123%)" in text
    assert "the limit is itself a measurement, of a plain loop" in text


# The plan.


def planned(**changes):
    values = {"dtypes": ["float32"], "threads": [1], "batch_sizes": [1], "prompt_lengths": [8], "new_tokens": [4]}
    return make_plan("random:tiny", **{**values, "repetitions": 1, **changes})


def test_a_plan_is_every_combination():
    found = planned(dtypes=["auto", "int8", "float32"], threads=[1, 2, 1], batch_sizes=[1, 40], new_tokens=[4, 0])
    assert found.dtypes == ("float32", "int8")
    assert found.threads == (1, 2)
    assert len(found) == 2 * 2 * 4
    assert (found.max_batch_size, found.max_length, found.step_tokens) == (40, 12, 512)


def test_shares_are_of_the_best_limits_of_the_whole_run(monkeypatch):
    """One bandwidth for a number of threads, though it is measured before and after each dtype."""
    bandwidths, rates = iter([3e9, 9e9, 5e9, 4e9]), iter([1e9, 2e9, 8e9, 7e9])
    monkeypatch.setattr(
        plan, "measure_limits", lambda dtype, threads: MachineLimits(next(bandwidths), {dtype: next(rates)})
    )
    records = []
    plan.run_plan(planned(dtypes=["float32", "int8"], new_tokens=[0]), records)
    assert [(r["bandwidth_gbs"], r["block_peak_gflops"]) for r in records] == [(9, 2), (9, 8)]
    for record in records:
        assert record["bandwidth_share"] == pytest.approx(record["read_gbs"] / 9)
    text = to_markdown(records)
    assert "9.0 GB/s with 1 thread." in text


def test_a_bandwidth_is_that_of_its_number_of_threads(monkeypatch):
    monkeypatch.setattr(plan, "measure_limits", lambda dtype, threads: MachineLimits(threads * 1e9, {dtype: 1e9}))
    records = []
    plan.run_plan(planned(threads=[2, 1], new_tokens=[0]), records)
    assert [(r["n_threads"], r["bandwidth_gbs"]) for r in records] == [(2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": [1, 0]}, "--batch-sizes gives 0 and must give 1 or more"),
        ({"prompt_lengths": [-1]}, "--prompt-lengths gives -1"),
        ({"new_tokens": [1]}, "--new-tokens gives 1 and must give 2 or more, or 0, .* the first new token comes with"),
        ({"repetitions": 0}, "--repetitions gives 0"),
        ({"threads": [0]}, "threads is 0"),
        ({"dtypes": ["float16"]}, "dtype is 'float16'"),
        ({"prompt_lengths": [1000], "new_tokens": [25]}, "1000 tokens and 25 after it take 1025 positions"),
        (
            {"prompt_lengths": [1024], "new_tokens": [0]},
            "--prompt-lengths gives 1024 and may give 1023 at most: .* its first new token",
        ),
    ],
)
def test_impossible_plans_are_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        planned(**changes)


# The command.


@pytest.fixture
def no_limits(monkeypatch):
    """Not the machine's: it takes a while."""
    monkeypatch.setattr(plan, "measure_limits", lambda dtype, threads: LIMITS)


QUICK = "bench --random tiny --batch-sizes 1,2 --prompt-lengths 4 --new-tokens 3 --repetitions 2 --threads 1"


def test_the_command_prints_a_table(no_limits, capsys):
    assert cli.main(QUICK.split()) == 0
    out, err = capsys.readouterr()
    tests = [line.split("|")[5].strip() for line in out.splitlines() if line.startswith("| random:tiny ")]
    assert tests == ["pp4", "tg3 @ d4"] * 2
    assert "4 cases of random:tiny" in err


def test_the_command_writes_records(no_limits, capsys, tmp_path):
    file = tmp_path / "records.json"
    assert cli.main([*QUICK.split(), "--json", "--dtype", "float32,int8", "--output", str(file)]) == 0
    assert capsys.readouterr().out == ""
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [(r["dtype"], r["batch_size"], r["n_prompt"], r["n_gen"], r["n_depth"]) for r in found] == [
        (dtype, size, *counts) for dtype in ("float32", "int8") for size in (1, 2) for counts in ((4, 0, 0), (0, 3, 4))
    ]
    for record in found:
        assert len(record["samples_ns"]) == len(record["samples_ts"]) == 2
        assert all(math.isfinite(v) and v >= 0 for v in record.values() if isinstance(v, (int, float)))
    assert cli.main(["bench", "--compare", str(file), str(file)]) == 0
    out = capsys.readouterr().out
    assert out.count("random:tiny, float32, threads 1, batch ") == 4
    assert out.count("+0.0%") >= 8


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_the_commands_other_formats(no_limits, capsys, form):
    assert cli.main([*QUICK.split(), "--format", form]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + (form == "csv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompt-lengths 500 --new-tokens 13", "take 513 positions and demo has 512"),
        ("--new-tokens 1", "must give 2 or more"),
        ("--random 125M", "--random is '125M' and must be one of tiny, 124M, 355M, 774M, 1.5B."),
        ("--random random:124M", "--random is 'random:124M' and must be one of tiny, 124M"),
        ("--preset cpu-study --random x", "--random is 'x' and must be one of tiny, 124M"),
        ("--preset cpu-study --text README.md", "cpu-study has none: omit it, or give --preset onnx-study"),
        ("--preset onnx-study --text no-such-file", "--text no-such-file cannot be read"),
        (
            "--preset onnx-study --random tiny --text setup.cfg",
            "--text needs a tokenizer and random:tiny has none",
        ),
        ("--output /dev/null/file", "the folder of --output /dev/null/file does not exist"),
        ("--plot x.png --output x.png", "--output and --plot are both x.png"),
        (
            "--plot x.png --dtype float32,int8 --batch-sizes 1,2,3,4,5,6,7 --prompt-lengths 1,2,3,4,5,6,7",
            "--plot would draw 14 lines into one picture and more than 12 cannot be told apart",
        ),
        ("--compare a", "--compare has 1 file: give pairs"),
        ("--compare a b a c", "--compare has a more than once on one side"),
        ("--small", "there is no --preset: omit --small"),
        ("--preset cpu-study --batch-sizes 4", "--preset has cases of its own: omit --batch-sizes"),
        ("--preset cpu-study --threads 1,2", "a preset runs with one"),
        ("--compare a b --output b", "--output b is one of the files of --compare: name another"),
        ("--preset onnx-study --text a --output a", "--text a would be written over: name another file"),
        ("--compare a b --output ./tests/../a", "is one of the files of --compare: name another"),
        ("--compare a b --plot b.png", "measures nothing: omit --plot"),
        ("--compare a b --repetitions 2 --model x", "measures nothing: omit --model, --repetitions"),
        ("--json --format csv", "--json is --format json and --format is csv"),
        ("--output no/such/file", "the folder of --output no/such/file does not exist"),
        ("--output .", "--output . is a folder"),
        ("--plot no/such/file.png", "the folder of --plot"),
        ("--plot picture.gif", "picture.gif: its name must end in .png or .svg"),
        ("--compare no-such-file no-such-file", "no-such-file cannot be read"),
    ],
)
def test_what_is_impossible_is_refused_before_any_work(arguments, message, capsys, monkeypatch):
    def fail(*arguments, **names):
        raise AssertionError("work has begun")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(plan, "LLM", fail)
    monkeypatch.setattr(rerun, "LLM", fail)
    monkeypatch.setattr(plan, "measure_limits", fail)
    assert cli.main(["bench", *arguments.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (ROOT / "x.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--preset no-such-study", "--preset: invalid choice: 'no-such-study'"),
        ("--threads one", "--threads: it is 'one' and must be a whole number, or several separated by commas"),
        ("--random 124M --model demo", "--model"),
        ("--dtype float32,", "--dtype: it is 'float32,' and must be one of auto, float32, bfloat16, int8, int4, or"),
        ("--dtype float32,half", "--dtype: it is 'float32,half' and must be"),
    ],
)
def test_malformed_flags_end_with_the_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments.split()])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flag", ["--output", "--plot"])
@pytest.mark.parametrize("arguments", ["", "--preset cpu-study", "--compare a b"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(flag, arguments, capsys, monkeypatch, tmp_path):
    if "compare" in arguments and flag == "--plot":
        pytest.skip("--compare draws nothing")

    def refuse(path, *mode, **names):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert cli.main(["bench", *arguments.split(), flag, str(tmp_path / "x.png")]) == 2
    err = capsys.readouterr().err
    assert f"{flag} {tmp_path / 'x.png'} cannot be written (Permission denied): name a file in a folder" in err


def test_trying_a_file_changes_nothing(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    for path in (old, new, Path("/dev/null")):
        check_writable("--output", path)
    assert old.read_text() == "kept"
    assert not new.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full and /proc are Linux's")
def test_a_folder_of_the_system_is_refused():
    with pytest.raises(RequestError, match=r"/proc/results\.json cannot be written"):
        check_writable("--output", Path("/proc/results.json"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_results_that_cannot_be_written_are_printed(no_limits, capsys):
    assert cli.main([*QUICK.split(), "--json", "--output", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 4
    assert "/dev/full could not be written (No space left on device): the results are on stdout." in err


def test_an_interruption_leaves_what_was_measured(no_limits, capsys, monkeypatch):
    def interrupted(llm, case, repetitions):
        if case.batch_size == 2:
            raise KeyboardInterrupt
        return run_case(llm, case, repetitions)

    monkeypatch.setattr(plan, "run_case", interrupted)
    assert cli.main([*QUICK.split(), "--json"]) == 130
    out, err = capsys.readouterr()
    assert [record["test"] for record in json.loads(out)] == ["pp4", "tg3 @ d4"]
    assert "interrupted" in err


@pytest.mark.parametrize(("form", "begins"), [("md", "| dtype | batch |"), ("jsonl", '{"preset": "cpu-study"')])
@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt, 130), (RequestError("No more."), 2)])
def test_a_preset_that_stops_midway_leaves_what_was_measured(capsys, monkeypatch, form, begins, stop, code):
    def measure_once(llm, *arguments, **names):
        if llm.dtype == "float32":
            raise stop
        return measure.measure(llm, *arguments, **names)

    monkeypatch.setattr("tinygpt.bench.presets.rerun.measure", measure_once)
    command = "bench --preset cpu-study --small --random tiny --dtype int8,float32 --threads 1 --repetitions 1 --format"
    assert cli.main([*command.split(), form]) == code
    out = capsys.readouterr().out
    assert out.startswith(begins)
    assert len(out.splitlines()) == (3 if form == "md" else 1)
    assert "int8" in out


def test_too_little_memory_for_a_preset_names_its_flags(monkeypatch, capsys):
    def refuse(*arguments, **names):
        raise RequestError("lower max_num_seqs.")

    monkeypatch.setattr(rerun, "LLM", refuse)
    assert cli.main(["bench", "--preset", "cpu-study", "--random", "tiny", "--threads", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "lower max_num_seqs. A preset chooses max_num_seqs and the positions itself: give another --dtype" in err


def test_too_little_memory_names_the_flags(no_limits, monkeypatch, capsys):
    def refuse(*arguments, **names):
        raise RequestError("lower max_num_seqs.")

    monkeypatch.setattr(plan, "LLM", refuse)
    assert cli.main(["bench", "--random", "tiny", "--batch-sizes", "1,100000", "--threads", "1"]) == 2
    assert (
        "lower max_num_seqs. In bench, max_num_seqs is the largest of --batch-sizes, 100000" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "more", "begins"),
    [
        ("x.json", [], "["),
        ("x.CSV", [], '"'),
        ("x.jsonl", [], "{"),
        ("x.txt", [], "|"),
        ("x.json", ["--format", "md"], "|"),
    ],
)
def test_the_format_is_what_the_file_ends_in(no_limits, tmp_path, name, more, begins):
    assert cli.main([*QUICK.split(), *more, "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(begins)


def test_compiling_is_said_once_and_only_where_a_kernel_compiles(no_limits, capsys, monkeypatch):
    @contextmanager
    def listen(callback):
        for _ in range(num_kernels):
            callback()
        yield

    monkeypatch.setattr("tinygpt.kernels.cpu.jit.on_compilation", listen)
    for num_kernels in (0, 3):
        assert cli.main(QUICK.split()) == 0
        assert capsys.readouterr().err.count("compiling kernels") == (num_kernels > 0)


def test_kernels_that_cannot_be_kept_are_said_to(no_limits, capsys, monkeypatch):
    monkeypatch.setattr("tinygpt.kernels.cpu.jit.cache_folder", lambda: SimpleNamespace(note="kept nowhere"))
    assert cli.main(QUICK.split()) == 0
    assert "tinygpt: kept nowhere" in capsys.readouterr().err


def test_more_threads_than_cores_are_noted(records, monkeypatch):
    monkeypatch.setattr("tinygpt.bench.formats.logical_cores", lambda: 1)
    assert "- 2 threads share 1 logical core, and wait for one another." in to_markdown(records)
    monkeypatch.setattr("tinygpt.bench.formats.logical_cores", lambda: 2)
    assert "share" not in to_markdown(records).replace("the share", "")


def test_help_says_what_goes_with_what(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "1.5B, or tiny",
        "They take --model or --random, --dtype, one number of --threads, --repetitions",
        "for the perplexity of onnx-study",
        "what the name of --output ends in, or md",
        "keys of their own for a preset and for --compare",
        "2 or more, as the first one comes with the prompt",
        "OLD NEW OLD NEW",
        "One that is interrupted leaves what it has measured",
    ):
        assert part in text


def test_a_plot_without_matplotlib_is_refused(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*QUICK.split(), "--plot", "picture.png"]) == 2
    assert "pip install 'tinygpt[plot]'" in capsys.readouterr().err
