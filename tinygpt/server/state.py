"""ServerState: what all requests share."""

import asyncio
from dataclasses import dataclass
from functools import cached_property

import tinygpt
from tinygpt.errors import CheckpointError
from tinygpt.llm import LLM
from tinygpt.request.prompts import Prompt
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.config import ServerConfig
from tinygpt.server.errors import ApiError
from tinygpt.server.generation import Generation
from tinygpt.server.mailbox import Mailbox
from tinygpt.server.token_names import TokenNames


@dataclass
class ServerState:
    """is_draining: no new work is taken, and what runs may finish."""

    llm: LLM
    config: ServerConfig
    started: int
    is_draining: bool = False
    _first_logprobs: dict[int, float] | None = None

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
    def token_names(self) -> TokenNames:
        try:
            return TokenNames(self.llm.tokenizer)
        except CheckpointError:
            return TokenNames(None)

    async def first_logprobs(self) -> dict[int, float] | None:
        """Log probabilities of all tokens behind BOS alone, the most probable first; None: there is no BOS.

        It is what the first token of a prompt has, since nothing else comes before it. Found once, as any other
        request's are.
        """
        bos = self.llm.config.bos_token_id
        if self._first_logprobs is None and bos is not None:
            generation = self.new_generation()
            generation.submit([(Prompt(None, [bos, bos]), SamplingParams(max_tokens=1, prompt_logprobs=-1))])
            [output] = await generation.outputs()
            self._first_logprobs = output.prompt_logprobs[1]
        return self._first_logprobs

    def new_generation(self) -> Generation:
        if self.is_draining:
            raise ApiError(503, "the server is shutting down: try again later.", headers={"retry-after": "1"})
        return Generation(self.llm, self.mailbox)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.config.served_model_names:
            there = ", ".join(self.config.served_model_names)
            raise ApiError(
                404, f"the model {name!r} does not exist: this server has {there}.", "model", "model_not_found"
            )
