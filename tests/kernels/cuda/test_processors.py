"""Biases and penalties on a simulated GPU: the bits of the reference."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cuda_device import SimulatedDevice
from support.examples import examples
from support.tables import fields
from tinygpt.kernels import reference
from tinygpt.kernels.cuda.sampling import DeviceLogits, process_logits
from tinygpt.kernels.numbers import Processors, Ragged

pytestmark = pytest.mark.usefixtures("compute_capability")

V = 37
FLOATS = np.float32([-np.inf, -0.0, 0.0, 1e38, -1e38, 1e-45, 0.1, -3.7, 12.3])


def ragged(arrays, dtype=np.int32):
    return Ragged.of([np.array(array, dtype) for array in arrays])


def processors_of(rows):
    """Return Processors of rows, each a dict of settings; a missing one is off."""
    return Processors(
        rows=np.array([row["row"] for row in rows]),
        token_ids=ragged([row.get("token_ids", []) for row in rows]),
        num_prompt_tokens=np.array([row.get("num_prompt_tokens", 0) for row in rows]),
        repetition_penalty=np.array([row.get("repetition_penalty", 1) for row in rows], np.float32),
        frequency_penalty=np.array([row.get("frequency_penalty", 0) for row in rows], np.float32),
        presence_penalty=np.array([row.get("presence_penalty", 0) for row in rows], np.float32),
        bias_ids=ragged([list(row.get("bias", {})) for row in rows]),
        biases=ragged([list(row.get("bias", {}).values()) for row in rows], np.float32),
    )


def process(logits, processors):
    """Return the processed rows, which lie in reverse order on the device."""
    device = SimulatedDevice()
    sampling = SimpleNamespace(ids=np.full(2 * V, 7, np.int32))
    workspace = SimpleNamespace(device=device, logits=logits[::-1].copy().ravel(), sampling=sampling)
    on_device = DeviceLogits(workspace, np.arange(len(logits))[::-1].copy(), V)
    process_logits(on_device, processors)
    return on_device.copy()


def assert_as_the_reference(logits, processors):
    wanted = logits.copy()
    reference.process_logits(wanted, processors)
    np.testing.assert_array_equal(process(logits, processors).view(np.uint32), wanted.view(np.uint32))


def random_logits(rows, seed=0):
    logits = np.random.default_rng(seed).standard_normal((rows, V)).astype(np.float32) * 3
    logits[:, ::5] = np.random.default_rng(seed).choice(FLOATS, logits[:, ::5].shape)
    return logits


HISTORY = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 1, 4, 36, 0, 3, 1]
CASES = fields("""
bias: bias={4: 2.5, 0: -100.0, 36: 0.1}
repetition_penalty: repetition_penalty=1.3
repetition_reward: repetition_penalty=0.7
frequency_penalty: frequency_penalty=0.3, num_prompt_tokens=7
presence_penalty: presence_penalty=-1.7, num_prompt_tokens=7
""")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_processor_equals_the_reference(case):
    logits = random_logits(3)
    processors = processors_of(
        [{"row": 2, "token_ids": HISTORY, **case}, {"row": 0, "token_ids": [5], **case}]
    )
    assert_as_the_reference(logits, processors)
    assert not np.array_equal(process(logits, processors)[2], logits[2])


IDS = st.integers(0, 6) | st.integers(0, V - 1)


@st.composite
def rows_of_processors(draw):
    token_ids = draw(st.lists(IDS, max_size=90))
    return {
        "token_ids": token_ids,
        "num_prompt_tokens": draw(st.integers(0, len(token_ids))),
        "repetition_penalty": draw(st.sampled_from([1, 1.1, 0.3, 2])),
        "frequency_penalty": draw(st.sampled_from([0, 0.7, -0.1])),
        "presence_penalty": draw(st.sampled_from([0, 0.3, -2])),
        "bias": draw(st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=5)),
    }


@settings(max_examples=examples(60), deadline=None)
@given(rows=st.lists(rows_of_processors(), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_any_processors_equal_the_reference(rows, seed):
    processors = processors_of([{"row": i, **row} for i, row in enumerate(reversed(rows))])
    assert_as_the_reference(random_logits(len(rows), seed), processors)
