"""/v1/embeddings: LLM.embed over HTTP."""

import asyncio
import base64

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinygpt.request.prompts import Prompt
from tinygpt.server.endpoint import Endpoint
from tinygpt.server.errors import ApiError
from tinygpt.server.inputs import prompt_list, read_prompts
from tinygpt.server.protocol.embeddings import Embedding, EmbeddingRequest, Embeddings, EmbeddingUsage
from tinygpt.server.record import record_of
from tinygpt.server.replies import json_reply
from tinygpt.server.state import ServerState


def routes(state: ServerState) -> list[Route]:
    turn = asyncio.Lock()  # each keeps all steps waiting: one at a time, and others' steps between two of them
    num_waiting = 0

    async def embed(request: Request, form: EmbeddingRequest) -> Response:
        nonlocal num_waiting
        prompts = await _read(state, form)
        record_of(request).num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        if num_waiting >= state.max_waiting:
            raise ApiError(429, "too many requests are waiting.", code="queue_full", headers={"retry-after": "1"})
        num_waiting += 1
        try:
            vectors = []
            for prompt in prompts:
                async with turn:
                    vectors.append(await asyncio.to_thread(state.llm.embed, prompt, form.pooling))  # (1, C)
        finally:
            num_waiting -= 1
        return json_reply(_reply(state, form, np.concatenate(vectors), record_of(request).num_prompt_tokens))

    return [Route("/v1/embeddings", Endpoint(EmbeddingRequest, embed, state.config.max_body_bytes), methods=["POST"])]


async def _read(state: ServerState, form: EmbeddingRequest) -> list[Prompt]:
    state.check_model(form.model)
    state.check_added_tokens(form.add_special_tokens)
    width, longest = state.llm.config.n_embd, state.llm.max_model_len
    if form.dimensions not in (None, width):
        raise ApiError(400, f"dimensions is {form.dimensions}, and this model's vectors have {width}.", "dimensions")
    prompts = await read_prompts(state, prompt_list(form.input), form.split_special_tokens, field="input")
    for prompt in prompts:
        if len(prompt.token_ids) > longest:
            message = f"this model's context has {longest} tokens, and an input has {len(prompt.token_ids)}."
            raise ApiError(400, message, "input", "context_length_exceeded")
    return prompts


def _reply(state: ServerState, form: EmbeddingRequest, vectors: np.ndarray, num_tokens: int) -> Embeddings:
    """vectors: (inputs, C) float32."""

    def written(vector: np.ndarray) -> list[float] | str:
        if form.encoding_format == "float":
            return vector.tolist()
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()

    data = [Embedding(object="embedding", index=i, embedding=written(vector)) for i, vector in enumerate(vectors)]
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return Embeddings(object="list", model=form.model or state.model_name, data=data, usage=usage)
