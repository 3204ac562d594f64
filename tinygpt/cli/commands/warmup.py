"""`tinygpt warmup`: compile every kernel for a model and dtype ahead of time."""

import argparse

from tinygpt.cli import loading
from tinygpt.cli.flags import model as model_flags
from tinygpt.cli.output.messages import say

SUMMARY = "compile the kernels for a model and dtype ahead of time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_flags.add_group(parser, model_flags.CPU_FLAGS)


def run(args: argparse.Namespace) -> None:
    loading.set_thread_pools(args.threads)
    from tinygpt.compile_ahead import warmup
    from tinygpt.kernels.cpu.jit import kernel_files

    if not warmup(args.model, args.dtype, args.kv_cache_dtype, args.threads):
        say("nothing was left to compile")
    say(f"the kernels are kept in {' and '.join(map(str, kernel_files().folders))}")
