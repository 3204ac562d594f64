"""InfoRoutes: the routes that generate no text: embeddings, scores, tokenizer, models, health, metrics."""

import asyncio
import base64
import secrets
import time
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BeforeValidator
from starlette.responses import JSONResponse, PlainTextResponse, Response

import tinygpt

from ..engine.prompts import Prompt
from ..kernels import numbers
from ..text.chat import PlainTemplate
from ..wire import record_to_json
from .api import Api, listed, route
from .protocol import (
    MAX_IDS,
    MAX_PROMPTS,
    Form,
    IdLists,
    ModelName,
    Pooling,
    Positive,
    Strict,
    Text,
    Texts,
    TokenId,
    TokenIds,
    items,
    whole_numbers,
)
from .refusals import ApiError
from .turns import json_reply, read_apart


class ClassifyRequest(Form):
    input: Text | TokenIds | Texts | IdLists
    user: str | None = None
    add_special_tokens: bool | None = None


class LensRequest(Form):
    prompt: Text | TokenIds
    add_special_tokens: bool | None = None


class EmbeddingRequest(ClassifyRequest):
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None
    pooling: Pooling = "last"


class ScoreRequest(Form):
    """One text_1 for all of text_2, or one for each."""

    text_1: Text | Texts
    text_2: Text | Texts
    pooling: Pooling = "last"
    user: str | None = None


class ContinuationsRequest(Form):
    prompt: str | TokenIds | None
    continuations: Annotated[list[Text | TokenIds], items(MAX_PROMPTS)]
    soft_prompt: Text | None = None


class TokenizeRequest(Form):
    """Special tokens in the prompt are special tokens here, so that clients learn their ids."""

    takes_adapter = True
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    takes_adapter = True
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], items(MAX_IDS), BeforeValidator(whole_numbers)]
    skip_special_tokens: bool | None = None


