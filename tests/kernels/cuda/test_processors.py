"""The CUDA kernel that changes scores: in the simulator against the reference, to the bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cuda_compile import compile_kernel
from support.cuda_simulator import simulate
from tinygpt.engine.sampling_state import Processors, Ragged
from tinygpt.kernels import reference
from tinygpt.kernels.cuda.sampling.processors import pack_processors, process_rows

V = 37
FLOATS = np.float32([-np.inf, -0.0, 0.0, 1e38, -1e38, 1e-45, 0.1, -3.7, 12.3])


def ragged(arrays, dtype=np.int32):
    return Ragged.of([np.array(array, dtype) for array in arrays])


def controls_of(rows):
    """Each row a dict of what it asks for; what it leaves out is off."""
    words = [word for row in rows for word in row.get("words", [])]
    return Processors(
        rows=np.array([row["row"] for row in rows]),
        token_ids=ragged([row.get("token_ids", []) for row in rows]),
        num_prompt_tokens=np.array([row.get("num_prompt_tokens", 0) for row in rows]),
        repetition_penalty=np.array([row.get("repetition_penalty", 1) for row in rows], np.float32),
        frequency_penalty=np.array([row.get("frequency_penalty", 0) for row in rows], np.float32),
        presence_penalty=np.array([row.get("presence_penalty", 0) for row in rows], np.float32),
        no_repeat_ngram_size=np.array([row.get("no_repeat_ngram_size", 0) for row in rows]),
        bias_ids=ragged([list(row.get("bias", {})) for row in rows]),
        biases=ragged([list(row.get("bias", {}).values()) for row in rows], np.float32),
        words=ragged(words) if words else Ragged(np.zeros(0, np.int32), np.zeros(1, np.int64)),
        word_bounds=np.cumsum([0, *(len(row.get("words", [])) for row in rows)]),
        allowed_ids=ragged([row.get("allowed", []) for row in rows]),
        forbidden_ids=ragged([row.get("forbidden", []) for row in rows]),
    )


def process(logits, controls, threads=64):
    out, counts = logits.copy().ravel(), np.zeros(len(controls.rows) * logits.shape[1], np.int32)
    simulate(
        process_rows,
        len(controls.rows),
        threads,
        out,
        logits.shape[1],
        *pack_processors(controls, controls.rows),
        counts,
    )
    assert not counts.any()
    return out.reshape(logits.shape)


def assert_as_the_reference(logits, controls):
    wanted = logits.copy()
    reference.process_logits(wanted, controls)
    np.testing.assert_array_equal(process(logits, controls).view(np.uint32), wanted.view(np.uint32))


def random_logits(rows, seed=0):
    logits = np.random.default_rng(seed).standard_normal((rows, V)).astype(np.float32) * 3
    logits[:, ::5] = np.random.default_rng(seed).choice(FLOATS, logits[:, ::5].shape)
    return logits


HISTORY = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 1, 4, 36, 0, 3, 1]
CASES = [
    {"bias": {4: 2.5, 0: -100.0, 36: 0.1}},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.3, "num_prompt_tokens": 7},
    {"presence_penalty": -1.7, "num_prompt_tokens": 7},
]
WITHOUT_EFFECT = [
    {"frequency_penalty": 1.1, "presence_penalty": 0.7, "num_prompt_tokens": len(HISTORY)},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case))
def test_each_control_equals_the_reference(case):
    logits = random_logits(3)
    controls = controls_of([{"row": 2, "token_ids": HISTORY, **case}, {"row": 0, "token_ids": [5], **case}])
    assert_as_the_reference(logits, controls)
    assert not np.array_equal(process(logits, controls)[2], logits[2])


@pytest.mark.parametrize("case", WITHOUT_EFFECT, ids=lambda case: " ".join(case))
def test_what_does_not_apply_changes_nothing(case):
    logits = random_logits(1)
    controls = controls_of([{"row": 0, "token_ids": HISTORY, **case}])
    np.testing.assert_array_equal(process(logits, controls), logits)


def test_all_controls_at_once_and_beside_rows_without():
    everything = {name: value for case in CASES for name, value in case.items()}
    everything |= {"num_prompt_tokens": 5, "token_ids": HISTORY}
    assert_as_the_reference(random_logits(4, 1), controls_of([{"row": 3, **everything}, {"row": 1}, {"row": 0}]))


def test_nothing_to_look_back_at():
    everything = {name: value for case in CASES for name, value in case.items()} | {"num_prompt_tokens": 0}
    assert_as_the_reference(random_logits(1, 2), controls_of([{"row": 0, **everything}]))


def test_a_surplus_block_changes_nothing():
    logits = random_logits(2)
    controls = controls_of([{"row": -1, "bias": {3: -np.inf}}, {"row": 1, "bias": {3: -np.inf}}])
    out = process(logits, controls)
    np.testing.assert_array_equal(out[0], logits[0])
    assert out[1, 3] == -np.inf


IDS = st.integers(0, 6) | st.integers(0, V - 1)


@st.composite
def rows_of_controls(draw):
    token_ids = draw(st.lists(IDS, max_size=90))
    return {
        "token_ids": token_ids,
        "num_prompt_tokens": draw(st.integers(0, len(token_ids))),
        "repetition_penalty": draw(st.sampled_from([1, 1.1, 0.3, 2])),
        "frequency_penalty": draw(st.sampled_from([0, 0.7, -0.1])),
        "presence_penalty": draw(st.sampled_from([0, 0.3, -2])),
        "bias": draw(st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=5)),
    }


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(rows_of_controls(), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_any_controls_equal_the_reference(rows, seed):
    controls = controls_of([{"row": i, **row} for i, row in enumerate(reversed(rows))])
    assert_as_the_reference(random_logits(len(rows), seed), controls)


@pytest.mark.toolchain
def test_what_the_kernel_needs():
    floats, ints = np.zeros(1, np.float32), np.zeros(1, np.int32)
    compiled = compile_kernel(process_rows, floats, V, ints, ints, ints, ints)
    assert compiled.registers <= 64
    assert compiled.spilled == compiled.stack == 0
    # A count times its penalty is rounded before it is subtracted.
    assert "mul.rn.f32" in compiled.ptx
    assert "fma.rn.f32" not in compiled.ptx
