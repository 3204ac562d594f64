"""Captures and edits: bits of neighbours and of chunked prompts, the prefix cache, and refusals."""

import subprocess
import sys

import numpy as np
import pytest

from support.engines import log_softmax
from support.golden_models import write_model
from support.kernel_tools import same_bits
from support.paths import ROOT
from support.tables import rows
from tinygpt import LLM, Edit, SamplingParams
from tinygpt.errors import FailedRequestError, RequestError

FIELDS = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 96, "vocab_size": 97, "n_inner": 96}
# Steps with looks compile for 10 s; float32's and int8's differ most, and int8's KV cache holds bfloat16.
DTYPES = [
    "float32",
    "int8",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("float16", "bfloat16", "int4")),
]
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 97, (4, 40)).tolist()
VECTOR = RNG.standard_normal(64).astype(np.float32)
# One of each kind of point, at positions in the prompt and after it.
EDITS = [
    Edit("blocks.0.hook_resid_mid", value=VECTOR, at=slice(3, 9)),
    Edit("blocks.1.attn.hook_z", keep=0, index=1),
    Edit("blocks.0.attn.hook_k", function=np.tanh),
    Edit("blocks.0.mlp.hook_post", keep=0, index=7),
    Edit("blocks.1.hook_mlp_out", keep=0.5, at=[4, 8]),
    Edit("blocks.1.mlp.hook_pre", keep=2),
    Edit("blocks.1.hook_attn_out", keep=0.5),
    Edit("blocks.1.hook_resid_post", project_out=VECTOR),
]
GREEDY = {"max_tokens": 6, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("looks"), **FIELDS))


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def llm(folder, dtype):
    with LLM(folder, dtype, threads=2, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(folder):
    with LLM(folder, threads=2, max_num_seqs=4) as llm:
        yield llm


def results(outputs) -> list:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def test_a_capture_changes_no_bit(llm):
    ids = IDS[0][:20]
    logits, cache = llm.run_with_cache(ids)
    same_bits(logits[0], llm.logits(ids))
    same_bits(cache["resid_pre", 0] + cache["attn_out", 0], cache["resid_mid", 0])
    same_bits(cache["resid_mid", 1] + cache["mlp_out", 1], cache["resid_post", 1])
    same_bits(cache.logit_lens()[-1], logits)
    same_bits(llm.logits(ids, Edit("resid_mid", keep=1, value=-0.0)), logits[0])
    states = llm.hidden_states(ids, before_norm=True)
    same_bits(cache.accumulated_resid()[:, 0], states)
    np.testing.assert_allclose(cache.stack_activation("pattern")[:, 0], llm.attentions(ids), atol=1e-6)


def test_neighbours_of_an_edited_request_keep_their_bits(llm):
    params = [
        SamplingParams(**GREEDY),
        SamplingParams(**GREEDY, edits=EDITS),
        SamplingParams(**GREEDY, capture="z"),
    ]
    params.append(SamplingParams(**GREEDY, temperature=1.0, seed=3))
    alone = [results(llm.generate([ids], p))[0] for ids, p in zip(IDS, params, strict=True)]
    assert results(llm.generate(IDS, params)) == alone
    assert alone[1] != results(llm.generate([IDS[1]], **GREEDY))[0]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_any_chunks_and_threads_give_the_same_bits(folder, llm, dtype, size):
    asked = dict(GREEDY, edits=EDITS, capture=["resid_post", "attn.hook_pattern"])
    (expected,) = llm.generate([IDS[0]], **asked)
    with LLM(folder, dtype, threads=1, max_num_seqs=1, max_num_batched_tokens=size) as other:
        (found,) = other.generate([IDS[0]], **asked)
    assert results([found]) == results([expected])
    arrays = found.outputs[0].activations
    wanted = expected.outputs[0].activations
    assert (
        list(arrays)
        == list(wanted)
        == [name for i in (0, 1) for name in (f"blocks.{i}.attn.hook_pattern", f"blocks.{i}.hook_resid_post")]
    )
    for name, array in arrays.items():
        assert array.shape[-2:] == ((45, 45) if "pattern" in name else (45, 64))
        same_bits(array, wanted[name])


# The prefix cache.


def test_an_edit_stays_out_of_other_prompts_and_they_out_of_its_own(folder, plain):
    prompt = RNG.integers(0, 97, 40).tolist()
    edit = Edit("blocks.0.hook_resid_pre", value=VECTOR, at=10)
    with LLM(folder, threads=2, max_num_seqs=2, prefix_cache_seqs=0) as forgetful:
        expected = [results(forgetful.generate([prompt], **GREEDY, edits=edits)) for edits in (edit, None)]
    assert expected[0] != expected[1]
    for _ in range(2):
        found = [results(plain.generate([prompt], **GREEDY, edits=edits)) for edits in (edit, None)]
        assert found == expected


def test_positions_before_an_edit_are_shared(plain):
    prompt = RNG.integers(0, 97, 40).tolist()
    edit = Edit("blocks.0.hook_resid_pre", value=VECTOR, at=25)
    plain.generate([prompt], **GREEDY)
    assert plain.generate([prompt], **GREEDY, edits=edit)[0].num_cached_tokens == 25
    (new,) = plain.generate([prompt], **GREEDY, edits=Edit("z", keep=0, at="new"))
    assert new.num_cached_tokens == 39
    assert new.outputs[0].token_ids[0] == plain.generate([prompt], **GREEDY)[0].outputs[0].token_ids[0]


def test_equal_edits_share_their_prompt_and_functions_do_not(plain):
    prompt = RNG.integers(0, 97, 40).tolist()
    value = VECTOR + 1
    first, second = (
        plain.generate([prompt], **GREEDY, edits=Edit("resid_pre", value=value)) for _ in range(2)
    )
    assert second[0].num_cached_tokens == 39
    assert results(first) == results(second)
    for _ in range(2):
        (output,) = plain.generate([prompt], **GREEDY, edits=Edit("resid_pre", function=np.tanh))
        assert output.num_cached_tokens == 0


@pytest.mark.parametrize("at", [[2, -1], slice(2, -1)])
def test_equal_edits_at_other_positions_share_nothing_after_the_first(folder, plain, at):
    prompt = RNG.integers(0, 97, 40).tolist()
    edit = Edit("blocks.0.hook_resid_pre", value=VECTOR, at=at)
    with LLM(folder, threads=2, prefix_cache_seqs=0) as forgetful:
        expected = results(forgetful.generate([prompt], **GREEDY, edits=edit))
    plain.generate([prompt[:30]], **GREEDY, edits=edit)
    assert results(plain.generate([prompt], **GREEDY, edits=edit)) == expected


def test_captured_positions_are_computed(plain):
    prompt = RNG.integers(0, 97, 40).tolist()
    plain.generate([prompt], **GREEDY)
    (output,) = plain.generate([prompt], **GREEDY, capture="blocks.0.hook_resid_pre")
    assert output.num_cached_tokens == 0
    assert output.outputs[0].activations["blocks.0.hook_resid_pre"].shape == (45, 64)


def test_a_sample_of_several_captures_its_own(plain):
    (output,) = plain.generate(
        [IDS[0]], **GREEDY, capture="blocks.1.hook_resid_post", n=3, temperature=2.0, seed=1
    )
    for sample in output.outputs:
        _, cache = plain.run_with_cache(IDS[0] + sample.token_ids[:-1], "blocks.1.hook_resid_post")
        same_bits(sample.activations["blocks.1.hook_resid_post"], cache["resid_post", 1][0])


# Failures.


def fail(rows):
    raise ZeroDivisionError("mine")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fail, r"at z of layer 0 failed: ZeroDivisionError\('mine'\)"),
        (lambda rows: rows * 1j, "it returned complex numbers"),
        (lambda rows: rows[:, :1], r"returned an array of shape \(40, 1, 16\) for one of \(40, 4, 16\)"),
        (lambda rows: rows * np.nan, "its edits left position 0 in layer 1 with keys or values that are not"),
    ],
)
def test_a_function_that_fails_ends_its_request_alone(plain, function, message):
    expected = results(plain.generate(IDS[1:3], **GREEDY))
    params = [SamplingParams(**GREEDY, edits=Edit("z", function=function)), *[SamplingParams(**GREEDY)] * 2]
    found = dict(plain.generate_as_finished(IDS[:3], params, return_exceptions=True))
    assert isinstance(found[0], FailedRequestError)
    assert results([found[1], found[2]]) == expected
    with pytest.raises(FailedRequestError, match=message):
        plain.generate([IDS[0]], params[0])
    with pytest.raises(FailedRequestError, match=message):
        next(plain.stream(IDS[0], params[0]))  # before a chunk


