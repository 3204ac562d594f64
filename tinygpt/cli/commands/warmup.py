"""`python -m tinygpt warmup`: compile every kernel for a model and dtype ahead of time."""

import argparse

from tinygpt.cli import loading, model_flags
from tinygpt.cli.messages import counted, say
from tinygpt.errors import TinyGPTError
from tinygpt.sampling_params import SamplingParams

SUMMARY = "compile the kernels for a model and dtype ahead of time"
# What a request may ask for, each on its way through other kernels.
REQUESTS = {
    "greedy": SamplingParams(max_tokens=2, ignore_eos=True),
    "sampling": SamplingParams(max_tokens=2, temperature=0.8, top_k=40, top_p=0.95, seed=0, ignore_eos=True),
    "other filters": SamplingParams(max_tokens=2, temperature=0.8, typical_p=0.9, seed=0, ignore_eos=True),
    "logprobs": SamplingParams(max_tokens=2, logprobs=3, ignore_eos=True),
    "processors": SamplingParams(
        max_tokens=2, repetition_penalty=1.1, temperature=1.0, logprobs=1, logprobs_mode="processed", ignore_eos=True
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_flags.add_group(parser, model_flags.CPU_FLAGS)


def run(args: argparse.Namespace) -> None:
    loading.set_thread_pools(args.threads)
    from tqdm import tqdm

    from tinygpt.execution.backend import load_backend
    from tinygpt.kernels.cpu.jit import cache_folder, kernel_files, mark_warm
    from tinygpt.llm import LLM

    load_backend("cpu", args.dtype)  # an impossible dtype is refused before anything is said
    if cache_folder().note:
        say(cache_folder().note)
    before = len(kernel_files().names())
    say("compiling kernels for this machine (10 to 20 s for a dtype)")
    # disable=None: no bar where stderr is no terminal.
    with tqdm(total=1 + len(REQUESTS), bar_format="tinygpt: {desc} {bar} {elapsed}", disable=None) as bar:
        bar.set_description_str("loading")
        with LLM(
            args.model, args.dtype, threads=args.threads, max_num_seqs=1, kv_cache_dtype=args.kv_cache_dtype
        ) as llm:
            for name, params in REQUESTS.items():
                bar.update()
                bar.set_description_str(name)
                llm.generate([[0, 0]], params)
            mark_warm(loading.kernels_of(llm, args.kv_cache_dtype))
        bar.update()
    if not kernel_files().is_keeping:
        raise TinyGPTError("the compiled kernels could not be kept, so other processes compile them again.")
    made = len(kernel_files().names()) - before
    say(f"{counted(made, 'kernel')} compiled" if made else "nothing was left to compile")
    say(f"the kernels are kept in {' and '.join(map(str, kernel_files().folders))}")
