"""How many random examples a property is tried with: all with --slow, and a third of them every day."""

from hypothesis import settings

ALL, SOME = "all examples", "a third of them"

# A first example may wait for a kernel to compile, so no deadline.
settings.register_profile(ALL, deadline=None, print_blob=True, max_examples=100)
settings.register_profile(SOME, settings.get_profile(ALL), max_examples=34)


def choose(is_slow: bool) -> None:
    settings.load_profile(ALL if is_slow else SOME)


def are_all() -> bool:
    return settings.default.max_examples == settings.get_profile(ALL).max_examples


def examples(count: int) -> int:
    """For a property that is not tried with as many as others."""
    return count if are_all() else -(-count // 3)
