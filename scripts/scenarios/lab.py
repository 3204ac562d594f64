"""Lab: a folder with checkpoints and prompts, and runs that are compared with what comes of them undisturbed."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300  # seconds after which a run is taken for hanging
ENDS = (0, 1, 2, 130, 141)
PROMPT = ("generate", "Once upon a time", "--seed", "7", "--max-tokens", "24")
BATCH_FLAGS = ("--max-tokens", "16", "--seed", "5", "--max-num-seqs", "4")
NUM_PROMPTS = 40


class Skipped(Exception):
    """This machine, or this user, cannot do what the scenario does."""


@dataclass(frozen=True)
class Run:
    """How a process ended."""

    code: int
    out: str
    err: str

    def problem(self, expected: str, may_fail: bool = True) -> str | None:
        """What is wrong with it: it prints what it would undisturbed, or one sentence that says why not."""
        if self.code == 0:
            return None if self.out == expected else f"another output: {self.out[-300:]!r}"
        if "Traceback" in self.err or "Exception ignored" in self.err or "unexpected " in self.err:
            return f"exit code {self.code}, and no sentence: {self.err[-2000:]}"
        if self.code not in ENDS:
            return f"exit code {self.code}: {self.err[-500:]}"
        if not may_fail:
            return f"exit code {self.code}, and nothing was wrong: {self.err[-500:]}"
        return None if "tinygpt: error: " in self.err else f"exit code {self.code} without a sentence: {self.err!r}"


@dataclass
class Lab:
    """folder: empty, for this campaign alone."""

    folder: Path
    counts: Counter = field(default_factory=Counter)  # of `next_of`
    kept: dict[str, str] = field(default_factory=dict)  # what a scenario needs again
    rounds: Counter = field(default_factory=Counter)  # how often a scenario has been through all calls

    def next_of(self, name: str) -> int:
        """1, 2, 3, ... at each call with this name: for what is to be tried for every n."""
        self.counts[name] += 1
        return self.counts[name]

    def new_folder(self) -> Path:
        folder = self.folder / f"{self.next_of('folders')}"
        folder.mkdir()
        folder.chmod(0o755)
        return folder

    def start(self, *arguments: str, wrapper: tuple[str, ...] = (), env: Mapping[str, Any] | None = None, **options):
        """`python -m tinygpt`, or what `wrapper` makes of it. A variable that is None in `env` is unset."""
        return self.start_program(["-m", "tinygpt", *arguments], wrapper, env, **options)

    def start_program(self, arguments, wrapper=(), env=None, **options) -> subprocess.Popen:
        changed = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **(env or {})}
        environment = {name: str(value) for name, value in changed.items() if value is not None}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen([*wrapper, sys.executable, *arguments], cwd=ROOT, env=environment, text=True, **streams)

    def run(self, *arguments: str, **options) -> Run:
        return finish(self.start(*arguments, **options))

    def run_program(self, program: str, *arguments: str, **options) -> Run:
        return finish(self.start_program(["-c", program, *arguments], **options))

    @cached_property
    def text(self) -> str:
        """What PROMPT comes to; its kernels are compiled now, if they were not."""
        run = self.run(*PROMPT)
        assert run.code == 0, run.err
        return run.out

    @cached_property
    def tiny(self) -> Path:
        """A tiny random checkpoint without a tokenizer."""
        V, T, C, L = 50, 64, 16, 2
        config = {"model_type": "gpt2", "vocab_size": V, "n_positions": T, "n_embd": C, "n_layer": L, "n_head": 2}
        linears = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, 4 * C), "mlp.c_proj": (4 * C, C)}
        shapes = {"wte.weight": (V, C), "wpe.weight": (T, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
        for layer in range(L):
            shapes |= {f"h.{layer}.{name}.{kind}": (C,) for name in ("ln_1", "ln_2") for kind in ("weight", "bias")}
            shapes |= {f"h.{layer}.{name}.weight": shape for name, shape in linears.items()}
            shapes |= {f"h.{layer}.{name}.bias": shape[1:] for name, shape in linears.items()}
        generator = np.random.default_rng(0)
        folder = self.new_folder()
        (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": 1, "eos_token_id": 2}))
        tensors = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors")
        return folder

    @cached_property
    def converted(self) -> Path:
        """The demo in int8."""
        target = self.new_folder() / "int8"
        assert self.run("convert", "demo", str(target)).code == 0
        return target

    @cached_property
    def converted_text(self) -> str:
        run = self.run(*PROMPT, "--model", str(self.converted))
        assert run.code == 0, run.err
        return run.out

    @cached_property
    def prompts(self) -> Path:
        path = self.new_folder() / "prompts.jsonl"
        lines = [{"id": f"é{i}", "prompt": f"The {i}th fox", "max_tokens": 4 + i % 13} for i in range(NUM_PROMPTS)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def batch(self, output: Path) -> tuple[str, ...]:
        return ("generate", "--input", str(self.prompts), "--output", str(output), *BATCH_FLAGS)

    @cached_property
    def records(self) -> dict[str, Any]:
        """What the prompts come to, undisturbed."""
        output = self.new_folder() / "out.jsonl"
        run = self.run(*self.batch(output))
        assert run.code == 0, run.err
        return read_records(output)

    def problem_of_records(self, output: Path) -> str | None:
        """What is wrong with a finished batch: records lost, doubled, or other ones."""
        try:
            records = read_records(output)
        except ValueError as error:
            return str(error)
        if records == self.records:
            return None
        different = [i for i in self.records if records.get(i) != self.records[i]]
        return f"{len(records)} of {len(self.records)} records, these lost or different: {different[:5]}"


def finish(process: subprocess.Popen) -> Run:
    """Wait for the end, or make it."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        out, err = process.communicate()
        return Run(-1000, out, f"hangs: {err}")
    return Run(process.returncode, out or "", err or "")


def read_records(path: Path) -> dict[str, Any]:
    """Records by their ids, without what differs from run to run. ValueError if one comes twice."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_id = {record["id"]: (record["prompt"], record["outputs"]) for record in records}
    if len(by_id) < len(records):
        raise ValueError(f"{len(records) - len(by_id)} records are there twice")
    return by_id
