"""Live parity with transformers: tiny random GPT-2 checkpoints in each form, with the model that transformers reads.

RECIPES try fields of config.json and sizes of all kinds.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from support.oracles import LEAD, TOLERANCE, generate
from tinygpt import LLM, SamplingParams

logging.disable_progress_bar()
logging.set_verbosity_error()

NEW_TOKENS = 64  # of a greedy run
PROMPT_TOKENS = 5  # of prompt_of(case)
FORMS = ("safetensors", "safetensors-sharded", "bin", "bin-legacy", "bin-sharded")
DTYPES = ("float32", "float16", "bfloat16")
WRAPPERS = ("", "model.", "module.", "_orig_mod.")
PREFIXES = tuple(wrapper + stem for wrapper in WRAPPERS for stem in ("", "transformer."))  # of "wte.weight"
SHARDS = 3
LOGITS_STD = 3.0  # as of trained GPT-2s; the absolute tolerance presupposes it


@dataclass(frozen=True)
class Recipe:
    """One checkpoint. `fields` go into config.json over the defaults of transformers' GPT2Config."""

    name: str
    fields: dict[str, Any]
    form: str = "safetensors"
    dtype: str = "float32"
    prefix: str = "transformer."
    buffers: bool = False  # attn.bias and attn.masked_bias, as in old checkpoints
    seed: int = 0

    @property
    def config(self) -> GPT2Config:
        plain = {
            "bos_token_id": None,
            "eos_token_id": None,
            "attn_pdrop": 0,
            "embd_pdrop": 0,
            "resid_pdrop": 0,
        }
        return GPT2Config(**plain, **self.fields)


def recipe(name: str, sizes: tuple[int, int, int, int, int], **rest: Any) -> Recipe:
    """Return a recipe of (n_embd, n_head, n_layer, vocab_size, n_positions) and fields of Recipe or of config.json."""
    names = ("n_embd", "n_head", "n_layer", "vocab_size", "n_positions")
    own = {key: rest.pop(key) for key in list(rest) if key in Recipe.__dataclass_fields__}
    return Recipe(name, {**dict(zip(names, sizes, strict=True)), **rest}, **own)


ACTIVATION = (36, 3, 2, 181, 72)
SCORES = (48, 4, 3, 193, 85)
BY_LAYER = {"scale_attn_by_inverse_layer_idx": True}
RECIPES = (
    recipe("plain", (64, 4, 2, 257, 96)),
    recipe("one-head", (48, 1, 2, 101, 73)),
    recipe("head-size-1", (6, 6, 2, 97, 70), seed=26),
    recipe("head-size-7", (21, 3, 2, 131, 77), seed=3),
    recipe("head-size-64", (128, 2, 2, 503, 150)),
    recipe("head-size-80", (160, 2, 2, 211, 75)),
    recipe("head-size-128", (256, 2, 1, 509, 81), seed=1),
    recipe("head-size-300", (300, 1, 1, 97, 69)),
    recipe("odd-width", (17, 1, 2, 97, 71), seed=3),
    recipe("one-token-wider", (65, 5, 2, 129, 129), seed=1),
    recipe("vocab-50304", (16, 4, 1, 50304, 70)),
    recipe("vocab-3", (16, 2, 2, 3, 74), seed=1),
    recipe("short", (20, 4, 2, 113, 16), seed=1),
    recipe("inner-wide", (40, 5, 2, 149, 80), activation_function="gelu_python_tanh", n_inner=333),
    recipe("inner-narrow", (40, 5, 2, 149, 80), seed=1, n_inner=7),
    *(recipe(name, ACTIVATION, activation_function=name) for name in ("gelu", "gelu_fast", "tanh")),
    *(recipe(name, ACTIVATION, seed=1, activation_function=name) for name in ("quick_gelu", "relu", "silu")),
    recipe("scores-both", SCORES, seed=2, scale_attn_weights=False, **BY_LAYER),
    recipe("mistral-like", (80, 4, 3, 211, 100), reorder_and_upcast_attn=True, **BY_LAYER),
    recipe("epsilon-large", (32, 4, 2, 157, 78), layer_norm_epsilon=0.1),
    recipe("untied", (44, 4, 2, 223, 90), activation_function="gelu_accurate", tie_word_embeddings=False),
)


@dataclass(frozen=True)
class Greedy:
    """transformers' greedy continuation of a prompt, and the smallest lead of a best logit."""

    token_ids: list[int]
    lead: float


@dataclass(frozen=True)
class Case:
    """A checkpoint in a folder, and transformers' model of it in float32."""

    recipe: Recipe
    folder: Path
    model: GPT2LMHeadModel = field(repr=False)

    def random_ids(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.model.config.vocab_size, (length,), generator=generator).tolist()


def make_case(recipe: Recipe, folder: Path) -> Case:
    """Write the recipe's checkpoint; if transformers reads its names, it reads the model back from the files."""
    model = make_model(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(recipe.config.to_dict()))
    write_weights(folder, state_of(recipe, model), recipe.form)
    if recipe.prefix in ("", "transformer."):
        attention = {"attn_implementation": "eager"} if recipe.config.reorder_and_upcast_attn else {}
        model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, **attention).eval()
    return Case(recipe, folder, model)


