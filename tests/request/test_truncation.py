"""More tokens than positions: what is refused, cut, dropped, and what a window slides over."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import opened, sample_of, sizes
from support.paths import EOS
from support.sampling import any_params
from tinygpt import LLM, SamplingParams
from tinygpt.engine.prompts import Window

SIZE = 24  # positions
TEXT = np.random.default_rng(1).integers(EOS, size=80).tolist()


llm = opened("small_demo", max_model_len=SIZE, max_num_seqs=1, prefix_cache_seqs=0)


@pytest.fixture(scope="module", params=[(2, 2, 0), (3, 5, 2), (8, 64, 1)], ids=str)
def busy(request, small_demo):
    with LLM(small_demo, max_model_len=SIZE, **sizes(*request.param)) as llm:
        yield llm


def test_clamp_cuts_max_tokens(llm):
    params = SamplingParams(max_tokens=1000, min_tokens=900, overflow="clamp", ignore_eos=True)
    (output,) = llm.generate([TEXT[:20]], params)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (4, "length")
    fits = SamplingParams(max_tokens=4, ignore_eos=True, seed=output.outputs[0].seed)
    assert output.outputs == llm.generate([TEXT[:20]], fits)[0].outputs
    assert output.num_truncated_tokens == 0


def test_truncate_drops_the_beginning(llm):
    params = SamplingParams(max_tokens=10, overflow="truncate", ignore_eos=True, seed=1)
    (output,) = llm.generate([TEXT[:40]], params)
    assert (output.num_truncated_tokens, output.prompt_token_ids) == (40 - 14, TEXT[:40])
    assert output.outputs == llm.generate([TEXT[26:40]], params)[0].outputs
    (short,) = llm.generate([TEXT[:14]], params)
    assert short.num_truncated_tokens == 0


def test_truncate_leaves_a_token(llm):
    (output,) = llm.generate([TEXT[:40]], max_tokens=SIZE - 1, overflow="truncate")
    assert output.num_truncated_tokens == 39


@given(size=st.integers(1, 9), data=st.data())
def test_a_window_drops_whole_strides_and_no_more_than_it_has_to(size, data):
    stride = data.draw(st.integers(1, size))
    window = Window(size, stride)
    dropped = [window.num_dropped(length) for length in range(60)]
    assert all(0 < length - num <= size for length, num in enumerate(dropped) if length)
    for before, after in itertools.pairwise(dropped):
        assert after - before in (0, stride)
    assert all(num == 0 or length - num > size - stride for length, num in enumerate(dropped))


def kept_tail(token_ids: list[int], stride: int) -> list[int]:
    """Spelled out: tokens come one by one, and when all positions are full the oldest leave."""
    kept = []
    for token_id in token_ids:
        if len(kept) == SIZE:
            del kept[:stride]
        kept.append(token_id)
    return kept


@pytest.mark.parametrize(
    ("stride", "prompt_len"), [(None, 5), (1, 20), (7, 3), (7, 61), (SIZE, 10), (SIZE - 1, 24)]
)
def test_each_token_is_that_of_a_fresh_run_on_the_kept_tail(llm, stride, prompt_len):
    params = SamplingParams(
        max_tokens=60, ignore_eos=True, logprobs=2, overflow="slide", stride=stride, seed=0
    )
    (output,) = llm.generate([TEXT[:prompt_len]], params)
    tokens = output.outputs[0].token_ids
    logprobs = output.outputs[0].logprobs
    assert (len(tokens), output.outputs[0].finish_reason) == (60, "length")
    one = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=2, seed=0, overflow="clamp")
    for i in range(60):
        tail = kept_tail(TEXT[:prompt_len] + tokens[:i], stride or SIZE // 2)
        if (
            len(tail) == SIZE
        ):  # all positions taken: `generate` would have no room, and the window shows no more
            assert tokens[i] == int(np.argmax(llm.logits(tail)[-1]))
            continue
        (fresh,) = llm.generate([tail], one)[0].outputs
        assert (fresh.token_ids, fresh.logprobs) == (tokens[i : i + 1], logprobs[i : i + 1])


requests = st.tuples(
    st.integers(0, 8),
    st.integers(1, 60),
    any_params(
        max_tokens=st.integers(1, 60),
        prompt_logprobs=st.none(),
        overflow=st.just("slide"),
        stride=st.sampled_from([None, 1, 9, SIZE]),
        ignore_eos=st.just(True),
    ),
)


@given(batch=st.lists(requests, min_size=1, max_size=6))
@settings(max_examples=5)
def test_whoever_else_slides(llm, busy, batch):
    prompts = [TEXT[start : start + length] for start, length, _ in batch]
    params = [p for _, _, p in batch]
    outputs = busy.generate(prompts, params)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        assert output.outputs == llm.generate([prompt], own)[0].outputs


def test_controls_see_what_has_left(llm):
    """A token that may come once: 2**31 - 1 tokens are asked for, and the end is when none is left."""
    once = {
        "allowed_token_ids": TEXT[40:79],
        "no_repeat_ngram_size": 1,
        "ignore_eos": True,
        "overflow": "slide",
    }
    with pytest.raises(ValueError, match="leave no token to choose"):
        llm.generate([TEXT[:30]], max_tokens=2**31 - 1, **once)
    left = set(TEXT[40:79]) - set(TEXT[:30])
    tokens = sample_of(llm, TEXT[:30], max_tokens=len(left), **once).token_ids
    assert sorted(tokens) == sorted(left)
