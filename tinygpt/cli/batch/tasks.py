"""The prompts of --input as tasks with answers, whoever answers them: this process, others beside it, or Ray."""

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tinygpt.cli.batch.records import failure_line, record_line
from tinygpt.cli.output.cut_texts import Ended
from tinygpt.errors import FailedRequestError, RequestError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tinygpt.engine.throughput import Throughput
    from tinygpt.llm import LLM
    from tinygpt.outputs import RequestOutput
    from tinygpt.request.prompts import Prompt
    from tinygpt.sampling_params import SamplingParams

MAX_WORKERS = 1024


@dataclass(frozen=True)
class Task:
    """A prompt to answer; `index` is its place among them."""

    index: int
    record_id: str | int
    prompt: "Prompt"
    params: "SamplingParams"

    @property
    def cost(self) -> int:
        """Tokens that it may take in all."""
        samples = max(self.params.best_of or self.params.n, self.params.num_beams)
        return len(self.prompt.token_ids) + samples * self.params.max_tokens


@dataclass(frozen=True)
class Answer:
    """A task's record; `problem` is what came in place of one, and ends all.

    worker, work: who has answered, by a name of its own, and all the work of its engine so far.
    """

    index: int
    line: str = ""
    is_truncated: bool = False
    samples: tuple[Ended, ...] = ()
    is_failed: bool = False  # the record says why there are no samples
    problem: str | None = None
    worker: str = ""
    work: "Throughput | None" = None

    @classmethod
    def of(cls, task: Task, model: str, dtype: str, found: "RequestOutput | FailedRequestError") -> "Answer":
        if isinstance(found, FailedRequestError):
            line = failure_line(task.record_id, model, dtype, task.prompt, str(found))
            return cls(task.index, line, is_failed=True)
        line = record_line(task.record_id, model, dtype, found)
        samples = tuple((sample.text, sample.finish_reason) for sample in found.outputs)
        return cls(task.index, line, found.num_truncated_tokens > 0, samples)

    @classmethod
    def to(cls, task: Task, model: str, llm: "LLM", worker: str, future: "Future[RequestOutput]") -> "Answer":
        """What has come of a task of this worker's, an error among it."""
        try:
            found = future.result()
        except FailedRequestError as error:
            found = error
        except Exception as error:
            return cls(task.index, problem=f"id {task.record_id!r}: {error}")
        return replace(cls.of(task, model, llm.dtype, found), worker=worker, work=llm.engine.throughput)


def has_workers(args: argparse.Namespace) -> bool:
    return args.workers > 1 or args.ray


def check_workers(args: argparse.Namespace) -> None:
    """RequestError for workers that cannot be had."""
    if not 1 <= args.workers <= MAX_WORKERS:
        raise RequestError(f"--workers is {args.workers} and must be a whole number from 1 to {MAX_WORKERS}.")
    if not has_workers(args):
        return
    flag = "--ray" if args.ray else "--workers"
    if args.input is None:
        raise RequestError(f"{flag} is for the prompts of a file: give it with --input.")
    if args.device != "cpu":
        raise RequestError(f"{flag} is for processes of the CPU and --device is {args.device}: omit one of them.")
    if (args.tensor_parallel_size, args.pipeline_parallel_size) != (1, 1):
        raise RequestError(f"workers have a model each: omit {flag}, or --tensor-parallel and --pipeline-parallel.")
