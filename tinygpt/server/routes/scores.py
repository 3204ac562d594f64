"""/v1/score, which compares texts by their embeddings as vLLM does, and /score_continuations, which is LLM.score."""

import secrets
import time
from functools import partial

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinygpt.remote.wire import SCORE_PATH, score_to_json
from tinygpt.server.protocol.embeddings import EmbeddingUsage
from tinygpt.server.protocol.scores import ContinuationsRequest, Score, ScoreRequest, Scores
from tinygpt.server.record import record_of
from tinygpt.server.refusals.errors import ApiError
from tinygpt.server.replies.json_reply import json_reply
from tinygpt.server.routes.inputs import check_lengths, read_prompts, salted
from tinygpt.server.state import ServerState
from tinygpt.server.transport.endpoint import Endpoint
from tinygpt.server.transport.event_stream import compact


def routes(state: ServerState) -> list[Route]:
    async def score(request: Request, form: ScoreRequest) -> Response:
        state.check_model(form.model)
        first, second = ([given] if isinstance(given, str) else given for given in (form.text_1, form.text_2))
        if len(first) != len(second) and len(first) != 1:
            numbers = f"text_1 is {len(first)} texts and text_2 {len(second)}"
            raise ApiError(400, f"{numbers}: give one text_1 for all, or one for each text_2.", "text_1")
        prompts = [
            *await read_prompts(state, first, form.split_special_tokens, field="text_1"),
            *await read_prompts(state, second, form.split_special_tokens, field="text_2"),
        ]
        check_lengths(state, prompts[: len(first)], "text_1")
        check_lengths(state, prompts[len(first) :], "text_2")
        num_tokens = record_of(request).num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        found = await state.take_turns(partial(state.llm.embed, prompt, form.pooling) for prompt in prompts)
        vectors = np.concatenate(found).astype(np.float64)  # (texts, C)
        cosines = _cosines(vectors[: len(first)], vectors[len(first) :]).tolist()
        data = [Score(index=i, object="score", score=cosine) for i, cosine in enumerate(cosines)]
        return json_reply(
            Scores(
                id=f"score-{secrets.token_hex(16)}",
                object="list",
                created=int(time.time()),
                model=form.model or state.model_name,
                data=data,
                usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
            )
        )

    async def score_continuations(request: Request, form: ContinuationsRequest) -> Response:
        state.check_model(form.model)
        is_split = True if form.split_special_tokens is None else form.split_special_tokens
        prompt = salted(form.prompt or "", form.cache_salt)
        calls = [partial(state.llm.score, prompt, [each], form.soft_prompt, is_split) for each in form.continuations]
        scores = [score for [score] in await state.take_turns(calls)]
        return Response(compact({"scores": [*map(score_to_json, scores)]}), media_type="application/json")

    return [
        Route("/v1/score", Endpoint(ScoreRequest, score, state), methods=["POST"]),
        Route(SCORE_PATH, Endpoint(ContinuationsRequest, score_continuations, state), methods=["POST"]),
    ]


def _cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(1 or N, C) and (N, C) -> (N,), from -1 to 1; that of a vector of zeros is 0."""
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)  # (N,)
    products = (first * second).sum(axis=1)  # (N,)
    return np.clip(np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0), -1, 1)  # (N,)
