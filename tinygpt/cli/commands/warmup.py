"""`tinygpt warmup`: compile every kernel for a model and dtype ahead of time, or take them from another machine."""

import argparse
from pathlib import Path

from tinygpt.cli import loading
from tinygpt.cli.flags import model as model_flags
from tinygpt.cli.output.messages import counted, say
from tinygpt.cli.output.results_file import check_writable
from tinygpt.errors import RequestError

SUMMARY = "compile the kernels for a model and dtype ahead of time"
DESCRIPTION = """\
Compile the kernels for a model and dtype ahead of time. --export writes all kernels that are there by then to a file,
and --import takes them from it, on a machine with the same CPU, Python and packages. Kernels are machine code: import a
file only if you trust whoever made it, as you would a program.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_flags.add_group(parser, model_flags.CPU_FLAGS)
    one = parser.add_argument_group("other machines of the same kind").add_mutually_exclusive_group()
    one.add_argument("--export", type=Path, metavar="FILE", help="write the compiled kernels to a file, too")
    one.add_argument(
        "--import",
        type=Path,
        metavar="FILE",
        dest="import_from",
        help="keep the kernels of such a file, and compile none; only from somebody whom you trust",
    )


def run(args: argparse.Namespace) -> None:
    _check(args)
    loading.set_thread_pools(args.threads)
    from tinygpt.compile_ahead import warmup
    from tinygpt.kernels.cpu.jit import kernel_files, whole_build
    from tinygpt.kernels.kernel_archive import export_kernels, import_kernels

    if args.import_from is not None:
        number = import_kernels(args.import_from, kernel_files(), whole_build())
        say(f"{counted(number, 'kernel')} imported")
    elif not warmup(args.model, args.dtype, args.kv_cache_dtype, args.threads):
        say("nothing was left to compile")
    say(f"the kernels are kept in {' and '.join(map(str, kernel_files().folders))}")
    if args.export is not None:
        number = export_kernels(args.export, kernel_files(), whole_build())
        say(f"{counted(number, 'kernel')} exported to {args.export}")


def _check(args: argparse.Namespace) -> None:
    """RequestError, before any work, for a file that cannot be written, and for flags that an import has no use for."""
    if args.export is not None:
        check_writable("--export", args.export)
        if args.export.exists():
            raise RequestError(f"--export {args.export} is there already: give another name, or remove it.")
    if args.import_from is not None:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        unused = [name for name in model_flags.CPU_FLAGS if getattr(args, name) != parser.get_default(name)]
        if unused:
            flag = f"--{unused[0].replace('_', '-')}"
            raise RequestError(f"--import takes all kernels of a file, whatever they are for: leave {flag} out.")
