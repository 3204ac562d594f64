"""/tokenize, /detokenize and /tokenizer_info."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinygpt.server.protocol.tokens import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
    TokenizerInfo,
)
from tinygpt.server.replies.json_reply import json_reply
from tinygpt.server.state import ServerState
from tinygpt.server.transport.endpoint import Endpoint
from tinygpt.server.work.threads import beside, in_thread


def routes(state: ServerState) -> list[Route]:
    async def tokenize(request: Request, form: TokenizeRequest) -> Response:
        state.check_model(form.model)
        state.check_added_tokens(form.add_special_tokens)

        def encode() -> list[int]:
            return state.llm.tokenizer.encode(form.prompt, bool(form.split_special_tokens))

        tokens = await beside(len(form.prompt), encode)
        names = {"token_strs": list(map(state.token_names.name, tokens))} if form.return_token_strs else {}
        return json_reply(
            TokenizeReply(count=len(tokens), max_model_len=state.llm.max_model_len, tokens=tokens, **names)
        )

    async def detokenize(request: Request, form: DetokenizeRequest) -> Response:
        state.check_model(form.model)
        state.check_token_ids("tokens", form.tokens)
        text = await in_thread(state.llm.tokenizer.decode, form.tokens, bool(form.skip_special_tokens))
        return json_reply(DetokenizeReply(prompt=text))

    async def info(request: Request) -> Response:
        return json_reply(_info(state))

    return [
        Route("/tokenize", Endpoint(TokenizeRequest, tokenize, state), methods=["POST"]),
        Route("/detokenize", Endpoint(DetokenizeRequest, detokenize, state), methods=["POST"]),
        Route("/tokenizer_info", info),
    ]


def _info(state: ServerState) -> TokenizerInfo:
    config = state.llm.config
    return TokenizerInfo(
        tokenizer_class="GPT2Tokenizer",
        eos_token=_name(state, next(iter(config.eos_token_ids), None)),
        bos_token=_name(state, config.bos_token_id),
        pad_token=None,
        vocab_size=config.vocab_size,
        model_max_length=state.llm.max_model_len,
        chat_template=state.chat_template.source if state.chat_template else None,
    )


def _name(state: ServerState, token_id: int | None) -> str | None:
    return None if token_id is None or state.tokenizer is None else state.tokenizer.decode([token_id])
