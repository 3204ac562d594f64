"""scripts/bench_torch_gpu.py without a GPU: its model is tinygpt's, and a rehearsal runs to its end."""

import sys

import pytest

from support.recorded import needs_transformers

pytestmark = needs_transformers


def test_a_rehearsal_on_the_cpu(monkeypatch, capsys):
    from scripts import bench_torch_gpu

    flags = "--models tiny --device cpu --dtype float32 --engines tinygpt eager --batches 1 2 --steps 4 --repeats 1"
    monkeypatch.setattr(bench_torch_gpu, "PREFILL", 9)
    monkeypatch.setattr(sys, "argv", ["bench_torch_gpu.py", *flags.split()])
    bench_torch_gpu.main()
    first, *_, header, _, one, two, prefill = capsys.readouterr().out.splitlines()
    assert float(first.split("at most ")[1].split(";")[0]) < 1e-4
    assert "200 of 200 greedy tokens are equal" in first
    assert header == "| model | case | tinygpt | eager |"
    for row in (one, two, prefill):
        assert all(float(cell) > 0 for cell in row.split(" | ")[2:3])


def test_steps_and_prefills_are_timed_apart():
    from scripts.bench_torch_gpu import torch_ms

    class Counting:
        starts = steps = 0

        def start(self, token_ids, num_steps):
            self.starts += 1

        def step(self):
            self.steps += 1

    for steps in (5, 0):
        engine = Counting()
        assert len(torch_ms(engine, [[1]], steps, repeats=2)) == 2
        assert (engine.starts, engine.steps) == (3, 3 * steps)


@pytest.mark.skipif(sys.platform == "win32", reason="torch compiles with a C++ compiler")
def test_a_static_cache_gives_the_same_tokens():
    import torch

    from scripts.bench_torch_gpu import Compiled, Eager, build_model

    model = build_model("tiny", "float32", "cpu")
    prompts = torch.randint(50257, (2, 7)).tolist()
    compiled, eager = Compiled(model), Eager(model)
    compiled._run = compiled._next  # compiling takes half a minute
    with torch.no_grad():
        for engine in (eager, compiled):
            engine.start(prompts, 4)
        for _ in range(4):
            assert torch.equal(compiled.tokens, eager.tokens)
            eager.step()
            compiled.step()
