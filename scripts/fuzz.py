"""Damaged files through every reader (extra `test`; Linux).

    python scripts/fuzz.py --examples 2000               # of each format
    python scripts/fuzz.py --formats lora torch --seed 7

A file of a format is damaged and loaded. A load is right, as an independent reader sees the file, or ends in one
of tinygpt's errors; it opens no file outside its folder, runs nothing, and its time and memory are limited. Each format
has a process. hypothesis shrinks a failure and prints how to reproduce it; the exit code is then 1.
"""

import argparse
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.numpy import load
from tokenizers import AddedToken

# tinygpt and the tests' writers of checkpoints are next to scripts/.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "tests"))

from support import library_tokenizers
from support.foreign import WRITERS
from support.golden_models import write_lora, write_model, write_soft_prompt
from support.tiny_checkpoint import CONFIG, random_tensors
from support.torch_files import torch_bytes
from tinygpt import LLM, SamplingParams
from tinygpt.errors import TinyGPTError
from tinygpt.evaluation.parity import Golden, load_goldens, save_goldens
from tinygpt.text.tokenizer import Tokenizer
from tinygpt.weights.convert.export import parts_of
from tinygpt.weights.open import open_checkpoint

ROOT = Path(__file__).resolve().parents[1]
SECONDS, MEMORY = 20, 2 << 30  # of a load: CPU time, and bytes on top of the memory that is in use
Files = Mapping[str, bytes]
TEXTS = ("the theme there", " \n\t of Ångström's 12 日本", "<|endoftext|>then", "")
VALUES = [
    None,
    True,
    "",
    "a",
    "\0",
    "../canary",
    "/etc/passwd",
    "é" * 300,
    r"(\w+\.?)+!",
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    0.5,
    -0.0,
    1e308,
    float("nan"),
    0,
    1,
    7,
    255,
    65536,
    2**31,
    2**32 - 1,
    2**63,
    10**18,
    -1,
    -(2**31),
    10**400,
]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("r", "e"), ("Ġ", "o"), ("Ġo", "f"), ("1", "2"), ("Ã", "ħ")]


@dataclass(frozen=True)
class Format:
    """Undamaged files, a reader, and check(folder, loaded, undamaged)."""

    files: Callable[[], Files]
    load: Callable[[Path], Any]
    check: Callable[[Path, Any, Any], bool] = lambda folder, loaded, undamaged: True


def made(make: Callable[[Path], Any]) -> Files:
    with tempfile.TemporaryDirectory() as name:
        make(Path(name))
        paths = sorted(path for path in Path(name).rglob("*") if path.is_file())
        return {path.relative_to(name).as_posix(): path.read_bytes() for path in paths}


def foreign(form: str) -> Files:
    return made(lambda folder: WRITERS[form](folder, random_tensors(prefix="")))


def torch_file(is_legacy: bool) -> Files:
    data = torch_bytes(random_tensors(prefix=""), is_legacy)
    return {"config.json": json.dumps(CONFIG).encode(), "pytorch_model.bin": data}


def packed(dtype: str) -> Files:
    from tinygpt.cli.main import main

    def convert(folder: Path) -> None:
        folder.rmdir()  # convert makes it
        assert main(["convert", base_model(), str(folder), "--dtype", dtype]) == 0

    return made(convert)


def tokenizer_files(write: Callable) -> Files:
    """Return a few merges and an end of text, written by write(library, folder, **files)."""
    library = library_tokenizers.bpe(MERGES)
    library.add_special_tokens([AddedToken("<|endoftext|>", rstrip=True)])
    added = {"<|endoftext|>": library.get_vocab_size() - 1, "<a1>": library.get_vocab_size()}
    options = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>"}
    return made(lambda folder: write(library, folder, added_tokens=added, tokenizer_config=options))


def golden_file(folder: Path) -> None:
    logits = np.random.default_rng(3).standard_normal((2, 16), np.float32)
    save_goldens(folder / "golden.npz", [Golden([1, 2], logits, [3], [0.5], None)])


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {part.short_name: part.array().copy() for part in parts_of(open_checkpoint(folder))}


def logits_of(folder: Path, device: str = "reference", **options: Any) -> np.ndarray:
    with LLM(str(folder), device=device, max_num_seqs=1, threads=1, **options) as llm:
        # Every weight counts.
        return llm.logits([*range(min(llm.config.n_positions, llm.config.vocab_size))])


@cache
def base_model() -> str:
    return str(write_model(Path(tempfile.mkdtemp(prefix="fuzz-base-"))))


def load_soft_prompt(folder: Path) -> Any:
    with LLM(
        base_model(), device="reference", max_num_seqs=1, threads=1, soft_prompts={"soft": folder / "x"}
    ) as llm:
        return llm.generate([[1]], SamplingParams(max_tokens=2, soft_prompt="soft"), use_tqdm=False)[
            0
        ].outputs


