"""The answers: a module for each group of paths, which checks, asks the engine and replies."""

from starlette.routing import Route

from tinygpt.server.routes import chat, completions, embeddings, generate, health, models, openapi, page, scores, tokens
from tinygpt.server.state import ServerState


def all_routes(state: ServerState) -> list[Route]:
    return [
        *page.routes(),
        *completions.routes(state),
        *chat.routes(state),
        *generate.routes(state),
        *embeddings.routes(state),
        *scores.routes(state),
        *models.routes(state),
        *tokens.routes(state),
        *health.routes(state),
        *openapi.routes(state),
    ]
