"""The server described by OpenAPI 3.1, from the models that check and write: what they refuse, this says."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

import tinygpt
from tinygpt.server.protocol.chat import ChatCompletion, ChatRequest
from tinygpt.server.protocol.common import ErrorReply
from tinygpt.server.protocol.completions import Completion, CompletionRequest
from tinygpt.server.protocol.embeddings import EmbeddingRequest, Embeddings
from tinygpt.server.protocol.generate import Generated, GenerateRequest
from tinygpt.server.protocol.models import Deleted, Health, ModelCard, ModelList, Version
from tinygpt.server.protocol.schemas import REF, schemas_of
from tinygpt.server.protocol.scores import ContinuationsRequest, ScoredContinuations, ScoreRequest, Scores
from tinygpt.server.protocol.tokens import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
    TokenizerInfo,
)
from tinygpt.server.state import ServerState
from tinygpt.server.transport.security import OPEN_PATHS

STATUSES = {
    400: "the request is not possible; the message says why",
    401: "no key, or a wrong one",
    403: "not allowed",
    404: "no such model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is no JSON",
    429: "the queue is full",
    503: "the server is shutting down",
}
OF_BODY = (400, 403, 408, 413, 415)


@dataclass(frozen=True)
class Operation:
    """One method of a path. form: what its body is; reply: None for text. statuses: of refusals."""

    method: str
    path: str
    summary: str
    form: type[BaseModel] | None
    reply: type[BaseModel] | None
    statuses: tuple[int, ...] = (403,)
    is_streamed: bool = False
    example: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.method}_{self.path.strip('/').replace('/', '_').replace('{', '').replace('}', '') or 'page'}"


OPERATIONS = (
    Operation(
        "post",
        "/v1/completions",
        "Continue prompts",
        CompletionRequest,
        Completion,
        (*OF_BODY, 404, 429, 503),
        is_streamed=True,
        example={"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0},
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer messages",
        ChatRequest,
        ChatCompletion,
        (*OF_BODY, 404, 429, 503),
        is_streamed=True,
        example={"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8},
    ),
    Operation(
        "post",
        "/generate",
        "Continue a prompt as LLM.submit does",
        GenerateRequest,
        Generated,
        (*OF_BODY, 404, 429, 503),
        is_streamed=True,
        example={"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0},
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "A vector for each text",
        EmbeddingRequest,
        Embeddings,
        (*OF_BODY, 404, 429, 503),
        example={"input": ["a wolf", "a king"], "pooling": "mean"},
    ),
    Operation(
        "post",
        "/v1/score",
        "How alike texts are",
        ScoreRequest,
        Scores,
        (*OF_BODY, 404, 429, 503),
        example={"text_1": "a wolf", "text_2": ["a fox", "a king"], "pooling": "mean"},
    ),
    Operation(
        "post",
        "/score_continuations",
        "How probable continuations of a prompt are",
        ContinuationsRequest,
        ScoredContinuations,
        (*OF_BODY, 404, 429, 503),
        example={"prompt": "He was the son of the", "continuations": [" king", " spoon"]},
    ),
    Operation("get", "/v1/models", "The names of the model", None, ModelList),
    Operation("get", "/v1/models/{model}", "The model by one of its names", None, ModelCard, (403, 404)),
    Operation("delete", "/v1/models/{model}", "Refused for what is served", None, Deleted, (403, 404)),
    Operation(
        "post",
        "/tokenize",
        "A text's token ids",
        TokenizeRequest,
        TokenizeReply,
        (*OF_BODY, 404),
        example={"prompt": "Once upon a time"},
    ),
    Operation(
        "post",
        "/detokenize",
        "The text of token ids",
        DetokenizeRequest,
        DetokenizeReply,
        (*OF_BODY, 404),
        example={"tokens": [1, 2, 3]},
    ),
    Operation("get", "/tokenizer_info", "The tokenizer", None, TokenizerInfo),
    Operation("get", "/health", "Whether new requests are taken", None, Health, (403, 503)),
    Operation("get", "/metrics", "For Prometheus", None, None),
    Operation("get", "/version", "The version of tinygpt", None, Version),
)


def document(state: ServerState) -> dict[str, Any]:
    models = [model for operation in OPERATIONS for model in (operation.form, operation.reply) if model is not None]
    components: dict[str, Any] = {"schemas": schemas_of(dict.fromkeys([*models, ErrorReply]), state.limits)}
    if state.config.api_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, state)
    info = {"title": "tinygpt", "version": tinygpt.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _described(operation: Operation, state: ServerState) -> dict[str, Any]:
    has_key = bool(state.config.api_keys) and operation.path not in OPEN_PATHS
    found: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    if "{model}" in operation.path:
        found["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _name_schema(operation)}]
    if operation.form is not None:
        content = {"schema": _ref(operation.form), "examples": {"usual": {"value": operation.example}}}
        found["requestBody"] = {"required": True, "content": {"application/json": content}}
    statuses = sorted({*operation.statuses, *([401] if has_key else [])})
    found["responses"] = {"200": _done(operation)} | {str(status): _refused(status) for status in statuses}
    if operation.path == "/health":
        found["responses"]["503"]["content"] = _done(operation)["content"]
    if has_key:
        found["security"] = [{"key": []}]
    return found


def _name_schema(operation: Operation) -> dict[str, Any]:
    return {"$ref": REF.format(model="ModelName")} if operation.method == "get" else {"type": "string", "minLength": 1}


def _done(operation: Operation) -> dict[str, Any]:
    if operation.reply is None:
        return {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    content: dict[str, Any] = {"application/json": {"schema": _ref(operation.reply)}}
    if operation.is_streamed:  # the schema of an event
        data = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
        content["text/event-stream"] = {"schema": data}
    return {"description": "done", "content": content}


def _refused(status: int) -> dict[str, Any]:
    return {"description": STATUSES[status], "content": {"application/json": {"schema": _ref(ErrorReply)}}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}