def load_tokenizer(folder: Path) -> list[tuple[list[int] | None, str]]:
    tokenizer = Tokenizer.from_folder(folder)
    coded = []
    for text in TEXTS:
        ids = None
        with suppress(TinyGPTError):  # of a text that the vocabulary cannot encode
            ids = tokenizer.encode(text)
        coded.append((ids, tokenizer.decode(ids or [])))
    return coded


def is_as_read_elsewhere(folder: Path, loaded: dict[str, np.ndarray], undamaged: Any) -> bool:
    """Compare with the safetensors library, or with torch.load(weights_only=True), if it reads the file at all."""
    try:
        if (path := folder / "model.safetensors").exists():
            arrays = load(path.read_bytes())
        else:
            import torch

            state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
            arrays = {name: tensor.detach().float().numpy() for name, tensor in state.items()}
    except Exception:  # of any kind: the library refuses the file
        return True
    arrays = {name.removeprefix("transformer."): array for name, array in arrays.items()}
    common = loaded.keys() & arrays.keys()
    return all(
        np.array_equal(loaded[name], np.asarray(arrays[name], np.float32), equal_nan=True) for name in common
    )


def is_undamaged(folder: Path, loaded: Any, undamaged: Any) -> bool:
    return np.array_equal(loaded, undamaged, equal_nan=True)  # the file has a checksum


def is_small(folder: Path, loaded: dict[str, np.ndarray], undamaged: Any) -> bool:
    """Other programs' files have no checksum: the tensors are float32, and not larger than files allow."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return sum(array.nbytes for array in loaded.values()) <= 200 * size


FORMATS = {
    "safetensors": Format(partial(foreign, "hugging_face"), tensors_of, is_as_read_elsewhere),
    "config": Format(partial(foreign, "hugging_face"), logits_of),
    "torch": Format(partial(torch_file, False), tensors_of, is_as_read_elsewhere),
    "torch-legacy": Format(partial(torch_file, True), tensors_of, is_as_read_elsewhere),
    "packed-float32": Format(partial(packed, "float32"), partial(logits_of, device="cpu"), is_undamaged),
    "packed-int4": Format(partial(packed, "int4"), partial(logits_of, device="cpu"), is_undamaged),
    "lora": Format(
        lambda: made(lambda folder: write_lora(folder / "x", 2, ["c_attn", "c_proj"], False)),
        lambda folder: logits_of(Path(base_model()), lora=folder / "x"),
    ),
    "soft-prompt": Format(
        lambda: made(lambda folder: write_soft_prompt(folder / "x", "prompt", 3)), load_soft_prompt
    ),
    "tokenizer.json": Format(partial(tokenizer_files, library_tokenizers.save), load_tokenizer),
    "vocab.json": Format(partial(tokenizer_files, library_tokenizers.write_pair), load_tokenizer),
    "golden.npz": Format(partial(made, golden_file), lambda folder: load_goldens(folder / "golden.npz")),
    **{
        form: Format(partial(foreign, form), tensors_of, is_small)
        for form in WRITERS
        if form != "hugging_face"
    },
}


def edit_bytes(draw: Callable, data: bytes) -> bytes:
    if not data:
        return b"\0"
    place = draw(st.integers(0, len(data) - 1))
    size = draw(st.sampled_from([1, 2, 4, 8, 64, 1000]))
    piece = data[place : place + size]
    stop = place + size
    flipped = bytes([piece[0] ^ 1 << draw(st.integers(0, 7))]) + piece[1:]
    others = [flipped, flipped, b"\0" * size, b"\xff" * size, b"\n" * size, data[:size], piece * 3, b""]
    other = draw(st.sampled_from(others))
    return data[:place] + other + (data[stop:] if draw(st.integers(0, 9)) else b"")


def edit_json(draw: Callable, data: bytes) -> bytes:
    root = {"": json.loads(data)}
    node, key = root, ""
    while isinstance(node[key], (dict, list)) and node[key] and (node is root or draw(st.booleans())):
        node = node[key]
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    change = draw(st.sampled_from(["set", "set", "drop", "rename", "nudge"]))
    if change == "set" or not isinstance(node, dict) or node is root:
        node[key] = draw(st.sampled_from(VALUES))
    elif change == "drop":
        del node[key]
    elif change == "rename":
        node[draw(st.sampled_from([*node, "", "\ud800", "x" + key]))] = node.pop(key)
    else:
        value = node[key]
        near = (
            [value + 1, -value, value * 2, [value]]
            if isinstance(value, (int, float))
            else [[value], str(value)]
        )
        node[key] = draw(st.sampled_from([*near, not value]))
    return json.dumps(root[""]).encode("utf-8", "surrogatepass")


def edit_header(draw: Callable, data: bytes) -> bytes:
    """Edit the JSON of a safetensors file, whose frame stays whole."""
    size = int.from_bytes(data[:8], "little")
    header = edit_json(draw, data[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def edit_zip(draw: Callable, data: bytes) -> bytes:
    """Edit an entry of a zip archive, whose checksums stay right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = draw(st.sampled_from(sorted(entries)))
    out = io.BytesIO()
    entries[name] = edit_bytes(draw, entries[name])
    with zipfile.ZipFile(out, "w") as archive:
        for name, entry in entries.items():
            archive.writestr(name, entry)
    return out.getvalue()


