"""The engine's thread: callers share its steps, are refused, cancelled, interrupted and forked, and lose nothing."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from support.engines import batches_of, opened, sample_of
from support.gate import Gate, assert_idle, paused
from support.paths import ROOT
from tinygpt import LLM, SamplingParams
from tinygpt.errors import QueueFullError, RequestError, TinyGPTError
from tinygpt.outputs import ThreadFuture

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SECONDS = 120  # a test that would wait forever fails after this time
USES = [
    lambda llm: llm.submit([1]),
    lambda llm: llm.generate([1]),
    lambda llm: llm.logits([1]),
    LLM.check_health,
]


def params_for(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=3 + i % 7, temperature=i % 2, seed=i, ignore_eos=True, logprobs=1)


llm = opened("small_demo", max_num_seqs=4, max_queue=80)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        assert_idle(llm)
        assert (llm.engine._pending, llm.engine._queued) == (set(), set())


def test_64_threads_at_once_lose_nothing(llm):
    prompts = [[i, i + 1, i + 2] for i in range(64)]
    alone = [llm.generate([prompt], params_for(i))[0].outputs for i, prompt in enumerate(prompts)]
    together = threading.Barrier(64)

    def use(i: int):
        together.wait(SECONDS)
        if i % 3 == 0:
            return llm.generate([prompts[i]], params_for(i))[0].outputs
        return llm.submit(prompts[i], params_for(i)).result(SECONDS).outputs

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(use, range(64))) == alone


@pytest.mark.usefixtures("single_steps")
def test_callers_share_steps(llm, monkeypatch):
    batches = batches_of(llm, monkeypatch)
    with paused(llm):
        futures = [llm.submit([i], max_tokens=10, ignore_eos=True) for i in range(4)]
    for future in futures:
        future.result(SECONDS)
    assert [len(batch.slots) for batch in batches] == [4] * 10


def test_after_step_is_called_once_for_each_call_of_the_engine(llm):
    chunks, seen = [], []
    llm.engine.after_step.append(lambda: seen.append(len(chunks)))
    try:
        llm.submit([1], params_for(6), on_chunk=chunks.append).result(SECONDS)
        with paused(llm):
            assert seen[0] == 1  # the first token comes alone
            assert seen == sorted(set(seen))
            assert seen[-1] == len(chunks)
    finally:
        llm.engine.after_step.clear()


@pytest.mark.parametrize(
    "fields", [{}, {"prompt_logprobs": 1}, {"capture": "resid_pre"}, {"guided_regex": "[a-z ]{30}"}], ids=str
)
def test_samples_that_make_room_for_a_late_caller_have_the_same_bits(llm, fields):
    params = SamplingParams(
        n=9, max_tokens=20, temperature=1.0, seed=3, ignore_eos=True, logprobs=1, **fields
    )
    late = []

    def submit(chunk) -> None:
        if len(late) < 3 and chunk.index == 0:
            late.append(llm.submit([4, 5], params_for(3)))

    prompt = list(range(5, 45))
    several = llm.submit(prompt, params, submit)
    output = several.result(SECONDS)
    results = [future.result(SECONDS) for future in late]
    assert len(results) == 3
    assert max(result.metrics.finished for result in results) < output.metrics.finished
    (alone,) = llm.generate([prompt], params)
    for one, other in zip(output.outputs, alone.outputs, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
        for name, array in (one.activations or {}).items():
            assert np.array_equal(array, other.activations[name])
    assert output.prompt_logprobs == alone.prompt_logprobs


def test_the_queue_is_bounded(small_demo):
    with LLM(small_demo, max_num_seqs=2, max_queue=3) as llm:
        with paused(llm):
            futures = [llm.submit([i], params_for(i)) for i in range(5)]
            with pytest.raises(
                QueueFullError, match=r"max_queue is 3 and the queue holds 3, so .* no room for 1 more"
            ):
                llm.submit([9])
            futures.pop().cancel()
            with pytest.raises(QueueFullError, match=r"the queue holds 2, .* room for 2 more"):
                llm.submit([9], n=2, temperature=1.0)
            futures.append(llm.submit([9], params_for(4)))
        assert len(llm.generate([[1]] * 9, params_for(1))) == 9  # max_queue is for `submit`
        for future in futures:
            assert future.result(SECONDS).outputs
        assert llm.submit([9]).result(SECONDS).outputs


@pytest.mark.parametrize("fields", [{"n": 6}, {"n": 1, "best_of": 6}], ids=str)
def test_a_request_for_which_there_is_never_room(fields, small_demo):
    with LLM(small_demo, max_num_seqs=2, max_queue=3) as llm:
        with pytest.raises(RequestError, match="6 samples, but max_queue is 3 and max_num_seqs 2") as raised:
            llm.submit([1], temperature=1.0, **fields)
        assert not isinstance(raised.value, QueueFullError)  # submitting again would not help
        assert llm.submit([1], n=5, max_tokens=1, temperature=1.0).result(SECONDS).outputs


def test_cancelling_before_the_run(llm):
    with paused(llm):
        future = llm.submit([1], LONG)
        other = llm.submit([2], params_for(2))
        assert future.cancel()
    assert wait([future], SECONDS).done == {future}
    with pytest.raises(CancelledError):
        future.result()
    assert other.result(SECONDS).outputs


def test_cancelling_during_the_run_frees_the_slot_within_a_step(llm):
    with llm.engine.wrapped(Gate) as gate:
        future = llm.submit([1], LONG)
        gate.allow(1)
        gate.wait_until_asked(2)
        sequence = llm.engine.scheduler.running[0]
        assert future.cancel()
        gate.allow(1)
    assert (llm.engine.scheduler.running, sequence.slot) == ([], None)
    assert len(sequence.new_token_ids) == 2
    assert future.cancelled()


def test_samples_share_the_lists_of_their_request_until_it_ends(llm):
    lists = {"allowed_token_ids": [5, 6] * 500, "suppress_tokens": [7] * 500, "bad_words_ids": [[6, 6]] * 500}
    with llm.engine.wrapped(Gate) as gate:
        future = llm.submit([1], n=4, temperature=1.0, max_tokens=3, ignore_eos=True, **lists)
        gate.wait_until_asked(1)
        gate.allow(2)
        gate.wait_until_asked(3)
        states = [sequence.sampling_state for sequence in llm.engine.scheduler.running]
        assert len({id(state.params) for state in states}) == 1
        gate.allow(9)
        future.result(SECONDS)
    assert [sequence.sampling_state for sequence in future.request.sequences] == [None] * 4


def test_cancelling_a_finished_request_does_nothing(llm):
    future = llm.submit([1], params_for(0))
    future.result(SECONDS)
    assert not future.cancel()


def test_closing_resolves_every_future(small_demo):
    llm = LLM(small_demo, max_num_seqs=2)
    futures = [llm.submit([i], LONG) for i in range(20)]
    llm.close()
    assert wait(futures, SECONDS).not_done == set()
    for future in futures:
        with pytest.raises(RequestError, match="closed before the request was finished"):
            future.result()
    for use in USES:
        with pytest.raises(RequestError, match="has been closed"):
            use(llm)
    llm.close()


def test_a_forgotten_llm_is_collected(small_demo):
    llm = LLM(small_demo)
    llm.generate([1], params_for(1))
    thread = llm.engine._thread
    seen = [weakref.ref(part) for part in (llm, llm.engine)]
    del llm
    gc.collect()
    thread.join(SECONDS)
    gc.collect()
    assert ([part() for part in seen], thread.is_alive()) == ([None, None], False)


def raiser(error):
    def function(*arguments):
        raise error

    return function


@pytest.mark.parametrize("where", ["on_chunk", "processor"])
@pytest.mark.parametrize("error", [KeyError("mine"), SystemExit(1), asyncio.CancelledError()], ids=repr)
def test_a_function_that_raises_fails_its_request_alone(llm, where, error):
    function = raiser(error)
    params = SamplingParams(max_tokens=4, logits_processors=[function] if where == "processor" else [])
    with paused(llm):
        bad = llm.submit([1], params, function if where == "on_chunk" else None)
        good = llm.submit([1], params_for(4))
    with pytest.raises(TinyGPTError, match=f"raised {type(error).__name__}"):
        bad.result(SECONDS)
    assert good.result(SECONDS).outputs == llm.generate([[1]], params_for(4))[0].outputs


@pytest.mark.parametrize(
    ("error", "raised"), [(MemoryError("no more"), MemoryError), (SystemExit(1), RuntimeError)]
)
def test_a_step_that_fails_ends_every_request_and_the_next_step_works(llm, monkeypatch, error, raised):
    with monkeypatch.context() as patch:
        with paused(llm):
            patch.setattr(llm.engine.runner, "forward", raiser(error))
            futures = [llm.submit([i], LONG) for i in range(6)]
        for future in futures:
            with pytest.raises(raised, match=r"no more|broken off by SystemExit\(1\)"):
                future.result(SECONDS)
        with pytest.raises(TinyGPTError, match="the engine has failed: "):
            llm.check_health()
    assert (
        llm.submit([1], params_for(1)).result(SECONDS).outputs
        == llm.generate([[1]], params_for(1))[0].outputs
    )
    llm.check_health()


def test_cancelling_resolves_every_future_if_the_backend_cannot_copy(llm, monkeypatch):
    with llm.engine.wrapped(Gate) as gate, monkeypatch.context() as patch:
        with paused(llm):  # the second waits for keys and values of the first
            futures = [llm.submit([703] * 40, LONG), llm.submit([703] * 40 + [1], LONG)]
        gate.wait_until_asked(1)
        patch.setattr(llm.engine.scheduler, "_copy_positions", raiser(MemoryError("copy_positions")))
        assert futures[0].cancel()
        gate.allow(1)
        assert wait(futures, SECONDS).not_done == set()
    with pytest.raises(MemoryError, match="copy_positions"):
        futures[1].result()


@pytest.mark.parametrize("error", [MemoryError("no more"), SystemExit(1)], ids=repr)
def test_a_thread_that_cannot_go_on_refuses_later_calls_with_the_error(small_demo, monkeypatch, error):
    llm = LLM(small_demo)
    with paused(llm):
        monkeypatch.setattr(llm.engine.runner, "forward", raiser(RuntimeError("first")))
        monkeypatch.setattr(llm.engine.scheduler, "remove", raiser(error))
        futures = [llm.submit([i], LONG) for i in range(3)]
    for future in futures:
        with pytest.raises(RuntimeError, match="first"):
            future.result(SECONDS)
    llm.engine._thread.join(SECONDS)
    for use in USES:
        with pytest.raises(TinyGPTError, match="the engine has failed: "):
            use(llm)
    llm.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_closing_resolves_every_future_if_the_backend_cannot_be_closed(small_demo, monkeypatch):
    llm = LLM(small_demo)
    futures = [llm.submit([i], LONG) for i in range(3)]
    monkeypatch.setattr(llm.engine.runner, "close", raiser(MemoryError("no more")))
    llm.engine._inbox.put(None)
    llm.engine._thread.join(SECONDS)
    assert not llm.engine._thread.is_alive()
    llm.close()
    assert wait(futures, SECONDS).not_done == set()


@pytest.mark.parametrize("part", ["_prepare_slot", "add"])
def test_an_admission_that_fails_keeps_no_slot_and_no_caller(llm, monkeypatch, part):
    scheduler = llm.engine.scheduler
    embeds = np.zeros((1, llm.config.n_embd))
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, part, raiser(MemoryError("no more")))
        with pytest.raises(MemoryError, match="no more"):
            llm.generate([[1], [2]], prompt_embeds=embeds)


@pytest.mark.parametrize("where", ["on_chunk", "processor"])
@pytest.mark.parametrize(
    "call", [lambda llm: llm.close(), lambda llm: llm.generate([2]), lambda llm: llm.logits([2])]
)
def test_a_function_called_in_a_step_may_submit_but_not_run_or_close(llm, where, call):
    submitted = []

    def function(*arguments):
        submitted.append(llm.submit([2], params_for(0)))
        call(llm)

    params = SamplingParams(logits_processors=[function] if where == "processor" else [])
    with pytest.raises(TinyGPTError, match="may submit requests, but not run them or close the LLM"):
        llm.submit([1], params, function if where == "on_chunk" else None).result(SECONDS)
    assert submitted[0].result(SECONDS).outputs


def run_program(program: str, model: str) -> None:
    code = f"""
