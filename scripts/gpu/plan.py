"""Which job comes when: what the bars need first, and what takes long last, so that a time bound costs little."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .cases import PREFILL, Case, Job

OURS = "ours"
ENGINES = (OURS, "eager", "graph", "compiled")
DTYPES = ("bfloat16", "float32", "int8")
FLOAT32_MODELS = ("124M", "tiny")  # the sizes at which float32 is measured


@dataclass(frozen=True)
class Choice:
    """What is to be measured: the script's flags of these names."""

    models: Sequence[str]
    batches: Sequence[int]
    engines: Sequence[str]
    dtypes: Sequence[str]
    device: str
    steps: int
    repeats: int


def plan(choice: Choice, scratch: Path) -> list[Job]:
    """Jobs in order. Both sides' logits and greedy tokens for the first model go to files in `scratch`."""
    first, *others = choice.models
    cases = [*map(Case.decode, choice.batches[:1]), PREFILL, *map(Case.decode, choice.batches[1:])]
    ours, quick, compiled = (
        [engine for engine in choice.engines if engine in some] for some in ((OURS,), ("eager", "graph"), ("compiled",))
    )
    checked = {(OURS, dtype): str(scratch / f"ours-{dtype}.npz") for dtype in choice.dtypes}
    checked["torch", "float32"] = str(scratch / "transformers.npz")

    def job(side: str, model: str, dtype: str, names: Sequence[str], cases: Sequence[Case]) -> list[Job]:
        is_asked_for = dtype in choice.dtypes and (dtype != "float32" or model in FLOAT32_MODELS)
        runs = tuple((name, case) for name in names for case in cases)
        check = checked.get((side, dtype)) if model == first and names != compiled else None
        found = Job(side, model, dtype, choice.device, runs, choice.steps, choice.repeats, check)
        return [found] if is_asked_for and runs else []

    jobs = [Job("limits", first, device=choice.device)]
    for dtype in ("bfloat16", "float32"):
        jobs += job("ours", first, dtype, ours, cases)
        jobs += job("torch", first, dtype, quick, cases)
    jobs += job("torch", first, "bfloat16", compiled, cases[:1])
    for model in others:
        jobs += job("ours", model, "bfloat16", ours, cases)
    for model in others:
        jobs += job("torch", model, "bfloat16", quick, cases)
    for model in choice.models:
        jobs += job("ours", model, "int8", ours, cases)
    for model in others:
        jobs += job("torch", model, "bfloat16", compiled, cases[:1])
    for model in choice.models:
        jobs += job("torch", model, "bfloat16", compiled, cases[1:])
    jobs += job("torch", first, "float32", compiled, cases)
    return jobs
