"""/v1/models: the one model that is served, by each of its names."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinygpt.server.protocol.models import Deleted, ModelCard, ModelList
from tinygpt.server.refusals.errors import ApiError
from tinygpt.server.replies.json_reply import json_reply
from tinygpt.server.state import ServerState


def routes(state: ServerState) -> list[Route]:
    async def list_models(request: Request) -> Response:
        return json_reply(ModelList(object="list", data=[_card(state, n) for n in state.config.served_model_names]))

    async def one_model(request: Request) -> Response:
        name = request.path_params["model"]
        if request.method == "DELETE":
            return _delete(state, name)
        state.check_model(name)
        return json_reply(_card(state, name))

    # One route for both methods, or a refused third one would be told of one of them alone.
    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", one_model, methods=["GET", "DELETE"]),
    ]


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=state.started,
        owned_by="tinygpt",
        root=state.model_name,
        parent=None,
        max_model_len=state.llm.max_model_len,
        max_logprobs=state.config.max_logprobs,
    )


def _delete(state: ServerState, name: str) -> Response:
    """Nothing is ever deleted: a model that is not there need not be, and one that is served stays."""
    if name in state.config.served_model_names:
        raise ApiError(403, f"{name!r} is what this server was started with, and cannot be deleted.", "model")
    return json_reply(Deleted(id=name, object="model", deleted=False))
