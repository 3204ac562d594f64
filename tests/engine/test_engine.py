"""The LLM as its users see it, on the demo checkpoint: what comes out, what is refused, and what may be mixed."""

import gc
from functools import partial

import numpy as np
import pytest

from support import tiny_checkpoint
from support.engines import log_softmax
from support.gate import Gate, paused
from support.paths import EOS
from tinygpt import LLM, SamplingParams
from tinygpt.errors import FailedRequestError, RequestError, TinyGPTError

pytestmark = pytest.mark.usefixtures("single_steps")  # they are counted

PROMPTS = ["Once upon a time", "The old", "", "In the morning she went to the", "It was"]
GREEDY = SamplingParams(max_tokens=12)
WARM = SamplingParams(max_tokens=12, temperature=1.0, seed=7)


def sampled(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "seed": 7, **fields})


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    yield
    if "llm" in request.fixturenames:
        scheduler = request.getfixturevalue("llm").engine.scheduler
        if state_of(scheduler) != NOTHING_LEFT:
            gc.collect()  # streams that a failed test left open; after every test it would take longer than the test
        assert state_of(scheduler) == NOTHING_LEFT


NOTHING_LEFT = ([], 0, 4)


def state_of(scheduler) -> tuple[list, int, int]:
    return scheduler.running, len(scheduler.waiting), scheduler.slots.num_free


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """11 tokens, 6 positions, no tokenizer."""
    return tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module", params=["cpu", "reference"])
def tiny(request, tiny_folder):
    with LLM(tiny_folder, device=request.param, max_num_seqs=2) as llm:
        yield llm


def ids_of(output, sample: int = 0) -> list[int]:
    return output.outputs[sample].token_ids


def generate_one(llm: LLM, prompt, params=GREEDY):
    (output,) = llm.generate(prompt, params)
    return output.outputs[0]


def test_output_of_a_text(llm):
    (output,) = llm.generate(PROMPTS[0], GREEDY)
    assert (output.prompt, output.prompt_token_ids) == (PROMPTS[0], llm.tokenizer.encode(PROMPTS[0]))
    (sample,) = output.outputs
    assert (sample.index, len(sample.token_ids), sample.finish_reason, sample.stop_reason) == (
        0,
        12,
        "length",
        None,
    )
    assert sample.text == llm.tokenizer.decode(sample.token_ids)
    assert (sample.logprobs, sample.cumulative_logprob) == (None, None)
    assert output.metrics.arrival <= output.metrics.first_token <= output.metrics.finished


