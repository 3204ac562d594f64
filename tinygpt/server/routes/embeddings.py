"""/v1/embeddings: LLM.embed over HTTP."""

import base64
from functools import partial

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinygpt.request.prompts import Prompt
from tinygpt.server.protocol.embeddings import Embedding, EmbeddingRequest, Embeddings, EmbeddingUsage
from tinygpt.server.record import record_of
from tinygpt.server.refusals.errors import ApiError
from tinygpt.server.replies.json_reply import json_reply
from tinygpt.server.routes.inputs import check_lengths, prompt_list, read_prompts
from tinygpt.server.state import ServerState
from tinygpt.server.transport.endpoint import Endpoint


def routes(state: ServerState) -> list[Route]:
    async def embed(request: Request, form: EmbeddingRequest) -> Response:
        prompts = await _read(state, form)
        record_of(request).num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        vectors = await state.take_turns(partial(state.llm.embed, prompt, form.pooling) for prompt in prompts)  # (1, C)
        return json_reply(_reply(state, form, np.concatenate(vectors), record_of(request).num_prompt_tokens))

    return [Route("/v1/embeddings", Endpoint(EmbeddingRequest, embed, state), methods=["POST"])]


async def _read(state: ServerState, form: EmbeddingRequest) -> list[Prompt]:
    state.check_model(form.model)
    state.check_added_tokens(form.add_special_tokens)
    width = state.llm.config.n_embd
    if form.dimensions not in (None, width):
        raise ApiError(400, f"dimensions is {form.dimensions}, and this model's vectors have {width}.", "dimensions")
    prompts = await read_prompts(state, prompt_list(form.input), form.split_special_tokens, field="input")
    check_lengths(state, prompts, "input")
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
