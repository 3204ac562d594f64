"""Cases of bench: what is planned and refused, and records compared with figures worked out by hand."""

import subprocess
from types import SimpleNamespace

import pytest

from support.bench_records import (
    ENDED,
    LLAMA_BENCH_KEYS,
    SAMPLES,
    TINY,
    case_of,
    generation_record,
    planned,
    prompt_record,
    record,
    run_of,
)
from support.golden_models import write_model
from tinygpt.bench import record as records_of_bench
from tinygpt.bench import roofline, sweep
from tinygpt.bench.roofline import MachineLimits
from tinygpt.errors import RequestError


def test_a_plan_is_every_combination():
    found = planned(
        dtypes=["auto", "int8", "float32"], threads=[1, 2, 1], batch_sizes=[1, 40], new_tokens=[4, 0]
    )
    assert (found.caches, found.threads) == ({"float32": "float32", "int8": "bfloat16"}, (1, 2))
    assert (len(found), found.max_batch_size, found.step_tokens) == (2 * 2 * 4, 40, 512)
    assert planned(dtypes=["float32", "int8"], kv_cache_dtype="int8").caches == {
        "float32": "int8",
        "int8": "int8",
    }


def test_a_later_dtype_is_refused_before_the_first_is_measured(tmp_path):
    """Heads of 5 numbers are shared among ranks in float32, but have no whole pairs."""
    folder = str(write_model(tmp_path, n_embd=35, n_head=7, n_layer=1, vocab_size=97, n_positions=90))
    assert [*planned(model=folder, ranks=(2, 1)).caches] == ["float32"]
    with pytest.raises(RequestError, match="bfloat16"):
        planned(model=folder, ranks=(2, 1), dtypes=["float32", "bfloat16"])


def test_shares_are_of_the_best_limits_of_a_number_of_threads(monkeypatch):
    bandwidths = {(1, "float32"): [3e9, 9e9], (1, "int8"): [5e9, 4e9]}
    bandwidths |= {(2, "float32"): [2e9] * 2, (2, "int8"): [1e9] * 2}

    def measure_limits(dtype, threads, device):
        return MachineLimits(bandwidths[threads, dtype].pop(), {dtype: 1e9})

    monkeypatch.setattr(sweep, "measure_limits", measure_limits)
    records, told = [], []
    plan = planned(dtypes=["float32", "int8"], threads=[1, 2], new_tokens=[0])
    sweep.run_plan(plan, records, told.append)
    assert [(r["dtype"], r["n_threads"], r["bandwidth_gbs"]) for r in records] == [
        ("float32", 1, 9), ("float32", 2, 2), ("int8", 1, 9), ("int8", 2, 2)
    ]  # fmt: skip
    assert records[2]["bandwidth_share"] == pytest.approx(records[2]["read_gbs"] / 9)
    assert told[3] == f"4 of 4: int8, 2 threads, batch 1, pp8: {records[3]['median_ts']:.1f} tokens/s"


def test_a_record_has_llama_benchs_keys():
    for found in (prompt_record(), generation_record()):
        assert {*LLAMA_BENCH_KEYS.split(), *SAMPLES} <= found.keys()
        assert found["test_time"] == "2026-01-02T03:04:05Z" == ENDED.strftime("%Y-%m-%dT%H:%M:%SZ")
        assert (found["n_batch"], found["n_threads"]) == (512, 2)
        assert found["model_n_params"] == roofline.num_parameters(TINY)


