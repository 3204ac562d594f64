"""/v1/completions."""

import secrets
import time
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinygpt.outputs import RequestOutput
from tinygpt.request.prompts import Prompt
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.completions.job import CompletionJob
from tinygpt.server.completions.reply import completion
from tinygpt.server.completions.scoring import scored, scoring_request
from tinygpt.server.completions.stream import CompletionStream
from tinygpt.server.completions.suffix import check_suffix, choose
from tinygpt.server.protocol.completions import CompletionRequest
from tinygpt.server.replies.json_reply import json_reply
from tinygpt.server.routes.inputs import (
    check_context,
    check_stream,
    default_max_tokens,
    prompt_list,
    read_params,
    read_prompts,
)
from tinygpt.server.state import ServerState
from tinygpt.server.transport.endpoint import Endpoint
from tinygpt.server.transport.event_stream import EventStream
from tinygpt.server.work.generation import Generation


def routes(state: ServerState) -> list[Route]:
    async def complete(request: Request, form: CompletionRequest) -> Response | EventStream:
        state.check_model(form.model)
        generation = state.new_generation(request)
        job = await _read(state, request, form)
        suffix = await _read_suffix(state, job)
        if not form.stream or form.max_tokens == 0:
            reply = completion(job, await _outputs(state, generation, job, suffix))
            if form.stream:
                return EventStream(partial(CompletionStream(job, generation).whole, reply))
            return json_reply(reply)
        await generation.submit([(prompt, job.params) for prompt in job.prompts], is_streamed=True)
        return EventStream(CompletionStream(job, generation).events)

    endpoint = Endpoint(CompletionRequest, complete, state)
    return [Route("/v1/completions", endpoint, methods=["POST"])]


async def _read(state: ServerState, request: Request, form: CompletionRequest) -> CompletionJob:
    """Check all that can be checked before any work."""
    state.check_num_logprobs("logprobs", form.logprobs)
    state.check_num_logprobs("prompt_logprobs", form.prompt_logprobs)
    state.check_added_tokens(form.add_special_tokens)
    prompts = await read_prompts(state, prompt_list(form.prompt), form.split_special_tokens, form.cache_salt)
    params = await _params(state, request, form, prompts)
    if form.stream:
        check_stream(params)
    max_tokens = params.max_tokens if form.max_tokens is None else form.max_tokens
    check_context(state, form, prompts, params, max_tokens)
    with_echo = form.echo and form.logprobs is not None and params.soft_prompt is None
    return CompletionJob(
        id=f"cmpl-{secrets.token_hex(16)}",
        created=int(time.time()),
        model=form.model or state.model_name,
        system_fingerprint=state.system_fingerprint,
        form=form,
        prompts=prompts,
        params=params,
        names=state.token_names,
        first_logprobs=await state.first_logprobs() if with_echo else None,
    )


async def _params(
    state: ServerState, request: Request, form: CompletionRequest, prompts: list[Prompt]
) -> SamplingParams:
    wanted = [form.prompt_logprobs, form.logprobs if form.echo else None]
    return await read_params(
        state,
        request,
        form,
        max_tokens=(
            default_max_tokens(state, prompts, form.soft_prompt) if form.max_tokens is None else max(form.max_tokens, 1)
        ),
        best_of=form.best_of or None,
        logprobs=form.logprobs,
        prompt_logprobs=max((count for count in wanted if count is not None), default=None),
    )


async def _read_suffix(state: ServerState, job: CompletionJob) -> Prompt | None:
    """The suffix; None where there is none, or where there are no candidates to try it on."""
    if not job.form.suffix or (job.params.best_of or job.params.n) == job.params.n or job.params.temperature == 0:
        return None
    [suffix] = await read_prompts(
        state, [job.form.suffix], job.form.split_special_tokens, job.form.cache_salt, "suffix"
    )
    check_suffix(job.prompts, suffix, job.params, state.llm.max_model_len, state.unknown_tokens)
    return suffix


async def _outputs(
    state: ServerState, generation: Generation, job: CompletionJob, suffix: Prompt | None = None
) -> list[RequestOutput]:
    if job.form.max_tokens == 0:
        bos = state.llm.config.bos_token_id
        found = await generation.run([scoring_request(prompt, job.params, bos) for prompt in job.prompts])
        return [scored(prompt, job.params, output) for prompt, output in zip(job.prompts, found, strict=True)]
    if suffix is None:
        return await generation.run([(prompt, job.params) for prompt in job.prompts])
    candidates = replace(job.params, n=job.params.best_of, best_of=None)
    outputs = await generation.run([(prompt, candidates) for prompt in job.prompts])
    return await choose(generation, outputs, suffix, job.params, state.encode)
