"""`tinygpt serve`: the engine over HTTP, for OpenAI's and vLLM's clients."""

import argparse
import os
import time
from dataclasses import replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from ..errors import NoTokenizerError, RequestError, how_to_install, invalid
from ..llm_args import SOFT_PROMPT, named_path
from .flags import MODEL_FLAGS, Command, add_chat_template, add_group, compiling, load_llm, set_thread_pools
from .streams import log

if TYPE_CHECKING:
    from ..llm import LLM
    from ..server.api import ServerConfig

MAX_CAPTURED = 64 * 2**20  # bytes of a reply's activations
# What clients send: greedy, sampled, with a penalty, a text with its log probabilities, its first token's for `echo`.
FIRST_REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.0, "presence_penalty": 0.5},
    {"logprobs": 1, "prompt_logprobs": 1},
    {"prompt_logprobs": -1},
)
KEY_VARIABLE = "TINYGPT_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Texts come from strangers: special tokens in them are plain text.
    parser.set_defaults(split_special_tokens=True, temperature=1.0)
    names = [name for name in MODEL_FLAGS if name != "split_special_tokens"]
    soft_prompt = f"{SOFT_PROMPT}, for requests that name it; several may be given (default: none)"
    group = add_group(parser, names, soft_prompt={"help": soft_prompt})
    about = "samples that may wait; more are refused with status 429 (default: %(default)s)"
    group.add_argument("--max-queue", type=int, default=512, metavar="N", help=about)
    add = parser.add_argument_group("server").add_argument
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen (default: %(default)s, this machine)",
    )
    add("--port", type=int, default=8000, metavar="N", help="0 is any free one (default: %(default)s)")
    about = (
        f"a key for clients, several may be given; {KEY_VARIABLE} hides it from process lists (default: none)"
    )
    add("--api-key", action="append", metavar="KEY", help=about)
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model for clients (default: --model)",
    )
    about = "names that requests may be sent to; * is any (default: this machine's names if --host is local, else any)"
    add("--allowed-hosts", nargs="+", metavar="NAME", help=about)
    about = "web pages from elsewhere that may read replies (default: none)"
    add("--allowed-origins", nargs="+", default=[], metavar="URL", help=about)
    add(
        "--max-logprobs",
        type=int,
        default=20,
        metavar="N",
        help="most logprobs of a request (default: %(default)s)",
    )
    add_chat_template(add)
    about = "fields of a request that the server does not know: ignore or refuse (default: %(default)s)"
    add("--unknown-fields", type=str.lower, choices=("ignore", "refuse"), default="refuse", help=about)
    about = "time for running requests after SIGTERM or Ctrl-C (default: %(default)g)"
    add("--drain-seconds", type=float, default=30.0, metavar="SECONDS", help=about)
    add(
        "--enable-log-requests",
        action="store_true",
        help="log each body, and so its prompts (default: no text)",
    )
    about = "let requests capture and edit activations: fields capture and edits (default: off)"
    add("--look", action="store_true", help=about)
    about = "a control vector in GGUF for the field steer of requests; several may be given (default: none)"
    add("--control-vector", action="append", type=named_path, metavar="NAME=PATH", help=about)
    about = "form of the log on stderr (default: %(default)s)"
    add("--log-format", type=str.lower, choices=("text", "json"), default="text", help=about)


def run(args: argparse.Namespace) -> None:
    _check(args)
    set_thread_pools(args.threads)  # before NumPy is imported
    try:
        from ..look.edits import ControlVector
        from ..server.app import create_app, listen, serve, url_of
        from ..server.monitoring import configure_logging
    except ImportError as error:
        raise RequestError(
            f"serve needs {error.name}, which comes with: {how_to_install('serve')}."
        ) from None
    with listen(args.host, args.port) as listener:
        vectors = {name: ControlVector.load(path) for name, path in args.control_vector or ()}
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
            configure_logging(args.log_format)
            for vector in vectors.values():
                llm.logits([0], vector.edits())  # RequestError if it does not fit the model
            config = replace(_server_config(args, listener.getsockname()[0]), control_vectors=vectors or None)
            app = create_app(llm, config)
            serve(
                app, listener, args.drain_seconds, lambda: log(f"serving {args.model} on {url_of(listener)}")
            )


def _try_first(llm: "LLM", args: argparse.Namespace) -> None:
    """Answer each once: what compiles for the first client would hold up all others."""
    room = llm.max_model_len - 1
    if args.device == "reference" or not room:
        return
    started = time.perf_counter()
    prompt = [0] * min(2, room)
    batches = [([prompt], fields) for fields in FIRST_REQUESTS]
    if args.device == "cuda":  # more rows take other kernels, and steps are captured as graphs
        for power in range((args.max_num_seqs - 1).bit_length()):
            rows = min(2 << power, args.max_num_seqs)
            batches += [([[0]] * rows, fields) for fields in FIRST_REQUESTS[:2]]
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


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.port < 2**16:
        raise invalid("--port", args.port, f"from 0 to {2**16 - 1}")
    if not 0 <= args.drain_seconds < float("inf"):
        raise invalid("--drain-seconds", args.drain_seconds, "0 or more")
    if args.max_logprobs < 0:
        raise invalid("--max-logprobs", args.max_logprobs, "0 or more")
    if not all(name.strip() for name in args.served_model_name or ()):
        raise RequestError("--served-model-name has an empty name.")
    if not all(_keys(args)):
        raise RequestError(f"--api-key, or the variable {KEY_VARIABLE}, is empty.")


def _server_config(args: argparse.Namespace, address: str) -> "ServerConfig":
    """address: the numeric address of --host."""
    from ..server.api import ServerConfig
    from ..server.app import LOOPBACK

    keys = _keys(args)
    is_local = ip_address(address).is_loopback
    hosts = LOOPBACK | {args.host.lower(), address} if is_local else {"*"}
    if args.allowed_hosts:
        hosts = set(map(str.lower, args.allowed_hosts))
    if not is_local and not keys:
        log(f"every machine that reaches {args.host} may use this server: there is no --api-key")
    return ServerConfig(
        served_model_names=tuple(args.served_model_name or [args.model]),
        api_keys=keys,
        allowed_hosts=None if "*" in hosts else frozenset(hosts),
        allowed_origins=tuple(args.allowed_origins),
        max_logprobs=args.max_logprobs,
        enable_log_requests=args.enable_log_requests,
        look=args.look,
        ignores_unknown_fields=args.unknown_fields == "ignore",
    )


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    given = os.environ.get(KEY_VARIABLE)
    return tuple(key.strip() for key in args.api_key or ([given] if given else []))


SERVE = Command(add_arguments, run, "[flags] [MODEL]")
