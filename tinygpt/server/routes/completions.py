"""/v1/completions."""

import secrets
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinygpt.outputs import RequestOutput
from tinygpt.server.completion_job import CompletionJob
from tinygpt.server.completion_reply import completion
from tinygpt.server.completion_stream import CompletionStream
from tinygpt.server.endpoint import Endpoint
from tinygpt.server.errors import ApiError
from tinygpt.server.event_stream import EventStream
from tinygpt.server.inputs import check_context, default_max_tokens, prompt_list, read_prompts
from tinygpt.server.protocol.completions import CompletionRequest
from tinygpt.server.state import ServerState


def routes(state: ServerState) -> list[Route]:
    async def complete(request: Request, form: CompletionRequest) -> Response:
        state.check_model(form.model)
        generation = state.new_generation()
        job = await _read(state, form)
        if form.stream:
            generation.submit([(prompt, job.params) for prompt in job.prompts], is_streamed=True)
            return EventStream(CompletionStream(job, generation).events())
        generation.submit([(prompt, job.params) for prompt in job.prompts])
        return _json(job, await generation.outputs())

    endpoint = Endpoint(CompletionRequest, complete, state.config.max_body_bytes)
    return [Route("/v1/completions", endpoint, methods=["POST"])]


async def _read(state: ServerState, form: CompletionRequest) -> CompletionJob:
    """Check all that can be checked before any work."""
    prompts = await read_prompts(state, prompt_list(form.prompt), form.split_special_tokens, form.cache_salt)
    with_echo = form.echo and form.logprobs is not None
    params = form.sampling_params(
        state.llm.tokenizer.encode,
        max_tokens=default_max_tokens(state, prompts) if form.max_tokens is None else form.max_tokens,
        logprobs=form.logprobs,
        best_of=form.best_of or None,
        prompt_logprobs=form.logprobs if with_echo else form.prompt_logprobs,
    )
    if form.stream and (params.best_of or params.n) > params.n:
        raise ApiError(400, f"best_of is {params.best_of}, and a stream cannot choose among samples.", "best_of")
    check_context(state, prompts, params)
    return CompletionJob(
        id=f"cmpl-{secrets.token_hex(16)}",
        created=int(time.time()),
        model=form.model,
        system_fingerprint=state.system_fingerprint,
        form=form,
        prompts=prompts,
        params=params,
        names=state.token_names,
        first_logprobs=await state.first_logprobs() if with_echo and params.soft_prompt is None else None,
    )


def _json(job: CompletionJob, outputs: list[RequestOutput]) -> Response:
    return Response(completion(job, outputs).model_dump_json(exclude_unset=True), media_type="application/json")
