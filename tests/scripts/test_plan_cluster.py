"""`scripts/plan_cluster.py`: what it says of bytes is what ranks send, and of memory what they hold."""

import sys
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest

from support.paths import ROOT
from tinygpt.bench.machine_limits import MachineLimits
from tinygpt.config import ModelConfig
from tinygpt.execution.backend import load_backend
from tinygpt.execution.model_source import ModelSource
from tinygpt.kernels.cpu.rank import load_part
from tinygpt.parallel.cut import part_of_rank
from tinygpt.parallel.layout import Layout
from tinygpt.weights.parameters import EMBEDDING, HEAD
from tinygpt.weights.random_checkpoint import random_checkpoint

# As `python scripts/plan_cluster.py` finds its parts.
sys.path.append(str(ROOT / "scripts"))
import plan_cluster
from cluster import measurement, prediction, refusals

LIMITS = MachineLimits(10e9, {"float32": 1e12, "bfloat16": 1e12})
FREE = prediction.Network(0.0, 1e15)


def predict(layout, network=FREE, dtype="float32", batch_size=1):
    return prediction.predict(ModelConfig(), dtype, layout, prediction.Load(batch_size, 1), LIMITS, network, 1.0)


def test_one_host_reads_all_weights_at_its_memorys_pace():
    """124M: 12 layers of 12 C^2 and a head of 50257 C, in 4 bytes, at 10 GB/s; the KV cache is next to nothing."""
    weights = 4 * (12 * 12 * 768**2 + 50257 * 768)
    assert predict(Layout()).seconds == pytest.approx(weights / 10e9, rel=1e-3)
    assert predict(Layout()).memory == pytest.approx(weights, rel=0.01)


def test_two_tensor_ranks_halve_both_and_wait_for_24_sums():
    one, two = predict(Layout()), predict(Layout(2))
    assert two.seconds == pytest.approx(one.seconds / 2, rel=1e-3)
    assert two.memory == pytest.approx(one.memory / 2, rel=0.01)
    late = predict(Layout(2), prediction.Network(1e-3, 1e15))
    assert late.seconds - two.seconds == pytest.approx(27e-3)  # the plan, the embedding's rows and the logits, too


def test_two_stages_halve_the_memory_alone():
    one, two = predict(Layout()), predict(Layout(1, 2))
    assert two.seconds == pytest.approx(one.seconds, rel=1e-3)
    assert two.memory == pytest.approx(4 * (9 * 12 * 768**2 + 50257 * 768), rel=0.01)  # 9 layers, and a tied embedding


def test_stages_that_work_on_groups_of_a_batch_take_a_turn_more_in_four_steps():
    """Where computing takes the time, not reading: 9 layers, or 3 and a head that is as large as 5.4."""
    slow = MachineLimits(1e15, {"float32": 1e9, "bfloat16": 1e9})
    fields = "float32", Layout(1, 2), prediction.Load(32, 1), slow, FREE, 1.0
    layers, head = 12 * 12 * 768**2, 50257 * 768
    turn = 2 * 16 * max(layers * 9 / 12, layers * 3 / 12 + head) / 1e9
    assert prediction.predict(ModelConfig(), *fields).seconds == pytest.approx(2.25 * turn, rel=1e-3)


@pytest.mark.parametrize(("layout", "floats"), [(Layout(2), 25 * 2 * 768 + 25128), (Layout(1, 2), 768 + 50257)])
def test_what_is_sent_in_a_step(layout, floats):
    assert prediction.sent_bytes(ModelConfig(), layout, 1) == 4 * floats


def test_every_way_to_use_four_hosts():
    found = [
        (layout.tensor_size, layout.pipeline_size, n) for layout, n in prediction.layouts(ModelConfig(), "float32", 4)
    ]
    assert found == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]


def test_layouts_that_a_model_cannot_be_cut_by_are_none():
    config = ModelConfig(n_embd=96, n_head=3, n_layer=2)
    assert [layout for layout, _ in prediction.layouts(config, "float32", 4)] == [Layout(), Layout(1, 2)]


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, 2)])
@pytest.mark.parametrize(
    ("dtype", "tied"), [("float32", True), ("float32", False), ("bfloat16", True), ("int8", True), ("int4", False)]
)
def test_memory_is_what_each_rank_holds(dtype, layout, tied):
    """All arrays of its weights and its KV cache, within the padding of panels and what scales take."""
    config = ModelConfig(n_embd=512, n_head=8, n_layer=2, vocab_size=2048, n_positions=64, tie_word_embeddings=tied)
    checkpoint = random_checkpoint("random", config)
    if not tied:
        checkpoint = replace(checkpoint, tied=False, stored={**checkpoint.stored, HEAD: checkpoint.stored[EMBEDDING]})
    source = ModelSource(load_backend("cpu", dtype), checkpoint, dtype, "float32" if dtype == "float32" else "bfloat16")
    for rank in range(layout.size):
        part = part_of_rank(layout, rank, config, dtype)
        params = source.load_part(1, part, load_part)
        cache = source.backend.new_kv_cache(part, 2, 64, source.kv_cache_dtype)
        held = {array.ctypes.data: array.nbytes for array in arrays((params, cache))}  # a tied head once
        predicted = prediction.rank_bytes(config, dtype, layout, rank, prediction.Load(2, 64))
        assert predicted == pytest.approx(sum(held.values()), rel=0.05)


def arrays(value):
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        yield from (array for item in value for array in arrays(item))
    elif is_dataclass(value):
        yield from (array for field in fields(value) for array in arrays(getattr(value, field.name)))


