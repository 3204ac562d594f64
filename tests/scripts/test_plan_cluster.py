"""`scripts/plan_cluster.py`: what it says of bytes is what ranks send, and of memory what they hold."""

import importlib.util

import pytest

from support.paths import ROOT
from tinygpt.bench.machine_limits import MachineLimits
from tinygpt.config import ModelConfig
from tinygpt.parallel.layout import Layout

spec = importlib.util.spec_from_file_location("plan_cluster", ROOT / "scripts" / "plan_cluster.py")
plan_cluster = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plan_cluster)

LIMITS = MachineLimits(10e9, {"float32": 1e12, "bfloat16": 1e12})
FREE = plan_cluster.Network(0.0, 1e15)


def predict(layout, network=FREE, dtype="float32", batch_size=1):
    return plan_cluster.predict(ModelConfig(), dtype, layout, plan_cluster.Load(batch_size, 1), LIMITS, network, 1.0)


def test_one_host_reads_all_weights_at_its_memorys_pace():
    """124M: 12 layers of 12 C^2 and a head of 50257 C, in 4 bytes, at 10 GB/s; the KV cache is next to nothing."""
    weights = 4 * (12 * 12 * 768**2 + 50257 * 768)
    assert predict(Layout()).seconds == pytest.approx(weights / 10e9, rel=1e-3)
    assert predict(Layout()).memory == pytest.approx(weights, rel=0.01)


def test_two_tensor_ranks_halve_both_and_wait_for_24_sums():
    one, two = predict(Layout()), predict(Layout(2))
    assert two.seconds == pytest.approx(one.seconds / 2, rel=1e-3)
    assert two.memory == pytest.approx(one.memory / 2, rel=0.01)
    late = predict(Layout(2), plan_cluster.Network(1e-3, 1e15))
    assert late.seconds - two.seconds == pytest.approx(27e-3)  # the plan, the embedding's rows and the logits, too


def test_two_stages_halve_the_memory_alone():
    one, two = predict(Layout()), predict(Layout(1, 2))
    assert two.seconds == pytest.approx(one.seconds, rel=1e-3)
    assert two.memory == pytest.approx(4 * (9 * 12 * 768**2 + 50257 * 768), rel=0.01)  # 9 layers, and a tied embedding


def test_stages_that_work_on_groups_of_a_batch_take_a_turn_more_in_four_steps():
    """Where computing takes the time, not reading: 9 layers, or 3 and a head that is as large as 5.4."""
    slow = MachineLimits(1e15, {"float32": 1e9, "bfloat16": 1e9})
    fields = "float32", Layout(1, 2), plan_cluster.Load(32, 1), slow, FREE, 1.0
    layers, head = 12 * 12 * 768**2, 50257 * 768
    turn = 2 * 16 * max(layers * 9 / 12, layers * 3 / 12 + head) / 1e9
    assert plan_cluster.predict(ModelConfig(), *fields).seconds == pytest.approx(2.25 * turn, rel=1e-3)


@pytest.mark.parametrize(("layout", "floats"), [(Layout(2), 25 * 2 * 768 + 25128), (Layout(1, 2), 768 + 50257)])
def test_what_is_sent_in_a_step(layout, floats):
    assert plan_cluster.sent_bytes(ModelConfig(), layout, 1) == 4 * floats


def test_every_way_to_use_four_hosts():
    found = [(layout.tensor_size, layout.pipeline_size, n) for layout, n in plan_cluster.layouts(ModelConfig(), 4)]
    assert found == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]


@pytest.mark.parametrize(("of_two", "status"), [(1.1, 0), (1.5, 1)])
def test_a_check_fails_by_predictions_that_are_off_and_not_by_what_was_not_tried(monkeypatch, capsys, of_two, status):
    """Two ranks share what one has, and so are to take as long."""
    seconds = {1: 1.0, 2: of_two}
    monkeypatch.setattr(plan_cluster, "find_spec", lambda name: name)
    monkeypatch.setattr(plan_cluster, "physical_cores", lambda: 2)
    monkeypatch.setattr(plan_cluster, "measure_limits", lambda dtype, threads: LIMITS)
    monkeypatch.setattr(plan_cluster, "local_latency", lambda ranks: 1e-6)
    monkeypatch.setattr(plan_cluster, "seconds_of_ranks", lambda model, dtype, load, ranks, threads: seconds[ranks])
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
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_is_measured(monkeypatch, ranks, said):
    monkeypatch.setattr(plan_cluster, "measure_limits", None)
    monkeypatch.setattr(plan_cluster, "find_spec", lambda name: None)  # no mpi4py
    monkeypatch.setattr("sys.argv", ["plan_cluster.py", "random:124M", "--check", *ranks.split()])
    with pytest.raises(SystemExit, match=said):
        plan_cluster.main()
