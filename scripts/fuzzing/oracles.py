"""Whether what was loaded from a damaged file is what the file says, by readers that share no code with ours.

Each check returns what is wrong in a few words, or None.
"""

import json
import math
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from tinygpt.tokenizer.prepared import PREPARED_FILE
from tinygpt.weights.families.gpt2 import canonical_name

from . import binary_mutators
from .seeds import base_tensors
from .tokenizer_seeds import DECODER, prepared_digest, to_json

Arrays = Mapping[str, np.ndarray]
ALIASES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
ALIASES |= {"max_position_embeddings": "n_positions"}


class NoWord(Exception):
    """The independent reader refuses what we load, or is not installed."""


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """What the file holds, in float32, as the libraries of the two formats read it."""
    return _read_torch(path) if path.suffix == ".bin" else _read_safetensors(path)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    arrays = {}
    for name, entry in safetensors.deserialize(path.read_bytes()):
        dtype = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2", "I32": "<i4"}.get(entry["dtype"])
        if dtype:
            array = np.frombuffer(bytes(entry["data"]), dtype).reshape(entry["shape"])
            if entry["dtype"] == "BF16":
                array = (array.astype(np.uint32) << 16).view(np.float32)
            arrays[name] = array if dtype == "<i4" else array.astype(np.float32)
    return arrays


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    try:
        import torch

        if zipfile.is_zipfile(path):
            _refuse_folders(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
        return {name: tensor.detach().float().numpy() for name, tensor in state.items()}
    except Exception as error:  # of any kind: torch has no errors of its own for a damaged file
        raise NoWord(str(error)) from None


def _refuse_folders(path: Path) -> None:
    """An entry with MS-DOS's mark of a folder: torch reads nothing of it, and hands out whatever is in memory."""
    with zipfile.ZipFile(path) as archive:
        if folders := [entry.filename for entry in archive.infolist() if entry.external_attr & 0x10]:
            raise NoWord(f"torch would take {folders} for folders")


def _weights(folder: Path) -> dict[str, np.ndarray]:
    for index in folder.glob("*.index.json"):
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {
            name: array for shard in set(weight_map.values()) for name, array in read_arrays(folder / shard).items()
        }
    (file,) = [*folder.glob("*model.safetensors"), *folder.glob("*model.bin")]
    return read_arrays(file)


def _difference(loaded: Arrays, wanted: Arrays) -> str | None:
    """What differs in the tensors that both have; which of them must be there is the loader's own affair."""
    wrong = [name for name in loaded.keys() & wanted.keys() if not _is_equal(loaded, wanted, name)]
    return f"{', '.join(wrong)}: other elements than in the file" if wrong else None


def _is_equal(one: Arrays, other: Arrays, name: str) -> bool:
    return name in other and np.array_equal(one[name], other[name], equal_nan=True)


def _is_same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and not _difference(one, other)


def check_checkpoint(folder: Path, loaded: Arrays, undamaged: Arrays) -> str | None:
    if _is_same(loaded, undamaged):
        return None
    wanted = {canonical_name(name): array for name, array in _weights(folder).items()}
    lost = [name for name in loaded if name not in wanted and name not in ("wte.weight", "lm_head.weight")]
    return f"{', '.join(lost)} cannot be in the file" if lost else _difference(loaded, wanted)


def check_config(folder: Path, loaded: Any, undamaged: Any) -> str | None:
    config, logits = loaded
    said = json.loads((folder / "config.json").read_bytes())
    said |= {ALIASES[name]: value for name, value in said.items() if name in ALIASES}
    wrong = [
        f"{name} is {getattr(config, name)!r} and {said[name]!r} in config.json"
        for name in CONFIG_FIELDS & said.keys()
        if getattr(config, name) != said[name]
    ]
    if wrong:
        return "; ".join(wrong)
    eos = json.loads((folder / "generation_config.json").read_bytes()).get("eos_token_id")
    if config.eos_token_ids != tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]):
        return f"eos_token_ids are {config.eos_token_ids} and {eos!r} in generation_config.json"
    same = all(getattr(config, name) == getattr(undamaged[0], name) for name in ARITHMETIC_FIELDS)
    return "equal fields give other logits" if same and not np.array_equal(logits, undamaged[1]) else None


