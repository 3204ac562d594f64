"""`generate --ray`: an actor pool of Ray Data, at $RAY_ADDRESS or on this machine."""

import argparse
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ..cli.flags import llm_args, set_thread_pools
from ..cli.streams import PromptRecord, counted, log
from ..errors import FailedRequestError, RequestError, TinyGPTError, how_to_install
from ..hardware import physical_cores
from ..llm_args import LLMArgs

ROUNDS = 2  # prompts of a batch for each slot: no slot idles between batches
OBJECT_STORE = 128 * 2**20  # bytes, for prompts and records
SECONDS_TO_ANSWER = 5
# Ray reads these at its import.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}

Request = tuple[int, Any, Any]  # index, Prompt, SamplingParams


def open_inputs(args: LLMArgs) -> tuple[Any, Any]:
    """Return a ModelSource and an InputProcessor, which need no weights."""
    set_thread_pools(args.threads)
    from ..engine.input_processor import InputProcessor
    from ..engine.model_runner import ModelSource

    source = ModelSource.open(args)
    return source, InputProcessor(source, args, args.sizes(source.config, source.backend.MAX_STEP_TOKENS))


def prompt_check(args: argparse.Namespace) -> Callable[[PromptRecord], Any]:
    """Return a function that raises RequestError for a prompt which is not possible for the model.

    It lets all pass of a model that cannot be opened, or would be downloaded first: told when all lines are in order.
    """
    from ..weights.open import is_on_hub

    own = llm_args(args)
    adapters = [*(own.lora_modules or {}).values(), *(own.soft_prompts or {}).values()]
    with suppress(TinyGPTError):
        if not any(map(is_on_hub, [own.checkpoint, *filter(None, [own.lora, *adapters])])):
            return partial(_check_prompt, open_inputs(own)[1])
    return lambda record: None


def _check_prompt(inputs: Any, record: PromptRecord) -> None:
    prompt = inputs.read_prompt(record.prompt, record.split_special_tokens)
    inputs.num_truncated_tokens(prompt, record.params)


def setup(args: argparse.Namespace) -> tuple[LLMArgs, Any]:
    """Return LLM's arguments, with absolute paths, and an InputProcessor."""
    own = llm_args(args)
    source, inputs = open_inputs(own)
    whole: dict[str, Any] = {
        name: _whole_path(getattr(own, name)) for name in ("model", "lora", "draft_model")
    }
    for name in ("lora_modules", "soft_prompts"):
        whole[name] = {adapter: _whole_path(path) for adapter, path in getattr(own, name).items()}
    threads = args.threads or max(physical_cores() // args.ray, 1)
    return replace(own, threads=threads, dtype=source.dtype, **whole), inputs


def _whole_path(name: str | None) -> str | None:
    is_path = name is not None and name != "demo" and os.path.exists(name)
    return os.path.abspath(name) if is_path else name


class Actor:
    """An LLM of the pool. Requests are pickled, as Arrow lacks their types."""

    def __init__(self, args: LLMArgs):
        set_thread_pools(args.threads)
        from ..llm import LLM

        self._llm = LLM(**vars(args))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        requests = [pickle.loads(request) for request in batch["request"]]
        asked = [(i, self._llm.submit(prompt, params)) for i, prompt, params in requests]
        return {"found": [pickle.dumps((i, _found(future))) for i, future in asked]}


def _found(future: Any) -> Any:
    error = future.exception()
    return error if isinstance(error, FailedRequestError) else future.result()


@contextmanager
def outputs_on_ray(count: int, args: LLMArgs, requests: list[Request]) -> Iterator[Iterator[tuple[int, Any]]]:
    """Yield an iterator of (index, RequestOutput or FailedRequestError), the longest requests first.

    Raise RequestError if the cluster has no room, TinyGPTError if Ray fails.
    """
    ray = _import_ray()
    log("starting Ray")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with redirect_stdout(sys.stderr):  # Ray prints when actors end, and stdout is for records
        try:
            _join(ray, count, args.threads)
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler would not say how to continue
            yield _outputs(ray, count, args, requests)
        except ray.exceptions.RayError as error:
            raise TinyGPTError(f"Ray has given up: {_last_line(error)}") from error
        finally:
            ray.shutdown()


def _outputs(ray: Any, count: int, args: LLMArgs, requests: list[Request]) -> Iterator[tuple[int, Any]]:
    longest_first = sorted(requests, key=_num_tokens, reverse=True)
    rows = [{"request": pickle.dumps(request)} for request in longest_first]
    batch_size = ROUNDS * args.max_num_seqs
    # A batch or a new host may take long.
    ray.data.DataContext.get_current().execution_no_progress_timeout_s = -1
    dataset = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // batch_size))
    done = dataset.map_batches(
        Actor,
        fn_constructor_args=(args,),
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=count),
        num_cpus=args.threads,
    )
    for row in done.iter_rows():
        yield pickle.loads(row["found"])


def _num_tokens(request: Request) -> int:
    _, prompt, params = request
    return len(prompt.token_ids) + max(params.num_samples, params.num_beams) * params.max_tokens


def _import_ray() -> Any:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise RequestError(f"--ray needs {error.name}, which comes with: {how_to_install('ray')}.") from None
    rays = logging.getLogger("ray.data")  # Ray's log files keep the lines
    for handler in [h for h in rays.handlers if isinstance(h, logging.StreamHandler)]:
        rays.removeHandler(handler)
    return ray


def _join(ray: Any, count: int, threads: int) -> None:
    """Join the cluster at RAY_ADDRESS, or start a cluster. Raise RequestError if it has no room for an actor."""
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS")
    if not address:  # one CPU more is Ray's own
        size = {"num_cpus": count * threads + 1, "object_store_memory": OBJECT_STORE}
        ray.init("local", include_dashboard=False, **size, **quiet)
        return
    host, _, port = address.rpartition("/")[2].rpartition(":")
    try:
        if port.isdecimal():  # not "auto"; Ray would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_ANSWER).close()
        ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:  # depends on the address
        raise TinyGPTError(
            f"RAY_ADDRESS is {address!r}, and no cluster answers: {_last_line(error)}"
        ) from error
    hosts = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]  # CPUs of each
    room = sum(cpus // threads for cpus in hosts)
    has = f"the Ray cluster at {address} has {sum(hosts)} CPUs on {counted(len(hosts), 'host')}, room for {room}"
    if not room:
        raise RequestError(f"--threads is {threads} and {has} actors: give fewer threads.")
    if room < count:
        log(
            f"--ray {count} needs {count * threads} CPUs and {has}: the other actors wait until it adds hosts"
        )


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]
