"""Measured: a case of a benchmark with its runs, and its record with llama-bench's keys or a study's."""

import functools
import statistics
import subprocess
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
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
    def counts(self) -> dict[str, int]:
        """llama-bench's sizes of a test: a generation begins after its prompt."""
        new = self.case.new_tokens
        length = self.case.prompt_length
        return {"n_prompt": 0 if new else length, "n_gen": new, "n_depth": length if new else 0}

    @property
    def name(self) -> str:
        new = self.case.new_tokens
        return f"tg{new} @ d{self.case.prompt_length}" if new else f"pp{self.case.prompt_length}"

    def to_llama_bench(self, limits: MachineLimits) -> Record:
        """Return llama-bench's keys, and the keys of `report.py`'s docstring."""
        return {
            **self._machine_and_model(),
            **self.counts,
            "test_time": self.ended.strftime("%Y-%m-%dT%H:%M:%SZ"),
            **self._times(),
            "test": self.name,
            "dtype": self.dtype,
            "kv_cache_dtype": self.plan.caches[self.dtype],
            "batch_size": self.case.batch_size,
            **self._shares_of(limits),
            **self._latencies(),
            "peak_memory": self.peak_memory or None,
        }

    def _machine_and_model(self) -> Record:
        config = self.plan.config
        commit, number = build()
        size = roofline.num_parameters(config)
        cache = roofline.CACHE_NAMES[self.plan.caches[self.dtype]]
        args = self.plan.args
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
            "n_batch": self.plan.step_tokens,
            "n_ubatch": self.plan.step_tokens,
            "n_threads": self.threads,
            "type_k": cache,
            "type_v": cache,
            **UNUSED_FIELDS,
            **(split if args.layout.size > 1 else {}),
            **({"n_gpu_layers": config.n_layer} if self.gpu else {}),
        }

    def _times(self) -> Record:
        # llama-bench times all tokens: a generation has one pass less than new tokens.
        count = self.case.batch_size * (self.counts["n_prompt"] + self.counts["n_gen"])
        times = [round(1e9 * count / rate) for rate in self.rates]
        return {
            "avg_ns": round(statistics.fmean(times)),
            "stddev_ns": round(deviation(times)),
            "avg_ts": statistics.fmean(self.rates),
            "stddev_ts": deviation(self.rates),
            "samples_ns": times,
            "samples_ts": self.rates,
            "median_ts": statistics.median(self.rates),
            "low_ts": min(self.rates),
            "high_ts": max(self.rates),
        }

    def _shares_of(self, limits: MachineLimits) -> Record:
        kinds = roofline.tiles_of(self.dtype, self.plan.args.device)
        block_rate, head_rate = (limits.tile_rates[kind] for kind in kinds)
        read = statistics.median(work.bytes_read / work.seconds for work in self.works)
        operations = [(work.in_blocks + work.in_head) / work.seconds for work in self.works]
        shares = [
            (work.in_blocks / block_rate + work.in_head / head_rate) / work.seconds for work in self.works
        ]
        return {
            "read_gbs": read / 1e9,
            "bandwidth_share": read / limits.bandwidth,
            "bandwidth_gbs": limits.bandwidth / 1e9,
            "gflops": statistics.median(operations) / 1e9,
            "peak_share": statistics.median(shares),
            "block_peak_gflops": block_rate / 1e9,
            "head_peak_gflops": head_rate / 1e9,
        }

    def _latencies(self) -> Record:
        new = self.case.new_tokens
        together = self.case.batch_size if new else 1
        first = statistics.median(run.first_token for run in self.runs)
        outside = [1 - (run.prompt + run.generation) / run.total for run in self.runs]
        return {
            "ms_per_token": statistics.median(1e3 * together / rate for rate in self.rates),
            "first_token_ms": None if new else 1e3 * first,
            "outside_share": statistics.median(outside),
            "sampling_share": statistics.median(run.sampling / run.total for run in self.runs),
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
            "avg_ns": round(statistics.mean(samples)),
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
