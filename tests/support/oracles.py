"""Answers of transformers' models, live or as recorded: GPT-2 on golden models and the demo, families, experts."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.family_models import write_any, write_family
from support.golden_models import GOLDEN_MODELS, NEED_PEFT
from support.moe_models import EXPERT_LAYERS, H, T, moe_arrays
from support.paths import DEMO
from support.recorded import HAS_TRANSFORMERS, recorded

TOLERANCE = 1e-4  # absolute, on logits with a std of a few units
LEAD = 2 * TOLERANCE  # a best logit with a smaller lead may rightly differ
HAS_GROUPS = False  # transformers before 4.57 has groups of beams itself
if HAS_TRANSFORMERS:
    import torch
    from transformers import AutoModelForCausalLM, GenerationMixin, GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    HAS_GROUPS = hasattr(GenerationMixin, "_group_beam_search")


def read_model(folder: Path) -> Any:
    """Read a checkpoint in float32, without EOS ids; assert that its files have each tensor and no other."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, report = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(report.values()), report
    model.generation_config.eos_token_id = None
    return model.eval()


def model_of(name: str, **others: object) -> Any:
    """Return "demo" or a golden model with `others` over the fields of its config.json."""
    return read_model(DEMO) if name == "demo" else live_model(**GOLDEN_MODELS[name] | others)


def live_model(seed: str = "", **fields: object) -> Any:
    """Return the model of write_any's files."""
    return _live_model(seed, json.dumps(fields))


@functools.lru_cache(maxsize=4)
def _live_model(seed: str, fields: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return read_model(write_any(Path(folder), seed, **json.loads(fields)))


def live_peft_model(folder: Path, write: Any, **fields: Any) -> Any:
    """Return PEFT's model of what write(a folder) has written, on write_any(**fields), all in `folder`."""
    peft = pytest.importorskip("peft", reason=NEED_PEFT)
    base = read_model(write_any(folder / "base", **fields))
    return peft.PeftModel.from_pretrained(base, write(folder / "adapter")).eval()


def traced(model: Any, token_ids: list[int]) -> tuple[list[Any], Any]:
    """Return hidden states (T, C), before the last one the input of ln_f, which transformers leaves out; and maps."""
    norms = []
    hook = model.transformer.ln_f.register_forward_pre_hook(lambda _, inputs: norms.append(inputs[0][0]))
    with torch.no_grad():
        output = model(torch.tensor([token_ids]), output_hidden_states=True, output_attentions=True)
    hook.remove()
    *states, last = (state[0] for state in output.hidden_states)
    return [*states, *norms, last], output.attentions


@functools.lru_cache(maxsize=2)
def _family_model(name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return read_model(write_family(Path(folder), name))


def logits(model: Any, token_ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()  # (T, V)


def generate(model: Any, prompt: list[int], **options: Any) -> Any:
    ids = torch.tensor([prompt])  # (1, T)
    options |= {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def greedy(model: Any, prompt: list[int], count: int) -> np.ndarray:
    output = generate(model, prompt, max_new_tokens=count, pad_token_id=0)
    best = torch.cat(output.scores).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > LEAD
    return output.sequences[0, len(prompt) :].numpy()


@recorded
def logits_of(name: str, token_ids: list[int], **others: object) -> np.ndarray:
    return logits(model_of(name, **others), token_ids)


@recorded
def greedy_of(name: str, prompt: list[int], count: int, **others: object) -> np.ndarray:
    return greedy(model_of(name, **others), prompt, count)


@recorded
def family_logits_of(name: str, token_ids: list[int]) -> np.ndarray:
    return logits(_family_model(name), token_ids)


@recorded
def family_greedy_of(name: str, prompt: list[int], count: int) -> np.ndarray:
    return greedy(_family_model(name), prompt, count)


@recorded
def top_logprobs_of(name: str, token_ids: list[int], count: int) -> np.ndarray:
    """Return (T, 2, count): the best ids of each position, and their log probabilities."""
    best = torch.from_numpy(logits(model_of(name), token_ids)).double().log_softmax(-1).topk(count)
    return torch.stack([best.indices.double(), best.values], 1).numpy()


def search(model: Any, prompt: list[int], options: dict, pad: int) -> np.ndarray:
    """Return (num_beams, 1 + max_new_tokens): a score and the new ids, padded."""
    options = {**options, "num_return_sequences": options["num_beams"], "pad_token_id": pad}
    output = generate(model, prompt, **options)
    new = output.sequences[:, len(prompt) :].double()
    padding = torch.full((len(new), options["max_new_tokens"] - new.shape[1]), float(pad))
    return torch.cat([output.sequences_scores.double()[:, None], new, padding], 1).numpy()


@recorded
def beams_of(name: str, prompt: list[int], options: dict) -> np.ndarray:
    return search(model_of(name), prompt, options, options["eos_token_id"][0])


@recorded(is_live=HAS_GROUPS)
def beam_groups_of(name: str, prompt: list[int], options: dict) -> np.ndarray:
    return search(model_of(name), prompt, options, options["eos_token_id"][0])


@recorded
def moe_logits_of(per_token: int, token_ids: list[int]) -> np.ndarray:
    """Return logits of a GPT-2 with experts in place of some MLPs; transformers has no class with them."""
    arrays = moe_arrays()
    V, C = arrays["wte.weight"].shape
    F = len(arrays["h.0.mlp.c_fc.bias"])
    L = 1 + max(int(name.split(".")[1]) for name in arrays if name[:2] == "h.")
    sizes = {"vocab_size": V, "n_positions": T, "n_embd": C, "n_head": H, "n_layer": L, "n_inner": F}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    for i in EXPERT_LAYERS:
        model.transformer.h[i].mlp = _experts(config, arrays[f"h.{i}.mlp.gate.weight"], per_token)
    state = {name: torch.from_numpy(array) for name, array in arrays.items() if ".gate." not in name}
    report = model.transformer.load_state_dict(state, strict=True)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    return logits(model.eval(), token_ids)


def _experts(config: "GPT2Config", gate: np.ndarray, per_token: int) -> "torch.nn.Module":
    class Experts(torch.nn.Module):
        """Token after token; the weights of top-k are probabilities, and of several experts sum to 1."""

        def __init__(self):
            super().__init__()
            self.gate = torch.from_numpy(gate)
            self.experts = torch.nn.ModuleList(GPT2MLP(config.n_inner, config) for _ in gate)

        def forward(self, x: "torch.Tensor") -> "torch.Tensor":
            rows = x.reshape(-1, x.shape[-1])  # (T, C)
            shares, chosen = (rows @ self.gate.T).softmax(-1).topk(per_token)
            shares = shares / shares.sum(-1, keepdim=True) if per_token > 1 else shares
            each = [
                sum(share * self.experts[e](row[None])[0] for share, e in zip(*pair, strict=True))
                for row, pair in zip(rows, zip(shares, chosen, strict=True), strict=True)
            ]
            return torch.stack(each).reshape(x.shape)

    return Experts()
