"""DRY, XTC and top-n-sigma beside llama.cpp's own samplers, live with llama-cpp-python, otherwise as recorded."""

import ctypes
import functools
import importlib.util
import tempfile
from pathlib import Path

import numpy as np
import pytest

from support.engines import opened, sample_of
from support.paths import DEMO
from support.recorded import recorded
from support.sampling import BACKENDS
from support.tables import fields
from tinygpt import SamplingParams
from tinygpt.cli import main as cli
from tinygpt.engine.sampler import Sampler
from tinygpt.kernels.reference.sampling import filtered, filters_of

HAS_LLAMA = importlib.util.find_spec("llama_cpp") is not None
TEXT = """"Run," said the dog: "run, run!" "Run," said the cat: "run, run!" * The dog and the cat said: "run, run!"
The dog and the cat and the dog and the cat and the dog and the cat"""
CASES = fields("""
defaults: dry_multiplier=0.8
another base: dry_multiplier=1.5, dry_base=1.1, dry_penalty_last_n=200
base 1: dry_multiplier=2.0, dry_base=1.0, dry_allowed_length=1
single tokens: dry_multiplier=0.3, dry_allowed_length=0, dry_penalty_last_n=20
greatest exponent: dry_multiplier=0.25, dry_base=900.0, dry_sequence_breakers=[]
no breakers: dry_multiplier=0.8, dry_sequence_breakers=[], dry_penalty_last_n=500
long breakers: dry_multiplier=0.8, dry_sequence_breakers=[" said the", "run!", "dog:"]
overlapping: dry_multiplier=0.8, dry_sequence_breakers=["the do", "and the dog", "aaaa", "n"]
""")
LAST_TOKENS = (1, 7, 40, -9, -1)  # of TEXT, so that histories end in it, or in repeats


@functools.cache
def vocabulary():
    """llama.cpp's, of the demo."""
    import llama_cpp

    with tempfile.TemporaryDirectory() as folder:
        assert cli.main(["convert", str(DEMO), f"{folder}/demo", "--to", "gguf"]) == 0
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(Path(folder, "demo/model.gguf")).encode(), params)
    return llama_cpp.llama_model_get_vocab(model)


def through(sampler, row, token_ids=()):
    """Return what llama.cpp's sampler leaves of a row (V,), -inf for tokens that it removes."""
    import llama_cpp

    data = (llama_cpp.llama_token_data * row.size)(*((i, score, 0.0) for i, score in enumerate(row.tolist())))
    candidates = llama_cpp.llama_token_data_array(data, row.size, -1, False)
    for token_id in token_ids:
        llama_cpp.llama_sampler_accept(sampler, token_id)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(candidates))
    llama_cpp.llama_sampler_free(sampler)
    scores = np.full(row.size, -np.inf, np.float32)
    for each in candidates.data[: candidates.size]:
        scores[each.id] = each.logit
    return scores


@recorded(is_live=HAS_LLAMA)
def dry_penalties(token_ids, multiplier, base, allowed_length, penalty_last_n, breakers):
    """(K, 2) float64: the tokens that llama.cpp penalizes after these, and their scores, which were 0."""
    import llama_cpp

    texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
    sizes = multiplier, base, allowed_length, penalty_last_n
    sampler = llama_cpp.llama_sampler_init_dry(vocabulary(), *sizes, texts, len(breakers))
    row = np.zeros(llama_cpp.llama_vocab_n_tokens(vocabulary()), np.float32)
    scores = through(sampler, row, token_ids.tolist())
    return np.stack([np.flatnonzero(scores), scores[scores != 0]], 1).astype(np.float64)


@recorded(is_live=HAS_LLAMA)
def excluded(row, top_n_sigma, top_k, xtc_threshold):
    """(V,): what stays of a row after these samplers, in the order of llama.cpp's chain."""
    import llama_cpp

    for sampler in (
        llama_cpp.llama_sampler_init_top_n_sigma(top_n_sigma),
        llama_cpp.llama_sampler_init_top_k(top_k),
        llama_cpp.llama_sampler_init_xtc(1.0, xtc_threshold, 0, 0),
    ):
        row = through(sampler, row)
    return row


llm = opened("demo", device="reference")
fast = opened("demo")  # by which texts are made


