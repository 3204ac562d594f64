"""CompletionJob: a completion that was asked for and checked: what runs for it, and what all its replies share."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tinygpt.request.prompts import Prompt
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.completions.logprobs import LogprobArrays, TokenLogprobs
from tinygpt.server.protocol.common import Usage
from tinygpt.server.protocol.completions import CompletionRequest
from tinygpt.server.replies.token_names import TokenNames, name_by_id


@dataclass(frozen=True)
class CompletionJob:
    """first_logprobs: what the model says of each token behind BOS alone; None where that is not wanted or unknown."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    form: CompletionRequest
    prompts: list[Prompt]
    params: SamplingParams
    names: TokenNames
    first_logprobs: dict[int, float] | None

    @property
    def head(self) -> dict[str, Any]:
        """What every reply and every chunk of it begins with."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.form.echo) and self.form.logprobs is not None

    def prompt_text(self, i: int) -> str:
        """What `echo` puts in front of a choice of prompt i."""
        prompt = self.prompts[i]
        if prompt.text is not None:
            return prompt.text
        return b"".join(map(self.names.bytes_of, prompt.token_ids)).decode("utf-8", errors="replace")

    def echoed_tokens(self, i: int, found: list[dict[int, float] | None]) -> Iterator[TokenLogprobs]:
        """The tokens of prompt i, of which the engine has `found` this."""
        token_ids = [] if self.prompts[i].text == "" else self.prompts[i].token_ids  # BOS was not given
        for position, (token_id, logprobs) in enumerate(zip(token_ids, found, strict=False)):
            yield TokenLogprobs(token_id, logprobs if position else self.first_logprobs)

    def logprob_arrays(self) -> LogprobArrays | None:
        """For one choice; None where no log probabilities are asked for."""
        if self.form.logprobs is None:
            return None
        name = name_by_id if self.form.return_tokens_as_token_ids else self.names.name
        return LogprobArrays(self.names, self.form.logprobs, name, with_ids=bool(self.form.return_token_ids))

    def usage(self, num_completion_tokens: int) -> Usage:
        return Usage.of(sum(len(prompt.token_ids) for prompt in self.prompts), num_completion_tokens)


def sampled_tokens(token_ids: Iterable[int], found: Iterable[dict[int, float] | None]) -> Iterator[TokenLogprobs]:
    return map(TokenLogprobs, token_ids, found)
