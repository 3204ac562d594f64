"""Tiny random GPT-2 checkpoints, made by transformers and written in every form that checkpoints come in."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

logging.disable_progress_bar()
logging.set_verbosity_error()

FORMS = ("safetensors", "safetensors-sharded", "bin", "bin-legacy", "bin-sharded")
DTYPES = ("float32", "float16", "bfloat16")
# In front of "wte.weight"; "transformer." alone is what GPT2LMHeadModel itself writes.
PREFIXES = (
    "",
    "transformer.",
    "model.",
    "model.transformer.",
    "module.",
    "module.transformer.",
    "_orig_mod.",
    "_orig_mod.transformer.",
)
SHARDS = 3
LOGITS_STD = 3.0  # what trained GPT-2s have; an absolute tolerance means nothing without it


@dataclass(frozen=True)
class Recipe:
    """One checkpoint. `fields` go into config.json over the defaults of transformers' GPT2Config.

    eos: "none" leaves generation to its length; "one" and "several" name ids that the greedy run meets.
    """

    name: str
    fields: dict[str, Any]
    form: str = "safetensors"
    dtype: str = "float32"
    prefix: str = "transformer."
    buffers: bool = False  # attn.bias and attn.masked_bias, as old checkpoints have them
    n_ctx: bool = False
    eos: str = "none"
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


@dataclass(frozen=True)
class Greedy:
    """transformers' greedy continuation of a prompt, and how close the closest call of two logits was."""

    token_ids: list[int]
    lead: float


@dataclass(frozen=True)
class Case:
    """A checkpoint in a folder beside the model that transformers makes of it, in float32."""

    recipe: Recipe
    folder: Path
    model: GPT2LMHeadModel = field(repr=False)

    def random_ids(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.model.config.vocab_size, (length,), generator=generator).tolist()


def make_case(recipe: Recipe, folder: Path) -> Case:
    """Write `recipe` into `folder`; where transformers reads such files, the model is read back from them."""
    model = make_model(recipe)
    config = {**recipe.config.to_dict(), **({"n_ctx": recipe.config.n_positions} if recipe.n_ctx else {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, state_of(recipe, model), recipe.form)
    if recipe.prefix in ("", "transformer."):
        attention = {"attn_implementation": "eager"} if recipe.config.reorder_and_upcast_attn else {}
        model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, **attention).eval()
    case = Case(recipe, folder, model)
    if recipe.eos != "none":
        choose_eos(case)
    return case


def make_model(recipe: Recipe) -> GPT2LMHeadModel:
    """A float32 model whose weights are already rounded to the recipe's dtype."""
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
    """Nothing stays at a 0 or 1 that would hide a mistake; a few channels stand out, as in trained models."""
    outlier = 1 % config.n_embd
    if name.endswith("wte.weight") or name.startswith("lm_head"):
        parameter.normal_(std=0.5)
    elif name.endswith("wpe.weight"):
        parameter.normal_(std=0.5)
        parameter[:, outlier] += 5.0
    elif ".ln_" in name and name.endswith("weight"):
        # Signs keep a tied head from repeating the last token for ever.
        parameter.uniform_(0.7, 1.3).mul_(torch.randint(2, parameter.shape) * 2 - 1)
        parameter[outlier] *= 0.2  # trained models damp the channel that stands out
        parameter[-1] *= 3.0
    elif name.endswith("bias"):
        parameter.normal_(std=0.1)
    else:
        parameter.normal_(std=1.5 * parameter.shape[0] ** -0.5)  # Conv1D: (in, out)
    if name.endswith("attn.c_attn.weight"):
        _sharpen(parameter, int(name.split(".")[2]), config)


def _sharpen(c_attn: torch.Tensor, layer: int, config: GPT2Config) -> None:
    """Scale queries and keys so that scores have a std of about 2 under the config's own scaling."""
    head_size = config.n_embd // config.n_head
    scaling = (head_size**-0.5 if config.scale_attn_weights else 1.0) * head_size**0.5
    if config.scale_attn_by_inverse_layer_idx:
        scaling /= layer + 1
    c_attn[:, : 2 * config.n_embd] *= (1.0 / scaling) ** 0.5


def state_of(recipe: Recipe, model: GPT2LMHeadModel) -> dict[str, torch.Tensor]:
    """The tensors of the recipe's files, named and typed as it says."""
    dtype, config = getattr(torch, recipe.dtype), recipe.config
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    head = state.pop("lm_head.weight")
    state = {recipe.prefix + name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    if recipe.buffers:
        size = config.n_positions
        for layer in range(config.n_layer):
            mask = torch.tril(torch.ones(size, size, dtype=torch.uint8)).view(1, 1, size, size)
            state[f"{recipe.prefix}h.{layer}.attn.bias"] = mask
            state[f"{recipe.prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    if not config.tie_word_embeddings:
        state[recipe.prefix.removesuffix("transformer.") + "lm_head.weight"] = head
    elif recipe.form.startswith("bin"):  # torch.save writes a tied head twice, as two views of one storage
        state[recipe.prefix.removesuffix("transformer.") + "lm_head.weight"] = state[recipe.prefix + "wte.weight"]
    return state


def write_weights(folder: Path, state: dict[str, torch.Tensor], form: str) -> None:
    """Write `state` into `folder` as one of FORMS."""
    stem, suffix = ("model", "safetensors") if form.startswith("safetensors") else ("pytorch_model", "bin")
    if not form.endswith("-sharded"):
        _write_file(folder / f"{stem}.{suffix}", state, form)
        return
    names = list(state)
    weight_map = {
        name: f"{stem}-{1 + i * SHARDS // len(names):05}-of-{SHARDS:05}.{suffix}" for i, name in enumerate(names)
    }
    for file in sorted(set(weight_map.values())):
        _write_file(folder / file, {name: state[name] for name in names if weight_map[name] == file}, form)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def _write_file(path: Path, state: dict[str, torch.Tensor], form: str) -> None:
    if form.startswith("safetensors"):
        save_file(state, path, metadata={"format": "pt"})
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form != "bin-legacy")


def greedy(model: GPT2LMHeadModel, prompt: list[int], max_new_tokens: int) -> Greedy:
    """transformers' `generate(do_sample=False)`: the new ids, an EOS included where one ended it."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.scores).topk(2).values
    lead = (best[:, 0] - best[:, 1]).min().item()
    return Greedy(output.sequences[0, len(prompt) :].tolist(), lead)


def choose_eos(case: Case) -> None:
    """Write a generation_config.json with EOS ids that the greedy run of `prompt_of(case)` meets."""
    prompt = prompt_of(case)
    run = greedy(case.model, prompt, case.model.config.n_positions - len(prompt)).token_ids
    fresh = [token for i, token in enumerate(run) if token not in run[:i]]
    met = fresh[min(5, len(fresh) - 1)]
    never = next(i for i in range(case.model.config.vocab_size) if i not in run)
    eos = met if case.recipe.eos == "one" else [never, met]
    (case.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    case.model.generation_config.eos_token_id = eos


def prompt_of(case: Case) -> list[int]:
    return case.random_ids(5, seed=1)
