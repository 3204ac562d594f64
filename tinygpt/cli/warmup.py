"""`tinygpt warmup`: compile every kernel for a model and dtype ahead of time."""

import argparse

from tinygpt.cli.flags import CPU_FLAGS, add_group
from tinygpt.cli.loading import set_thread_pools
from tinygpt.cli.output import log

SUMMARY = "compile the kernels for a model and dtype ahead of time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_group(parser, CPU_FLAGS)


def run(args: argparse.Namespace) -> None:
    set_thread_pools(args.threads)
    from tinygpt.kernels.cpu.jit import kernel_cache
    from tinygpt.llm import warmup

    if not warmup(args.model, args.dtype, args.kv_cache_dtype, args.threads):
        log("nothing was left to compile")
    log(f"the kernels are kept in {kernel_cache().folder}")
