"""Hidden states, attention maps and embeddings, against those of transformers."""

import numpy as np
import pytest

from support.engines import opened
from support.examples import are_all
from support.family_models import write_any
from support.golden_models import golden_ids
from support.oracles import live_model, traced
from support.paths import EOS, VOCAB_SIZE
from support.recorded import recorded
from support.tables import rows
from tinygpt import LLM, SamplingParams
from tinygpt.errors import RequestError

V = 90
SIZES = {"n_layer": 3, "n_head": 3, "n_embd": 48, "n_positions": 96, "vocab_size": V}
VARIANTS = dict(
    rows("""
plain | {}
odd-heads | {"n_head": 4, "n_embd": 44}
by-layer | {"scale_attn_by_inverse_layer_idx": true}
unscaled | {"scale_attn_weights": false}
upcast | {"reorder_and_upcast_attn": true, "tie_word_embeddings": false}
""")
)
MODELS = {name: SIZES | fields for name, fields in VARIANTS.items()}
# From position 68 on, a window begins in the second block of 64 keys.
MODELS["local"] = {"model_type": "gpt_neo", "hidden_size": 48, "window_size": 5, "vocab_size": V}
MODELS["local"] |= {"max_position_embeddings": 96}
LENGTHS = [1, 13, 64, 90]
TOLERANCE = 1e-4


def ids_of(length: int) -> list[int]:
    return golden_ids(length, f"{length} ids", V)


def trace_of(variant: str, ids: list[int]):
    return traced(live_model(**MODELS[variant]), ids)


@recorded
def hidden_states_of(variant: str, ids: list[int]) -> np.ndarray:
    return np.stack(trace_of(variant, ids)[0])  # (L + 2, T, C)


@recorded
def attentions_of(variant: str, ids: list[int]) -> np.ndarray:
    return np.concatenate(trace_of(variant, ids)[1])  # (L, H, T, T)


@pytest.fixture(scope="module", params=MODELS)
def variant(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=["cpu", "reference"])
def llm(request, variant, tmp_path_factory):
    folder = write_any(tmp_path_factory.mktemp(variant), **MODELS[variant])
    with LLM(str(folder), device=request.param, max_num_seqs=2, max_num_batched_tokens=40) as llm:
        yield llm


@pytest.mark.parametrize("length", LENGTHS)
def test_they_equal_those_of_transformers(variant, llm, length):
    ids = ids_of(length)
    states = llm.hidden_states(ids)
    before = llm.hidden_states(ids, before_norm=True)
    assert states.dtype == np.float32
    np.testing.assert_array_equal(before[:-1], states[:-1])
    wanted = hidden_states_of(variant, ids)
    found = np.concatenate([before, states[-1:]])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * max(1, np.abs(wanted).max() / 10))
    maps = llm.attentions(ids)
    assert maps.dtype == np.float32
    wanted = attentions_of(variant, ids)
    np.testing.assert_allclose(maps, wanted, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(maps[wanted == 0], 0)  # of what a query does not see


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [("last", lambda x: x[-1]), ("mean", lambda x: x.mean(0)), ("sum", lambda x: x.sum(0))],
)
def test_embeddings_are_pooled_last_hidden_states(variant, llm, pooling, pool):
    if variant == "local" and not are_all():
        pytest.skip("compiles a step of its own: run with --slow")
    prompts = [ids_of(length) for length in LENGTHS]
    expected = np.stack([pool(llm.hidden_states(ids)[-1]) for ids in prompts])  # (prompts, C)
    vectors = llm.embed(prompts, pooling)
    assert (vectors.shape, vectors.dtype) == (expected.shape, np.float32)
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-5)


demo = opened("demo", max_num_seqs=2)


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8"])
def test_other_dtypes_are_near(demo, dtype):
    """Their KV cache holds bfloat16."""
    ids = demo.tokenizer.encode("Once upon a time there was a little house in the woods")
    with LLM("demo", dtype=dtype) as other:
        np.testing.assert_allclose(other.attentions(ids), demo.attentions(ids), rtol=0, atol=0.05)
        got = other.embed([ids])[0]
        expected = demo.embed([ids])[0]
        assert got @ expected / np.linalg.norm(got) / np.linalg.norm(expected) > 0.99


def test_the_same_bits_beside_a_running_request(demo):
    ids = np.random.default_rng(0).integers(EOS, size=150).tolist()
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1, seed=0)
    expected = demo.generate([ids[:50]], params)[0].outputs[0]
    states = demo.hidden_states(ids)
    maps = demo.attentions(ids)
    vector = demo.embed([ids], "mean")
    tokens = []
    for i, chunk in enumerate(demo.stream(ids[:50], params)):
        tokens.append(chunk.token_id)
        if i % 7 == 0:
            np.testing.assert_array_equal(demo.hidden_states(ids), states)
            np.testing.assert_array_equal(demo.attentions(ids), maps)
            np.testing.assert_array_equal(demo.embed([[3], ids], "mean")[1:], vector)
    assert tokens == expected.token_ids


def test_what_is_refused(demo):
    for call in (demo.hidden_states, demo.attentions, demo.logits, lambda ids: demo.embed([[1], ids])):
        for ids, message in (
            ([], "at least one token id"),
            ([VOCAB_SIZE], f"token id {VOCAB_SIZE} is outside"),
            ([1] * 513, "513 token ids were given.*at most 512"),
        ):
            with pytest.raises(RequestError, match=message):
                call(ids)
    with pytest.raises(RequestError, match="pooling is 'max' and must be one of 'last', 'mean', 'sum'"):
        demo.embed(["a"], "max")
    with LLM("demo") as closed:
        pass
    for call in (closed.hidden_states, closed.attentions, closed.embed):
        with pytest.raises(RequestError, match="closed"):
            call([1])
