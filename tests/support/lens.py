"""TransformerLens's answers on tiny models: of 3.5.1, the last with HookedTransformer, live or kept.

`python tests/support/lens.py` asks it and writes tests/data/lens.npz. In 4.3 an edit of hook_resid_mid does not reach
the residual stream; here it does, as in 3.5.1.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "data" / "lens.npz"
MODELS = {
    "plain": {},
    "one-head": {"n_head": 1, "n_embd": 24, "n_layer": 3},
    "relu-narrow": {"activation_function": "relu", "n_inner": 20},
    "epsilon-untied": {"layer_norm_epsilon": 0.1, "tie_word_embeddings": False, "n_head": 5, "n_embd": 20},
    "local": {"model_type": "gpt_neo", "hidden_size": 16, "num_heads": 2, "window_size": 3},
}
IDS = [5, 17, 3, 60, 22]
# By name: a point, what TransformerLens's hook does to x (1, T, ...), and the fields of an Edit.
Change = tuple[str, Callable[[Any, Any], Any], dict[str, Any]]
SCORES = ("knock out attention", "scale the pattern")  # of the reference alone


def changes(width: int) -> dict[str, Change]:
    vector = np.linspace(-1, 2, width, dtype=np.float32)
    rows = np.stack([vector, -vector])
    steer = _set(np.s_[:, 2:], lambda x, t: x + t(vector))
    patch = _set(np.s_[0, [1, 3]], lambda x, t: t(rows))
    no_head, no_neuron = (_set(np.s_[:, :, index], lambda x, t: 0) for index in (0, 7))
    knock_out = _set(np.s_[:, 0, 3, 1], lambda x, t: -np.inf)
    return {
        "steer resid_pre": ("blocks.0.hook_resid_pre", steer, {"value": vector, "at": slice(2, None)}),
        "steer resid_mid": ("blocks.0.hook_resid_mid", steer, {"value": vector, "at": [2, 3, 4]}),
        "steer resid_post": ("blocks.1.hook_resid_post", steer, {"value": vector, "at": slice(-3, None)}),
        "ablate a head": ("blocks.0.attn.hook_z", no_head, {"keep": 0, "index": 0}),
        "ablate a neuron": ("blocks.1.mlp.hook_post", no_neuron, {"keep": 0, "index": 7}),
        "patch": ("blocks.1.hook_resid_pre", patch, {"keep": 0, "value": rows, "at": [1, 3]}),
        "scale mlp_out": ("blocks.0.hook_mlp_out", lambda x, t: x * 0.5, {"keep": 0.5}),
        "scale attn_out": ("blocks.1.hook_attn_out", lambda x, t: x * 0.5, {"keep": 0.5}),
        "function of q": ("blocks.0.attn.hook_q", lambda x, t: x.tanh(), {"function": np.tanh}),
        "project out": ("blocks.0.hook_resid_post", _project(vector), {"project_out": vector}),
        "knock out attention": (
            "blocks.0.attn.hook_attn_scores",
            knock_out,
            {"value": -np.inf, "at": 3, "index": (0, 1)},
        ),
        "scale the pattern": ("blocks.1.attn.hook_pattern", lambda x, t: x * 0.5, {"keep": 0.5}),
    }


def _set(where: Any, new: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def hook(x, t):
        x[where] = new(x[where], t)
        return x

    return hook


def _project(vector):
    def hook(x, t):
        direction = t(vector / np.linalg.norm(vector))
        return x - (x @ direction)[..., None] * direction

    return hook


def ask(name: str) -> dict[str, np.ndarray]:
    """Return all arrays of a model without the axis of the batch, and logits (T, V) of each change."""
    import torch
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_neo_weights
    from transformers import AutoModelForCausalLM

    from support.family_models import write_any

    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        theirs = AutoModelForCausalLM.from_pretrained(write_any(Path(folder), **MODELS[name])).eval()
    c = theirs.config
    width = c.hidden_size
    is_neo = c.model_type == "gpt_neo"
    inner = c.intermediate_size if is_neo else c.n_inner
    local = {"window_size": c.window_size, "attn_types": c.attention_layers} if is_neo else {}
    config = HookedTransformerConfig(
        n_layers=c.num_hidden_layers,
        d_model=width,
        n_ctx=c.max_position_embeddings,
        d_head=width // c.num_attention_heads,
        n_heads=c.num_attention_heads,
        d_mlp=inner or 4 * width,
        d_vocab=c.vocab_size,
        act_fn=c.activation_function,
        eps=c.layer_norm_epsilon,
        normalization_type="LN",
        use_attn_scale=not is_neo,
        use_local_attn=is_neo,
        use_attn_result=True,
        default_prepend_bos=False,
        device="cpu",
        **local,
    )
    model = HookedTransformer(config)
    ids = torch.tensor([IDS])
    weights = (convert_neo_weights if is_neo else convert_gpt2_weights)(theirs, config)
    model.load_state_dict(weights, strict=False)
    logits, cache = model.run_with_cache(ids)
    found = {
        "logits": logits[0].numpy(),
        **{key: array[0].numpy() for key, array in cache.items() if "unembed" not in key},
    }
    for label, (point, change, _) in changes(width).items():
        hook = lambda x, hook, change=change: change(x.clone(), torch.from_numpy)  # noqa: E731
        found[label] = model.run_with_hooks(ids, fwd_hooks=[(point, hook)])[0].numpy()
    stack, labels = cache.decompose_resid(return_labels=True)
    attrs = cache.logit_attrs(
        stack, 9, incorrect_tokens=4
    )  # without ln_f's weight, which is in the directions below
    found |= {"accumulated": cache.accumulated_resid(incl_mid=True, apply_ln=False)[:, 0].numpy()}
    found |= {
        "decomposed": stack[:, 0].numpy(),
        "heads": cache.stack_head_results(incl_remainder=True)[:, 0].numpy(),
    }
    found |= {"scaled": cache.apply_ln_to_stack(stack)[:, 0].numpy()}
    assert len(labels) == len(attrs)
    return found


def kept(name: str) -> dict[str, np.ndarray]:
    with np.load(FILE) as file:
        return {key.partition("/")[2]: file[key] for key in file.files if key.startswith(f"{name}/")}


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    np.savez_compressed(
        FILE, **{f"{name}/{key}": array for name in MODELS for key, array in ask(name).items()}
    )
