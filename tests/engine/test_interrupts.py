"""Ctrl-C, and whatever else breaks a step off: no neighbour's result changes, and the next step goes on."""

import itertools
import threading
from dataclasses import replace
from importlib.util import find_spec

import pytest

from tinygpt import LLM, SamplingParams
from tinygpt.engine import engine as engine_module
from tinygpt.engine.beams import Beams
from tinygpt.engine.engine import Engine
from tinygpt.engine.multi_step import Pace
from tinygpt.engine.prefix_sharing import PrefixSharing
from tinygpt.engine.scheduler import Scheduler
from tinygpt.engine.step_lock import StepLock
from tinygpt.errors import TinyGPTError, is_ctrl_c
from tinygpt.execution.model_runner import ModelRunner
from tinygpt.kernels.compiling import CompileClock
from tinygpt.request.sequence import Sequence
from tinygpt.sampling.prompt_logprobs import PromptLogprobs
from tinygpt.sampling.sampler import Sampler
from tinygpt.tokenizer.text_stream import TextStream

PROMPT = list(range(100, 130))


def as_they_are(prompt_ids, new_ids, scores):
    return scores


def asked(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "seed": 0, **fields})


REQUESTS = [
    (PROMPT, asked(prompt_logprobs=1, logprobs=2, temperature=1.0)),
    ([5, *PROMPT], asked(prompt_logprobs=0, n=2, temperature=1.0)),
    ([7, 8], asked(max_tokens=12, prompt_lookup_num_tokens=3)),
    ("Once upon a time", asked(stop=["the"], max_tokens=12, logits_processors=[as_they_are])),
    (PROMPT[:20], asked(num_beams=3, n=2)),
]
if find_spec("llguidance") is not None:  # the extra `guided`
    REQUESTS.append(([9, 8], asked(guided_regex="([A-Z][0-9] )+", temperature=1.0)))


@pytest.fixture(scope="module")
def expected(small_demo):
    with LLM(small_demo, max_num_seqs=4) as llm:
        return [llm.generate([prompt], params)[0] for prompt, params in REQUESTS]


@pytest.fixture
def llm(small_demo):
    with LLM(small_demo, max_num_seqs=8, max_num_batched_tokens=16) as llm:
        yield llm


def check(outputs, expected) -> None:
    """Equal, not close."""
    for output, alone in zip(outputs, expected, strict=True):
        assert (output.outputs, output.prompt_logprobs) == (alone.outputs, alone.prompt_logprobs)


def run_interrupted(llm: LLM, given=REQUESTS, on_chunk=None, seconds: float = 0.0) -> list:
    """What becomes of requests where whoever takes the steps is interrupted, and takes another one."""
    requests, ended, num_interrupts = [llm._inputs.request(*request) for request in given], [], 0
    scheduler = llm.engine.scheduler
    for request in requests:
        request.when_finished(lambda: ended.append(True))
        if request.params.num_beams == 1:
            for sequence in request.sequences:
                sequence.on_chunk = on_chunk
        llm.engine.add(request.sequences)
    steps = iter(range(1000))  # enough for any number of interrupts
    while (scheduler.waiting or scheduler.running) and next(steps, None) is not None:
        try:
            llm.engine.step(seconds)
        except KeyboardInterrupt:
            num_interrupts += 1
    assert (len(ended), scheduler.running, scheduler.slots.num_free) == (len(requests), [], 8)
    assert num_interrupts > 1
    return [request.output(CompileClock()) for request in requests]


PLACES = [
    (Beams, "take"),
    (Beams, "advance"),
    (engine_module, "confirm_drafts"),
    (engine_module, "predict"),
    (Engine, "_record"),
    (ModelRunner, "forward"),
    (PrefixSharing, "share"),
    (PromptLogprobs, "note"),
    (Scheduler, "_share"),
    (Scheduler, "remove"),
    (Scheduler, "schedule"),
    (Sampler, "compute_masks"),
    (Sampler, "sample"),
    (Sequence, "advance"),
    (StepLock, "acquire_or_wait"),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_an_interrupted_step_is_simply_taken_again(llm, expected, monkeypatch, owner, name, when):
    function, calls = getattr(owner, name), itertools.count()

    def interrupted(*arguments):
        is_due = next(calls) % 3 == 1
        if is_due and when == "before":
            raise KeyboardInterrupt
        result = function(*arguments)
        if is_due:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        check(run_interrupted(llm), expected)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["multi_step", "take", "advance"])
def test_several_steps_in_one_call_are_interrupted(llm, monkeypatch, name, when):
    requests = [(prompt, asked(max_tokens=40, temperature=heat)) for prompt in ([3], [4, 5]) for heat in (0.0, 1.0)]
    expected = [llm.generate([prompt], params)[0] for prompt, params in requests]
    monkeypatch.setattr(Pace, "num_steps", lambda pace, seconds: 5)
    owner, every = (ModelRunner, 2) if name == "multi_step" else (Sequence, 11)
    function, calls = getattr(owner, name), itertools.count()

    def interrupted(*arguments):
        is_due = next(calls) % every == 1
        if is_due and when == "before":
            raise KeyboardInterrupt
        result = function(*arguments)
        if is_due:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        check(run_interrupted(llm, requests, seconds=1.0), expected)


def test_ctrl_c_within_on_chunk(llm, expected):
    def on_chunk(chunk):
        raise KeyboardInterrupt

    check(run_interrupted(llm, on_chunk=on_chunk), expected)


def test_ctrl_c_within_a_processor(llm, expected):
    calls = itertools.count()

    def interrupted(prompt_ids, new_ids, scores):
        if next(calls) % 2 == 0:
            raise KeyboardInterrupt
        return scores

    prompt, params = REQUESTS[3]
    changed = (prompt, replace(params, logits_processors=[interrupted]))
    check(run_interrupted(llm, [*REQUESTS[:3], changed, *REQUESTS[4:]]), expected)


def test_ctrl_c_while_several_expire(llm):
    def on_chunk(chunk):
        raise KeyboardInterrupt

    requests = [llm._inputs.request([i], asked(max_tokens=400, max_time=1e-9)) for i in range(3)]
    for request in requests:
        request.sequences[0].on_chunk = on_chunk
        llm.engine.add(request.sequences)
    for _ in requests:
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    assert [request.output(CompileClock()).outputs[0].stop_reason for request in requests] == ["max_time"] * 3
    assert not llm.engine.scheduler.waiting


def test_a_sequence_that_is_interrupted_half_way_fails(llm, monkeypatch):
    """Its text would lack a token, and nobody would know."""

    def push_later(text, token_id):
        raise KeyboardInterrupt

    request, ended = llm._inputs.request([1, 2], asked()), []
    request.when_finished(lambda: ended.append(True))
    llm.engine.add(request.sequences)
    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "push_later", push_later)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    llm.step()
    assert ended
    with pytest.raises(TinyGPTError, match="interrupted while it was given a token"):
        request.output(CompileClock())


@pytest.mark.parametrize("name", ["acquire_or_wait", "_acquire_next"])
def test_ctrl_c_just_when_a_turn_has_begun(llm, monkeypatch, name):
    begin = getattr(StepLock, name)

    def interrupted(turn):
        begin(turn)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StepLock, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.step() if name == "acquire_or_wait" else llm.logits([1])
    assert llm.engine._step_lock._owner is None
    assert llm.generate([[1]], asked())


def test_whose_interrupt_it_is():
    answers = []
    thread = threading.Thread(target=lambda: answers.append(is_ctrl_c(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert (is_ctrl_c(KeyboardInterrupt()), is_ctrl_c(SystemExit()), answers) == (True, False, [False])