UNREADABLE = (ValueError, zipfile.BadZipFile, zlib.error, EOFError, RecursionError, NotImplementedError)


@dataclass(frozen=True)
class Damage:
    name: str
    data: bytes = field(repr=False)


@st.composite
def damaged(draw: Callable, files: Files) -> Damage:
    name = draw(st.sampled_from(sorted(files)))
    data, kinds = files[name], [edit_bytes]
    kinds += [edit_json] * 3 * name.endswith("json")
    kinds += [edit_header] * 2 * name.endswith("safetensors") + [edit_zip] * 2 * data.startswith(b"PK")
    for _ in range(draw(st.integers(1, 3))):
        with suppress(*UNREADABLE):  # damaged too much before
            data = draw(st.sampled_from(kinds))(draw, data)
    return Damage(name, data)


class Watch:
    """Python's audit hook: reports acts that a load must not do. Once a process: a hook cannot be removed."""

    NEVER = (
        "subprocess.",
        "socket.",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "shutil.",
        "os.remove",
    )
    CODE = tuple(str(Path(place).resolve()) for place in (ROOT, sys.prefix, sys.base_prefix))

    def __init__(self) -> None:
        self.folder, self.violations = "", []
        self.known = (base_model(), *self.CODE, "/proc", "/sys", "/dev/fd")
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        if not self.folder:
            return
        if event.startswith(self.NEVER):
            self.violations.append(f"{event} {arguments}")
            raise PermissionError(f"{event} during a load")
        if event == "open" and not isinstance(arguments[0], int):
            path, _, flags = arguments
            real = os.path.realpath(os.fsdecode(path))
            is_known = real.startswith((self.folder, *self.known))
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or not is_known:
                self.violations.append(f"open {real}")


@contextmanager
def limited() -> Iterator[None]:
    """After the CPU time the kernel kills this process; allocations beyond the memory fail."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def write_all(folder: Path, files: Files) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # keeps a mapping of the earlier file
        path.write_bytes(data)


def fuzz_format(
    name: str, examples: int, seed_number: int, findings: Path, watch: Watch | None = None
) -> None:
    """Raise AssertionError, or the reader's own exception, for damage that a reader does not survive.

    The smallest such damage is kept in the folder `findings`.
    """
    form, watch = FORMATS[name], watch or Watch()
    files = form.files()
    base_model()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        write_all(folder, files)
        undamaged = form.load(folder)

        def run(damage: Damage) -> None:
            write_all(folder, {**files, damage.name: damage.data})
            check_load(form, folder, undamaged, watch)

        try:
            given(damaged(files))(run_settings(examples, seed_number)(run))()
        except BaseException:
            shutil.copytree(folder, findings / name, dirs_exist_ok=True)
            raise


def run_settings(examples: int, seed_number: int) -> Callable[[Callable], Callable]:
    quiet = {"database": None, "deadline": None, "report_multiple_bugs": False}
    limits = settings(max_examples=examples, suppress_health_check=list(HealthCheck), **quiet)
    return lambda test: seed(seed_number)(limits(test))


def check_load(form: Format, folder: Path, undamaged: Any, watch: Watch) -> None:
    watch.violations, watch.folder = [], str(folder)
    try:
        with limited():
            loaded = form.load(folder)
    except TinyGPTError:
        loaded = None
    finally:
        watch.folder = ""
    assert not watch.violations, watch.violations
    if loaded is not None:
        assert form.check(folder, loaded, undamaged), "loaded something else than the file holds"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--formats", nargs="*", choices=FORMATS, default=list(FORMATS), help="default: all of them")
    add("--examples", type=int, default=200, help="of each format (default: 200)")
    add("--seed", type=int, default=1)
    add("--findings", type=Path, default=Path("findings"), help="for the files of failures")
    args = parser.parse_args()
    failed = 0
    for name in args.formats:
        arguments = name, args.examples, args.seed, args.findings
        process = multiprocessing.get_context("spawn").Process(target=fuzz_format, args=arguments)
        process.start()
        process.join()
        print(f"{name}: {f'FAILED with {process.exitcode}' if process.exitcode else 'fine'}", flush=True)
        failed += process.exitcode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
