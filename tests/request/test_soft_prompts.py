"""Soft prompts in requests: what PEFT makes of the same files, whoever else is in the batch."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import batches_of, log_softmax, sample_of, sizes
from support.examples import daily
from support.golden_models import SOFT_PROMPTS, golden_ids, write_model, write_soft_prompt
from support.oracles import generate, live_model, live_peft_model
from support.recorded import recorded
from support.sampling import any_params
from tinygpt import LLM, SamplingParams
from tinygpt.errors import RequestError

pytestmark = pytest.mark.filterwarnings("ignore:::transformers", "ignore:::peft")
V = 90
POSITIONS = 96
C = 48
P = 7
FIELDS = {
    "n_layer": 3,
    "n_head": 3,
    "n_embd": C,
    "n_positions": POSITIONS,
    "vocab_size": V,
    "bos_token_id": 1,
}
NAMES = tuple(SOFT_PROMPTS)
TOLERANCE = 1e-4
EVERY = slice(None, None, 4)  # positions whose logits are compared


@dataclass(frozen=True)
class Tuned:
    base: str
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Tuned:
    folder = tmp_path_factory.mktemp("tuned")
    folders = {name: write_soft_prompt(folder / name, name, P, **FIELDS) for name in NAMES}
    return Tuned(str(write_model(folder / "base", **FIELDS)), folders)


def ids_of(count: int) -> list[int]:
    return golden_ids(count, vocab_size=V)


@functools.cache
def peft_model(name: str):
    with tempfile.TemporaryDirectory() as folder:
        return live_peft_model(Path(folder), lambda own: write_soft_prompt(own, name, P, **FIELDS), **FIELDS)


@recorded
def soft_tokens_of_peft(name: str, prompt: list[int], fields: dict) -> np.ndarray:
    output = generate(peft_model(name), prompt, **{"max_new_tokens": 12, "pad_token_id": 0, **fields})
    return output.sequences[0, len(prompt) :].numpy().astype(np.int8)


@recorded
def soft_logits_of_peft(name: str, prompt: list[int]) -> np.ndarray:
    """(T / 4, V)."""
    import torch

    with torch.no_grad():
        return peft_model(name)(input_ids=torch.tensor([prompt])).logits[0, -len(prompt) :][EVERY].numpy()


@recorded
def logits_behind(embeds: np.ndarray, prompt: list[int]) -> np.ndarray:
    """(T / 4, V): transformers' own, where embeddings stand in front of the prompt's."""
    import torch

    model = live_model(**FIELDS)
    with torch.no_grad():
        inputs = torch.cat(
            [torch.from_numpy(embeds.astype(np.float32)), model.transformer.wte.weight[prompt]]
        )
        return model(inputs_embeds=inputs[None]).logits[0, len(embeds) :][EVERY].numpy()


@pytest.fixture(scope="module", params=["cpu", "reference"])
def llm(request, tuned):
    with LLM(tuned.base, device=request.param, soft_prompts=tuned.folders, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(tuned):
    with LLM(tuned.base, soft_prompts=tuned.folders, max_num_seqs=1, prefix_cache_seqs=0) as llm:
        yield llm


def params_of(name: str | None, **fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "soft_prompt": name, "ignore_eos": True, "seed": 0, **fields})


def table(found: list[dict[int, float]]) -> np.ndarray:
    """(len(found), V), where all of the vocabulary was asked for."""
    return np.array([[row[token_id] for token_id in range(V)] for row in found])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "fields", [{}, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}], ids=["plain", "edited"]
)
def test_tokens_equal_those_of_peft(llm, tuned, name, fields):
    prompt = ids_of(9)
    (output,) = llm.generate([prompt], params_of(name, **fields))
    assert output.outputs[0].token_ids == soft_tokens_of_peft(name, prompt, fields).tolist()
    assert output.prompt_token_ids == prompt
    (other,) = llm.generate([prompt], params_of(None, **fields))
    assert other.outputs[0].token_ids != output.outputs[0].token_ids  # the soft prompt does something


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 9, 80])
def test_log_probabilities_equal_those_of_peft(llm, tuned, name, length):
    prompt = ids_of(length)
    (output,) = llm.generate([prompt], params_of(name, max_tokens=1, logprobs=V, prompt_logprobs=V))
    assert output.prompt_logprobs[0] is None
    got = table(output.prompt_logprobs[1:] + output.outputs[0].logprobs)
    np.testing.assert_allclose(
        got[EVERY], log_softmax(soft_logits_of_peft(name, prompt)), rtol=0, atol=TOLERANCE
    )


def test_embeddings_that_a_request_brings_along(llm, tuned):
    prompt = ids_of(9)
    embeds = np.random.default_rng(0).standard_normal((P, C))
    expected = log_softmax(logits_behind(embeds, prompt))
    params = params_of(None, max_tokens=1, prompt_embeds=embeds, logprobs=V, prompt_logprobs=V)
    (output,) = llm.generate([prompt], params)
    got = table(output.prompt_logprobs[1:] + output.outputs[0].logprobs)
    np.testing.assert_allclose(got[EVERY], expected, rtol=0, atol=TOLERANCE)
    embeds[:] = 0  # the params hold their own
    assert llm.generate([prompt], params)[0].prompt_logprobs == output.prompt_logprobs


EMBEDS = np.random.default_rng(1).standard_normal((2, 3, C)).astype(np.float32)
SIZES = [(2, 2, 0), (3, 5, 2), (6, 64, 3)]
visits = st.tuples(
    st.sampled_from([None, *NAMES, 0, 1]),
    st.sampled_from([1, 5, 30, 60]),
    st.lists(st.integers(0, 3), max_size=2),
    any_params(dict, stop=st.none()),  # there is no tokenizer
)


@pytest.fixture(scope="module", params=SIZES, ids=str)
def busy(request, tuned):
    with LLM(tuned.base, soft_prompts=tuned.folders, **sizes(*request.param)) as llm:
        yield llm


@given(visits=st.lists(visits, min_size=1, max_size=7))
@settings(max_examples=15)
def test_neighbours_change_nothing(alone, busy, tuned, visits):
    base = ids_of(60)
    prompts = [base[:count] + tail for _, count, tail, _ in visits]
    params = [
        params_of(None, prompt_embeds=EMBEDS[kind], **fields)
        if isinstance(kind, int)
        else params_of(kind, **fields)
        for kind, _, _, fields in visits
    ]
    for prompt, p, output in zip(prompts, params, busy.generate(prompts, params), strict=True):
        (expected,) = alone.generate([prompt], p)
        assert output.outputs == expected.outputs
        assert output.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("single_steps")
def test_a_soft_prompt_is_read_once(tuned, name, alone, monkeypatch):
    """Its positions are shared like those of any beginning; counts are of the prompt's own tokens."""
    prompt = ids_of(30)
    num_own = 0 if name == "prefix" else P  # a prefix is not computed at all
    with LLM(tuned.base, soft_prompts=tuned.folders, prefix_cache_seqs=2) as llm:
        batches = batches_of(llm, monkeypatch)
        outputs = llm.generate([prompt, prompt[:25]], params_of(name, max_tokens=1))
        assert sum(batch.token_ids.size for batch in batches) == num_own + 30 + 1
        (later,) = llm.generate([[*prompt, 5]], params_of(name, max_tokens=1))
        assert sum(batch.token_ids.size for batch in batches) == num_own + 30 + 1 + 1
        (without,) = llm.generate([prompt], params_of(None, max_tokens=1))
    assert [output.num_cached_tokens for output in (*outputs, later, without)] == [0, 24, 30, 0]
    assert later.outputs == alone.generate([[*prompt, 5]], params_of(name, max_tokens=1))[0].outputs


