"""What tinygpt makes of a folder of each format: the loads that are tried on damaged files."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt import LLM, SamplingParams
from tinygpt.cli.batch import Earlier, read_earlier
from tinygpt.cli.input import PromptRecord, read_prompts
from tinygpt.errors import TinyGPTError
from tinygpt.evaluation.golden import Golden, load_goldens
from tinygpt.execution.model_source import ModelSource
from tinygpt.kernels.cpu import packed as packing
from tinygpt.kernels.kernel_archive import import_kernels
from tinygpt.kernels.kernel_files import KernelFiles
from tinygpt.tokenizer.tokenizer import Tokenizer
from tinygpt.weights.adapters.lora import merge_lora
from tinygpt.weights.adapters.soft_prompt import read_soft_prompt
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.open import open_checkpoint

from . import seeds

TEXTS = ("the theme there", " \n\t of Ångström's 12 日本", "<|endoftext|>then", "")
ASKED = [(text, is_split) for text in TEXTS for is_split in (False, True)]  # is_split: special tokens are plain text


def tensors(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(folder)
    loaded = {name: tensor.float32().copy() for name, tensor in checkpoint.stored.items()}
    for name in checkpoint.stored:
        checkpoint.release(name)
    return loaded


def model(folder: Path) -> tuple[ModelConfig, np.ndarray]:
    """A model that runs, which finds what was believed too early."""
    with LLM(str(folder), device="reference", max_num_seqs=1, threads=1) as llm:
        llm.generate([[]], SamplingParams(max_tokens=2))
        return llm.config, llm.logits([1, 2, 3])


def packed(folder: Path) -> dict[str, np.ndarray]:
    source = ModelSource.open(str(folder))
    return {name: array.copy() for name, array in packing.arrays_of(source.load_params(1)).items()}


def session(folder: Path) -> tuple[list[int], Any]:
    """The session's tokens, and what another request gets that begins as the undamaged one does."""
    llm = seeds.session_llm()
    # These take the places in the cache of what an earlier file may have left there.
    llm.generate([[9], [10]], SamplingParams(max_tokens=1), use_tqdm=False)
    with llm.load_session(folder / "session") as session:
        token_ids = session.token_ids
        session.generate(SamplingParams(max_tokens=1, overflow="slide"))
    (other,) = llm.generate([[1, 5, 6, 7, 8]], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2, seed=1))
    return token_ids, other.outputs


def lora(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor.float32().copy() for name, tensor in merge_lora(base_checkpoint(), folder).stored.items()}


def soft_prompt(folder: Path) -> dict[str, np.ndarray]:
    prompt = read_soft_prompt(folder, base_checkpoint().config)
    return {"prompt_embeddings": prompt.embeds}


@functools.cache
def base_checkpoint() -> Checkpoint:
    """The checkpoint that adapters belong to; its file has left its folder, and stays mapped."""
    with tempfile.TemporaryDirectory() as name:
        return open_checkpoint(seeds.written(Path(name), seeds.safetensors()))


def tokenizer(folder: Path) -> list[tuple[list[int] | str, str]]:
    """What each of ASKED becomes, and its text again. A text that cannot be encoded has its error in place of ids."""
    tokenizer, results = Tokenizer.from_folder(folder), []
    for text, is_split in ASKED:
        try:
            ids = tokenizer.encode(text, is_split)
        except TinyGPTError as error:
            ids = str(error)
        results.append((ids, tokenizer.decode([] if isinstance(ids, str) else ids)))
    stream = tokenizer.detokenizer()
    results.append(([], "".join(map(stream.push, [*range(300), 2**40])) + stream.finish()))
    return results


def prompts(folder: Path) -> list[tuple[Any, Any]]:
    return [(record.id, record.prompt) for record in _records(folder)]


def results(folder: Path) -> Earlier:
    return read_earlier(folder / "results.jsonl", _records(folder), "seed", "auto")


def _records(folder: Path) -> list[PromptRecord]:
    return read_prompts(folder / "prompts.jsonl", SamplingParams())


def golden(folder: Path) -> list[Golden]:
    return load_goldens(folder / "golden.npz")


def kernel_archive(folder: Path) -> dict[str, bytes]:
    """Each file that an import leaves behind, by its name: of kernels, what would be unpickled and run."""
    for path in folder.iterdir():  # of an earlier import
        if path.name != "kernels.bin":
            path.unlink()
    files = KernelFiles(folder)
    import_kernels(folder / "kernels.bin", files, seeds.BUILD)
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*")} - {"kernels.bin"}
    return {name: bytes(files.load(name) or b"") if name in files.names() else b"" for name in left}


def kernel(folder: Path) -> bytes | None:
    """What is given to be unpickled and run; None where it would be compiled again."""
    body = KernelFiles(folder).load("add.kernel")
    return None if body is None else bytes(body)