def test_output_of_token_ids(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = generate_one(llm, PROMPTS[0]).token_ids
    for given in (
        ids,
        [ids],
        np.array(ids),
        np.array([ids], np.int32),
        tuple(ids),
        [np.uint16(i) for i in ids],
    ):
        (output,) = llm.generate(given, GREEDY)
        assert (output.prompt, output.prompt_token_ids, ids_of(output)) == (None, ids, expected)
        assert all(type(i) is int for i in output.prompt_token_ids)


def test_outputs_stand_in_the_prompts_order(llm):
    prompts = [
        PROMPTS[0],
        llm.tokenizer.encode(PROMPTS[1]),
        "",
        PROMPTS[3],
        [5],
        PROMPTS[4],
        np.array([6, 7]),
    ]
    params = [SamplingParams(max_tokens=n) for n in (20, 1, 7, 2, 11, 3, 5)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == [PROMPTS[0], None, "", PROMPTS[3], None, PROMPTS[4], None]
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        assert len(ids_of(output)) == p.max_tokens
        assert ids_of(output) == generate_one(llm, prompt, p).token_ids


@pytest.mark.parametrize(
    "empty", ["", [""], [[]], [np.array([], int)]], ids=["text", "texts", "ids", "numpy"]
)
def test_an_empty_prompt_starts_at_bos(llm, empty):
    (output,) = llm.generate(empty, GREEDY)
    assert output.prompt_token_ids == [llm.config.bos_token_id]
    assert ids_of(output) == generate_one(llm, [llm.config.bos_token_id]).token_ids


def test_generate_as_finished(llm):
    params = [SamplingParams(max_tokens=n) for n in (20, 2, 9)]
    pairs = list(llm.generate_as_finished(PROMPTS[:3], params))
    assert [i for i, _ in pairs] == [1, 2, 0]
    for i, output in pairs:
        assert (output.prompt, len(ids_of(output))) == (PROMPTS[i], params[i].max_tokens)


# Its second token can be none.
FAILS_LATE = SamplingParams(max_tokens=9, allowed_token_ids=[11], no_repeat_ngram_size=1)


def test_a_request_that_fails_is_returned_and_the_others_are_finished(llm):
    params = [GREEDY, FAILS_LATE, GREEDY]
    found = dict(llm.generate_as_finished(PROMPTS[:3], params, return_exceptions=True))
    assert type(found[1]) is FailedRequestError
    assert "leave no token to choose" in str(found[1])
    for i in (0, 2):
        assert ids_of(found[i]) == generate_one(llm, PROMPTS[i]).token_ids


def test_a_request_that_fails_ends_the_others_unless_it_is_to_be_returned(llm):
    with pytest.raises(FailedRequestError, match="leave no token to choose"):
        list(llm.generate_as_finished(PROMPTS[:2], [SamplingParams(max_tokens=50), FAILS_LATE]))
    with paused(llm):
        assert llm.engine.scheduler.slots.num_free == 4


def test_closing_generate_as_finished_frees_the_rows(llm):
    outputs = llm.generate_as_finished(PROMPTS, [SamplingParams(max_tokens=n) for n in (1, 50, 50, 50, 50)])
    assert next(outputs)[0] == 0
    outputs.close()
    with paused(llm):
        assert llm.engine.scheduler.slots.num_free == 4


@pytest.mark.parametrize("n", [2, 6])
def test_samples_differ_and_each_is_one_of_a_larger_request(llm, n):
    (output,) = llm.generate(PROMPTS[0], sampled(n=n))
    assert [sample.index for sample in output.outputs] == list(range(n))
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == n
    assert {sample.seed for sample in output.outputs} == {7}
    (more,) = llm.generate(PROMPTS[0], sampled(n=n + 3))
    assert [sample.token_ids for sample in more.outputs[:n]] == [
        sample.token_ids for sample in output.outputs
    ]


def test_a_drawn_seed_is_told_and_repeats_the_request(llm):
    drawn = [generate_one(llm, PROMPTS[0], sampled(seed=None)) for _ in range(4)]
    assert len({sample.seed for sample in drawn}) == len({tuple(sample.token_ids) for sample in drawn}) == 4
    for sample in drawn:
        assert generate_one(llm, PROMPTS[0], sampled(seed=sample.seed)).token_ids == sample.token_ids


@pytest.mark.parametrize("n", [1, 3, 5])
def test_best_of_returns_the_most_probable_per_token(llm, n):
    """Of equal ones, as greedy samples are, the first."""
    fields = {"max_tokens": 9, "stop": "e", "logprobs": 1}
    samples = llm.generate(PROMPTS[0], sampled(n=5, **fields))[0].outputs
    assert len({len(sample.token_ids) for sample in samples}) > 1
    ranked = sorted(samples, key=lambda sample: -sample.cumulative_logprob / len(sample.token_ids))
    (output,) = llm.generate(PROMPTS[0], sampled(n=n, best_of=5, **fields))
    expected = samples if n == 5 else ranked[:n]
    assert [sample.token_ids for sample in output.outputs] == [sample.token_ids for sample in expected]
    assert [sample.index for sample in output.outputs] == list(range(n))


@pytest.mark.parametrize(
    ("place", "field"), [(0, "stop_token_ids"), (5, "stop_token_ids"), (5, "eos_token_id")]
)
def test_tokens_that_end_a_sample(llm, place, field):
    whole = generate_one(llm, PROMPTS[0]).token_ids
    stop = whole[place]
    kept = whole[: whole.index(stop) + 1]
    absent = max({*range(EOS)} - {*whole})
    sample = generate_one(llm, PROMPTS[0], SamplingParams(max_tokens=12, **{field: [absent, stop]}))
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == (kept, "stop", stop)
    assert sample.text == llm.tokenizer.decode(kept[:-1])
    ignoring = SamplingParams(
        max_tokens=12, ignore_eos=True, **{field: stop if field == "eos_token_id" else [stop]}
    )
    sample = generate_one(llm, PROMPTS[0], ignoring)
    assert sample.token_ids == (whole if field == "eos_token_id" else kept)


def test_eos_ends_unless_it_is_ignored(tiny, tmp_path):
    run = generate_one(tiny, [3], SamplingParams(max_tokens=5, ignore_eos=True)).token_ids
    with LLM(tiny_checkpoint.write_checkpoint(tmp_path / "eos", eos_token_id=run[0])) as llm:
        sample = generate_one(llm, [3], SamplingParams(max_tokens=5))
        assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == (run[:1], "stop", run[0])
        sample = generate_one(llm, [3], SamplingParams(max_tokens=5, ignore_eos=True))
        assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == (run, "length", None)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_the_models_own(llm, params, count):
    params = SamplingParams(**{**vars(params), "logprobs": count, "top_k": 50})
    (output,) = llm.generate(PROMPTS[0], params)
    sample = output.outputs[0]
    rows = log_softmax(
        llm.logits(output.prompt_token_ids + sample.token_ids)[len(output.prompt_token_ids) - 1 : -1]
    )
    assert len(sample.logprobs) == len(sample.token_ids) == len(rows)
    for row, token_id, told in zip(rows, sample.token_ids, sample.logprobs, strict=True):
        best = np.argsort(-row, kind="stable")[:count].tolist()
        assert list(told) == best + [token_id] * (token_id not in best)  # best first
        np.testing.assert_allclose(list(told.values()), row[list(told)], rtol=0, atol=1e-12)
    chosen = [told[i] for told, i in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert sample.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-12)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_logits(llm, length):
    ids = np.random.default_rng(length).integers(llm.config.vocab_size, size=length)
    logits = llm.logits(ids)
    assert (logits.shape, logits.dtype) == ((length, llm.config.vocab_size), np.float32)
    kept = logits.copy()
    np.testing.assert_array_equal(llm.logits(ids.tolist()), kept)
    np.testing.assert_array_equal(llm.logits(ids[:40]), kept[:40])
    llm.logits(ids[::-1])
    np.testing.assert_array_equal(logits, kept)  # not a view of what the next call overwrites


def test_a_stream_comes_one_token_at_a_time_and_frees_its_slot_when_it_is_closed(llm):
    with llm.engine.wrapped(Gate) as gate:
        stream = llm.stream(PROMPTS[0], max_tokens=400, ignore_eos=True)
        gate.allow(1)
        assert next(stream).text
        gate.wait_until_asked(2)
        stream.close()
        gate.allow(1)
    with paused(llm):
        assert state_of(llm.engine.scheduler) == NOTHING_LEFT
    with pytest.raises(StopIteration):
        next(stream)


def test_everything_may_run_inside_a_stream(llm):
    alone = {prompt: generate_one(llm, prompt, sampled(max_tokens=25)).token_ids for prompt in PROMPTS}
    logits = llm.logits([1, 2, 3])
    first, second = (llm.stream(prompt, sampled(max_tokens=25)) for prompt in PROMPTS[:2])
    tokens = [next(first).token_id, next(first).token_id]
    others = [next(second).token_id]
    outputs = llm.generate(PROMPTS, sampled(max_tokens=25))  # ends both streams on the way, unread
    tokens.append(next(first).token_id)
    np.testing.assert_array_equal(llm.logits([1, 2, 3]), logits)
    others += [chunk.token_id for chunk in second]
    tokens += [chunk.token_id for chunk in first]
    assert (tokens, others) == (alone[PROMPTS[0]], alone[PROMPTS[1]])
    assert [ids_of(output) for output in outputs] == list(alone.values())


def test_each_position_can_be_taken(llm, tiny_folder):
    assert len(generate_one(llm, [1] * 511, SamplingParams(max_tokens=1)).token_ids) == 1
    assert len(llm.logits([1] * 512)) == 512
    with LLM(tiny_folder, max_model_len=4) as llm:
        assert len(generate_one(llm, [1, 2], SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2


def test_without_a_tokenizer_token_ids_work(tiny):
    (output,) = tiny.generate([3, 4], max_tokens=3, ignore_eos=True)
    assert (output.outputs[0].text, len(ids_of(output))) == (None, 3)
    assert [c.token_id for c in tiny.stream([3, 4], max_tokens=3, ignore_eos=True)] == ids_of(output)
    assert tiny.logits([1, 2]).shape == (2, 11)
    assert tiny.generate("", max_tokens=1)[0].prompt_token_ids == [1]  # BOS needs no tokenizer


@pytest.mark.parametrize("bos_token_id", [None, -1, 11])
def test_a_model_without_bos_refuses_an_empty_prompt(tmp_path, bos_token_id):
    with LLM(tiny_checkpoint.write_checkpoint(tmp_path / "no bos", bos_token_id=bos_token_id)) as llm:
        with pytest.raises(RequestError, match="no BOS"):
            llm.generate("")
        assert generate_one(llm, [3], SamplingParams(max_tokens=1)).token_ids


@pytest.fixture(params=["cpu-float32", "cpu-bfloat16", "cpu-int8", "reference-float32"])
def damaged(request, tmp_path):
    """Only positions 3 and later are not numbers: short requests are served."""
    folder = tiny_checkpoint.write_damaged(tmp_path / "damaged")
    device, dtype = request.param.split("-")
    with LLM(folder, device=device, dtype=dtype, max_num_seqs=2) as llm:
        yield llm


LONG = SamplingParams(max_tokens=4, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


@pytest.mark.parametrize("params", [LONG, sampled(max_tokens=4, ignore_eos=True)], ids=["greedy", "sampled"])
def test_logits_that_are_not_numbers_are_an_error_and_the_engine_goes_on(damaged, params):
    good = generate_one(damaged, [3, 4], SHORT).token_ids
    for _ in range(3):
        with pytest.raises(TinyGPTError, match="position 3 are not finite"):
            damaged.generate([3, 4], params)
        assert generate_one(damaged, [3, 4], SHORT).token_ids == good
    with pytest.raises(TinyGPTError, match="not finite"):
        list(damaged.stream([3, 4], params))
    assert damaged.engine.scheduler.slots.num_free == 2


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["h.1.mlp.c_proj.weight", "h.0.attn.c_proj.weight", "wte.weight"])
def test_one_weight_that_is_not_a_number_is_not_lost_in_quantising(tmp_path, name, dtype):
    tensors = tiny_checkpoint.random_tensors()
    tensors[f"transformer.{name}"][3, 5] = np.nan
    folder = tiny_checkpoint.write_checkpoint(tmp_path / "damaged", tensors)
    with (
        LLM(folder, dtype=dtype, max_num_seqs=1) as llm,
        pytest.raises(TinyGPTError, match="not finite"),
    ):
        llm.generate([3, 4], SHORT)


def test_a_request_that_fails_does_not_touch_a_stream_beside_it(damaged):
    """Even though the stream's last token was drawn in the very step that failed, and other steps follow."""
    good = generate_one(damaged, [3], SHORT).token_ids
    stream = damaged.stream([3], SHORT)
    tokens = [next(stream).token_id]
    with pytest.raises(TinyGPTError, match="not finite"):
        damaged.generate([3, 4, 5, 6], SHORT)
    assert generate_one(damaged, [3], SHORT).token_ids == good
    assert tokens + [chunk.token_id for chunk in stream] == good


def test_a_closed_llm_refuses_everything(tiny_folder):
    with LLM(tiny_folder) as llm:
        assert llm.generate([3], max_tokens=1)
    llm.close()  # a second time does nothing
    calls = (llm.generate, llm.generate_as_finished, llm.stream, llm.logits)
    for use in (*(partial(call, [1]) for call in calls), lambda: llm.generate([]), lambda: llm.tokenizer):
        with pytest.raises(RequestError, match="closed"):
            use()