def scores_after(llm, backend, token_ids, **fields):
    (sequence,) = llm._inputs.request(token_ids, SamplingParams(**fields)).sequences
    scores = np.zeros((1, llm.config.vocab_size), np.float32)
    assert Sampler(backend).process(scores, [sequence]) == [None]
    return scores[0]


@BACKENDS
@pytest.mark.parametrize("case", CASES)
def test_dry_penalizes_as_llama_cpp(llm, backend, case):
    params, num_penalized = SamplingParams(**CASES[case]), 0
    for last in LAST_TOKENS:
        token_ids = llm.tokenizer.encode(TEXT)[:last] * (1 if last < 0 else 3)
        sizes = params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_penalty_last_n
        found = dry_penalties(np.array(token_ids), *sizes, params.dry_sequence_breakers)  # (K, 2)
        expected = np.zeros(llm.config.vocab_size, np.float32)
        expected[found[:, 0].astype(int)] = found[:, 1]
        np.testing.assert_array_equal(scores_after(llm, backend, token_ids, **CASES[case]), expected)
        num_penalized += len(found)
    assert num_penalized > 1


@BACKENDS
@pytest.mark.parametrize("base", [2.0, 4.0, 16.0, 256.0])
def test_the_greatest_exponent_is_rounded_as_a_float32(llm, backend, base):
    """llama.cpp's FLOAT_MAX_LOG / log(base) is 128 for base 2 in float32 and less in float64; 2.0**128 is infinite."""
    fields = {"dry_multiplier": 1.0, "dry_base": base, "dry_allowed_length": 1, "dry_penalty_last_n": -1}
    scores = scores_after(llm, backend, [5] * 200, **fields, dry_sequence_breakers=[])
    assert scores[5] == -np.inf


def test_xtc_and_top_n_sigma_keep_as_llama_cpp():
    num_removed = np.zeros(3, int)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        row = (rng.standard_normal(30) * rng.choice([0.5, 1, 3])).astype(np.float32)
        row[rng.random(30) < 0.2] = -np.inf  # a mask's
        for i, (sigma, k, threshold) in enumerate([(1.5, 0, 1.0), (-1.0, 0, 0.08), (2.0, 6, 0.1)]):
            params = SamplingParams(temperature=1, top_k=k, top_n_sigma=sigma, xtc_threshold=threshold)
            ours = filtered(row, filters_of(params, 1.0, excludes_top=True))
            np.testing.assert_array_equal(ours, excluded(row, sigma, k, threshold))
            num_removed[i] += np.sum(ours < row)
    assert (num_removed > 20).all()


def test_dry_without_bounds_forbids_repeats(fast):
    """A penalty above all scores is no_repeat_ngram_size."""
    dry = SamplingParams(
        max_tokens=60, dry_multiplier=1e3, dry_penalty_last_n=-1, dry_sequence_breakers="none"
    )
    ngram = SamplingParams(max_tokens=60, no_repeat_ngram_size=3)
    prompt = "The dog ran and the dog ran and the dog"
    ours, theirs, plain = (
        sample_of(fast, prompt, p).token_ids for p in (dry, ngram, SamplingParams(max_tokens=60))
    )
    assert ours == theirs != plain


@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_xtc_excludes_in_its_share_of_draws_whatever_the_token_s_draw(fast, probability):
    """Of two equal tokens the second stays: the first comes in half of the other draws."""

    def two(prompt, new, scores):
        return np.where(np.arange(scores.size) < 2, np.float32(0), np.float32(-np.inf))

    params = SamplingParams(max_tokens=160, temperature=1, seed=5, ignore_eos=True, logits_processors=two)
    params = [params, SamplingParams(**vars(params) | {"xtc_probability": probability})]
    plain, with_xtc = (sample_of(fast, "Once", p).token_ids for p in params)
    share = with_xtc.count(0) / plain.count(0)
    assert abs(share - (1 - probability)) < 0.15
    assert all(x == 0 for x, y in zip(plain, with_xtc, strict=True) if x != y)


def test_breakers_need_a_tokenizer_or_none(llm, monkeypatch):
    monkeypatch.setattr(llm._inputs, "_tokenizer", None)
    with pytest.raises(ValueError, match=r"dry_sequence_breakers needs a tokenizer: .* Give an empty list"):
        llm._inputs.request([1, 2], SamplingParams(dry_multiplier=1))
    assert llm._inputs.request([1, 2], SamplingParams(dry_multiplier=1, dry_sequence_breakers=[])).sequences
