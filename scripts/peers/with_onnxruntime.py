"""onnxruntime, on the fused graph of its own converter. It computes the logits of every position of a prompt."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime

from .engine import SteppingEngine

PRECISIONS = {"float32": "fp32", "int8": "int8"}
TYPES = {"tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(float)": np.float32}


def make(checkpoint: Path, folder: Path, dtype: str) -> None:
    converter = "onnxruntime.transformers.models.gpt2.convert_to_onnx"
    output = folder / "model.onnx"
    checks = ["--test_cases", "1", "--test_runs", "1"]  # its own are thousands; we compare logits anyway
    flags = ["-o", "-p", PRECISIONS[dtype], "--overwrite", *checks, "--output", str(output)]
    # Run in `folder`, as it leaves files in the working directory.
    subprocess.run([sys.executable, "-m", converter, "-m", str(checkpoint), *flags], check=True, cwd=folder)
    for leftover in folder.glob("checkpoint_past*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    shutil.copy(checkpoint / "config.json", folder)


class Engine(SteppingEngine):
    def __init__(self, folder: Path, dtype: str, threads: int):
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.heads = config["n_layer"], config["n_head"]
        self.head_size = config["n_embd"] // self.heads
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.types = {i.name: TYPES[i.type] for i in self.session.get_inputs()}
        self.outputs = [output.name for output in self.session.get_outputs()]

    def start(self, ids: list[list[int]]) -> None:
        nothing = np.zeros((2, len(ids), self.heads, 0, self.head_size), np.float32)
        self.past = [onnxruntime.OrtValue.ortvalue_from_numpy(nothing)] * self.layers
        self.length = 0
        self.tokens = np.array(ids)
        self.step()

    def step(self) -> None:
        self.tokens = self._forward(self.tokens)[:, -1:].argmax(-1)

    def last_logits(self, ids: list[int]) -> list[float]:
        self.start([ids[:-1]])
        return self._forward(np.array([ids[-1:]]))[0, -1].tolist()

    def _forward(self, tokens: np.ndarray) -> np.ndarray:
        """Logits (batch, new, vocabulary) of tokens (batch, new); the past grows by them."""
        batch, new = tokens.shape
        positions = np.broadcast_to(np.arange(self.length, self.length + new), (batch, new))
        self.length += new
        arrays = {"input_ids": tokens, "position_ids": positions, "attention_mask": np.ones((batch, self.length))}
        inputs = {f"past_{i}": past for i, past in enumerate(self.past)}
        for name, array in arrays.items():
            array = np.ascontiguousarray(array, self.types[name])
            inputs[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        logits, *self.past = self.session.run_with_ort_values(self.outputs, inputs)
        return logits.numpy()
