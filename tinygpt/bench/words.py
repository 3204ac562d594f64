"""Numbers in words, the same in tables and pictures."""


def runs_text(count: int, spread: str = "") -> str:
    """What a figure is made of; `spread` follows where there are several runs to have one."""
    return "single runs" if count == 1 else f"medians of {count} runs{spread}"


def points_text(count: int) -> str:
    """What a point of a picture is."""
    return f"Points are {runs_text(count, ', error bars reach over all of them')}."


def threads_text(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def parameters_text(count: float) -> str:
    """124M, or 1.56B."""
    return f"{count / 1e6:.0f}M" if count < 1e9 else f"{count / 1e9:.2f}B"
