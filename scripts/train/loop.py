"""Training: batches, schedule, optimizer, and a state that a later run can go on from."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .model import GPT
from .validation import Validation

STATE = "state.pt"
STEPS_BETWEEN_WAITS = 10  # the host runs ahead of a GPU, and must not by so much that its clock is wrong


@dataclass(frozen=True)
class Plan:
    """How to train. `tokens` and `deadline`, by time.monotonic(), are bounds: the first one reached ends the run."""

    tokens: int
    deadline: float
    batch_tokens: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip: float
    seed: int
    evaluations: int

    def rate(self, step: int, progress: float) -> float:
        """Up in a line over warmup_steps, then down to 0 along a cosine of the progress, 0 to 1."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


@dataclass(frozen=True)
class Batches:
    """Windows of `size` tokens and the one after each, out of token_ids (T,): every pass over them in a new order.

    A pass starts somewhere within the first window, so that the next one cuts the text elsewhere. What a step gets
    depends on the seed and the step alone. The windows that fill no batch are left to other passes.
    """

    token_ids: Tensor
    size: int
    num_windows: int
    seed: int

    @property
    def steps_per_pass(self) -> int:
        return self.windows_per_pass // self.num_windows

    @property
    def windows_per_pass(self) -> int:
        return len(self.token_ids) // self.size - 1  # one less: room to start anywhere in the first

    def of_step(self, step: int) -> Tensor:
        """(num_windows, size + 1)"""
        starts = self._starts(step // self.steps_per_pass)
        first = step % self.steps_per_pass * self.num_windows
        columns = torch.arange(self.size + 1, device=self.token_ids.device)
        return self.token_ids[starts[first : first + self.num_windows, None] + columns].long()

    def _starts(self, number: int) -> Tensor:
        return _starts_of_pass(self.windows_per_pass, self.size, self.seed, number, self.token_ids.device)


@lru_cache(maxsize=2)
def _starts_of_pass(num_windows: int, size: int, seed: int, number: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    offset = torch.randint(size, (), generator=generator)
    return (offset + size * torch.randperm(num_windows, generator=generator)).to(device)


@dataclass
class Trainer:
    """A model in training. `best` is the best validation so far: whoever takes it keeps those weights."""

    model: GPT
    batches: Batches
    plan: Plan
    bfloat16: bool = False  # products, while weights and sums stay float32
    compile: bool = False
    step: int = 0
    best: Validation | None = None
    is_ending: bool = False

    @property
    def tokens_seen(self) -> int:
        return self.step * self.batches.num_windows * self.batches.size

    @cached_property
    def optimizer(self) -> torch.optim.AdamW:
        """Weight decay on matrices alone, embeddings included: biases and layer norms are few, and must be free."""
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.plan.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        fused = parameters[0].is_cuda
        return torch.optim.AdamW(groups, lr=self.plan.learning_rate, betas=(0.9, 0.95), fused=fused)

    def run(self, validate: Callable[[], Validation], keep: Callable[[bool], None], say: Callable[[str], None]) -> None:
        """Train until a bound is reached, one step at least unless all tokens are seen.

        Validates at even distances of the progress, and at the end, and then calls keep(whether this is the best).
        """
        forward = self.forward_of(say)  # before the clock of the schedule starts
        torch.manual_seed(self.plan.seed + self.step)
        begin, first = time.monotonic(), self.step
        rested = begin  # when validation has taken less than a fifth of the time again
        progress = self.progress(begin)
        due = progress + 1 / self.plan.evaluations
        while progress < 1 or (self.step == first and self.tokens_seen < self.plan.tokens):
            before = time.monotonic()
            loss = self.train_step(forward, progress)
            if self.step % STEPS_BETWEEN_WAITS == 0:
                loss.item()
            progress = self.progress(begin, time.monotonic() - before)
            if progress >= 1 or (progress >= due and time.monotonic() >= rested):
                before = time.monotonic()
                found = validate()
                say(f"{progress:4.0%} {self.tokens_seen / 1e6:8.2f} M tokens, loss {loss:.4f}, validation {found}")
                keep(self._is_best(found))
                rested = time.monotonic() + 4 * (time.monotonic() - before)
                due = progress + 1 / self.plan.evaluations

    def end(self) -> None:
        """Have the run end with this step, as though its time were over."""
        self.is_ending = True

    def progress(self, begin: float, step_seconds: float = 0.0) -> float:
        """How much of the run is done: the share of whichever bound is nearer. All, if a step would not fit in."""
        now = time.monotonic()
        is_late = self.is_ending or now + step_seconds >= self.plan.deadline
        of_time = 1.0 if is_late else (now - begin) / (self.plan.deadline - begin)
        return max(self.tokens_seen / self.plan.tokens, of_time)

    def train_step(self, forward: Callable[..., Tensor], progress: float) -> Tensor:
        """The loss before the step, in nats, still on its device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate(self.step, progress)
        loss = self.loss_of(forward, self.batches.of_step(self.step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Everything that `load` needs. `about` says which run this is."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        best = self.best and (self.best.loss, self.best.bits_per_byte)
        partial = folder / f"{STATE}.partial"
        torch.save(state | {"best": best, "about": about}, partial)
        partial.replace(folder / STATE)

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.best = state["step"], state["best"] and Validation(*state["best"])

    def _is_best(self, found: Validation) -> bool:
        is_best = self.best is None or found.loss < self.best.loss
        self.best = found if is_best else self.best
        return is_best

    def loss_of(self, forward: Callable[..., Tensor], batch: Tensor) -> Tensor:
        """Of a batch (B, T + 1)."""
        with torch.autocast(batch.device.type, torch.bfloat16) if self.bfloat16 else nullcontext():
            return forward(batch[:, :-1], batch[:, 1:])

    def forward_of(self, say: Callable[[str], None]) -> Callable[..., Tensor]:
        """The model, compiled and warm if it is to be; as it is where compiling fails."""
        if not self.compile:
            return self.model
        try:
            forward = torch.compile(self.model)
            self.loss_of(forward, self.batches.of_step(0)).backward()
        except Exception as error:  # a compiler that is missing or broken costs speed, no more
            say(f"torch.compile failed ({type(error).__name__}: {str(error)[:200]}): training without it.")
            forward = self.model
        self.model.zero_grad(set_to_none=True)
        return forward
