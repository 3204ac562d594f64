"""/v1/chat/completions: for checkpoints that say how a conversation is written."""

import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinygpt.server.chat.job import ChatJob
from tinygpt.server.chat.marks import Marks
from tinygpt.server.chat.stream import ChatStream
from tinygpt.server.chat.template import ChatTemplate
from tinygpt.server.protocol.chat import ChatRequest, Message
from tinygpt.server.refusals.errors import ApiError
from tinygpt.server.replies.json_reply import json_reply
from tinygpt.server.routes.inputs import check_context, check_stream, default_max_tokens, read_params, read_prompts
from tinygpt.server.state import ServerState
from tinygpt.server.transport.endpoint import Endpoint
from tinygpt.server.transport.event_stream import EventStream
from tinygpt.server.work.threads import in_thread


def routes(state: ServerState) -> list[Route]:
    async def chat(request: Request, form: ChatRequest) -> Response | EventStream:
        state.check_model(form.model)
        template = _template(state)
        generation = state.new_generation(request)
        job = await _read(state, request, template, form)
        if form.stream:
            await generation.submit([(job.prompt, job.params)], is_streamed=True)
            return EventStream(ChatStream(job, generation).events)
        [output] = await generation.run([(job.prompt, job.params)])
        return json_reply(job.reply(output))

    return [Route("/v1/chat/completions", Endpoint(ChatRequest, chat, state), methods=["POST"])]


def _template(state: ServerState) -> ChatTemplate:
    if state.chat_template is None:
        raise ApiError(
            400,
            f"{state.model_name} has no chat template: it continues texts, and does not answer messages. Use "
            "/v1/completions, or serve a checkpoint whose tokenizer files have one.",
            code="no_chat_template",
        )
    if state.encode(""):
        raise ApiError(400, f"{state.model_name} has a tokenizer that puts tokens around every text: use token ids.")
    return state.chat_template


async def _read(state: ServerState, request: Request, template: ChatTemplate, form: ChatRequest) -> ChatJob:
    state.check_num_logprobs("top_logprobs", form.top_logprobs)
    if form.top_logprobs is not None and not form.logprobs:
        raise ApiError(400, f"top_logprobs is {form.top_logprobs}, which needs logprobs to be true.", "top_logprobs")
    if form.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs are not told of a chat: use /v1/completions.", "prompt_logprobs")
    [prompt] = await read_prompts(state, [await in_thread(_token_ids, state, template, form)], None, form.cache_salt)
    given = form.max_completion_tokens or form.max_tokens
    params = await read_params(
        state,
        request,
        form,
        max_tokens=given or default_max_tokens(state, [prompt], form.soft_prompt, most=None),
        best_of=form.best_of or None,
        logprobs=(form.top_logprobs or 0) if form.logprobs else None,
    )
    if form.stream:
        check_stream(params)
    check_context(state, form, [prompt], params, params.max_tokens)
    return ChatJob(
        id=f"chatcmpl-{secrets.token_hex(16)}",
        created=int(time.time()),
        model=form.model or state.model_name,
        system_fingerprint=state.system_fingerprint,
        form=form,
        prompt=prompt,
        params=params,
        names=state.token_names,
    )


def _token_ids(state: ServerState, template: ChatTemplate, form: ChatRequest) -> list[int]:
    tokenizer = state.llm.tokenizer
    marks = Marks(tokenizer.decode([token_id]) for token_id in tokenizer.special_ids)
    messages = [_plain(message, marks) for message in form.messages]
    options = {**marks.guard_all(form.chat_template_kwargs or {}), "add_generation_prompt": form.add_generation_prompt}
    if "messages" in options:
        raise ApiError(
            400, "chat_template_kwargs holds messages, which have a field of their own.", "chat_template_kwargs"
        )
    return marks.encode(template.render(messages, options), tokenizer.encode)


def _plain(message: Message, marks: Marks) -> dict[str, Any]:
    """A message as templates expect it, the text of all its parts as one."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    named = {} if message.name is None else {"name": marks.guard(message.name)}
    return {"role": message.role, "content": marks.guard(text), **named}
