"""What several kinds of requests and replies have in common."""

from tinygpt.server.protocol.fields import Model, Strict


class StreamOptions(Strict):
    """Without `stream` they mean nothing, and are allowed. include_obfuscation: events of equal lengths."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Usage(Model):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_prompt_tokens: int, num_completion_tokens: int) -> "Usage":
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
        )


class Error(Model):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Model):
    error: Error
