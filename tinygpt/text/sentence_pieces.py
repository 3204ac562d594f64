"""Files of sentencepiece, and the rules that transformers' classes of tokenizers put around them."""

import re
import unicodedata
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, NoTokenizerError, how_to_install
from ..weights.files import how_to_replace, read_regular

MAX_EXTRA_IDS = 1000
# In transformers' order, in which it adds those that the file lacks.
NAMED_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
# What each class of transformers takes if a file leaves it out.
_ENDS = {"unk_token": "<unk>", "eos_token": "</s>"}
_T5 = {**_ENDS, "pad_token": "<pad>", "extra_ids": 100, "add_eos_token": True}
CLASSES = {
    "T5Tokenizer": _T5,
    "MT5Tokenizer": _T5,
    "LlamaTokenizer": {**_ENDS, "bos_token": "<s>", "add_bos_token": True},
    "GPTSw3Tokenizer": {**_ENDS, "bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<pad>"},
}
# GPT-SW3 was trained on texts without these controls, and with spaces of one kind.
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\xa0\xad\u200b]")
_SPACES = re.compile("[\u2002\u2003\u2005\u2008-\u200a\u202f\u3000\ufffc]")


def _clean(lowers: bool, is_gpt_sw3: bool, text: str) -> str:
    """Return the text that the package takes. A character is lowered by itself, as in transformers."""
    if lowers:
        text = "".join(map(str.lower, text))
    if is_gpt_sw3:
        text = unicodedata.normalize("NFC", _SPACES.sub(" ", _CONTROLS.sub("", text)))
    return text


def read_sentencepiece(path: Path, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model of a tokenizer's spec, and the options with those that the class or the file has.

    options: of tokenizer_config.json. Raise CheckpointError, or NoTokenizerError if it cannot run.
    """
    class_name = (options.get("tokenizer_class") or "").removesuffix("Fast")
    refused = None
    if class_name and class_name not in CLASSES:
        refused = f"its class {class_name}"
    elif options.get("legacy") is False:
        refused = '"legacy": false in tokenizer_config.json'
    if refused:
        raise NoTokenizerError(
            f"{path} is a model of sentencepiece, and {refused} is not implemented: tokenize with transformers; token "
            "ids work."
        )
    processor = _load(path)
    pieces = [processor.id_to_piece(i) for i in range(len(processor))]
    ends = {"bos": processor.bos_id(), "eos": processor.eos_id(), "unk": processor.unk_id()}
    own = {f"{name}_token": pieces[i] for name, i in ends.items() if i >= 0}
    usual = CLASSES.get(class_name, own)
    options = {**dict.fromkeys(NAMED_TOKENS), **usual, **options}
    extra_ids = options.get("extra_ids") or 0
    if extra_ids > MAX_EXTRA_IDS:
        raise CheckpointError(
            f"the tokenizer of {path} has {extra_ids} extra_ids; at most {MAX_EXTRA_IDS} are taken."
        )
    # T5's tokens for gaps, the last first, take the white space around them.
    gap = {"special": True, "lstrip": True, "rstrip": True}
    gaps = {len(pieces) + i: {"content": f"<extra_id_{extra_ids - 1 - i}>", **gap} for i in range(extra_ids)}
    options["added_tokens_decoder"] = gaps | options.get("added_tokens_decoder", {})
    model = {
        "type": "sentencepiece",
        "vocab": {piece: i for i, piece in enumerate(pieces)},
        "processor": processor,
        "clean": partial(_clean, bool(options.get("do_lower_case")), class_name == "GPTSw3Tokenizer"),
        "ends_once": usual is _T5,  # it adds no second end
    }
    return model, options


def _load(path: Path) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        install = how_to_install("sentencepiece")
        raise NoTokenizerError(
            f"{path} needs the package sentencepiece: {install}; token ids work."
        ) from None
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(read_regular(path))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a model of sentencepiece ({error}); {how_to_replace(path)}, or give token ids."
        ) from None
    return processor
