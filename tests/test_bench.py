"""`python -m tinygpt bench` and what it is made of: counts, figures and formats, never how long anything took."""

import csv
import io
import json
import math
import subprocess
import sys
from datetime import datetime, timezone
from types import SimpleNamespace

import numpy as np
import pytest

import tinygpt
from tinygpt import LLM, SamplingParams, cli
from tinygpt.bench import limits, measure, memory, plan, work
from tinygpt.bench.build import Build
from tinygpt.bench.formats import COLUMNS, FORMATS, to_markdown
from tinygpt.bench.limits import Limits
from tinygpt.bench.measure import Measurement, Run
from tinygpt.bench.plan import make_plan
from tinygpt.bench.records import Setup, record_of
from tinygpt.bench.sweep import Case, cases_of, prompts_to_continue, prompts_to_read, run_case
from tinygpt.config import GPT2Config
from tinygpt.errors import RequestError
from tinygpt.kernels.cpu import peak
from tinygpt.kernels.cpu.tiles import PANEL, TILE_ROWS

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
LIMITS = Limits(bandwidth=40e9, block_rate=200e9, head_rate=100e9)


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
    timed = measure.TimedBackend(FakeBackend(monkeypatch), scheduler)
    assert timed.forward(None, batch(5), None, None) == "forward"
    scheduler.running = [decoding, decoding]
    for _ in range(2):
        timed.forward(None, batch(2), None, None)
    assert timed.sample(1, 2) == "sample"
    assert [timed.process_logits(), timed.filter_logits(), timed.top_logprobs()] == list(SECONDS)[2:5]
    timed.trace()
    assert (timed.prompt, timed.generation, timed.sampling) == (10, 20, 1 + 2 + 3 + 4)
    assert (timed.num_steps, timed.num_prompt_steps, timed.num_decoded) == (3, 1, 4)


def test_counts_of_one_prompt(llm):
    measurement = measure.measure(llm, [[1, 2, 3]], 6, repetitions=3)
    assert (measurement.batch_size, measurement.prompt_length, measurement.new_tokens) == (1, 3, 6)
    assert [(run.num_steps, run.num_prompt_steps, run.num_decoded) for run in measurement.runs] == [(6, 1, 5)] * 3
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
    assert [(run.num_steps, run.num_prompt_steps, run.num_decoded) for run in measurement.runs] == [(3, 3, 0)]


@pytest.mark.parametrize("prompt_length", [1, 10, 300])
def test_a_batch_decodes_together(llm, prompt_length):
    """At most one token is decoded beside prompts: the first prompt is read first where the others wait for it."""
    (run,) = run_case(llm, Case(8, prompt_length, 6), 1).runs
    assert run.num_prompt_steps == (2 if prompt_length > 16 else 1)
    assert run.num_decoded == 8 * (6 - 1) - (prompt_length > 16)


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
    assert len({tuple(prompt[:-1]) for prompt in prompts}) == 1
    assert {len(prompt) for prompt in prompts} == {7}


# The work of a pass, counted by hand for GPT-2 124M and a tiny model.

TINY = GPT2Config(vocab_size=10, n_positions=5, n_embd=4, n_layer=2, n_head=1, n_inner=6)


def test_work_of_a_tiny_model():
    # A layer: 4 x 12 + 4 x 4 + 4 x 6 + 6 x 4 weights, 12 + 4 + 6 + 4 biases, 2 norms of 8.
    assert work.block_weights(TINY) == 2 * 112
    assert work.num_parameters(TINY) == 2 * (112 + 26 + 16) + 10 * 4 + 5 * 4 + 8
    assert work.weight_bytes(TINY, "float32") == 4 * (224 + 40)
    assert work.weight_bytes(TINY, "int4", 3, 2) == 3 * 0.625 * 224 + 2 * 40
    assert work.model_bytes(TINY, "bfloat16") == 2 * (224 + 40) + 4 * (2 * 42 + 20 + 8)
    assert work.cache_bytes(TINY, "int8", 7) == 7 * 2 * 2 * 4 * 2
    assert work.block_operations(TINY, 3, 5) == 3 * (2 * 224 + 2 * 5 * 2 * 4 * 2)
    assert work.head_operations(TINY, 3) == 3 * 2 * 40


def test_work_of_gpt2():
    assert work.weight_bytes(GPT2Config(), "float32") == 4 * (124_439_808 - 1024 * 768 - 121_344)
    assert work.block_operations(GPT2Config(), 1, 0) == 2 * 84_934_656