def test_what_a_request_brings_along_pushes_nothing_out(tuned):
    prompt = ids_of(30)
    with LLM(tuned.base, soft_prompts=tuned.folders, prefix_cache_seqs=1) as llm:
        llm.generate([prompt], params_of("prompt"))
        llm.generate([prompt] * 2, params_of(None, prompt_embeds=np.ones((2, C))))
        (again,) = llm.generate([prompt], params_of("prompt"))
    assert again.num_cached_tokens == 29


@pytest.mark.parametrize("name", NAMES)
def test_beams_and_scores(llm, tuned, name):
    prompt = ids_of(9)
    (searched,) = llm.generate([prompt], params_of(name, num_beams=3, n=3, logprobs=0))
    found = llm.score(prompt, [sample.token_ids for sample in searched.outputs], soft_prompt=name)
    for sample, score in zip(searched.outputs, found, strict=True):
        np.testing.assert_allclose(score.cumulative_logprob, sample.cumulative_logprob, rtol=0, atol=1e-3)


def test_processors_see_the_users_ids_alone(alone, tuned):
    seen, prompt = [], ids_of(9)
    note = {"logits_processors": lambda prompt, new, scores: seen.append(prompt) or scores}
    params = [params_of(name, max_tokens=2, **note) for name in ("prompt", "prefix")]
    alone.generate([prompt] * 2, params)
    assert seen == [prompt] * 4


@pytest.mark.parametrize("name", NAMES)
def test_a_slide_keeps_the_soft_prompt(alone, tuned, name):
    prompt = ids_of(60)
    params = params_of(name, max_tokens=60, overflow="slide", stride=40)
    tokens = sample_of(alone, prompt, params).token_ids
    assert len(tokens) == 60
    num_read = POSITIONS - P  # of the text, when it slides for the first time
    kept = (prompt + tokens)[40 : num_read + 1]
    (fresh,) = alone.generate([kept], params_of(name, max_tokens=20))
    assert fresh.outputs[0].token_ids == tokens[num_read + 1 - 60 :][:20]


def test_lengths_count_virtual_tokens(alone):
    fits = POSITIONS - P - 12
    for name in NAMES:
        alone.generate([[5] * fits], params_of(name))
        with pytest.raises(RequestError, match=rf"{fits + 1 + P} tokens \({P} of them a soft prompt's\)"):
            alone.generate([[5] * (fits + 1)], params_of(name))
        with pytest.raises(RequestError, match="shorten them to 97 tokens together"):
            alone.score([5] * 80, [[5] * 11], soft_prompt=name)


@pytest.mark.parametrize("device", daily(["reference", "cpu"], ["reference"]))
def test_a_prefix_of_a_file_becomes_int8(tuned, device):
    """Its keys and values are float32 there: they are quantised as the backend quantises those it computes."""

    def log_probabilities(cache: str, name: str | None) -> np.ndarray:
        with LLM(tuned.base, device=device, kv_cache_dtype=cache, soft_prompts=tuned.folders) as llm:
            (output,) = llm.generate([ids_of(20)], params_of(name, max_tokens=1, prompt_logprobs=V))
        return table(output.prompt_logprobs[1:])

    exact = log_probabilities("float32", "prefix")
    without = log_probabilities("float32", None)
    error = np.abs(log_probabilities("int8", "prefix") - exact).mean()
    assert 0 < error < np.abs(without - exact).mean() / 10