import os, random, signal, sys, threading, time
from tinygpt import LLM, SamplingParams
from tinygpt.errors import RequestError
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
llm = LLM(sys.argv[1], threads=2, max_num_seqs=4)
short = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True)
long = SamplingParams(max_tokens=300, temperature=1.0, seed=1, ignore_eos=True)
want, want_long = (llm.generate("Once", p, use_tqdm=False)[0].outputs for p in (short, long))
{program}
print("done")
"""
    result = subprocess.run(
        [sys.executable, "-c", code, model], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert (result.stdout, result.returncode) == ("done\n", 0), result.stderr


def test_ctrl_c_ends_the_callers_requests_and_no_other(small_demo):
    run_program(
        """
background, draw, num_interrupts = llm.submit("Once", long), random.Random(1), 0
for i in range(12):
    try:
        timer = threading.Timer(draw.uniform(0, 0.03), os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        llm.generate(["a b"] * 40, long, use_tqdm=False) if i % 2 else [*llm.stream("a b", max_tokens=500)]
        timer.join()
        time.sleep(0)
    except KeyboardInterrupt:
        num_interrupts += 1
    assert llm.generate(["Once"] * 3, short, use_tqdm=False)[1].outputs == want
assert num_interrupts == 12
assert background.result(60).outputs == want_long
llm.engine.call(lambda: None)
scheduler = llm.engine.scheduler
assert (scheduler.running, len(scheduler.waiting), scheduler.slots.num_free) == ([], 0, 4)
""",
        small_demo,
    )


def interrupted_at(point, call):
    """Call with Ctrl-C at one of the points at which CPython looks for signals. Return False if it ends before."""

    def count(frame, event, argument):
        nonlocal point
        point -= event != "c_call"
        if not point:
            sys.setprofile(None)
            raise KeyboardInterrupt

    try:
        sys.setprofile(count)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def wait_shortly(future):
    with suppress(TimeoutError):
        future.result(0.001)


@pytest.mark.parametrize(
    "call", [ThreadFuture.cancel, wait_shortly, lambda future: future.add_done_callback(id)]
)
def test_ctrl_c_at_any_point_leaves_no_future_locked(call):
    point, future = 1, ThreadFuture()
    while interrupted_at(point, partial(call, future)):
        other = threading.Thread(target=future.settle, args=(int,), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), point
        point, future = point + 1, ThreadFuture()
    assert point > 3


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # it may come as a generator ends
@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate([[1, 2]] * 3, params_for(1)),
        lambda llm: [*llm.stream([1, 2], params_for(1))],
        lambda llm: [future.result() for future in [llm.submit([1, 2], params_for(1)) for _ in range(2)]],
        lambda llm: [future.cancel() for future in [llm.submit([1, 2], LONG) for _ in range(2)]],
        lambda llm: llm.logits([1, 2]),
    ],
)
def test_ctrl_c_at_any_point_loses_no_slot_and_no_room(llm, call):
    want = llm.generate([1, 2], params_for(1))[0].outputs
    for point in range(1, 400, 11):
        interrupted_at(point, partial(call, llm))
        while llm.engine.call(lambda: llm.engine._pending):
            time.sleep(0.001)
        assert not llm.engine._queued
    assert llm.generate([1, 2], params_for(1))[0].outputs == want


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_refused_and_makes_a_new_llm(small_demo):
    run_program(
        """
from functools import partial
def child(future, stream):
    old, new = (future.result, stream.__next__), (llm.generate, llm.submit, lambda prompt: [*llm.stream(prompt)])
    for call in (*old, *(partial(use, "a") for use in new)):
        try:
            call()
            return 1
        except RequestError as error:
            if "make a new one in the child" not in str(error):
                return 2
    future.cancel()
    llm.close()
    with LLM(sys.argv[1], threads=2, max_num_seqs=2) as new:
        return int(new.generate("Once", short, use_tqdm=False)[0].outputs != want)

for i in range(3):
    future, stream = llm.submit("Once", long), llm.stream("Once", long)
    next(stream)
    time.sleep(0.005 * i)
    if not (pid := os.fork()):
        signal.alarm(60)
        os._exit(child(future, stream))
    assert os.waitpid(pid, 0)[1] == 0
    assert future.result(60).outputs == want_long
""",
        small_demo,
    )


def test_a_finalizer_that_runs_as_python_ends_does_not_wait(small_demo, monkeypatch):
    """The engine's thread has ended by then."""
    llm = LLM(small_demo)
    future = llm.submit([1], LONG)
    stream = llm.stream([1], LONG)
    next(stream)
    with paused(llm):
        monkeypatch.setattr("sys.is_finalizing", lambda: True)
        for call in (future.result, lambda: next(stream), *(partial(use, llm) for use in USES)):
            with pytest.raises(RequestError, match="Python is ending"):
                call()
        llm.close()
        assert llm.engine._thread.is_alive()


single = opened("small_demo", scope="function", max_num_seqs=1)


def later(monkeypatch) -> None:
    now = time.perf_counter
    monkeypatch.setattr("time.perf_counter", lambda: now() + 1000)


def test_a_running_sample_keeps_its_tokens_when_its_time_is_over(single, monkeypatch):
    whole = sample_of(single, "Once upon a time", LONG)
    chunks = []
    with single.engine.wrapped(Gate) as gate:
        params = SamplingParams(max_tokens=400, ignore_eos=True, max_time=500)
        future = single.submit("Once upon a time", params, chunks.append)
        gate.allow(4)
        gate.wait_until_asked(5)
        later(monkeypatch)
        gate.allow(1)
        (sample,) = future.result(SECONDS).outputs
    assert [chunk.token_id for chunk in chunks] == [*whole.token_ids[:5], None]
    assert [chunk.finish_reason for chunk in chunks] == [None] * 5 + ["length"]
    assert whole.text.startswith("".join(chunk.text for chunk in chunks))
    assert (sample.stop_reason, single.engine.scheduler.slots.num_free) == ("max_time", 1)


def test_a_sample_that_waits_ends_without_a_token_when_its_time_is_over(single, monkeypatch):
    with single.engine.wrapped(Gate) as gate:
        running = single.submit("a", LONG)
        waiting = single.submit([5, 6, 7], max_time=500, prompt_logprobs=0, max_tokens=9)
        last = single.submit("c", max_tokens=1, max_time=5000)
        gate.wait_until_asked(1)
        later(monkeypatch)
        gate.allow(1)
        output = waiting.result(SECONDS)
        running.cancel()
        gate.allow(9)
        assert last.result(SECONDS).outputs[0].stop_reason is None
    (sample,) = output.outputs
    assert (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason) == (
        [],
        "",
        "length",
        "max_time",
    )
    assert (output.prompt_logprobs, output.prompt_cumulative_logprob) == ([None], None)
    metrics = output.metrics
    assert (metrics.scheduled, metrics.first_token, metrics.time_to_first_token) == (None, None, None)
    assert (metrics.prefill_time, metrics.time_per_output_token) == (None, None)
    assert metrics.queue_time == metrics.finished - metrics.arrival


def test_times_of_a_request(single):
    outputs = single.generate(["a", "b"], max_tokens=4, ignore_eos=True, max_time=500)
    for metrics in (output.metrics for output in outputs):
        assert metrics.arrival <= metrics.scheduled <= metrics.first_token <= metrics.finished
        assert metrics.queue_time + metrics.prefill_time == pytest.approx(metrics.time_to_first_token)
        assert 3 * metrics.time_per_output_token == pytest.approx(metrics.finished - metrics.first_token)
    assert outputs[1].metrics.scheduled >= outputs[0].metrics.finished  # there is one slot
