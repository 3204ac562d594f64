"""An input: which file of which format is damaged, and how. Everything follows from a seed and a number."""

from dataclasses import dataclass
from random import Random

from .formats import FORMATS

MAX_BYTES = 4_000_000  # of a damaged file; mutators that repeat each other's work would go on


@dataclass(frozen=True)
class Input:
    """A damaged file, to be loaded beside the other files of its format."""

    format: str
    file: str
    data: bytes


@dataclass(frozen=True)
class Mutation:
    """One change: its mutator's name, and what that draws from."""

    name: str
    seed: int


@dataclass(frozen=True)
class Case:
    """An input as it is made."""

    format: str
    file: str
    mutations: tuple[Mutation, ...]

    def input(self, undamaged: bytes) -> Input:
        format, data = FORMATS[self.format], undamaged
        mutators = {mutator.__name__: mutator for mutator in (*format.targets[self.file], format.seal) if mutator}
        for mutation in self.mutations:
            try:
                data = mutators[mutation.name](data, Random(mutation.seed))[:MAX_BYTES]
            except Exception:  # what is left of the file has no place for it
                continue
        return Input(self.format, self.file, data)

    def __str__(self) -> str:
        steps = ", ".join(f"{mutation.name}({mutation.seed})" for mutation in self.mutations)
        return f"{self.format}: {self.file}: {steps}"


def case_of(seed: int, index: int, formats: tuple[str, ...]) -> Case:
    """Input number `index` of a campaign."""
    rng = Random(f"{seed}:{index}")
    format = FORMATS[rng.choices(formats, [FORMATS[name].weight for name in formats])[0]]
    file = rng.choice([*format.targets])
    drawn = [rng.choice(format.targets[file]) for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 5]))]
    if format.seal and rng.random() < 0.6:
        drawn.append(format.seal)
    return Case(format.name, file, tuple(Mutation(mutator.__name__, rng.randrange(2**32)) for mutator in drawn))