def test_record_of_prompts():
    found = prompt_record()
    assert (found["n_prompt"], found["n_gen"], found["n_depth"], found["test"]) == (3, 0, 0, "pp3")
    assert (found["batch_size"], found["dtype"], found["type_k"], found["peak_memory"]) == (
        4,
        "float32",
        "f32",
        5e6,
    )
    assert (found["samples_ns"], found["avg_ns"], found["stddev_ns"]) == ([2000, 1000, 4000], 2333, 1528)
    assert found["samples_ts"] == pytest.approx([6e6, 12e6, 3e6])
    of_samples = [found[f"{name}_ts"] for name in ("median", "low", "high", "avg")]
    assert of_samples == pytest.approx([6e6, 3e6, 12e6, 7e6])
    assert found["ms_per_token"] == pytest.approx(2e-3 / 12)
    assert (found["first_token_ms"], found["sampling_share"]) == pytest.approx((4e-3, 0.1))
    assert found["read_gbs"] == pytest.approx(2 * 4 * (224 + 40) / 2e-6 / 1e9)
    assert found["bandwidth_share"] == pytest.approx(found["read_gbs"] / 40)
    in_blocks = 12 * (2 * 224 + 4 * 2 * 2 * 4)
    in_head = 4 * 80  # a token attends to 2 positions on average
    assert found["gflops"] == pytest.approx((in_blocks + in_head) / 2e-6 / 1e9)


def test_record_of_generation():
    found = generation_record()
    assert (found["n_prompt"], found["n_gen"], found["n_depth"], found["test"]) == (0, 6, 3, "tg6 @ d3")
    assert found["samples_ts"] == pytest.approx([2e6])
    assert found["samples_ns"] == [12000]  # 24 tokens at that rate
    assert found["ms_per_token"] == pytest.approx(2e-3)  # a pass
    assert found["first_token_ms"] is found["peak_memory"] is None
    assert found["sampling_share"] == 0.25
    assert found["outside_share"] == pytest.approx(1 - (1 + 12e-6) / 4)  # prompts took 1 of 4 seconds
    assert (found["model_type"], found["type_v"]) == ("gpt2 0M Q4", "bf16")
    # Five passes; 20 tokens, each of which attends to 4 to 8 positions.
    read = 5 * (0.625 * 224 + 40) + 20 * 6 * 2 * 2 * 4 * 2
    assert found["read_gbs"] == pytest.approx(read / 10e-6 / 1e9)
    in_blocks = 20 * (2 * 224 + 4 * 6 * 2 * 4)
    in_head = 20 * 80
    assert found["gflops"] == pytest.approx((in_blocks + in_head) / 10e-6 / 1e9)
    assert found["peak_share"] == pytest.approx((in_blocks / 200e9 + in_head / 100e9) / 10e-6)


@pytest.mark.parametrize(("dtype", "name", "size"), [("float32", "f32", 16), ("int8", "q8_0", 8)])
def test_a_cache_is_read_by_its_size(dtype, name, size):
    """Of a key of one head: its numbers, and in int8 a scale."""
    found = generation_record(dtype)
    assert (found["kv_cache_dtype"], found["type_k"], found["type_v"]) == (dtype, name, name)
    read = 5 * (0.625 * 224 + 40) + 20 * 6 * 2 * 2 * size
    assert found["read_gbs"] == pytest.approx(read / 10e-6 / 1e9)


def test_logits_of_a_long_prompt_are_computed_once():
    found = record(case_of(1, 5), [run_of(prompt=1e-6, num_steps=5, num_prompt_steps=5)])
    assert found["read_gbs"] == pytest.approx(4 * (5 * 224 + 40) / 1e-6 / 1e9)
    assert found["stddev_ns"] == found["stddev_ts"] == 0


def test_the_build_is_the_commit(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(
        records_of_bench,
        "tinygpt",
        SimpleNamespace(__file__=f"{tmp_path}/tinygpt/__init__.py", __version__="7"),
    )
    assert records_of_bench.build.__wrapped__() == ("7", 0)
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    for message in ("one", "two"):
        git("commit", "--allow-empty", "-m", message)
    commit, number = records_of_bench.build.__wrapped__()
    assert (len(commit), number) == (8, 2)
    (tmp_path / "file").write_text("2")
    assert records_of_bench.build.__wrapped__() == (f"{commit}+", 2)
