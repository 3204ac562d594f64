"""`generate --ray`: the workers are an actor pool of Ray Data, on one host or many."""

import pickle
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from tinygpt.cli import loading
from tinygpt.cli.batch.ray_cluster import import_ray, joined
from tinygpt.cli.batch.tasks import Answer, Task
from tinygpt.cli.batch.workers import Setup
from tinygpt.errors import TinyGPTError


class Actor:
    """One of the pool: an LLM that answers batches of tasks. These are pickled, as Arrow has no such types."""

    def __init__(self, setup: Setup):
        loading.set_thread_pools(setup.arguments["threads"])
        from tinygpt.llm import LLM

        self._llm, self._model, self._name = LLM(**setup.arguments), setup.model, uuid.uuid4().hex

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        tasks: list[Task] = [pickle.loads(task) for task in batch["task"]]
        asked = [(task, self._llm.submit(task.prompt, task.params)) for task in tasks]  # all run together
        answers = [Answer.to(task, self._model, self._llm, self._name, future) for task, future in asked]
        return {"answer": [pickle.dumps(answer) for answer in answers]}


@contextmanager
def answers_on_ray(count: int, setup: Setup, tasks: list[Task]) -> Iterator[Iterator[Answer]]:
    """In the block, each task's answer, as batches of them are finished, the longest first. What an actor had that
    ends, Ray gives to another. RequestError where there is no room for the actors, TinyGPTError for a problem, and if
    Ray gives up."""
    ray, threads = import_ray(), setup.arguments["threads"]
    with joined(ray, count, threads), closing(_answers(ray, count, setup, tasks)) as answers:
        yield answers


def _answers(ray: Any, count: int, setup: Setup, tasks: list[Task]) -> Iterator[Answer]:
    longest_first = sorted(tasks, key=lambda task: -task.cost)
    rows = [{"task": pickle.dumps(task)} for task in longest_first]
    # A batch may take long, and hosts may be long in coming: an actor that ends is noticed anyway.
    ray.data.DataContext.get_current().execution_no_progress_timeout_s = -1
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
