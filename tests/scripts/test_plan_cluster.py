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


@pytest.mark.parametrize(("layout", "floats"), [(Layout(2), 24 * 2 * 768 + 25128), (Layout(1, 2), 768 + 50257)])
def test_what_is_sent_in_a_step(layout, floats):
    assert plan_cluster.sent_bytes(ModelConfig(), layout, 1) == 4 * floats


def test_every_way_to_use_four_hosts():
    found = [(layout.tensor_size, layout.pipeline_size, n) for layout, n in plan_cluster.layouts(ModelConfig(), 4)]
    assert found == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]


def test_more_ranks_than_cores_are_not_measured(monkeypatch):
    monkeypatch.setattr(plan_cluster, "physical_cores", lambda: 2)
    monkeypatch.setattr("sys.argv", ["plan_cluster.py", "random:124M", "--check", "1", "4"])
    with pytest.raises(SystemExit, match="--check is 4 and there are 2 cores"):
        plan_cluster.main()
