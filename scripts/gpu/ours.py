"""tinygpt as `tinygpt bench` measures it, through its public API: scheduling, sampling and all."""

from importlib import metadata

import numpy as np

from tinygpt import LLM, SamplingParams
from tinygpt.bench.machine_limits import measure_device_limits, measure_limits
from tinygpt.bench.meter import meter_of
from tinygpt.bench.sweep import Case as BenchCase
from tinygpt.bench.sweep import run_case
from tinygpt.hardware.cpu import cpu_name
from tinygpt.hardware.threads import thread_count

from .cases import PREFILL_TOKENS, Case, Job
from .check import CHECK_PROMPT, GREEDY_TOKENS, Evidence, check_ids

# Prompts of a large batch are read in few steps, so that all sequences decode before the first timed step.
STEP_TOKENS = 2048


class Ours:
    """One LLM for all cases of a job: its largest batch is the largest that they have."""

    def __init__(self, job: Job):
        self.steps, self.repeats, self.meter = job.steps, job.repeats, meter_of(job.device)
        largest = max((case.batch for _, case in job.runs), default=1)
        self.llm = LLM(
            job.name,
            dtype=job.dtype,
            device=job.device,
            max_num_seqs=largest,
            max_num_batched_tokens=STEP_TOKENS,
            prefix_cache_seqs=0,
        )

    def measure(self, engine: str, case: Case) -> list[float]:
        """Of a prefill, until its token is there; of a step, the mean of self.steps around the context."""
        if case.is_prefill:
            found = run_case(self.llm, BenchCase(case.batch, PREFILL_TOKENS), self.repeats, self.meter)
            return [1e3 * run.first_token for run in found.runs]
        decoding = BenchCase(case.batch, case.context - self.steps // 2, self.steps + 1)
        found = run_case(self.llm, decoding, self.repeats, self.meter)
        return [1e3 * run.together / run.num_together for run in found.runs]

    def evidence(self) -> Evidence:
        token_ids = check_ids(self.llm.config.vocab_size)
        params = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
        (output,) = self.llm.generate([token_ids[:CHECK_PROMPT]], params, use_tqdm=False)
        logits = np.asarray(self.llm.logits(token_ids), np.float32)
        return Evidence(logits, np.array(output.outputs[0].token_ids))


def limits(device: str) -> dict[str, float | str]:
    """bandwidth: bytes read a second; of each dtype: operations a second. And what was measured."""
    of = [
        measure_device_limits(dtype) if device == "cuda" else measure_limits(dtype, thread_count(None))
        for dtype in ("bfloat16", "float32")
    ]
    best = of[0].best(of[1])
    versions = {name: _version_of(name) for name in ("torch", "transformers")}
    return {"gpu": meter_of(device).gpu or cpu_name(), **versions, "bandwidth": best.bandwidth, **best.tile_rates}


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
