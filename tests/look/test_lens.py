"""Every activation, edits and the cache's methods, beside TransformerLens 3.5.1 on tiny models."""

import numpy as np
import pytest

from support import lens
from support.family_models import write_any
from tinygpt import LLM, Edit

TOLERANCE = 1e-5  # of an array's largest value


CASES = [(name, device) for name in lens.MODELS for device in ("reference", "cpu")]
COMPILES = ("local", "cpu")
SLOW = pytest.param(COMPILES, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[SLOW if case == COMPILES else case for case in CASES], ids=str)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def name(case):
    return case[0]


@pytest.fixture(scope="module")
def theirs(name):
    return lens.kept(name)


@pytest.fixture(scope="module")
def llm(case, tmp_path_factory):
    name, device = case
    with LLM(str(write_any(tmp_path_factory.mktemp(name), **lens.MODELS[name])), device=device) as llm:
        yield llm


def near(ours, theirs) -> None:
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(theirs))
    ours = np.where(np.isneginf(ours), 0, ours)
    theirs = np.where(np.isneginf(theirs), 0, theirs)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())


def test_every_point_has_its_name_shape_and_values(llm, theirs):
    logits, cache = llm.run_with_cache(lens.IDS, "*")
    near(logits[0], theirs["logits"])
    assert set(cache) == {key for key in theirs if "hook_" in key}
    for key, array in cache.items():
        near(array[0], theirs[key])


def test_edits_change_the_logits_as_hooks_do(llm, theirs):
    plain = llm.logits(lens.IDS)
    for label, (point, _, fields) in lens.changes(llm.config.n_embd).items():
        if label in lens.SCORES and "attn_scores" not in llm._inputs._points().changed:
            continue
        near(llm.logits(lens.IDS, Edit(point, **fields)), theirs[label])
        assert np.abs(theirs[label] - plain).max() > 1e-3


def test_the_caches_methods(llm, theirs):
    logits, cache = llm.run_with_cache(lens.IDS)
    near(cache.accumulated_resid(incl_mid=True)[:, 0], theirs["accumulated"])
    parts, labels = cache.decompose_resid(return_labels=True)
    near(parts[:, 0], theirs["decomposed"])
    assert labels[:4] == ["embed", "pos_embed", "0_attn_out", "0_mlp_out"]
    near(cache.stack_head_results(incl_remainder=True)[:, 0], theirs["heads"])
    near(cache.apply_ln_to_stack(parts)[:, 0], theirs["scaled"])
    near(cache.stack_activation("scale", 1, "ln2")[0, 0], theirs["blocks.0.ln2.hook_scale"])
    near(cache.decompose_resid(pos_slice=-1, apply_ln=True)[:, 0], theirs["scaled"][:, -1])
    tensor = llm._inputs._points().tensor
    direction = tensor("lm_head.weight")[9] - tensor("lm_head.weight")[4]
    found = cache.logit_attrs(parts, 9, incorrect_tokens=4)[:, 0].sum(0) + tensor("ln_f.bias") @ direction
    near(found, theirs["logits"][:, 9] - theirs["logits"][:, 4])
    by_position = cache.logit_attrs(parts, np.array([[9] * len(lens.IDS)]))
    np.testing.assert_allclose(by_position, cache.logit_attrs(parts, 9), atol=1e-6)
    near(cache.logit_lens()[-1], logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", lens.MODELS, scope="module")
def test_what_was_kept_is_what_transformer_lens_says(name, theirs):
    pytest.importorskip("transformer_lens.HookedTransformer")
    live = lens.ask(name)
    assert live.keys() == theirs.keys()
    for key, array in live.items():
        near(array, theirs[key])
