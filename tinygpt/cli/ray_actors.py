"""`generate --ray`: the workers are an actor pool of Ray Data, on one host or many."""

import logging
import os
import pickle
import socket
from collections.abc import Iterator
from typing import Any

from tinygpt.cli import loading
from tinygpt.cli.messages import elapsed
from tinygpt.cli.tasks import Answer, Task
from tinygpt.cli.workers import Setup
from tinygpt.errors import RequestError, TinyGPTError, how_to_install

OBJECT_STORE = 128 * 2**20  # bytes; prompts and records pass through it, and no weights
SECONDS_TO_ANSWER = 5
# Ray reads these when it is imported: no word goes out, and progress is ours to show.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}


class Actor:
    """One of the pool: an LLM that answers batches of tasks. These are pickled, as Arrow has no such types."""

    def __init__(self, setup: Setup):
        loading.set_thread_pools(setup.arguments["threads"])
        from tinygpt.llm import LLM

        self._llm, self._model = LLM(**setup.arguments), setup.model

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        tasks: list[Task] = [pickle.loads(task) for task in batch["task"]]
        asked = [(task, self._llm.submit(task.prompt, task.params)) for task in tasks]  # all run together
        answers = [Answer.to(task, self._model, self._llm.dtype, future) for task, future in asked]
        return {"answer": [pickle.dumps(answer) for answer in answers]}


def answers_on_ray(count: int, setup: Setup, tasks: list[Task]) -> Iterator[Answer]:
    """Each task's, as batches of them are finished, the longest first. What an actor had that ends, Ray gives to
    another. TinyGPTError for a problem, and if Ray gives up."""
    ray = _ray()
    longest_first = sorted(tasks, key=lambda task: -task.cost)
    rows = [{"task": pickle.dumps(task)} for task in longest_first]
    with elapsed("starting Ray"):
        _join_cluster(ray, count * setup.arguments["threads"])
    try:
        dataset = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // setup.room))
        done = dataset.map_batches(
            Actor,
            fn_constructor_args=(setup,),
            batch_size=setup.room,
            compute=ray.data.ActorPoolStrategy(size=count),
            num_cpus=setup.arguments["threads"],
        )
        for row in done.iter_rows():
            answer: Answer = pickle.loads(row["answer"])
            if answer.problem is not None:
                raise TinyGPTError(answer.problem)
            yield answer
    except ray.exceptions.RayError as error:
        raise TinyGPTError(f"Ray has given up: {_last_line(error)}") from error
    finally:
        ray.shutdown()


def _ray() -> Any:
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise RequestError(f"--ray needs {error.name}, which comes with: {how_to_install('ray')}.") from None
    return ray


def _join_cluster(ray: Any, cpus: int) -> None:
    """The cluster at RAY_ADDRESS; else one of this machine alone, which ends with this process. cpus: what actors take,
    beside which Ray has one for itself."""
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address := os.environ.get("RAY_ADDRESS"):
        _check_answers(address)
        ray.init(address, **quiet)
        return
    ray.init("local", num_cpus=cpus + 1, include_dashboard=False, object_store_memory=OBJECT_STORE, **quiet)


def _check_answers(address: str) -> None:
    """TinyGPTError where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if not port.isdecimal():  # such as auto
        return
    try:
        socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise TinyGPTError(f"RAY_ADDRESS is {address!r}, and no cluster answers there: {error}.") from error


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]
