"""`python -m tinygpt serve`: the engine over HTTP, for OpenAI's and vLLM's clients."""

import argparse

from tinygpt.cli import loading, model_flags
from tinygpt.cli.flags import whole_number
from tinygpt.cli.messages import say
from tinygpt.errors import CheckpointError, RequestError

SUMMARY = "answer OpenAI's and vLLM's clients over HTTP"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_flags.add_group(parser, [name for name in model_flags.FLAGS if name != "split_special_tokens"])
    parser.set_defaults(split_special_tokens=True, temperature=1.0)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="(default: %(default)s)")
    group.add_argument("--port", type=whole_number, default=8000, metavar="N", help="(default: %(default)s)")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="(default: --model)")


def run(args: argparse.Namespace) -> None:
    try:
        from tinygpt.server.app import create_app
        from tinygpt.server.config import ServerConfig
        from tinygpt.server.listen import listen, url_of
        from tinygpt.server.serve import serve
    except ImportError as error:
        raise RequestError(f'serve needs {error.name}, which comes with: pip install "tinygpt[serve]".') from None
    listener = listen(args.host, args.port)
    try:
        llm = loading.load_llm(args, lambda llm: None)
    except CheckpointError as error:
        raise RequestError(str(error)) from error
    with llm:
        app = create_app(llm, ServerConfig(tuple(args.served_model_name or [args.model])))
        say(f"serving {args.model} on {url_of(listener)}")
        serve(app, listener)