class InfoRoutes:
    def __init__(self, api: Api):
        self._api = api
        self._llm = api.llm
        self._config = api.config

    @route("/v1/embeddings", "POST")
    async def embeddings(self, form: EmbeddingRequest, request: Request) -> Response:
        """Return a vector for each text."""
        if form.dimensions not in (None, width := self._llm.config.n_embd):
            message = f"dimensions is {form.dimensions}, and this model's vectors have {width}."
            raise ApiError(400, message, "dimensions")
        prompts, count = await self._inputs(form.input, form, request, "input")
        vectors = await self._vectors(prompts, form.pooling, request)
        if form.encoding_format == "float":
            written = vectors.tolist()
        else:
            written = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        data = ({"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(written))
        return await self._list(form, data, count)

    @route("/v1/score", "POST")
    async def score(self, form: ScoreRequest, request: Request) -> Response:
        """Return the cosines of texts' embeddings."""
        num_first = len(listed(form.text_1))
        num_second = len(listed(form.text_2))
        if num_first not in (1, num_second):
            message = f"text_1 has {num_first} texts and text_2 {num_second}: send one text_1, or one for each text_2."
            raise ApiError(400, message, "text_1")
        first_prompts, count_1 = await self._inputs(form.text_1, form, request, "text_1")
        second_prompts, count_2 = await self._inputs(form.text_2, form, request, "text_2")
        first = (await self._vectors(first_prompts, form.pooling, request)).astype(np.float64)
        second = (await self._vectors(second_prompts, form.pooling, request)).astype(np.float64)
        lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)  # (N,)
        products = (first * second).sum(axis=1)  # (N,)
        cosines = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)  # (N,)
        cosines = np.clip(cosines, -1, 1).tolist()
        data = ({"object": "score", "index": i, "score": cosine} for i, cosine in enumerate(cosines))
        return await self._list(form, data, count_1 + count_2, "score-")

    @route("/classify", "POST")
    async def classify(self, form: ClassifyRequest, request: Request) -> Response:
        """Return the label of each text and its probabilities, or those of each token."""
        prompts, count = await self._inputs(form.input, form, request, "input")
        make = partial(self._llm._classifying_requests, prompts)
        classes = await self._api.read_all(make, request)
        names = "label", "probs", "num_classes"
        data = ({"index": i} | {name: getattr(one, name) for name in names} for i, one in enumerate(classes))
        return await self._list(form, data, count, "classify-")

    @route("/lens", "POST")
    async def lens(self, form: LensRequest, request: Request) -> Response:
        """Return what each layer would say after a prompt, and how much its last token attends to each."""
        if not self._config.look:
            raise ApiError(400, "/lens needs a server that was started with --look.")
        [prompt], _ = await self._inputs(form.prompt, form, request, "prompt")

        names = ["resid_post", "pattern"]
        make = partial(self._llm._looking_requests, "activations", [prompt.token_ids], names, ())
        [activations] = await self._api.read_all(make, request)

        def describe() -> dict[str, Any]:
            layers = range(self._llm.config.n_layer)
            residuals = np.stack([activations[f"blocks.{i}.hook_resid_post"][-1] for i in layers])  # (L, C)
            logprobs = numbers.log_softmax(self._llm.logit_lens(residuals))  # (L, V)
            pairs = zip(logprobs.argmax(-1).tolist(), logprobs, strict=True)
            best = [{"token": self._api.names.name(i), "logprob": row[i].item()} for i, row in pairs]
            maps = [activations[f"blocks.{i}.attn.hook_pattern"] for i in layers]  # (H, T, T) each
            attention = np.stack([of_layer[:, -1] for of_layer in maps])  # (L, H, T)
            return {"layers": best, "attention": attention.astype(np.float64).round(4).tolist()}

        return await json_reply(await asyncio.to_thread(describe))

    @route("/score_continuations", "POST")
    async def score_continuations(self, form: ContinuationsRequest, request: Request) -> Response:
        """Return log probabilities of continuations, as LLM.score does, for RemoteLLM."""
        is_split = form.split_special_tokens is not False
        make = partial(
            self._llm._scoring_requests, form.prompt or "", form.continuations, form.soft_prompt, is_split
        )
        await request.state.reading.aclose()
        scores = await self._api.read_all(make, request)
        return await json_reply({"scores": (record_to_json(score) for score in scores)})

    @route("/tokenize", "POST")
    async def tokenize(self, form: TokenizeRequest, request: Request) -> Response:
        """Return a text's token ids."""

        def read() -> dict[str, Any]:
            ids = self._llm.tokenizer.encode(form.prompt, bool(form.split_special_tokens))
            names = {"token_strs": [*map(self._api.names.name, ids)]} if form.return_token_strs else {}
            return {"count": len(ids), "max_model_len": self._llm.max_model_len, "tokens": ids, **names}

        return await json_reply(await read_apart(request, read))

    @route("/detokenize", "POST")
    async def detokenize(self, form: DetokenizeRequest, request: Request) -> Response:
        """Return the text of token ids."""
        if (highest := max(form.tokens, default=0)) >= (size := self._llm.config.vocab_size):
            raise ApiError(
                400, f"tokens holds {highest}, which is outside the vocabulary of {size} ids.", "tokens"
            )
        decode = partial(self._llm.tokenizer.decode, form.tokens, bool(form.skip_special_tokens))
        return await json_reply({"prompt": await read_apart(request, decode)})

    @route("/v1/models", "GET")
    async def models(self) -> Response:
        """List the names of the model."""
        return await json_reply({"object": "list", "data": [*map(self._card, self._api.model_names)]})

    @route("/tokenizer_info", "GET")
    async def tokenizer_info(self) -> Response:
        """Return the facts of the tokenizer that evaluation harnesses need."""
        config = self._llm.config
        template = self._api.chat_template

        def text_of(token_id: int | None) -> str | None:
            is_known = token_id is not None and self._api.names.has_tokenizer
            return self._llm.tokenizer.decode([token_id]) if is_known else None

        return await json_reply(
            {
                "tokenizer_class": "GPT2Tokenizer",
                "eos_token": text_of(next(iter(config.eos_token_ids), None)),
                "bos_token": text_of(config.bos_token_id),
                "pad_token": None,
                "vocab_size": config.vocab_size,
                "model_max_length": self._llm.max_model_len,
                "chat_template": template.source if template else None,
            }
        )

    @route("/health", "GET")
    async def health(self) -> Response:
        """Return whether new requests are taken."""
        if self._api.is_draining:
            return JSONResponse({"status": "draining"}, 503, {"connection": "close"})
        return await json_reply({"status": "ok"})

    @route("/version", "GET")
    async def version(self) -> Response:
        """Return the version of tinygpt."""
        return await json_reply({"version": tinygpt.__version__})

    @route("/metrics", "GET", response_class=PlainTextResponse)
    async def prometheus(self) -> Response:
        """Return the metrics."""
        return Response(self._api.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @route("/v1/models/{model:path}", "GET", "DELETE")
    async def model(self, model: str, request: Request) -> Response:
        """Return the model by one of its names; DELETE is refused for a served name, and deletes nothing."""
        is_served = model in self._api.model_names
        if request.method == "DELETE" and is_served:
            raise ApiError(403, f"{model!r} is the model that this server was started with.", "model")
        if request.method == "DELETE":
            return await json_reply({"id": model, "object": "model", "deleted": False})
        self._api.check_model(model)
        return await json_reply(self._card(model))

    def _card(self, name: str) -> dict[str, Any]:
        template = self._api.chat_template
        return {
            "id": name,
            "object": "model",
            "created": self._api.started,
            "owned_by": "tinygpt",
            "root": self._api.model_name,
            "parent": self._api.model_name if name in self._llm.lora_modules else None,
            "chat_template": template and ("plain" if isinstance(template, PlainTemplate) else "jinja"),
            "look": self._config.look,
            "max_model_len": self._llm.max_model_len,
            "max_logprobs": self._config.max_logprobs,
        }

    async def _inputs(self, inputs: Any, form: Any, request: Request, field: str) -> tuple[list[Prompt], int]:
        """Return prompts that nothing follows, and the number of tokens."""
        prompts = await self._api.read_prompts(inputs, form, request, field)
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if longest > self._llm.max_model_len:
            raise self._api.too_long(f"{field} has one of {longest}", field)
        await request.state.reading.aclose()
        count = sum(len(prompt.token_ids) for prompt in prompts)
        return prompts, count

    async def _vectors(self, prompts: list[Prompt], pooling: str, request: Request) -> np.ndarray:
        """Return the embeddings, (N, C) float32."""
        make = partial(self._llm._embedding_requests, prompts, pooling)
        return np.stack(await self._api.read_all(make, request))

    async def _list(self, form: Any, data: Iterable[Any], count: int, prefix: str = "") -> Response:
        """prefix: of an id, which embeddings do not have."""
        head = {"id": prefix + secrets.token_hex(16), "created": int(time.time())} if prefix else {}
        counts = {"prompt_tokens": count, "total_tokens": count}
        more = {"object": "list", "model": form.model or self._api.model_name, "data": data, "usage": counts}
        return await json_reply(head | more)
