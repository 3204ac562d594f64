"""ServerState: what all requests share."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property
from typing import TypeVar
from weakref import WeakSet

from starlette.requests import Request

import tinygpt
from tinygpt.errors import CheckpointError
from tinygpt.llm import LLM
from tinygpt.request.prompts import Prompt, encode
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.chat.template import ChatTemplate
from tinygpt.server.config import ServerConfig
from tinygpt.server.metrics import Metrics
from tinygpt.server.protocol.fields import build_models
from tinygpt.server.protocol.schemas import ModelLimits
from tinygpt.server.record import record_of
from tinygpt.server.refusals.errors import ApiError
from tinygpt.server.replies.token_names import TokenNames
from tinygpt.server.work.generation import Generation
from tinygpt.server.work.mailbox import Mailbox
from tinygpt.server.work.turns import Turns
from tinygpt.tokenizer.tokenizer import Tokenizer

Result = TypeVar("Result")
CLOSES = {"connection": "close"}  # the next connection may be to another server


class ServerState:
    """is_draining: no new work is taken, and what runs may finish."""

    def __init__(self, llm: LLM, config: ServerConfig, started: int):
        self.llm, self.config, self.started = llm, config, started
        self.limits = ModelLimits(config.served_model_names, llm.config.vocab_size - 1, config.max_logprobs)
        self.metrics = Metrics(llm, self.model_name)
        self.unbuilt_models = build_models()  # one at a turn, in the loop; who needs them takes all that are left
        self.is_draining = False
        self._generations: WeakSet[Generation] = WeakSet()
        self._others: set[asyncio.Event] = set()  # to be set: each for a client that waits for something else
        self._reason: ApiError | None = None  # why the server has stopped all
        self._first_logprobs: dict[int, float] | None = None

    @property
    def model_name(self) -> str:
        return self.config.served_model_names[0]

    @property
    def system_fingerprint(self) -> str:
        """Changes where the same seed might give another text."""
        return f"tinygpt-{tinygpt.__version__}-{self.llm.dtype}"

    @cached_property
    def mailbox(self) -> Mailbox:
        """For the loop that first asks for it."""
        return Mailbox(asyncio.get_running_loop())

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        try:
            return self.llm.tokenizer
        except CheckpointError:
            return None

    @cached_property
    def token_names(self) -> TokenNames:
        return TokenNames(self.tokenizer)

    @cached_property
    def unknown_tokens(self) -> list[str]:
        """Tokens that a text may hold, and that the model has no row for."""
        if self.tokenizer is None:
            return []
        ids = self.tokenizer.ids_from(self.llm.config.vocab_size)
        return [self.tokenizer.decode([i]) for i in ids if i not in self.tokenizer.special_ids]

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.config.chat_template

    @cached_property
    def turns(self) -> Turns:
        """For what is no generation."""
        max_queue = self.llm.engine.engine_config.max_queue
        return Turns(math.inf if max_queue is None else max_queue)

    def encode(self, text: str) -> list[int]:
        """A text of a client's, apart from its prompt. Special tokens in it are plain text."""
        return encode(text, self.llm.tokenizer, self.llm.config.vocab_size, split_special_tokens=True)

    def new_generation(self, request: Request) -> Generation:
        record = record_of(request)
        record.generation = self._new_generation(record.num_bytes)
        return record.generation

    async def first_logprobs(self) -> dict[int, float] | None:
        """Log probabilities of all tokens behind BOS alone, the most probable first; None: there is no BOS.

        It is what the first token of a prompt has, since nothing else comes before it. Found once, as any other
        request's are.
        """
        bos = self.llm.config.bos_token_id
        if self._first_logprobs is None and bos is not None:
            wanted = SamplingParams(max_tokens=1, prompt_logprobs=-1)
            [output] = await self._new_generation().run([(Prompt(None, [bos, bos]), wanted)])
            self._first_logprobs = output.prompt_logprobs[1]
        return self._first_logprobs

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return sum(not generation.is_over for generation in self._generations) + len(self._others)

    def drain(self) -> None:
        self.is_draining = True

    def stop_all(self, reason: ApiError) -> None:
        """End what is still running, and have each client be told why."""
        for generation in list(self._generations):
            generation.stop(reason)
        self._reason = reason
        for stopped in self._others:
            stopped.set()

    async def unless_stopped(self, work: Awaitable[Result]) -> Result:
        """Its result; or the reason, where the server stops all before. For what is no generation."""
        event = asyncio.Event()
        if self._reason is not None:
            event.set()
        working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        self._others.add(event)
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():  # a thread of its own ends later
                raise self._reason
            return working.result()
        finally:
            self._others.discard(event)
            working.cancel()
            stopped.cancel()

    async def take_turns(self, pieces: Iterable[Callable[[], Result]]) -> list[Result]:
        """`Turns.run`, while new work is taken."""
        self._check_open()
        return await self.unless_stopped(self.turns.run(pieces))

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.config.served_model_names:
            there = ", ".join(self.config.served_model_names)
            raise ApiError(
                404, f"the model {name!r} does not exist: this server has {there}.", "model", "model_not_found"
            )

    def check_num_logprobs(self, field: str, count: int | None) -> None:
        if count is not None and count > self.limits.max_logprobs:
            raise ApiError(400, f"{field} is {count}, and this server gives at most {self.limits.max_logprobs}.", field)

    def check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        highest = self.limits.max_token_id
        if max(token_ids, default=0) > highest:
            message = f"{field} holds {max(token_ids)}, which is outside the vocabulary of ids 0 to {highest}."
            raise ApiError(400, message, field)

    def check_added_tokens(self, add_special_tokens: bool | None) -> None:
        """GPT-2's tokenizer adds no tokens to a text, so both answers mean the same; others' cannot be told not to."""
        if add_special_tokens is False and self.tokenizer is not None and self.encode(""):
            raise ApiError(
                400,
                "add_special_tokens is false, and this model's tokenizer puts tokens around each text: give token ids.",
                "add_special_tokens",
            )

    def _new_generation(self, num_bytes: int = 0) -> Generation:
        self._check_open()
        generation = Generation(self.llm, self.mailbox, num_bytes)
        self._generations.add(generation)
        return generation

    def _check_open(self) -> None:
        if self.is_draining:
            raise ApiError(503, "the server is shutting down: try again later.", headers={"retry-after": "1", **CLOSES})
