"""Measured: a case of a benchmark with its runs, and its record with llama-bench's keys or a study's."""

import functools
import subprocess
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any

import tinygpt

from ..hardware import cpu_name
from ..weights.config import PRECISIONS
from . import roofline
from .plan import Plan
from .report import Record, deviation, parameters_text
from .roofline import Case, MachineLimits, Run, Work

# Fields that compare-llama-bench.py of llama.cpp requires, with the values of a plain run on a CPU.
UNUSED_FIELDS = {
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 0,
    "n_gpu_layers": 0,
    "split_mode": "none",
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": False,
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "use_mmap": False,
    "embeddings": False,
    "no_op_offload": 0,
}


@dataclass(frozen=True)
class Measured:
    """A case in one dtype with a number of threads.

    peak_memory: bytes of the process, or of the GPU; 0 if unknown. more: fields that some studies alone have.
    """

    plan: Plan
    dtype: str
    threads: int
    case: Case
    runs: tuple[Run, ...]
    peak_memory: int = 0
    gpu: str = ""
    ended: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    more: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def works(self) -> list[Work]:
        known = self.plan.config, self.dtype, self.plan.caches[self.dtype]
        return [roofline.work_of(self.case, run, *known) for run in self.runs]

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each run."""
        return [work.tokens / work.seconds for work in self.works]

    @property
    def name(self) -> str:
        new = self.case.new_tokens
        return f"tg{new} @ d{self.case.prompt_length}" if new else f"pp{self.case.prompt_length}"

    def to_llama_bench(self, limits: MachineLimits) -> Record:
        """Return llama-bench's keys, and the keys of `report.py`'s docstring."""
        case = self.case
        rates = self.rates
        n_gen = case.new_tokens
        n_prompt, n_depth = (0, case.prompt_length) if n_gen else (case.prompt_length, 0)
        together = case.batch_size if n_gen else 1
        # llama-bench times all tokens: a generation has one pass less than new tokens.
        times = [round(1e9 * case.batch_size * (n_prompt + n_gen) / rate) for rate in rates]
        return {
            **self._machine_and_model(),
            "n_prompt": n_prompt,
            "n_gen": n_gen,
            "n_depth": n_depth,
            "test_time": self.ended.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "avg_ns": round(fmean(times)),
            "stddev_ns": round(deviation(times)),
            "avg_ts": fmean(rates),
            "stddev_ts": deviation(rates),
            "samples_ns": times,
            "samples_ts": rates,
            "median_ts": median(rates),
            "low_ts": min(rates),
            "high_ts": max(rates),
            "test": self.name,
            "dtype": self.dtype,
            "kv_cache_dtype": self.plan.caches[self.dtype],
            "batch_size": case.batch_size,
            **self._shares_of(limits),
            "ms_per_token": median(1e3 * together / rate for rate in rates),
            "first_token_ms": None if n_gen else 1e3 * median(run.first_token for run in self.runs),
            "outside_share": median(1 - (run.prompt + run.generation) / run.total for run in self.runs),
            "sampling_share": median(run.sampling / run.total for run in self.runs),
            "peak_memory": self.peak_memory or None,
        }

    def _machine_and_model(self) -> Record:
        config = self.plan.config
        args = self.plan.args
        commit, number = build()
        size = roofline.num_parameters(config)
        step = self.plan.step_tokens
        cache = roofline.CACHE_NAMES[self.plan.caches[self.dtype]]
        split = {"split_mode": f"tensor {args.tensor_parallel_size} x pipeline {args.pipeline_parallel_size}"}
        return {
            "build_commit": commit,
            "build_number": number,
            "cpu_info": cpu_name(),
            "gpu_info": self.gpu,
            "backends": "CUDA" if self.gpu else "CPU",
            "model_filename": args.model,
            "model_type": f"gpt2 {parameters_text(size)} {PRECISIONS[self.dtype].label}",
            "model_size": roofline.model_bytes(config, self.dtype),
            "model_n_params": size,
            "n_batch": step,
            "n_ubatch": step,
            "n_threads": self.threads,
            "type_k": cache,
            "type_v": cache,
            **UNUSED_FIELDS,
            **(split if args.layout.size > 1 else {}),
            **({"n_gpu_layers": config.n_layer} if self.gpu else {}),
        }

    def _shares_of(self, limits: MachineLimits) -> Record:
        """Return what a second reads and computes, as shares of the machine's limits."""
        of_block, of_head = map(limits.tile_rates.get, roofline.tiles_of(self.dtype, self.plan.args.device))
        read = median(work.bytes_read / work.seconds for work in self.works)
        return {
            "read_gbs": read / 1e9,
            "bandwidth_share": read / limits.bandwidth,
            "bandwidth_gbs": limits.bandwidth / 1e9,
            "gflops": median((work.in_blocks + work.in_head) / work.seconds for work in self.works) / 1e9,
            "peak_share": median(
                (work.in_blocks / of_block + work.in_head / of_head) / work.seconds for work in self.works
            ),
            "block_peak_gflops": of_block / 1e9,
            "head_peak_gflops": of_head / 1e9,
        }

    def to_study(self, name: str) -> Record:
        """Return llama-bench's keys as far as they go. Times are of each generate, and to its last first token."""
        samples = [round(1e9 * run.total) for run in self.runs]
        return {
            "preset": name,
            "model_filename": self.plan.args.model,
            "gpu_info": self.gpu,
            "n_threads": self.threads,
            "dtype": self.dtype,
            "batch_size": self.case.batch_size,
            "num_prompts": len(self.case.prompt_lengths),
            "n_prompt": self.case.prompt_length,
            "n_gen": self.case.new_tokens,
            "num_steps": self.runs[-1].num_steps or None,
            "avg_ns": round(mean(samples)),
            "samples_ns": samples,
            "stddev_ns": round(deviation(samples)),
            "first_token_ns": [round(1e9 * run.first_token) for run in self.runs],
            "peak_memory": self.peak_memory or None,
            **self.more,
        }


@functools.cache
def build() -> tuple[str, int]:
    """Return the commit of a checkout, with "+" if files changed, and its number; else the version and 0."""
    root = Path(tinygpt.__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if (root / ".git").exists():
            commit = git("describe", "--always", "--dirty=+", "--abbrev=8", "--exclude=*")
            return commit, int(git("rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):  # no git, or a folder that git does not trust
        pass
    return tinygpt.__version__, 0