REFUSED = rows(r"""
{"capture": "blocks.9.hook_z"} | capture has no point 'blocks.9.hook_z' in this model; did you mean
{"capture": "zz"} | has no point 'zz' in this model: names are as "blocks.0.hook_resid_pre"
{"edits": "z"} | edits is 'z' and must be an Edit or a list of them, or None
{"capture": "z", "overflow": "slide"} | overflow is 'slide' and must be another one with capture
""")
REFUSED_EDITS = rows(r"""
[{"name": "scale", "keep": 0}] | edits\[0\].name is 'blocks.0.ln1.hook_scale', which cannot be changed
[{"name": "pattern", "keep": 0}] | 'blocks.0.attn.hook_pattern', which cannot be changed here
[{"name": "z"}, {"name": "z", "value": [1, 2]}] | edits\[1\] does not fit .*z: a position has shape \(4, 16\)
[{"name": "z", "index": 4, "keep": 0}] | edits\[0\] does not fit
[{"name": "resid_pre", "at": -41}] | edits\[0\] does not fit .* and the prompt 40 positions
[{"name": "resid_pre", "value": [[1], [1]], "at": [1, 2, 3]}] | does not fit
[{"name": "z"}, {"name": "z", "at": 500}] | edits.at is \(500,\) and must be below max_model_len,
""")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *REFUSED,
        *(({"edits": [Edit(**edit) for edit in edits]}, message) for edits, message in REFUSED_EDITS),
        ({"edits": Edit("z", index=[1, 2, -3], keep=0)}, r"edits\[0\] does not fit"),
        ({"edits": Edit("z", index=[0] * 100_000, keep=0)}, r"edits\[0\] does not fit"),
        ({"edits": Edit("resid_pre", keep=np.ones((9, 1)))}, r"edits\[0\] does not fit"),
        ({"edits": Edit("resid_pre", value=np.ones((1, 9, 1, 1)))}, r"edits\[0\] does not fit"),
        ({"edits": Edit("resid_pre", value=np.ones((45, 1, 9)))}, r"edits\[0\] does not fit"),
        ({"edits": Edit("resid_pre", project_out=[1])}, r"edits\[0\] does not fit"),
        ({"edits": [Edit("resid_pre", keep=2)] * 501}, "edits are at more than 1000 points"),
        ({"edits": Edit("z", at=[1, 500])}, "edits.at is .* and must be below max_model_len"),
        ({"capture": "*" + "[ab]" * 50}, "capture may have at most 64 short forms and names with"),
        ({"capture": ["z"] * 65}, "capture may have at most 64 short forms and names with"),
        (
            {"edits": Edit("z", at=slice(500, None))},
            r"edits.at is slice\(500, None, None\) and must be below",
        ),
        ({"edits": Edit("z"), "num_beams": 2}, "num_beams is 2 and must be 1 with capture or edits"),
    ],
)
def test_what_is_refused(plain, fields, message, monkeypatch):
    monkeypatch.setattr(Edit, "changed", None)  # refused before any arithmetic
    with pytest.raises(RequestError, match=message):
        plain.generate([IDS[0]], **{**GREEDY, "logprobs": None, **fields})


