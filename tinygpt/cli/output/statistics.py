"""The one form in which every command says how fast it was."""

from typing import TYPE_CHECKING

from tinygpt.cli.output.messages import counted

if TYPE_CHECKING:
    from tinygpt.engine.throughput import Throughput


def rates(work: "Throughput") -> str:
    """As `prompt 4 tokens, 900.0 tokens/s; generation 127 tokens, 199.0 tokens/s`, by Throughput's definition."""
    prompt = _rate("prompt", work.prompt_tokens, work.prompt_seconds)
    return f"{prompt}; {_rate('generation', work.new_tokens, work.new_seconds)}"


def _rate(name: str, tokens: int, seconds: float) -> str:
    found = f"{name} {counted(tokens, 'token')}"
    return f"{found}, {tokens / seconds:.1f} tokens/s" if tokens and seconds else found