CONFIG_FIELDS = {
    "vocab_size",
    "n_positions",
    "n_embd",
    "n_layer",
    "n_head",
    "activation_function",
    "layer_norm_epsilon",
}
CONFIG_FIELDS |= {"n_inner", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"}
ARITHMETIC_FIELDS = CONFIG_FIELDS - {"tie_word_embeddings"} | {"reorder_and_upcast_attn"}


def check_packed(folder: Path, loaded: Arrays, undamaged: Arrays) -> str | None:
    if _is_same(loaded, undamaged):
        return None
    data = (folder / "model.tinygpt.safetensors").read_bytes()
    if _sealed(binary_mutators.seal_packed(data, None)) != _sealed(data):
        return "its checksum is wrong, and it was loaded"
    wanted = {name: bytes(entry["data"]) for name, entry in safetensors.deserialize(data)}
    wrong = [name for name, array in loaded.items() if array.tobytes() != wanted.get(name)]
    return f"{', '.join(wrong)} has other bytes than the file" if wrong else None


def check_session(folder: Path, loaded: Any, undamaged: Any) -> str | None:
    (token_ids, others), said = loaded, _read_safetensors(folder / "session")
    data = (folder / "session").read_bytes()
    if _sealed(binary_mutators.seal_session(data, None)) != _sealed(data):
        return "its checksum is wrong, and it was loaded"
    if token_ids != said["token_ids"].tolist():
        return f"its tokens are {token_ids} and {said['token_ids'].tolist()} in the file"
    return None if others == undamaged[1] else "another request has another result than before"


def _sealed(data: bytes) -> str:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])["__metadata__"]["crc32"]


def check_lora(folder: Path, loaded: Arrays, undamaged: Arrays) -> str | None:
    """Each matrix is the base model's plus a multiple of B @ A; the factor is known where no pattern decides it."""
    if _is_same(loaded, undamaged):
        return None
    config = json.loads((folder / "adapter_config.json").read_bytes())
    stored, base = _weights(folder), base_tensors()
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        result = loaded[name.removeprefix("transformer.")]
        a, b = stored.get(f"{module}.lora_A.weight"), stored.get(f"{module}.lora_B.weight")
        if a is None or b is None or np.array_equal(result, weight):
            continue
        update = (b.astype(np.float64) @ a).T
        scale = _lora_scale(config, result.astype(np.float64) - weight, update)
        size = np.abs(b).max() * np.abs(a).max() * a.shape[0] * (1 + abs(scale))  # of the largest number on the way
        if size < 1e37 and not np.allclose(result, weight + scale * update, rtol=1e-3, atol=1e-5 * (1 + size)):
            return f"{name} is not what its factors give"
    return None


def _lora_scale(config: Mapping[str, Any], change: np.ndarray, update: np.ndarray) -> float:
    r = 8 if config.get("r") is None else config["r"]
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        return float((change * update).sum() / (update * update).sum()) if update.any() else 0.0
    alpha = 8 if config.get("lora_alpha") is None else config["lora_alpha"]
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def check_soft_prompt(folder: Path, loaded: Arrays, undamaged: Arrays) -> str | None:
    return _difference(loaded, _weights(folder))


def check_texts(folder: Path, loaded: Any, undamaged: Any) -> str | None:
    """Nothing is known but that all of it is ids and texts."""
    for ids, text in loaded:
        is_refused = isinstance(ids, str)
        if not isinstance(text, str) or not (is_refused or all(type(i) is int and i >= 0 for i in ids)):
            return f"{ids!r} and {text!r} are no ids and no text"
    return None


