"""The whole reply to a completion."""

from itertools import chain

from tinygpt.outputs import CompletionOutput, RequestOutput
from tinygpt.server.completion_job import CompletionJob, sampled_tokens
from tinygpt.server.protocol.completions import Completion, CompletionChoice


def completion(job: CompletionJob, outputs: list[RequestOutput]) -> Completion:
    """outputs: of each prompt."""
    choices = [_choice(job, i, output, sample) for i, output in enumerate(outputs) for sample in output.outputs]
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return Completion(**job.head, choices=choices, usage=job.usage(num_tokens))


def _choice(job: CompletionJob, i: int, output: RequestOutput, sample: CompletionOutput) -> CompletionChoice:
    with_ids = job.form.return_token_ids
    arrays, tokens = job.logprob_arrays(), sampled_tokens(sample.token_ids, sample.logprobs or ())
    if job.form.echo:
        tokens = chain(job.echoed_tokens(i, output.prompt_logprobs or []), tokens)
    return CompletionChoice(
        index=i * job.params.n + sample.index,
        text=(job.prompt_text(i) if job.form.echo else "") + (sample.text or ""),
        logprobs=None if arrays is None else arrays.add(tokens),
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        **({"token_ids": sample.token_ids, "prompt_token_ids": output.prompt_token_ids} if with_ids else {}),
    )
