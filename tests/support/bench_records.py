"""Records of bench counted by hand, of made-up times."""

from datetime import datetime, timezone

from tinygpt.bench.plan import Grid, Plan, make_plan
from tinygpt.bench.record import Measured
from tinygpt.bench.roofline import Case, MachineLimits, Run
from tinygpt.llm_args import LLMArgs
from tinygpt.weights.config import ModelConfig

# Keys that llama-bench always writes, and that llama.cpp's compare-llama-bench.py requires.
LLAMA_BENCH_KEYS = """
    build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params
    n_batch n_ubatch n_threads type_k type_v n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts
    cpu_mask cpu_strict poll n_gpu_layers split_mode main_gpu no_kv_offload flash_attn tensor_split
    tensor_buft_overrides use_mmap embeddings
"""
SAMPLES = ["samples_ns", "samples_ts"]
LIMITS = MachineLimits(bandwidth=40e9, tile_rates={"float32": 200e9, "int4": 200e9, "int8": 100e9})
TINY = ModelConfig(vocab_size=10, n_positions=5, n_embd=4, n_layer=2, n_head=1, n_inner=6)
ENDED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def run_of(**values: float) -> Run:
    fields = {"prompt": 1, "generation": 1, "sampling": 0, "first_token": 1, "total": 10, "num_steps": 1}
    return Run(**{**fields, **values})


def record(
    case: Case, runs: list[Run], dtype: str = "float32", cache: str = "float32", peak_memory: int = 0
) -> dict:
    plan = Plan(LLMArgs("tiny"), {dtype: cache}, (2,), (case,), len(runs), TINY)
    return Measured(plan, dtype, 2, case, tuple(runs), peak_memory, ended=ENDED).to_llama_bench(LIMITS)


def case_of(batch_size: int, prompt_length: int, new_tokens: int = 0) -> Case:
    """As `make_plan` makes it."""
    return Case(batch_size, (prompt_length,) * batch_size, new_tokens, is_at_depth=new_tokens > 0)


def prompt_record(dtype: str = "float32") -> dict:
    """4 prompts of 3 tokens, read in two passes."""
    times = [{"prompt": s, "first_token": 2 * s, "sampling": s, "total": 10 * s} for s in (2e-6, 1e-6, 4e-6)]
    runs = [run_of(**time, num_steps=2, num_prompt_steps=2) for time in times]
    return record(case_of(4, 3), runs, dtype, peak_memory=5_000_000)


def generation_record(kv_cache_dtype: str = "bfloat16") -> dict:
    """4 sequences after 3 tokens: 6 new ones each, of which a pass of all decodes 5; and a pass of fewer."""
    times = {"generation": 12e-6, "together": 10e-6, "sampling": 1, "total": 4}
    run = run_of(**times, num_steps=7, num_prompt_steps=1, num_together=5)
    return record(case_of(4, 3, 6), [run], "int4", kv_cache_dtype)


def planned(
    model: str = "random:tiny", ranks: tuple[int, int] = (1, 1), kv_cache_dtype: str = "auto", **changes
):
    values = {
        "dtypes": ["float32"],
        "threads": [1],
        "batch_sizes": [1],
        "prompt_lengths": [8],
        "new_tokens": [4],
    }
    sizes = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), ranks, strict=True))
    args = LLMArgs(model, kv_cache_dtype=kv_cache_dtype, **sizes)
    return make_plan(args, Grid(**{**values, "repetitions": 1, **changes}))
