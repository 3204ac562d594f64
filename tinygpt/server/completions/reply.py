"""The whole reply to a completion."""

from itertools import chain
from typing import Any

from tinygpt.outputs import CompletionOutput, RequestOutput
from tinygpt.server.completions.job import CompletionJob, sampled_tokens
from tinygpt.server.protocol.completions import Completion, CompletionChoice, TokenLogprob
from tinygpt.server.replies.finite import finite


def completion(job: CompletionJob, outputs: list[RequestOutput]) -> Completion:
    """outputs: of each prompt."""
    choices = [_choice(job, i, output, sample) for i, output in enumerate(outputs) for sample in output.outputs]
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return Completion(**job.head, choices=choices, usage=job.usage(num_tokens))


def _choice(job: CompletionJob, i: int, output: RequestOutput, sample: CompletionOutput) -> CompletionChoice:
    arrays, tokens = job.logprob_arrays(), sampled_tokens(sample.token_ids, sample.logprobs or ())
    if job.form.echo:
        tokens = chain(job.echoed_tokens(i, output.prompt_logprobs or []), tokens)
    return CompletionChoice(
        index=i * job.params.n + sample.index,
        text=(job.prompt_text(i) if job.form.echo else "") + (sample.text or ""),
        logprobs=None if arrays is None else arrays.add(tokens),
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        **_asked_for(job, output, sample),
    )


def _asked_for(job: CompletionJob, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
    """Fields that a choice has for those alone who ask."""
    fields: dict[str, Any] = {}
    if job.form.return_token_ids:
        fields |= {"token_ids": sample.token_ids, "prompt_token_ids": output.prompt_token_ids}
    if job.form.prompt_logprobs is not None:
        found = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False)
        fields["prompt_logprobs"] = [described(job, token_id, entry) for token_id, entry in found]
    return fields


def described(job: CompletionJob, token_id: int, entry: dict[int, float] | None) -> dict[int, TokenLogprob] | None:
    """What was found of a token of the prompt, in vLLM's words. Its rank is known only if it is among the best."""
    if entry is None:
        return None
    best = dict(list(entry.items())[: job.form.prompt_logprobs])
    ranks = {i: rank for rank, i in enumerate(best, 1)}
    return {
        i: TokenLogprob(logprob=finite(logprob), rank=ranks.get(i), decoded_token=job.names.name(i))
        for i, logprob in (best | {token_id: entry[token_id]}).items()
    }
