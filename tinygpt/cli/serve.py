"""`tinygpt serve`: the engine over HTTP, for OpenAI's and vLLM's clients."""

import argparse
import os
import socket
import threading
from contextlib import ExitStack, suppress
from importlib import import_module
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING

from tinygpt.cli import loading
from tinygpt.cli.flags import MODEL_FLAGS, add_group
from tinygpt.cli.output import log
from tinygpt.errors import CheckpointError, NoTokenizerError, RequestError, how_to_install

if TYPE_CHECKING:
    from tinygpt.llm import LLM
    from tinygpt.server.config import ServerConfig

SUMMARY = "answer OpenAI's and vLLM's clients over HTTP"
KEY_VARIABLE = "TINYGPT_API_KEY"
LOG_FORMATS = ("text", "json")
PACKAGES = ("starlette", "uvicorn", "h11", "pydantic", "prometheus_client")  # of the extra `serve`
WEB_MODULES = (
    *("pydantic.main", "starlette.applications", "uvicorn.protocols.http.h11_impl", "prometheus_client"),
    *("tinygpt.server.app", "tinygpt.server.transport.serve"),  # last: they wait for what the first thread imports
)
SOFT_PROMPT = "a soft prompt in PEFT's layout, for requests that name it; several may be given (default: none)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Who has written the texts that come, nobody here knows: special tokens in them are plain text.
    parser.set_defaults(split_special_tokens=True, temperature=1.0)
    names = [name for name in MODEL_FLAGS if name != "split_special_tokens"]
    group = add_group(parser, names, soft_prompt={"help": SOFT_PROMPT})
    group.add_argument(
        "--max-queue",
        type=int,
        default=512,
        metavar="N",
        help="samples that may wait; more are refused with status 429 (default: %(default)s)",
    )
    _add_server_flags(parser.add_argument_group("server"))


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="(default: %(default)s, this machine)")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0 is any (default: %(default)s)")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"what clients must send; several may be given. Others see it in the list of processes, but not in the "
        f"variable {KEY_VARIABLE}, which is taken where the flag is absent (default: none)",
    )
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="what clients may call the model (default: --model)"
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="names that requests may be sent to; * is any (default: this machine's where --host is, any elsewhere)",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="URL",
        help="web pages from elsewhere that may read replies (default: none)",
    )
    group.add_argument(
        "--max-logprobs",
        type=int,
        default=20,
        metavar="N",
        help="log probabilities of a token that a request may ask for (default: %(default)s)",
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="how long what runs may go on after SIGTERM or Ctrl-C (default: %(default)g)",
    )
    group.add_argument(
        "--enable-log-requests",
        action="store_true",
        help="log the body of each request, and so its prompts (default: no text is logged)",
    )
    group.add_argument(
        "--log-format",
        type=str.lower,
        choices=LOG_FORMATS,
        default="text",
        help="of the log on stderr (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    _check(args)
    # As load_llm would, but before the server's modules, NumPy among them, are imported.
    loading.set_thread_pools(args.threads)
    with ExitStack() as starting:
        _check_installed()
        from tinygpt.server.transport.listen import listen, url_of

        with listen(args.host, args.port) as listener:
            importing = threading.Thread(target=_import_web)
            importing.start()
            with _load(args) as llm:
                importing.join()
                _serve(args, llm, listener, url_of(listener), starting)


def _check_installed() -> None:
    missing = next((name for name in PACKAGES if find_spec(name) is None), None)
    if missing is not None:
        raise _lacks(missing)


def _lacks(package: str) -> RequestError:
    return RequestError(f"serve needs {package}, which comes with: {how_to_install('serve')}.")


def _import_web() -> None:
    """In a second thread, while the first loads the model and waits for its kernels."""
    with suppress(Exception):  # which is told when the module is needed
        for name in WEB_MODULES:
            import_module(name)


def _serve(args: argparse.Namespace, llm: "LLM", listener: socket.socket, url: str, starting: ExitStack) -> None:
    """Serve until told to end. starting: to be closed when all is there."""
    try:
        from tinygpt.server.app import create_app
        from tinygpt.server.compile_log import CompileLog
        from tinygpt.server.transport.logs import configure_logging
        from tinygpt.server.transport.serve import serve
    except ImportError as error:
        raise _lacks(error.name) from None
    from tinygpt.kernels.compiling import ANNOUNCER

    configure_logging(args.log_format)
    app = create_app(llm, _server_config(args, llm, listener.getsockname()[0]))
    starting.close()  # what requests leave behind is looked for
    with ANNOUNCER.told(CompileLog()):
        serve(app, listener, args.drain_seconds, lambda: _announce(args.model, url, llm))


def _announce(model: str, url: str, llm: "LLM") -> None:
    log(f"serving {model} on {url}")
    try:
        _ = llm.tokenizer
    except NoTokenizerError as error:
        log(f"only token ids are served: {error}")


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.port < 2**16:
        raise RequestError(f"--port is {args.port} and must be from 0 to {2**16 - 1}.")
    if not 0 <= args.drain_seconds < float("inf"):
        raise RequestError(f"--drain-seconds is {args.drain_seconds:g} and must be 0 or more.")
    if args.max_logprobs < 0:
        raise RequestError(f"--max-logprobs is {args.max_logprobs} and must be 0 or more.")
    if not all(name.strip() for name in args.served_model_name or ()):
        raise RequestError("a --served-model-name is empty: give each some characters, or leave the flag out.")
    if not all(_keys(args)):
        raise RequestError(
            f"an --api-key, or the variable {KEY_VARIABLE}, is empty: give each some characters, or leave it out."
        )


def _load(args: argparse.Namespace) -> "LLM":
    return loading.load_llm(args, max_queue=args.max_queue)[0]


def _check_tokenizer(llm: "LLM") -> None:
    """CheckpointError for one that is damaged. Without any, a server takes token ids."""
    try:
        _ = llm.tokenizer
    except NoTokenizerError:
        pass
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} serve needs a whole tokenizer, or none at all; with this one, token ids work in `generate "
            "--input` and in the library."
        ) from None


def _server_config(args: argparse.Namespace, llm: "LLM", address: str) -> "ServerConfig":
    """address: what --host has turned out to be."""
    from tinygpt.server.chat.template import ChatTemplate
    from tinygpt.server.config import ServerConfig
    from tinygpt.server.transport.security import LOOPBACK

    keys, is_local = _keys(args), ip_address(address).is_loopback
    hosts = LOOPBACK | {args.host.lower(), address} if is_local else {"*"}
    if args.allowed_hosts:
        hosts = set(map(str.lower, args.allowed_hosts))
    if not is_local and not keys:
        log(f"whoever reaches {args.host} may use this server: there is no --api-key")
    return ServerConfig(
        served_model_names=tuple(args.served_model_name or [args.model]),
        api_keys=keys,
        allowed_hosts=None if "*" in hosts else frozenset(hosts),
        allowed_origins=tuple(args.allowed_origins),
        max_logprobs=args.max_logprobs,
        enable_log_requests=args.enable_log_requests,
        chat_template=ChatTemplate.from_folder(llm.checkpoint_path),
    )


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    given = os.environ.get(KEY_VARIABLE)
    return tuple(key.strip() for key in args.api_key or ([given] if given else []))
