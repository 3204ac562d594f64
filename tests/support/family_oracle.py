"""transformers' own classes on the models of families, live or as recorded."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from support.family_models import write_family
from support.golden_oracle import LEAD
from support.recorded import HAS_TRANSFORMERS, recorded

if HAS_TRANSFORMERS:
    import torch
    from transformers import AutoModelForCausalLM


def read_model(folder: Path) -> Any:
    """Raises where a tensor is missing in the files, or one too many."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, report = AutoModelForCausalLM.from_pretrained(folder, **options)
    wrong = {kind: found for kind, found in report.items() if found}
    assert not wrong, wrong
    model.generation_config.eos_token_id = None
    return model.eval()


@functools.lru_cache(maxsize=2)
def _model_of(name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return read_model(write_family(Path(folder), name))


@recorded
def family_logits_of(name: str, token_ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return _model_of(name)(torch.tensor([token_ids])).logits[0].numpy()  # (T, V)


@recorded
def family_greedy_of(name: str, prompt: list[int], count: int) -> np.ndarray:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    scores = {"output_scores": True, "return_dict_in_generate": True}
    output = _model_of(name).generate(ids, attention_mask=torch.ones_like(ids), **options, **scores)
    best = torch.cat(output.scores).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > LEAD
    return output.sequences[0, len(prompt) :].numpy()
