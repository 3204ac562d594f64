"""What parity with transformers is: logits to TOLERANCE, and the same greedy tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import GPT2LMHeadModel

from support.factory import Greedy
from tinygpt import LLM, SamplingParams

TOLERANCE = 1e-4  # absolute, on logits whose std is a few units
LEAD = 2 * TOLERANCE  # a best logit that leads by less may rightly differ: such a recipe needs another seed
NEW_TOKENS = 64  # of a greedy run
PROMPT_TOKENS = 5  # of prompt_of(case)


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
    stopped = not params.ignore_eos and expected.token_ids[-1] in llm.config.eos_token_ids
    assert output.finish_reason == ("stop" if stopped else "length")
    assert stopped or len(output.token_ids) == params.max_tokens


@contextmanager
def without_eos(model: GPT2LMHeadModel) -> Iterator[None]:
    """Meanwhile the model generates past its EOS ids."""
    eos, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        yield
    finally:
        model.generation_config.eos_token_id = eos
