"""/generate: LLM.submit over HTTP, whose output comes back whole. For RemoteLLM, which reads what is written here."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinygpt.remote.wire import PATH, chunk_to_json, output_to_json
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.protocol.generate import GenerateRequest
from tinygpt.server.routes.inputs import read_params, read_prompts
from tinygpt.server.state import ServerState
from tinygpt.server.transport.endpoint import Endpoint
from tinygpt.server.transport.event_stream import EventStream, Write, compact, event
from tinygpt.server.work.generation import Generation, PromptChunk


def routes(state: ServerState) -> list[Route]:
    async def generate(request: Request, form: GenerateRequest) -> Response | EventStream:
        state.check_model(form.model)
        state.check_num_logprobs("logprobs", form.logprobs)
        state.check_num_logprobs("prompt_logprobs", form.prompt_logprobs)
        generation = state.new_generation(request)
        prompts = await read_prompts(state, [form.prompt or ""], form.split_special_tokens, form.cache_salt)
        requests = [(prompts[0], await _params(state, request, form))]
        if form.stream:
            await generation.submit(requests, is_streamed=True)
            return EventStream(partial(_events, generation))
        [output] = await generation.run(requests)
        return Response(compact(output_to_json(output)), media_type="application/json")

    return [Route(PATH, Endpoint(GenerateRequest, generate, state), methods=["POST"])]


async def _params(state: ServerState, request: Request, form: GenerateRequest) -> SamplingParams:
    named = {"max_tokens": form.max_tokens, "logprobs": form.logprobs, "best_of": form.best_of or None}
    return await read_params(state, request, form, **named)


async def _events(generation: Generation, write: Write) -> None:
    def take(chunks: list[PromptChunk], is_last: bool) -> None:
        write(b"".join(event({"chunk": chunk_to_json(chunk)}) for _, chunk in chunks), is_last)

    await generation.follow(take)
    [output], _ = generation.outcome()
    write(event({"output": output_to_json(output)}), is_last=True)
