"""`tinygpt serve`: the engine over HTTP, for OpenAI's and vLLM's clients."""

import argparse
import os
import time
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING

from ..errors import NoTokenizerError, RequestError, how_to_install
from ..llm_args import SOFT_PROMPT
from ..server.config import KEY_VARIABLE, ServerConfig
from .flags import (
    MODEL_FLAGS,
    Command,
    add_chat_template,
    add_group,
    compiling,
    flag_of,
    flags_of,
    load_llm,
    options_of,
    set_thread_pools,
)
from .streams import log

if TYPE_CHECKING:
    from ..llm import LLM

SERVER_FLAGS = flags_of(ServerConfig)
MAX_CAPTURED = 64 * 2**20  # bytes of a reply's activations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Texts come from strangers: special tokens in them are plain text.
    parser.set_defaults(split_special_tokens=True, temperature=1.0)
    names = [name for name in MODEL_FLAGS if name != "split_special_tokens"]
    soft_prompt = f"{SOFT_PROMPT}, for requests that name it; several may be given (default: none)"
    group = add_group(parser, names, soft_prompt={"help": soft_prompt})
    group.add_argument(
        "--max-queue",
        type=int,
        default=512,
        metavar="N",
        help="samples that may wait; more are refused with status 429 (default: %(default)s)",
    )
    server = parser.add_argument_group("server")
    for name, field in SERVER_FLAGS.items():
        server.add_argument(flag_of(name), **options_of(field, field.default))
    add_chat_template(server.add_argument)


def run(args: argparse.Namespace) -> None:
    config = config_of(args)
    set_thread_pools(args.threads)  # before NumPy is imported
    try:
        from ..look.edits import ControlVector
        from ..server.app import create_app, listen, serve, url_of
        from ..server.monitoring import configure_logging
    except ImportError as error:
        raise RequestError(
            f"serve needs {error.name}, which comes with: {how_to_install('serve')}."
        ) from None
    with listen(config.host, config.port) as listener:
        vectors = {name: ControlVector.load(path) for name, path in config.control_vectors.items()}
        config = replace(config, control_vectors=vectors)
        more = {
            "max_queue": args.max_queue,
            "chat_template": args.chat_template,
            "max_capture_bytes": MAX_CAPTURED,
        }
        llm, _ = load_llm(args, **more)
        with llm:
            try:
                _ = llm.tokenizer  # CheckpointError for a damaged one
            except NoTokenizerError as error:
                log(f"only token ids are served: {error}")
            _try_first(llm, args)
            configure_logging(config.log_format)
            for vector in vectors.values():
                llm.logits([0], vector.edits())  # RequestError if it does not fit the model
            app = create_app(llm, _reached_at(config, listener.getsockname()[0]))
            on_start = partial(log, f"serving {args.model} on {url_of(listener)}")
            serve(app, listener, config.drain_seconds, on_start)


def _try_first(llm: "LLM", args: argparse.Namespace) -> None:
    """Answer each once: what compiles for the first client would hold up all others."""
    from ..llm import WARMUP_REQUESTS

    room = llm.max_model_len - 1
    if args.device == "reference" or not room:
        return
    started = time.perf_counter()
    prompt = [0] * min(2, room)
    batches = [([prompt], fields) for fields in WARMUP_REQUESTS]
    if args.device == "cuda":  # more rows take other kernels, and steps are captured as graphs
        for power in range((args.max_num_seqs - 1).bit_length()):
            rows = min(2 << power, args.max_num_seqs)
            batches += [([[0]] * rows, fields) for fields in WARMUP_REQUESTS[:2]]
    for prompts, fields in batches:
        llm.generate(prompts, max_tokens=3, overflow="clamp", ignore_eos=True, seed=0, **fields)
    for _ in llm.stream(prompt, max_tokens=2, overflow="clamp"):
        pass
    count = len(batches) + 1
    if args.look:
        _, cache = llm.run_with_cache([prompt], ["resid_post", "pattern"])
        llm.logit_lens(cache["resid_post", 0][0])
        count += 1
    seconds = time.perf_counter() - started
    log(f"tried {count} kinds of requests in {seconds:.2f} s{compiling(args)}")


def config_of(args: argparse.Namespace) -> ServerConfig:
    """Return the settings of the flags, and the key of the environment. Raise RequestError."""
    values = {field.name: getattr(args, name) for name, field in SERVER_FLAGS.items()}
    names = args.served_model_name or [args.model]
    if not all(map(str.strip, names)):
        raise RequestError("--served-model-name has an empty name.")
    hidden = os.environ.get(KEY_VARIABLE)
    keys = [key.strip() for key in args.api_key or ([hidden] if hidden else [])]
    if not all(keys):
        raise RequestError(f"--api-key, or the variable {KEY_VARIABLE}, is empty.")
    return ServerConfig(**values | {"served_model_names": names, "api_keys": keys})


def _reached_at(config: ServerConfig, address: str) -> ServerConfig:
    """Return the settings with the hosts that requests may be sent to. address: the numeric one of --host."""
    from ..server.app import LOOPBACK

    is_local = ip_address(address).is_loopback
    if not is_local and not config.api_keys:
        log(f"every machine that reaches {config.host} may use this server: there is no --api-key")
    own = LOOPBACK | {config.host.lower(), address} if is_local else {"*"}
    hosts = config.allowed_hosts or own
    return replace(config, allowed_hosts=None if "*" in hosts else hosts)


SERVE = Command(add_arguments, run, "[flags] [MODEL]")
