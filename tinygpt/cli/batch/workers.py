"""`generate --workers`: processes that answer the prompts of --input together, each an LLM over one mapped file."""

import argparse
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygpt.cli import loading
from tinygpt.cli.batch.tasks import Answer, Task
from tinygpt.cli.flags.model import llm_arguments
from tinygpt.cli.output.messages import counted, elapsed, say
from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.hardware.threads import physical_cores

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tinygpt.execution.model_source import ModelSource
    from tinygpt.outputs import RequestOutput
    from tinygpt.request.prompts import Prompt
    from tinygpt.sampling_params import SamplingParams

ROUNDS = 2  # prompts that a worker has, for each that it can run at once: no slot of it waits for the next one


@dataclass(frozen=True)
class Setup:
    """What each worker loads, and what its records call the model."""

    arguments: dict[str, Any]  # LLM's
    model: str

    @property
    def room(self) -> int:
        """How many tasks a worker has at once."""
        return ROUNDS * self.arguments["max_num_seqs"]


@dataclass
class Worker:
    """A process, and the tasks that it has."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    tasks: dict[int, Task] = field(default_factory=dict)

    @classmethod
    def start(cls, setup: Setup) -> "Worker":
        spawn = multiprocessing.get_context("spawn")  # a fork would share the threads' locks
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=work, args=(theirs, setup), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    @property
    def cost(self) -> int:
        return sum(task.cost for task in self.tasks.values())

    def give(self, task: Task) -> None:
        self.tasks[task.index] = task
        with suppress(OSError):  # it has ended: the next look at its connection says so
            self.connection.send(task)


def answers_of(workers: list[Worker], tasks: list[Task], room: int) -> Iterator[Answer]:
    """Each task's, as they are finished: the longest are begun first, each by the worker that has fewest tokens to do.

    A worker that ends leaves its tasks to the others. TinyGPTError if none is left, or for a problem.
    """
    waiting, num_left = sorted(tasks, key=lambda task: task.cost), len(tasks)
    while num_left:
        while waiting and (free := [worker for worker in workers if len(worker.tasks) < room]):
            min(free, key=lambda worker: worker.cost).give(waiting.pop())
        ready = wait([worker.connection for worker in workers])
        for worker in [worker for worker in workers if worker.connection in ready]:
            try:
                answer: Answer = worker.connection.recv()
            except (EOFError, OSError):
                _bury(worker, workers, waiting)
                continue
            if answer.problem is not None:
                raise TinyGPTError(answer.problem)
            del worker.tasks[answer.index]
            num_left -= 1
            yield answer


def _bury(worker: Worker, workers: list[Worker], waiting: list[Task]) -> None:
    """Take the tasks of a worker that has ended."""
    workers.remove(worker)
    worker.process.join()
    how = f"exit status {worker.process.exitcode}"
    if not workers:
        raise TinyGPTError(f"the last worker has ended ({how}): give the same command again to go on.")
    others, prompts = counted(len(workers), "other"), counted(len(worker.tasks), "prompt")
    say(f"a worker has ended ({how}): {others} will do its {prompts}")
    waiting += sorted(worker.tasks.values(), key=lambda task: task.cost)


@contextmanager
def started(count: int, setup: Setup) -> Iterator[list[Worker]]:
    """Workers, which end with the block."""
    workers = [Worker.start(setup) for _ in range(count)]
    everyone = list(workers)
    try:
        yield workers
    finally:
        for worker in everyone:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()


class Reader:
    """What is checked and encoded before the workers start: an LLM's reading of prompts, without its weights."""

    def __init__(self, args: argparse.Namespace):
        loading.set_thread_pools(args.threads)
        from tinygpt.engine.input_processor import InputProcessor
        from tinygpt.engine_config import EngineConfig
        from tinygpt.execution.model_source import ModelSource

        arguments = llm_arguments(args)
        names = ("max_num_seqs", "prefix_cache_seqs", "max_model_len", "max_num_batched_tokens")
        sizes = EngineConfig(**{name: arguments[name] for name in names})
        self.source = ModelSource.open(args.model, args.dtype, args.device, args.kv_cache_dtype, args.lora)
        sizes = sizes.for_model(self.source.config, self.source.backend.MAX_STEP_TOKENS)
        self._inputs = InputProcessor(
            self.source.config,
            sizes,
            self.source.checkpoint,
            arguments["soft_prompts"],
            arguments["split_special_tokens"],
        )
        self.dtype, self._arguments, self._args = self.source.dtype, arguments, args

    def read_prompt(self, prompt: Any, split_special_tokens: bool | None) -> "Prompt":
        return self._inputs.read_prompt(prompt, split_special_tokens)

    def generate_as_finished(self, prompts: list["Prompt"], params: "SamplingParams") -> None:
        """Check, and no more."""
        for prompt in prompts:
            self._inputs.request(prompt, params)

    def _threads(self, count: int) -> int:
        """Of each of so many workers."""
        return self._args.threads or max(physical_cores() // count, 1)

    def setup_elsewhere(self, count: int) -> Setup:
        """What `count` workers load that may be on other hosts, and in other folders: the model, each by itself."""
        arguments = {**self._arguments, "threads": self._threads(count), "dtype": self.dtype}
        for name in ("model", "lora", "draft_model"):
            arguments[name] = _whole_path(arguments[name])
        arguments["soft_prompts"] = {name: _whole_path(path) for name, path in arguments["soft_prompts"].items()}
        return Setup(arguments, self._args.model)

    @contextmanager
    def setup(self, count: int) -> Iterator[Setup]:
        """What `count` workers load while the block runs: a converted checkpoint as it is, and any other converted for
        them."""
        with tempfile.TemporaryDirectory(prefix="tinygpt-") as folder:
            shared = {**self._arguments, "threads": self._threads(count), "lora": None, "dtype": "auto"}
            if self.source.file is None:
                with elapsed(f"packing {self._args.model} as {self.dtype}, once for all workers"):
                    write_shared(self.source, self._args.model, Path(folder))
                shared["model"] = folder
            yield Setup(shared, self._args.model)


def _whole_path(name: str | None) -> str | None:
    """Of a file or folder that is here; a name of another kind stays, such as demo."""
    is_path = name is not None and name != "demo" and os.path.exists(name)
    return os.path.abspath(name) if is_path else name


def write_shared(source: "ModelSource", name: str, folder: Path) -> None:
    """A converted checkpoint, which all workers map. RequestError where the model has no files."""
    from tinygpt.kernels.cpu.packed import PACKING, arrays_of
    from tinygpt.weights.random_checkpoint import is_random
    from tinygpt.weights.stored.companions import write_companions
    from tinygpt.weights.stored.packed import write_packed
    from tinygpt.weights.stored.plain import can_be_written

    if is_random(name):
        raise RequestError(f"--model is {name}, which has no files to share among --workers: give a checkpoint.")
    if not can_be_written(source.checkpoint):
        raise RequestError(
            f"--model is {name}, a {source.checkpoint.family}, which --workers cannot share: leave --workers out."
        )
    tied, vocab_size = str(source.checkpoint.tied).lower(), source.config.vocab_size
    metadata = {"dtype": source.dtype, "tied": tied, "vocab_size": vocab_size, "source": name, **PACKING}
    write_packed(folder, arrays_of(source.load_params(physical_cores())), metadata)
    write_companions(folder, source.checkpoint)


def work(connection: Connection, setup: Setup) -> None:
    """What a worker's process does: answer tasks until there is nobody who gives any."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for the process that has started this one, and ends it
        signal.signal(number, signal.SIG_IGN)
    loading.set_thread_pools(setup.arguments["threads"])
    from tinygpt.llm import LLM

    lock = threading.Lock()

    def send(answer: Answer) -> None:
        with lock, suppress(OSError):
            connection.send(answer)

    def settle(task: Task, future: "Future[RequestOutput]") -> None:
        send(Answer.to(task, setup.model, llm, str(os.getpid()), future))

    try:
        llm = LLM(**setup.arguments)
    except TinyGPTError as error:
        send(Answer(-1, problem=str(error)))
        return
    with suppress(EOFError, OSError):
        while True:
            task: Task = connection.recv()
            llm.submit(task.prompt, task.params).add_done_callback(partial(settle, task))
