"""How long one and the same model takes to load from each format, and how much memory that takes at its peak.

    python scripts/bench_load.py                 # GPT-2 124M in float32, 0.5 GB for each format (Linux)
    python scripts/bench_load.py --shape tiny    # to see that it runs

Each load is a process of its own: the checkpoint is opened, and each parameter is read and let go, as the engine does.
The files are in the system's cache. Printed are the best of --repetitions, and the memory beyond what the process took
before, the parameter that is being read included. Where llama-cpp-python is there, llama.cpp loads GGUF's Q8_0, too:
mapped, which reads nothing yet, and read into memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

FORMS = (
    "hugging_face",
    "torch",
    "gguf",
    "gguf_q8_0",
    "openai_tf",
    "nanogpt",
    "megatron",
    "nemo",
    "fastertransformer",
    "onnx_external",
)
LOAD = """
import json, sys, time
from tinygpt.weights.open import open_checkpoint
from tinygpt.weights.parameters import parameter_shapes

def peak():
    with open("/proc/self/status") as status:  # getrusage counts the process that started this one, too
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))

before, start = peak(), time.perf_counter()
checkpoint = open_checkpoint(sys.argv[1])
opened = time.perf_counter()
for name in parameter_shapes(checkpoint.config):
    checkpoint.tensor(name).sum()
    checkpoint.release(name)
print(json.dumps([opened - start, time.perf_counter() - start, peak() - before]))
"""


LLAMA = """
import json, sys, time
import llama_cpp

def peak():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))

before, start = peak(), time.perf_counter()
model = llama_cpp.Llama(sys.argv[1], n_ctx=8, use_mmap=sys.argv[2] == "mapped", verbose=False)
print(json.dumps([0, time.perf_counter() - start, peak() - before]))
"""


def write(form: str, folder: Path, shape: str) -> Path:
    """The model in one form, as the tests write the tiny one: they take their sizes from its config."""
    from support import tf_writer, tiny_checkpoint
    from support.torch_files import own_bytes
    from tinygpt.weights.containers.tensorflow.crc32c import crc32c
    from tinygpt.weights.families.hugging_face.gpt2 import config_json
    from tinygpt.weights.random_checkpoint import SHAPES, open_random

    config = config_json(SHAPES[shape]) | {"n_inner": SHAPES[shape].inner_size}
    tiny_checkpoint.CONFIG.update(config)
    tf_writer.crc32c = lambda data: crc32c(memoryview(data))  # the tests' own takes minutes
    from support.foreign import WRITERS  # now that it is known what the sizes are

    arrays = {name: tensor.float32() for name, tensor in open_random(f"random:{shape}").stored.items()}
    if form == "gguf_q8_0":
        from tinygpt.weights.stored.gguf_out import write_gguf

        folder.mkdir()
        return write_gguf(folder, open_random(f"random:{shape}"), "int8", None)
    if form != "torch":
        return WRITERS[form](folder, arrays)
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(own_bytes(arrays))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(program: str, *arguments: str) -> list[float]:
    command = [sys.executable, "-c", program, *arguments]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def report(name: str, repetitions: int, *command: str) -> None:
    best = [min(column) for column in zip(*(load(*command) for _ in range(repetitions)), strict=True)]
    print(f"| {name} | {best[0]:.2f} | {best[1]:.2f} | {best[2] / 1e6:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="124M")
    parser.add_argument("--formats", nargs="*", default=FORMS, choices=FORMS)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    print("| format | opened, s | read, s | peak memory, MB |\n|---|---|---|---|")
    for form in args.formats:
        with tempfile.TemporaryDirectory() as name:
            path = write(form, Path(name) / "model", args.shape)
            report(form, args.repetitions, LOAD, str(path))
            if form == "gguf_q8_0" and find_spec("llama_cpp"):
                for how in ("mapped", "read"):
                    report(f"the same, {how} by llama.cpp", args.repetitions, LLAMA, str(path), how)


if __name__ == "__main__":
    main()
