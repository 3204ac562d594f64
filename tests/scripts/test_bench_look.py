"""scripts/bench_look.py on a tiny model, if TransformerLens is installed."""

import sys

import pytest


def test_a_rehearsal_on_a_tiny_model(monkeypatch, capsys):
    pytest.importorskip("transformer_lens.model_bridge")
    from scripts import bench_look

    monkeypatch.setattr(sys, "argv", ["bench_look.py", "--model", "tiny", "--repeats", "1"])
    bench_look.main()
    lines = capsys.readouterr().out.splitlines()
    assert float(lines[-1].rpartition(" ")[2]) < 1e-4
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")][2:]
    assert len([row for row in rows if all(float(cell) > 0 for cell in row[1:])]) == 4