@pytest.mark.parametrize(("of_two", "status"), [(1.1, 0), (1.5, 1)])
def test_a_check_fails_by_predictions_that_are_off_and_not_by_what_was_not_tried(monkeypatch, capsys, of_two, status):
    """Two ranks share what one has, and so are to take as long."""
    seconds = {1: 1.0, 2: of_two}
    monkeypatch.setattr(refusals, "find_spec", lambda name: name)
    monkeypatch.setattr(refusals, "find_mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(refusals, "physical_cores", lambda: 2)
    monkeypatch.setattr(measurement, "physical_cores", lambda: 2)
    monkeypatch.setattr(measurement, "measure_limits", lambda dtype, threads: LIMITS)
    monkeypatch.setattr(measurement, "local_latency", lambda ranks: 1e-6)
    monkeypatch.setattr(measurement, "seconds_of_ranks", lambda model, dtype, load, ranks, threads: seconds[ranks])
    monkeypatch.setattr("sys.argv", ["plan_cluster.py", "random:124M", "--check", "1", "2", "4"])
    assert plan_cluster.main() == status
    one, two, four = capsys.readouterr().out.splitlines()[-3:]
    assert one == "| 1 | | 1000.00 | |"
    assert two.startswith("| 2 | ")
    assert "4 ranks would wait for one another's turn on 2 cores" in four


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ("2 4", "--check begins with 2: begin with 1"),
        ("1 8", "--check has 1 8: give numbers from 1 to 4."),
        ("1 2", "--check of several ranks needs mpi4py, which comes with: pip install"),
        ("1 --context 32", "--context is 32: what is measured takes more than 32 positions"),
        ("1 --overheads", "two measurements: give one of them"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_is_measured(monkeypatch, ranks, said):
    monkeypatch.setattr(plan_cluster, "measure_limits", None)
    monkeypatch.setattr(measurement, "measure_limits", None)
    monkeypatch.setattr(refusals, "find_spec", lambda name: None)  # no mpi4py
    monkeypatch.setattr("sys.argv", ["plan_cluster.py", "random:124M", "--check", *ranks.split()])
    with pytest.raises(SystemExit, match=said):
        plan_cluster.main()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--hosts 1 0", "--hosts is 1 0: give numbers of 1 or more"),
        ("--batch-size 0", "--batch-size is 0: give numbers of 1 or more"),
        ("--context -1", "--context is -1: give numbers of 1 or more"),
        ("--context 2000", "--context is 2000 and random:124M has 1024 positions"),
        ("--latency -1", "--latency is -1.0: give numbers of 0 or more"),
        ("--bandwidth 0", "--bandwidth is 0: give a number above 0"),
        ("--memory-bandwidth -3", "--memory-bandwidth is -3: give a number above 0"),
        ("--efficiency 80", "--efficiency is 80: give a share, of 1 at most"),
        ("--efficiency nan", "--efficiency is nan: give a number above 0"),
        ("--dtype float17", "dtype is 'float17'"),
        ("--overheads", "--overheads of several ranks needs mpi4py, which comes with: pip install"),
    ],
)
def test_what_is_impossible_is_refused_before_anything_is_measured(monkeypatch, words, said):
    monkeypatch.setattr(plan_cluster, "measure_limits", None)
    monkeypatch.setattr(measurement, "measure_limits", None)
    monkeypatch.setattr(refusals, "find_spec", lambda name: None)  # no mpi4py
    monkeypatch.setattr("sys.argv", ["plan_cluster.py", "random:124M", *words.split()])
    with pytest.raises(SystemExit, match=said):
        plan_cluster.main()


def test_ranks_that_cannot_share_the_model_are_refused(monkeypatch):
    monkeypatch.setattr(plan_cluster, "measure_limits", None)
    monkeypatch.setattr(measurement, "measure_limits", None)
    monkeypatch.setattr(refusals, "find_spec", lambda name: name)
    monkeypatch.setattr(refusals, "find_mpiexec", lambda: "mpiexec")
    monkeypatch.setattr("sys.argv", ["plan_cluster.py", "random:tiny", "--check", "1", "2"])
    with pytest.raises(SystemExit, match=r"2 heads of 32 .* cannot be shared in bfloat16"):
        plan_cluster.main()


def test_overheads_are_medians_of_turns(monkeypatch, capsys):
    """One rank and two by turns, at 1 and 8 sequences; two take a tenth longer, but for one slow turn."""
    asked = []

    def seconds(model, dtype, load, ranks, threads):
        asked.append((load.batch_size, ranks, threads))
        return {1: 0.010, 2: 0.011}[ranks] + (len(asked) == 1)

    monkeypatch.setattr(measurement, "seconds_of_ranks", seconds)
    monkeypatch.setattr(measurement, "bytes_over_tcp", lambda model, dtype: 180_000)
    monkeypatch.setattr(refusals, "find_spec", lambda name: name)
    monkeypatch.setattr(refusals, "find_mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(refusals, "physical_cores", lambda: 2)
    monkeypatch.setattr("sys.argv", ["plan_cluster.py", "random:124M", "--overheads"])
    assert plan_cluster.main() == 0
    assert asked == [(1, 1, 2), (1, 2, 1)] * 5 + [(8, 1, 2), (8, 2, 1)] * 5
    out = capsys.readouterr().out
    assert "| 1 | 10.00 | 11.00 | +10.0% |\n| 8 | 10.00 | 11.00 | +10.0% |" in out
    assert "254112 by the formula, 180000\n" in out  # 4 x (25 x 2 x 768 + 25128)
