"""What `bench` will measure, and what is impossible."""

import pytest

from support.bench_records import planned
from support.golden_models import write_model
from tinygpt.bench import plan
from tinygpt.bench.formats import to_markdown
from tinygpt.bench.machine_limits import MachineLimits
from tinygpt.errors import RequestError
from tinygpt.execution import model_source


def test_a_plan_is_every_combination():
    found = planned(dtypes=["auto", "int8", "float32"], threads=[1, 2, 1], batch_sizes=[1, 40], new_tokens=[4, 0])
    assert found.dtypes == ("float32", "int8")
    assert found.threads == (1, 2)
    assert len(found) == 2 * 2 * 4
    assert (found.max_batch_size, found.max_length, found.step_tokens) == (40, 12, 512)


def test_a_plan_has_the_cache_of_each_dtype():
    assert planned(dtypes=["float32", "int8"]).caches == {"float32": "float32", "int8": "bfloat16"}
    assert planned(dtypes=["float32", "int8"], kv_cache_dtype="int8").caches == {"float32": "int8", "int8": "int8"}


def test_what_a_later_dtype_cannot_is_refused_before_the_first_is_measured(tmp_path):
    """Heads of 5 numbers are shared among ranks in float32, and have no whole pairs."""
    folder = str(write_model(tmp_path, n_embd=35, n_head=7, n_layer=1, vocab_size=97, n_positions=90))
    assert planned(model=folder, ranks=(2, 1)).dtypes == ("float32",)
    with pytest.raises(RequestError, match="cannot be shared in bfloat16 with the same results"):
        planned(model=folder, ranks=(2, 1), dtypes=["float32", "bfloat16"])


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


def test_each_case_is_told_as_soon_as_it_is_measured(monkeypatch):
    """By its rate in the table; what follows is not begun before."""
    events, run_case = [], plan.run_case
    monkeypatch.setattr(plan, "measure_limits", lambda dtype, threads: MachineLimits(1e9, {dtype: 1e9}))
    monkeypatch.setattr(plan, "run_case", lambda *case: events.append("began") or run_case(*case))
    records = []
    plan.run_plan(planned(batch_sizes=[1, 2], new_tokens=[0]), records, tell=events.append)
    first, second = (f"{record['test']}: {record['median_ts']:.1f} tokens/s" for record in records)
    cases = [f"{i} of 2: float32, 1 thread, batch {i}" for i in (1, 2)]
    assert events == ["began", f"{cases[0]}, {first}", "began", f"{cases[1]}, {second}"]


def test_a_plan_opens_its_checkpoint_once(monkeypatch):
    opened, open_checkpoint = [], model_source.open_checkpoint
    monkeypatch.setattr(model_source, "open_checkpoint", lambda model: opened.append(model) or open_checkpoint(model))
    made = plan.make_plan("demo", ["float32", "int8", "auto"], [1], [1], [8], [4], 1)
    assert (opened, made.dtypes) == (["demo"], ("float32", "int8"))


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