IMPOSSIBLE = rows(r"""
{"at": "old"} | at is 'old' and must be None, 'new', a position
{"at": [1, 1]} | each once
{"value": "x"} | value is 'x' and must be a number or an array
{"value": null} | value is None and must be a number or an array
{"index": [true, false]} | index is \[True, False\] and must be a whole number
{"index": 1.5} | index is 1.5 and must be a whole number
{"function": 3} | function is 3 and must be a function
{"project_out": [0, 0, 0]} | a vector that is not zero
""")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *IMPOSSIBLE,
        ({"at": slice(0, 9, 2)}, "without a step"),
        ({"value": 1j}, "value is 1j and must be a number or an array"),
        ({"keep": 0, "function": np.tanh}, "next to another change"),
    ],
)
def test_an_impossible_edit(fields, message):
    with pytest.raises(RequestError, match=message):
        Edit("z", **fields)


@pytest.mark.parametrize("num_tokens", [64, 7])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "int8"},
        pytest.param({"dtype": "int8", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        {"device": "reference"},
        {"device": "reference", "kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_an_edit_to_infinity_fails_its_request_alone(folder, options, num_tokens):
    """0 times infinity is NaN at earlier positions of the step, which the last edit hides and the prefix cache has."""
    prompt = RNG.integers(0, 97, 40).tolist()
    hidden = Edit("blocks.1.hook_resid_post", keep=0, value=VECTOR, at=slice(20, None))
    options = {"max_num_seqs": 2, "max_num_batched_tokens": num_tokens, **options}
    with LLM(folder, **options, prefix_cache_seqs=0) as forgetful:
        expected = results(forgetful.generate([prompt[:25]], **GREEDY))
    with LLM(folder, **options) as llm:
        for kind in ("attn.hook_q", "attn.hook_k", "attn.hook_v", "hook_resid_pre"):
            edits = [Edit(f"blocks.0.{kind}", value=np.inf, at=20), hidden]
            with pytest.raises(
                FailedRequestError, match=r"left position 20 in layer [01] with keys or values"
            ):
                llm.generate([prompt], max_tokens=1, temperature=0, edits=edits)
            with pytest.raises(FailedRequestError, match="left position 20"):
                llm.logits(prompt, edits)
            assert results(llm.generate([prompt[:25]], **GREEDY)) == expected
        with pytest.raises(
            FailedRequestError, match="39 are not finite numbers: the request's edits gave them"
        ):
            llm.generate([prompt], **GREEDY, edits=Edit("blocks.1.hook_resid_post", value=np.inf))


def test_a_capture_is_bounded(folder):
    with LLM(folder, max_capture_bytes=2**20) as llm:
        assert len(llm.generate([IDS[0]], **GREEDY, capture="z")[0].outputs[0].activations) == 2
        wanted = (
            r"capture takes 1.4 MiB for 8 x 45 positions, .* 1.0 MiB: .* "
            r"\(the largest are blocks.0.attn.hook_result"
        )
        with pytest.raises(RequestError, match=wanted):
            llm.generate([IDS[0]], **GREEDY, capture=["result", "z", "pattern"], n=8, temperature=1.0)


@pytest.mark.parametrize("stream", ["text", [[1.0], [1.0, 2.0]], np.zeros(3), np.zeros((0, 5))])
def test_the_lens_takes_a_stream_alone(plain, stream):
    with pytest.raises(RequestError, match=r"stream .* must (be numbers \(\.\.\., |end in )"):
        plain.logit_lens(stream)


def test_an_edit_of_the_prompts_end_and_of_a_score(plain):
    edit = Edit("blocks.1.hook_resid_post", keep=0, value=VECTOR, at=-1)
    logits = plain.logits(IDS[0], edit)
    same_bits(logits[-1:], plain.logit_lens(VECTOR[None]))
    same_bits(logits[:-1], plain.logits(IDS[0])[:-1])
    (found,) = plain.score(IDS[0], [IDS[1][:1]], edits=edit)
    expected = log_softmax(logits)[-1, IDS[1][0]]
    assert found.cumulative_logprob == pytest.approx(expected, abs=1e-5)


def test_edits_hold_where_tokens_come_several_at_once(plain):
    edit = Edit("blocks.1.hook_resid_post", value=3 * VECTOR, at="new")
    params = {"max_tokens": 12, "ignore_eos": True}
    (expected,) = plain.generate([IDS[0]], **params, edits=edit, logprobs=0)  # step by step
    (found,) = plain.generate([IDS[0]], **params, edits=edit, capture="blocks.0.hook_resid_post")
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].token_ids != plain.generate([IDS[0]], **params)[0].outputs[0].token_ids
    assert found.outputs[0].activations["blocks.0.hook_resid_post"].shape == (51, 64)


def test_an_ablation_leaves_nothing_of_infinity(plain):
    ablated = plain.logits(IDS[0], Edit("z", keep=0))
    same_bits(plain.logits(IDS[0], [Edit("z", value=np.inf), Edit("z", keep=0)]), ablated)


def test_the_reference_pads_rows_of_scores(folder):
    with LLM(folder, device="reference") as llm:
        (output,) = llm.generate([IDS[0][:5]], **GREEDY, capture=["pattern", "attn_scores"])
        _, cache = llm.run_with_cache(IDS[0][:5] + output.outputs[0].token_ids[:-1])
        for name, array in output.outputs[0].activations.items():
            assert array.shape == (4, 10, 10)
            np.testing.assert_allclose(array, cache[name][0], rtol=0, atol=1e-6)


KERNELS = """
import sys
from unittest import mock
from tinygpt import LLM
from tinygpt.kernels.cpu.jit import Kernel
from tinygpt.kernels.cpu.model import take_steps
with mock.patch.object(Kernel, "bound", autospec=True, side_effect=Kernel.bound) as bound:
    have_looks = lambda: {"HookBuffers(" in str(call) for call in bound.mock_calls if call.args[0] is take_steps}
    with LLM(sys.argv[1], threads=2) as llm:
        llm.generate([[1, 2, 3]], max_tokens=4)
        llm.embed([[1, 2, 3]])
        print(have_looks())
        llm.run_with_cache([1, 2, 3], "resid_pre")
        print(have_looks())
print([name for name in ("captures", "edits", "hooks") if f"tinygpt.look.{name}" in sys.modules])
"""


def test_kernels_with_looks_are_made_for_looks_alone(folder):
    """Objects and Numba choose a kernel by the types of its arguments."""
    found = subprocess.run(
        [sys.executable, "-c", KERNELS, folder], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == ["{False}", "{False, True}", "['captures', 'edits', 'hooks']"]
