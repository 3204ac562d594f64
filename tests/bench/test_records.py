"""Records of a measurement, beside figures worked out by hand."""

import pytest

from support.bench_records import (
    COMPARE_KEYS,
    ENDED,
    LLAMA_BENCH_KEYS,
    SAMPLES,
    TINY,
    generation_record,
    prompt_record,
    run_of,
    setup,
)
from tinygpt.bench import work
from tinygpt.bench.measure import Measurement
from tinygpt.bench.records import record_of


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


@pytest.mark.parametrize(("dtype", "name", "size"), [("float32", "f32", 4 * 4), ("int8", "q8_0", 4 + 4)])
def test_a_cache_is_read_by_its_own_size(dtype, name, size):
    """Of a key of one head: its numbers, and in int8 a scale."""
    record = generation_record(dtype)
    assert (record["kv_cache_dtype"], record["type_k"], record["type_v"]) == (dtype, name, name)
    read = 5 * (0.625 * 224 + 40) + 20 * 6 * 2 * 2 * size
    assert record["read_gbs"] == pytest.approx(read / 10e-6 / 1e9)


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
