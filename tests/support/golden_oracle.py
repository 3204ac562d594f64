"""transformers' GPT-2 on golden models and the demo, live or as recorded."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np

from support.golden_models import GOLDEN_MODELS, write_model
from support.paths import DEMO
from support.recorded import HAS_TRANSFORMERS, recorded

TOLERANCE = 1e-4  # absolute, on logits whose std is a few units
LEAD = 2 * TOLERANCE  # a best logit that leads by less may rightly differ
HAS_GROUPS = False  # of beams, which are in transformers itself before 4.57 alone
if HAS_TRANSFORMERS:
    import torch
    from transformers import GenerationMixin, GPT2LMHeadModel

    HAS_GROUPS = hasattr(GenerationMixin, "_group_beam_search")


def model_of(name: str, **others: object) -> "GPT2LMHeadModel":
    """A golden model, with `others` over the fields of its config.json, or "demo"; no token ends its texts."""
    return read_model(DEMO) if name == "demo" else live_model(**GOLDEN_MODELS[name] | others)


def live_model(seed: str = "", **fields: object) -> "GPT2LMHeadModel":
    """The same of write_model's files."""
    return _live_model(seed, json.dumps(fields))


@functools.lru_cache(maxsize=4)
def _live_model(seed: str, fields: str) -> "GPT2LMHeadModel":
    with tempfile.TemporaryDirectory() as folder:
        return read_model(write_model(Path(folder), seed, **json.loads(fields)))


def read_model(folder: Path) -> "GPT2LMHeadModel":
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


@recorded
def logits_of(name: str, token_ids: list[int], **others: object) -> np.ndarray:
    with torch.no_grad():
        return model_of(name, **others)(torch.tensor([token_ids])).logits[0].numpy()  # (T, V)


@recorded
def greedy_of(name: str, prompt: list[int], count: int, **others: object) -> np.ndarray:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    scores = {"output_scores": True, "return_dict_in_generate": True}
    output = model_of(name, **others).generate(ids, attention_mask=torch.ones_like(ids), **options, **scores)
    best = torch.cat(output.scores).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > LEAD
    return output.sequences[0, len(prompt) :].numpy()


@recorded
def top_logprobs_of(name: str, token_ids: list[int], count: int) -> np.ndarray:
    """(T, 2, count): the best ids of every position, and their log probabilities."""
    with torch.no_grad():
        best = model_of(name)(torch.tensor([token_ids])).logits[0].double().log_softmax(-1).topk(count)
    return torch.stack([best.indices.double(), best.values], 1).numpy()


def search(name: str, prompt: list[int], options: dict) -> np.ndarray:
    """(num_beams, 1 + max_new_tokens): a score and the new ids, padded with the first EOS."""
    ids = torch.tensor([prompt])
    options = {**options, "num_return_sequences": options["num_beams"], "pad_token_id": options["eos_token_id"][0]}
    scores = {"output_scores": True, "return_dict_in_generate": True}
    output = model_of(name).generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options, **scores)
    new = output.sequences[:, len(prompt) :].double()
    padding = torch.full((len(new), options["max_new_tokens"] - new.shape[1]), float(options["eos_token_id"][0]))
    return torch.cat([output.sequences_scores.double()[:, None], new, padding], 1).numpy()


@recorded
def beams_of(name: str, prompt: list[int], options: dict) -> np.ndarray:
    return search(name, prompt, options)


@recorded(is_live=HAS_GROUPS)
def beam_groups_of(name: str, prompt: list[int], options: dict) -> np.ndarray:
    return search(name, prompt, options)