def make_model(recipe: Recipe) -> GPT2LMHeadModel:
    """Return a float32 model with weights rounded to the recipe's dtype."""
    torch.manual_seed(recipe.seed)
    model = GPT2LMHeadModel(recipe.config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, recipe.config)
        ids = torch.randint(recipe.config.vocab_size, (1, recipe.config.n_positions))
        scale = LOGITS_STD / model(ids).logits.std()
        model.transformer.ln_f.weight *= scale
        model.transformer.ln_f.bias *= scale
        for parameter in model.parameters():
            parameter.copy_(parameter.to(getattr(torch, recipe.dtype)))
    return model


def _fill(name: str, parameter: torch.Tensor, config: GPT2Config) -> None:
    """Leave no 0 or 1 that would hide a mistake; a few channels stand out, as in trained models."""
    outlier = 1 % config.n_embd
    if name.endswith(("wte.weight", "wpe.weight")) or name.startswith("lm_head"):
        parameter.normal_(std=0.5)
        if name.endswith("wpe.weight"):
            parameter[:, outlier] += 5.0
    elif ".ln_" in name and name.endswith("weight"):
        # Signs keep a tied head from repeating the last token forever.
        parameter.uniform_(0.7, 1.3).mul_(torch.randint(2, parameter.shape) * 2 - 1)
        parameter[outlier] *= 0.2  # trained models damp the outlier channel
        parameter[-1] *= 3.0
    elif name.endswith("bias"):
        parameter.normal_(std=0.1)
    else:
        parameter.normal_(std=1.5 * parameter.shape[0] ** -0.5)  # Conv1D: (in, out)
    if name.endswith("attn.c_attn.weight"):  # scores with a std of about 2 under the config's own scaling
        head_size = config.n_embd // config.n_head
        scaling = (head_size**-0.5 if config.scale_attn_weights else 1.0) * head_size**0.5
        scaling /= int(name.split(".")[2]) + 1 if config.scale_attn_by_inverse_layer_idx else 1
        parameter[:, : 2 * config.n_embd] *= (1.0 / scaling) ** 0.5


def state_of(recipe: Recipe, model: GPT2LMHeadModel) -> dict[str, torch.Tensor]:
    """Return the tensors of the recipe's files, by their names there and in their dtype."""
    config = recipe.config
    head_name = recipe.prefix.removesuffix("transformer.") + "lm_head.weight"
    state = {name: tensor.to(getattr(torch, recipe.dtype)) for name, tensor in model.state_dict().items()}
    head = state.pop("lm_head.weight")
    state = {recipe.prefix + name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    if recipe.buffers:
        size = config.n_positions
        for layer in range(config.n_layer):
            mask = torch.tril(torch.ones(size, size, dtype=torch.uint8)).view(1, 1, size, size)
            state[f"{recipe.prefix}h.{layer}.attn.bias"] = mask
            state[f"{recipe.prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    if not config.tie_word_embeddings:
        state[head_name] = head
    elif recipe.form.startswith("bin"):  # torch.save writes a tied head twice, as two views of one storage
        state[head_name] = state[recipe.prefix + "wte.weight"]
    return state


def write_weights(folder: Path, state: dict[str, torch.Tensor], form: str) -> None:
    """Write `state` into `folder` as one of FORMS."""
    stem, suffix = ("model", "safetensors") if form.startswith("safetensors") else ("pytorch_model", "bin")
    if not form.endswith("-sharded"):
        _write_file(folder / f"{stem}.{suffix}", state, form)
        return
    names = list(state)
    shards = {
        n: f"{stem}-{1 + i * SHARDS // len(names):05}-of-{SHARDS:05}.{suffix}" for i, n in enumerate(names)
    }
    for file in sorted(set(shards.values())):
        _write_file(folder / file, {name: state[name] for name in names if shards[name] == file}, form)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": shards}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def _write_file(path: Path, state: dict[str, torch.Tensor], form: str) -> None:
    if form.startswith("safetensors"):
        save_file(state, path, metadata={"format": "pt"})
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form != "bin-legacy")


def greedy(model: GPT2LMHeadModel, prompt: list[int], max_new_tokens: int) -> Greedy:
    """Return the new ids of generate(do_sample=False), with the EOS that ended it, if any."""
    output = generate(model, prompt, max_new_tokens=max_new_tokens, pad_token_id=0)
    best = torch.cat(output.scores).topk(2).values
    return Greedy(output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).min().item())


def prompt_of(case: Case) -> list[int]:
    return case.random_ids(PROMPT_TOKENS, seed=1)


def assert_same_logits(llm: LLM, model: GPT2LMHeadModel, ids: list[int]) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()  # (T, V)
    logits = llm.logits(ids)  # (T, V)
    assert logits.dtype == np.float32
    assert logits.shape == expected.shape
    assert expected.std() > 1.0
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def assert_same_greedy(llm: LLM, expected: Greedy, prompt: list[int], params: SamplingParams) -> None:
    assert expected.lead > LEAD, f"two logits lie within {expected.lead:.1e}: choose another seed"
    output = llm.generate([prompt], params)[0].outputs[0]
    assert output.token_ids == expected.token_ids
    assert output.finish_reason == "length"
    assert len(output.token_ids) == params.max_tokens


def without_eos(model: GPT2LMHeadModel) -> Any:
    """Return a context in which the model generates past its EOS ids."""
    return patch.object(model.generation_config, "eos_token_id", None)
