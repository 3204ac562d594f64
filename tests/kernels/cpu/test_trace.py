"""Embeddings that are given in place of tokens, and a look inside a step, against transformers on both backends."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support.golden_models import golden_ids, write_model
from support.oracles import live_model, traced
from support.recorded import recorded
from tinygpt.kernels import cpu, reference
from tinygpt.kernels.backend import Batch
from tinygpt.kernels.cpu.model import final_norm
from tinygpt.kernels.reference.layers import layer_norm
from tinygpt.look.captures import captured
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.open import open_checkpoint

FIELDS = {"n_layer": 3, "n_head": 3, "n_embd": 48, "n_positions": 96, "vocab_size": 90}
LENGTH = 70
IDS = golden_ids(LENGTH, vocab_size=FIELDS["vocab_size"])
# Where answers are compared: at ends of chunks and of blocks, and in between. All of them would be long to keep.
PLACES = [0, 1, 15, 16, 32, 33, 40, 41, 63, 64, 68, 69]
KINDS = [(reference, "float32", 1e-4), (cpu, "float32", 1e-4), (cpu, "bfloat16", 0.15), (cpu, "int8", 0.15)]
BACKENDS = pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"), KINDS, ids=["reference", "cpu", "bf16", "int8"]
)


@recorded
def trace_of_transformers(is_tied: bool, ids: list[int]) -> np.ndarray:
    """(L + 3, PLACES, C): hidden states, and the queries of layer 1."""
    import torch

    model = live_model(**FIELDS, tie_word_embeddings=is_tied)
    states, _ = traced(model, ids)
    with torch.no_grad():
        layer = model.transformer.h[1]
        queries = layer.attn.c_attn(layer.ln_1(states[1]))[..., : FIELDS["n_embd"]]
    return torch.stack([*states, queries])[:, PLACES].numpy()


@recorded
def logits_of_embeds(is_tied: bool, ids: list[int], embeds: np.ndarray, places: dict[int, int]) -> np.ndarray:
    """(PLACES, V), where places has a row of embeds, counted down from -1, in a token's place."""
    import torch

    model = live_model(**FIELDS, tie_word_embeddings=is_tied)
    with torch.no_grad():
        inputs = model.transformer.wte(torch.tensor([ids]))
        for place, token_id in places.items():
            inputs[0, place] = torch.from_numpy(embeds[-1 - token_id])
        return model(inputs_embeds=inputs).logits[0, PLACES].numpy()


@dataclass(frozen=True)
class Case:
    is_tied: bool
    folder: Path


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def case(request, tmp_path_factory) -> Case:
    folder = write_model(tmp_path_factory.mktemp("traced"), **FIELDS, tie_word_embeddings=request.param)
    return Case(request.param, folder)


def machine(backend, folder, dtype):
    checkpoint = open_checkpoint(str(folder))
    cache_dtype = "float32" if dtype == "float32" else "bfloat16"
    return (
        backend.load_params(checkpoint, dtype, 2),
        backend.new_kv_cache(checkpoint.config, 1, 96, cache_dtype),
        backend.new_workspace(checkpoint.config, 96, 96, 2, dtype),
    )


@BACKENDS
def test_trace(case, backend, dtype, tolerance):
    """In two steps, as a prompt in chunks is; the cache and later steps are as they would be without."""
    params, cache, workspace = machine(backend, case.folder, dtype)
    parts = [Batch.of([IDS[:41]], [0], [0]), Batch.of([IDS[41:]], [41], [0])]
    layers = range(FIELDS["n_layer"])
    last = ("resid_post", layers[-1])
    places = [*(("resid_pre", layer) for layer in layers), last, ("q", 1)]

    def forward(batch: Batch, look):
        return backend.forward(params, batch, cache, workspace, look)

    *hidden, queries = captured(forward, parts, places)
    hidden = np.stack([*hidden, backend.final_norm(params, hidden[-1])])
    queries = queries.reshape(LENGTH, -1)
    *states, expected = trace_of_transformers(case.is_tied, IDS)  # (PLACES, C) each
    assert hidden.shape == (len(states), LENGTH, FIELDS["n_embd"])
    np.testing.assert_allclose(hidden[:, PLACES], states, rtol=0, atol=tolerance * np.abs(states).max())
    np.testing.assert_allclose(queries[PLACES], expected, rtol=0, atol=tolerance * np.abs(expected).max())
    following = Batch.of([[7]], [LENGTH], [0])
    after = backend.forward(params, following, cache, workspace).copy()
    params, cache, workspace = machine(backend, case.folder, dtype)
    backend.forward(params, Batch.of([IDS], [0], [0]), cache, workspace)
    np.testing.assert_array_equal(after, backend.forward(params, following, cache, workspace))


@BACKENDS
def test_embeds_stand_for_negative_ids(case, backend, dtype, tolerance):
    params, cache, workspace = machine(backend, case.folder, dtype)
    embeds = np.random.default_rng(0).standard_normal((5, 48)).astype(np.float32) * np.float32(0.3)
    places = {0: -3, 1: -1, 2: -5, 40: -1, 69: -2}
    mixed = [places.get(i, token_id) for i, token_id in enumerate(IDS)]
    expected = logits_of_embeds(case.is_tied, IDS, embeds, places)  # (PLACES, V)
    parts = [
        backend.forward(params, Batch.of([mixed[a:b]], [a], [0], "all", embeds), cache, workspace).copy()
        for a, b in ((0, 33), (33, 70))
    ]
    np.testing.assert_allclose(
        np.concatenate(parts)[PLACES], expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )


class OutlierGains:
    """A checkpoint whose ln_f has three channels far above the rest, which the head's smoothing evens out."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint

    def __getattr__(self, name: str):
        return getattr(self._checkpoint, name)

    def tensor(self, name: str) -> np.ndarray:
        values = self._checkpoint.tensor(name)
        return (
            values * np.where(np.arange(48) % 16 == 3, np.float32(30), np.float32(1))
            if "ln_f" in name
            else values
        )


def test_the_last_hidden_state_is_free_of_smoothing(case):
    checkpoint = OutlierGains(open_checkpoint(str(case.folder)))
    params = cpu.load_params(checkpoint, "int8", 1)
    x = np.random.default_rng(0).standard_normal((4, 48))
    assert np.ptp(params.head_factors) > 0.5  # there is something to undo
    expected = layer_norm(reference.load_params(checkpoint), "ln_f", x)
    np.testing.assert_allclose(final_norm(params, x.astype(np.float32)), expected, rtol=1e-4, atol=1e-4)
