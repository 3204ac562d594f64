"""What a run begins with, where that is a checkpoint: its sizes, its tokenizer and its weights."""

from dataclasses import replace
from pathlib import Path

from tinygpt.errors import TinyGPTError
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.families.gpt2 import model_config
from tinygpt.weights.files import read_json_object

from .corpus import CorpusError

FILES = ("config.json", "model.safetensors", "vocab.json", "merges.txt")
NO_MERGES = 257  # tokens that are bytes, and the end of text


def sizes_of(folder: Path) -> dict[str, int]:
    """By the names of train_demo.py's flags. CorpusError if it is no checkpoint as train_demo.py writes them."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise CorpusError(f"{folder} has no {' and no '.join(missing)}: give a checkpoint in Hugging Face's layout.")
    try:
        config = model_config(read_json_object(folder / "config.json"))
    except TinyGPTError as error:
        raise CorpusError(str(error)) from error
    plain = ModelConfig(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head)
    ids = {"bos_token_id": config.bos_token_id, "eos_token_ids": config.eos_token_ids}
    if config != replace(plain, n_inner=config.n_inner, **ids) or config.inner_size != plain.inner_size:
        raise CorpusError(f"{folder} differs from GPT-2 in more than its sizes, and only those are trained here.")
    vocab_size = len(read_json_object(folder / "vocab.json"))
    if vocab_size != config.vocab_size:
        raise CorpusError(f"{folder} has {config.vocab_size} embeddings and {vocab_size} tokens in vocab.json.")
    return {
        "merges": vocab_size - NO_MERGES,
        "layers": config.n_layer,
        "width": config.n_embd,
        "heads": config.n_head,
        "positions": config.n_positions,
    }
