"""The vocabulary of a tokenizer's files, as `convert` prepares it: with a digest of both."""

import hashlib
import json
import logging
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..weights.files import PREPARED_FILE, TOKENIZER_FILES, read_regular
from .added_tokens import added_token
from .files import MALFORMED, read_tokenizer
from .gpt2_bpe import NUM_BYTES, ByteLevelBPE, UnlikeGPT2, Vocabulary, read_vocabulary

FORMAT = b"tinygpt tokenizer 1\n"
NUMBERS = "<u4"

logger = logging.getLogger(__name__)


def write_prepared(folder: Path) -> None:
    """Write PREPARED_FILE if the tokenizer files in `folder` are valid and like GPT-2's."""
    try:
        spec = read_tokenizer(folder)
        ByteLevelBPE(spec)
        vocabulary = _as_json(read_vocabulary(spec["model"]))
    except (CheckpointError, UnlikeGPT2, *MALFORMED):
        return
    payload = json.dumps({"spec": {**spec, "model": {"type": "BPE"}}, **vocabulary}).encode()
    (folder / PREPARED_FILE).write_bytes(_digest(folder, payload) + b"\n" + payload)


def read_prepared(folder: Path) -> ByteLevelBPE | None:
    """Return the tokenizer, or None if the other files must be read."""
    file = folder / PREPARED_FILE
    try:
        digest, _, payload = read_regular(file).partition(b"\n")
        if digest == _digest(folder, payload):
            content = json.loads(payload)
            return ByteLevelBPE(_checked(content["spec"]), _vocabulary(content))
        logger.debug("%s does not belong to the files in its folder, which are read instead", file)
    except FileNotFoundError:  # of most checkpoints
        pass
    except (OSError, CheckpointError, UnlikeGPT2, *MALFORMED) as error:
        logger.debug("%s is not used (%r)", file, error)
    return None


def _digest(folder: Path, payload: bytes) -> bytes:
    digest = hashlib.sha256(FORMAT)
    for path in (folder / name for name in TOKENIZER_FILES):
        if path.exists():
            content = read_regular(path)
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
    digest.update(payload)
    return digest.hexdigest().encode()


def _checked(spec: dict[str, Any]) -> dict[str, Any]:
    """Check as the readers of other files."""
    for entry in spec["added_tokens"]:
        if type(entry["id"]) is not int or entry["id"] < 0:
            raise ValueError(f"{entry['id']!r} is no token id")
        added_token(entry, entry["id"])
    return spec


def _as_json(vocabulary: Vocabulary) -> dict[str, str]:
    bytes_of, id_of_rank = vocabulary
    ids = [*id_of_rank.values(), *(bytes_of.keys() - {*id_of_rank.values()})]  # ranked tokens first
    tokens = [*map(bytes_of.__getitem__, ids)]
    numbers = {"ranks": [*id_of_rank], "ids": ids, "lengths": [*map(len, tokens)]}
    arrays = {name: np.array(values, NUMBERS).tobytes() for name, values in numbers.items()}
    return {name: data.hex() for name, data in {**arrays, "tokens": b"".join(tokens)}.items()}


def _vocabulary(content: dict[str, str]) -> Vocabulary:
    """Raise ValueError for a damaged vocabulary: tiktoken would end the process."""
    ranks, ids, lengths = (
        np.frombuffer(bytes.fromhex(content[name]), NUMBERS).tolist() for name in ("ranks", "ids", "lengths")
    )
    data = bytes.fromhex(content["tokens"])
    tokens = [data[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
    bytes_of = dict(zip(ids, tokens, strict=True))
    id_of_rank = dict(zip(ranks, ids, strict=False))
    is_right = (len(bytes_of), len(id_of_rank), len(data)) == (len(ids), len(ranks), sum(lengths)) and all(
        bytes_of[token_id] == bytes([rank]) for rank, token_id in id_of_rank.items() if rank < NUM_BYTES
    )
    if not is_right:
        raise ValueError("it holds no vocabulary")
    return Vocabulary(bytes_of, id_of_rank)
