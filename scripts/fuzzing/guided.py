"""Guided by coverage: atheris changes a file as long as that reaches new lines of the readers. An opt-in.

Its own mutations are beside those of the format, so that a frame stays whole every other time.
"""

import sys
import tempfile
from pathlib import Path
from random import Random

READERS = ["tinygpt.weights", "tinygpt.tokenizer", "tinygpt.cli", "tinygpt.evaluation"]


class FindingError(Exception):
    """What atheris stops at and keeps the input of."""


def run(name: str, file: str | None, seconds: int, seed: int, findings: Path) -> None:
    """Fuzz one file of a format, its first one by default. Ends the process, as atheris does."""
    try:
        import atheris
    except ImportError:
        sys.exit("fuzz.py: coverage needs atheris, which is not installed: pip install atheris")

    with atheris.instrument_imports(include=READERS):
        from .cases import Input
        from .formats import FORMATS
        from .worker import Bench, Limits
    if name not in FORMATS:
        sys.exit(f"fuzz.py: no format {name}: give one of {', '.join(FORMATS)}")
    format, root = FORMATS[name], Path(tempfile.mkdtemp(prefix="tinygpt-fuzz-"))
    file = file or next(iter(format.targets))
    bench = Bench(root / "bench", Limits(seconds=60.0, memory=2**31))  # atheris has limits of its own
    mutators = format.targets[file]

    def try_one(data: bytes) -> None:
        outcome = bench.run(Input(name, file, data))
        if outcome.kind == "finding":
            raise FindingError(f"{outcome.what}\n{outcome.detail}")

    def mutate(data: bytes, max_size: int, atheris_seed: int) -> bytes:
        rng = Random(atheris_seed)
        try:
            if rng.random() < 0.5:
                return rng.choice(mutators)(data, rng)[:max_size]
        except Exception:
            pass  # there is no place for it: atheris' own always finds one
        return atheris.Mutate(data, max_size)

    corpus = root / "corpus"
    corpus.mkdir()
    (corpus / "undamaged").write_bytes(format.files()[file])
    findings.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", f"-seed={seed}", "-timeout=20", "-max_len=100000", "-print_final_stats=1"]
    atheris.Setup(
        ["fuzz.py", *options, f"-artifact_prefix={findings}/{name}-", str(corpus)], try_one, custom_mutator=mutate
    )
    atheris.Fuzz()