def check_tokenizer(asked: Sequence[tuple[str, bool]], folder: Path, loaded: Any, undamaged: Any) -> str | None:
    """Ids are those of Hugging Face's library, where that reads the file and no other file has a say."""
    if (wrong := check_texts(folder, loaded, undamaged)) or loaded == undamaged:
        return wrong
    options = folder / "tokenizer_config.json"
    if options.exists() and options.read_bytes() != to_json(DECODER):
        return None
    try:
        import tokenizers

        library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except BaseException as error:  # a panic of the library is no Exception
        raise NoWord(str(error)) from None
    if options.exists() and "<|endoftext|>" not in map(str, library.get_added_tokens_decoder().values()):
        raise NoWord("its added token comes from tokenizer_config.json, which the library does not read")
    library.no_truncation()
    library.no_padding()
    for (text, is_split), (ids, _) in zip(asked, loaded, strict=False):
        library.encode_special_tokens = is_split
        if not isinstance(ids, str) and ids != library.encode(text).ids:
            return f"{text!r} becomes {ids} and {library.encode(text).ids} in Hugging Face's tokenizers"
    return None


def check_prepared(folder: Path, loaded: Any, undamaged: Any) -> str | None:
    """What is prepared has no say unless its digest is right; then it is as good as any tokenizer's file."""
    digest, _, payload = (folder / PREPARED_FILE).read_bytes().partition(b"\n")
    if digest != prepared_digest(payload) and loaded != undamaged:
        return "its digest is wrong, and texts become something else"
    return check_texts(folder, loaded, undamaged)


def check_prompts(folder: Path, loaded: Any, undamaged: Any) -> str | None:
    lines = (folder / "prompts.jsonl").read_bytes().split(b"\n")
    records = [(i, json.loads(line)) for i, line in enumerate(lines, 1) if line.strip()]
    wanted = [(fields.get("id", i), fields.get("prompt", fields.get("prompt_token_ids"))) for i, fields in records]
    return None if loaded == wanted else f"its prompts are {loaded!r} and {wanted!r} in the file"


def check_results(folder: Path, loaded: Any, undamaged: Any) -> str | None:
    data = (folder / "results.jsonl").read_bytes()
    kept = data[: loaded.size]
    records = [json.loads(line) for line in kept.split(b"\n") if line.strip()]
    if (kept.endswith(b"\n") or not kept) == loaded.lacks_newline:
        return "half a record would be kept, or a line would not end"
    if b"\n" in data[loaded.size :]:
        return "a whole record would be lost"
    prompts = {2: [1, 2, 3], 7: [4], 8: [5]}
    answered = [(record["id"], (record["prompt"], record["prompt_token_ids"])) for record in records]
    wrong = [i for i, prompt in answered if i not in prompts or prompts[i] not in prompt]
    if wrong or {record["id"] for record in records} != loaded.ids:
        return f"ids {sorted(loaded.ids, key=str)} were believed, and {wrong} answer no prompt"
    return None


def check_golden(folder: Path, loaded: Any, undamaged: Any) -> str | None:
    for golden in loaded:
        if not isinstance(golden.logits, np.ndarray) or not all(type(i) is int for i in golden.token_ids):
            return f"{golden} is no golden"
    return None


def check_kernel_archive(folder: Path, loaded: dict[str, bytes], undamaged: dict[str, bytes]) -> str | None:
    """A header that is another one and sealed may name kernels otherwise, but makes no other machine code of them."""
    outside = [place for place in loaded if not re.fullmatch(r"key|\w+-\w{32}\.kernel|[\w.+-]+\.warm", place)]
    if outside:
        return f"a file that is no kernel: {outside}"
    other = [place for place, body in loaded.items() if body not in undamaged.values()]
    return f"other machine code than was exported: {other}" if other else None


def check_kernel(folder: Path, loaded: bytes | None, undamaged: bytes) -> str | None:
    return None if loaded in (None, undamaged) else "other machine code than was saved"
