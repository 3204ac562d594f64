"""InfoRoutes: the routes that run no step of the engine: tokenizer, models, health, metrics."""

from functools import partial
from typing import Any

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

import tinygpt

from . import protocol
from .api import Api, read_apart
from .replies import ApiError, json_large, json_reply


class InfoRoutes:
    """The handlers of these routes."""

    def __init__(self, api: Api):
        self._api = api
        self._llm = api.llm
        self._config = api.config

    async def tokenize(self, form: protocol.TokenizeRequest, request: Request) -> Response:
        """Return a text's token ids."""

        def read() -> dict[str, Any]:
            ids = self._llm.tokenizer.encode(form.prompt, bool(form.split_special_tokens))
            names = {"token_strs": [*map(self._api.names.name, ids)]} if form.return_token_strs else {}
            return {"count": len(ids), "max_model_len": self._llm.max_model_len, "tokens": ids, **names}

        return await json_large(await read_apart(request, read))

    async def detokenize(self, form: protocol.DetokenizeRequest, request: Request) -> Response:
        """Return the text of token ids."""
        if (highest := max(form.tokens, default=0)) >= (size := self._llm.config.vocab_size):
            raise ApiError(
                400, f"tokens holds {highest}, which is outside the vocabulary of {size} ids.", "tokens"
            )
        decode = partial(self._llm.tokenizer.decode, form.tokens, bool(form.skip_special_tokens))
        return json_reply({"prompt": await read_apart(request, decode)})

    async def tokenizer_info(self) -> Response:
        """Return the facts of the tokenizer that evaluation harnesses need."""
        config = self._llm.config
        template = self._api.chat_template
        ids = next(iter(config.eos_token_ids), None), config.bos_token_id
        ids = ids if self._api.names.has_tokenizer else (None, None)
        eos, bos = (None if i is None else self._llm.tokenizer.decode([i]) for i in ids)
        names = {"tokenizer_class": "GPT2Tokenizer", "eos_token": eos, "bos_token": bos, "pad_token": None}
        sizes = {"vocab_size": config.vocab_size, "model_max_length": self._llm.max_model_len}
        return json_reply(names | sizes | {"chat_template": template.source if template else None})

    async def models(self) -> Response:
        """List the names of the model."""
        return json_reply({"object": "list", "data": [*map(self._card, self._api.model_names)]})

    async def model(self, model: str, request: Request) -> Response:
        """Return the model by one of its names; DELETE is refused for a served name, and deletes nothing."""
        is_served = model in self._api.model_names
        if request.method == "DELETE" and is_served:
            raise ApiError(403, f"{model!r} is the model that this server was started with.", "model")
        if request.method == "DELETE":
            return json_reply({"id": model, "object": "model", "deleted": False})
        self._api.check_model(model)
        return json_reply(self._card(model))

    def _card(self, name: str) -> dict[str, Any]:
        sizes = {"max_model_len": self._llm.max_model_len, "max_logprobs": self._config.max_logprobs}
        card = {"id": name, "object": "model", "created": self._api.started, "owned_by": "tinygpt"}
        parent = self._api.model_name if name in self._api.llm.lora_modules else None
        return card | {"root": self._api.model_name, "parent": parent, "look": self._config.look} | sizes

    async def health(self) -> Response:
        """Return whether new requests are taken."""
        if self._api.is_draining:
            return JSONResponse({"status": "draining"}, 503, {"connection": "close"})
        return json_reply({"status": "ok"})

    async def prometheus(self) -> Response:
        """Return the metrics."""
        return Response(self._api.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def version(self) -> Response:
        """Return the version of tinygpt."""
        return json_reply({"version": tinygpt.__version__})