def test_an_untied_head_is_counted():
    untied = GPT2Config(**{**vars(TINY), "tie_word_embeddings": False})
    assert work.num_parameters(untied) - work.num_parameters(TINY) == 40
    assert work.model_bytes(untied, "int4") - work.model_bytes(TINY, "int4") == 40
    assert work.weight_bytes(untied, "int4") == work.weight_bytes(TINY, "int4")


# The machine's limits.


def test_limits_are_of_the_dtypes_tiles(monkeypatch):
    rates = {"int4": 3.0, "int8": 5.0}
    monkeypatch.setattr(limits, "tile_rate", lambda kind, threads: rates[kind] * threads)
    monkeypatch.setattr(limits, "read_bandwidth", lambda threads: 7.0)
    assert limits.measure_limits("int4", 2) == Limits(7.0, 6.0, 10.0)
    assert Limits(1, 5, 3).best(Limits(2, 4, 3)) == Limits(2, 5, 3)


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
    """4 sequences after 3 tokens: 6 new ones each, of which a pass of all decodes 5."""
    run = run_of(generation=10e-6, num_steps=6, num_prompt_steps=1, num_decoded=20, sampling=1, total=4)
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
    assert record["peak_share"] == pytest.approx((in_blocks / 200e9 + in_head / 100e9) / 2e-6)


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
    assert (record["model_type"], record["type_v"]) == ("gpt2 0M Q4", "bf16")
    # Five passes; 20 tokens, each of which attends to 4 to 8 positions.
    read = 5 * (0.625 * 224 + 40) + 20 * 6 * 2 * 2 * 4 * 2
    assert record["read_gbs"] == pytest.approx(read / 10e-6 / 1e9)
    assert record["gflops"] == pytest.approx(20 * (2 * 224 + 4 * 6 * 2 * 4 + 80) / 10e-6 / 1e9)


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


def test_markdown_names_the_machine_and_its_limits(records):
    text = to_markdown(records)
    assert "A CPU, build abcdef01; medians of 3 runs" in text
    assert "40.0 GB/s with 2 threads." in text
    assert "200 in float32 with 2 threads, 200 in int4 with 2 threads." in text


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": [1, 0]}, "a batch size is 0 and must be 1 or more"),
        ({"prompt_lengths": [-1]}, "a prompt length is -1"),
        ({"new_tokens": [1]}, "new tokens is 1 and must be 2 or more or 0"),
        ({"repetitions": 0}, "repetitions is 0"),
        ({"threads": [0]}, "threads is 0"),
        ({"dtypes": ["float16"]}, "dtype is 'float16'"),
        ({"prompt_lengths": [1000], "new_tokens": [25]}, "1000 tokens and 25 after it take 1025 positions"),
        ({"prompt_lengths": [1024], "new_tokens": [0]}, "1024 tokens and 1 after it take 1025 positions"),
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
        ("--new-tokens 1", "must be 2 or more"),
        ("--dtype float32,half", "'half'"),
        ("--small", "there is no --preset: leave --small away"),
        ("--preset cpu-study --batch-sizes 4", "--preset has cases of its own: leave --batch-sizes away"),
        ("--preset cpu-study --threads 1,2", "a preset runs with one"),
        ("--compare a b --repetitions 2 --model x", "measures nothing: leave --model, --repetitions away"),
        ("--json --format csv", "--json is --format json and --format is csv"),
        ("--output no/such/file", "the folder of --output no/such/file does not exist"),
        ("--output .", "--output . is a folder"),
        ("--plot no/such/file.png", "the folder of --plot"),
        ("--plot picture.gif", "gif"),
        ("--compare no-such-file no-such-file", "no-such-file cannot be read"),
    ],
)
def test_what_is_impossible_is_refused_before_any_work(arguments, message, capsys, monkeypatch):
    def fail(*arguments, **names):
        raise AssertionError("work has begun")

    monkeypatch.setattr(plan, "LLM", fail)
    monkeypatch.setattr(plan, "measure_limits", fail)
    assert cli.main(["bench", *arguments.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments", [["--preset", "no-such-study"], ["--threads", "one"], ["--random", "124M", "--model", "demo"]]
)
def test_malformed_flags_end_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*QUICK.split(), "--plot", "picture.png"]) == 2
    assert "pip install 'tinygpt[plot]'" in capsys.readouterr().err
