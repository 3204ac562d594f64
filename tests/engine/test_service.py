"""Submitted requests: batched whoever they come from, bounded, cancelled at any time, resolved in any case."""

import asyncio
import ctypes
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import numpy as np
import pytest

from support import tiny_checkpoint
from support.demo import VOCAB_SIZE
from tinygpt import LLM, SamplingParams
from tinygpt.errors import QueueFullError, RequestError, TinyGPTError

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SECONDS = 120  # after which a test fails that would wait for ever


def params_for(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=3 + i % 7, temperature=i % 2, seed=i, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def llm(small_demo):
    with LLM(small_demo, max_num_seqs=4, max_queue=80) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    """After every test that used the shared engine, each row is free and nobody waits."""
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        with between_steps(llm):
            scheduler = llm.engine.scheduler
            assert (scheduler.running, len(scheduler.waiting), scheduler.slots.num_free) == ([], 0, 4)
        assert (llm._service._pending, llm._service.num_samples) == ({}, 0)


def kill_thread(thread: threading.Thread) -> None:
    """SystemExit, wherever it stands."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def between_steps(llm: LLM):
    """A block in which no step is taken."""
    return llm.engine._step_lock.held()


def test_a_future_has_what_generate_gives(llm):
    for prompt in ("Once", [5, 6, 7], ""):
        assert (
            llm.submit(prompt, params_for(1)).result(SECONDS).outputs == llm.generate(prompt, params_for(1))[0].outputs
        )


def test_64_threads_at_once_lose_nothing(llm):
    prompts = [[i, i + 1, i + 2] for i in range(64)]
    alone = [llm.generate([prompt], params_for(i))[0].outputs for i, prompt in enumerate(prompts)]
    together = threading.Barrier(64)

    def use(i: int):
        together.wait(SECONDS)
        return llm.submit(prompts[i], params_for(i)).result(SECONDS).outputs

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(use, range(64))) == alone


@pytest.mark.usefixtures("single_steps")
def test_callers_share_steps(llm, monkeypatch):
    steps, forward = [], llm.engine.runner.forward
    monkeypatch.setattr(llm.engine.runner, "forward", lambda batch: steps.append(len(batch.slots)) or forward(batch))
    with between_steps(llm):
        futures = [llm.submit([i], SamplingParams(max_tokens=10, ignore_eos=True)) for i in range(4)]
    for future in futures:
        future.result(SECONDS)
    assert steps == [4] * 10


def test_generate_and_streams_run_beside_submitted_requests(llm):
    alone = llm.generate([[3], [4]], params_for(5))
    stream = llm.stream([9, 9], params_for(6))
    tokens = [next(stream).token_id]
    futures = [llm.submit([i], params_for(5)) for i in (3, 4)]
    assert [o.outputs for o in llm.generate([[3], [4]], params_for(5))] == [o.outputs for o in alone]
    assert [future.result(SECONDS).outputs for future in futures] == [o.outputs for o in alone]
    tokens += [chunk.token_id for chunk in stream]
    assert tokens == llm.generate([[9, 9]], params_for(6))[0].outputs[0].token_ids


def test_chunks_as_they_are_made(llm):
    chunks = []
    output = llm.submit("Once", params_for(3), on_chunk=chunks.append).result(SECONDS)
    assert [chunk.token_id for chunk in chunks] == output.outputs[0].token_ids
    assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text
    assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, "length"]


def test_the_queue_is_bounded(small_demo):
    with LLM(small_demo, max_num_seqs=2, max_queue=3) as llm:
        with between_steps(llm):
            futures = [llm.submit([i], params_for(i)) for i in range(5)]
            with pytest.raises(QueueFullError, match=r"max_queue is 3 and the queue holds 3, so .* no room for 1 more"):
                llm.submit([9])
            futures.pop().cancel()
            with pytest.raises(QueueFullError, match=r"the queue holds 2, .* room for 2 more"):
                llm.submit([9], SamplingParams(n=2, temperature=1.0))
            futures.append(llm.submit([9], params_for(4)))
        for future in futures:
            assert future.result(SECONDS).outputs
        assert llm.submit([9]).result(SECONDS).outputs


def test_a_queue_of_none_serves_as_many_as_run(small_demo):
    with LLM(small_demo, max_num_seqs=2, max_queue=0) as llm, between_steps(llm):
        llm.submit([1])
        with pytest.raises(QueueFullError):
            llm.submit([1], SamplingParams(n=2, temperature=1.0))
        llm.submit([1])
        with pytest.raises(QueueFullError):
            llm.submit([1])


@pytest.mark.parametrize("fields", [{"n": 6}, {"n": 1, "best_of": 6}], ids=str)
def test_a_request_for_which_there_is_never_room(fields, small_demo):
    with LLM(small_demo, max_num_seqs=2, max_queue=3) as llm:
        with pytest.raises(RequestError, match="6 samples, but max_queue is 3 and max_num_seqs 2") as raised:
            llm.submit([1], SamplingParams(temperature=1.0, **fields))
        assert not isinstance(raised.value, QueueFullError)  # later is no better
        assert llm.submit([1], SamplingParams(n=5, max_tokens=1, temperature=1.0)).result(SECONDS).outputs


def test_cancelling_before_the_run(llm):
    with between_steps(llm):
        future, other = llm.submit([1], LONG), llm.submit([2], params_for(2))
        assert future.cancel()
    assert wait([future], SECONDS).done == {future}
    with pytest.raises(CancelledError):
        future.result()
    assert other.result(SECONDS).outputs


def test_cancelling_during_the_run_frees_the_row_within_a_step(llm):
    has_begun, may_go_on = threading.Event(), threading.Event()

    def on_chunk(chunk):
        has_begun.set()
        may_go_on.wait(SECONDS)

    future = llm.submit([1], LONG, on_chunk)
    assert has_begun.wait(SECONDS)
    sequence = llm.engine.scheduler.running[0]
    assert future.cancel()
    may_go_on.set()
    with between_steps(llm):
        assert (llm.engine.scheduler.running, sequence.slot) == ([], None)
        assert len(sequence.new_token_ids) == 1
    assert future.cancelled()


def test_cancelling_what_is_done_does_nothing(llm):
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
    with pytest.raises(RequestError, match="has been closed"):
        llm.submit([1])


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([VOCAB_SIZE], None, "vocabulary"),
        ("a", SamplingParams(max_tokens=600), "512 positions"),
        (["a", "b"], None, "takes one"),
    ],
)
def test_what_is_impossible_is_refused_at_once(llm, prompt, params, message):
    with pytest.raises(RequestError, match=message):
        llm.submit(prompt, params)


@pytest.mark.parametrize("fields", [{"n": 2, "best_of": 3}, {"n": 1, "best_of": 3}])
def test_chunks_are_of_no_chosen_sample(llm, fields):
    with pytest.raises(RequestError, match="stream"):
        llm.submit("a", SamplingParams(**fields), on_chunk=print)


def test_an_error_reaches_its_request_alone(tmp_path):
    tensors = tiny_checkpoint.random_tensors()
    tensors["transformer.wpe.weight"][3:] = np.nan
    folder = tiny_checkpoint.write_checkpoint(tmp_path / "damaged", tensors)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(str(folder), max_num_seqs=4) as llm:
        good = llm.generate([[3]], params)[0].outputs[0].token_ids
        with between_steps(llm):
            futures = [llm.submit([3] * count, params) for count in (1, 3, 1)]
        with pytest.raises(TinyGPTError, match="not finite"):
            futures[1].result(SECONDS)
        assert [futures[i].result(SECONDS).outputs[0].token_ids for i in (0, 2)] == [good, good]


def test_a_function_that_raises_fails_its_request_alone(llm):
    def on_chunk(chunk):
        raise KeyError("mine")

    with between_steps(llm):
        bad, good = llm.submit([1], LONG, on_chunk), llm.submit([1], params_for(4))
    with pytest.raises(TinyGPTError, match=r"on_chunk raised KeyError\('mine'\)"):
        bad.result(SECONDS)
    assert good.result(SECONDS).outputs == llm.generate([[1]], params_for(4))[0].outputs


def raiser(error):
    def function(*arguments):
        raise error

    return function


# KeyboardInterrupt: out of a thread in which nobody presses Ctrl-C.
BASE_EXCEPTIONS = [SystemExit(1), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()]


@pytest.mark.parametrize("where", ["on_chunk", "processor"])
@pytest.mark.parametrize("error", BASE_EXCEPTIONS, ids=repr)
def test_whatever_a_function_raises_fails_its_request_alone(llm, where, error):
    function = raiser(error)
    params = SamplingParams(max_tokens=4, logits_processors=[function] if where == "processor" else [])
    with between_steps(llm):
        bad = llm.submit([1], params, function if where == "on_chunk" else None)
        good = llm.submit([1], params_for(4))
    with pytest.raises(TinyGPTError, match=f"raised {type(error).__name__}"):
        bad.result(SECONDS)
    expected = llm.generate([[1]], params_for(4))[0].outputs
    assert good.result(SECONDS).outputs == llm.submit([1], params_for(4)).result(SECONDS).outputs == expected


@pytest.mark.parametrize("error", BASE_EXCEPTIONS, ids=repr)
def test_a_callback_of_a_future_is_its_own_business(llm, error):
    with between_steps(llm):
        bad, good = llm.submit([1], params_for(0)), llm.submit([1], params_for(4))
        bad.add_done_callback(raiser(error))
    assert bad.result(SECONDS).outputs
    assert good.result(SECONDS).outputs == llm.generate([[1]], params_for(4))[0].outputs


def test_a_step_that_is_broken_off_leaves_nobody_waiting(llm, monkeypatch):
    with monkeypatch.context() as patch:
        with between_steps(llm):
            patch.setattr(llm.engine.runner, "forward", raiser(SystemExit(1)))
            futures = [llm.submit([i], LONG) for i in range(6)]
        for future in futures:  # not SystemExit, which would end who asks
            with pytest.raises(RuntimeError, match=r"broken off by SystemExit\(1\)"):
                future.result(SECONDS)
    assert llm.submit([1], params_for(1)).result(SECONDS).outputs


def test_after_a_step_that_failed_the_engine_is_ill_until_one_succeeds(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "forward", raiser(MemoryError("no more")))
        with pytest.raises(MemoryError):
            llm.submit([1], LONG).result(SECONDS)
        with pytest.raises(TinyGPTError, match=r"the engine has failed: MemoryError\('no more'\)"):
            llm.check_health()
    bad = llm.submit([1], SamplingParams(allowed_token_ids=[5], suppress_tokens=[5]))
    with pytest.raises(TinyGPTError):  # its own failure is no matter of the engine's
        bad.result(SECONDS)
    with between_steps(llm):
        pass
    llm.check_health()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_is_killed_keeps_nobody_waiting(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", lambda: None)  # none is taken, so that the request stays
        future = llm.submit([1], LONG)
        thread = llm._service._thread
        kill_thread(thread)
        with pytest.raises(RuntimeError, match="the engine's thread has ended by SystemExit"):
            future.result(SECONDS)
        thread.join(SECONDS)
        with pytest.raises(TinyGPTError, match="the engine has failed: SystemExit"):
            llm.check_health()
    assert llm.submit([1], params_for(1)).result(SECONDS).outputs  # by another thread


@pytest.mark.parametrize("where", ["on_chunk", "processor"])
def test_a_function_called_in_a_step_cannot_close(llm, where):
    def function(*arguments):
        llm.close()

    params = SamplingParams(logits_processors=[function] if where == "processor" else [])
    with pytest.raises(TinyGPTError, match="not run them or close the LLM"):
        llm.submit([1], params, function if where == "on_chunk" else None).result(SECONDS)
    assert llm.tokenizer
    assert llm.submit([1], params_for(1)).result(SECONDS).outputs


@pytest.mark.parametrize("on_chunk", [3, "print"])
def test_on_chunk_must_be_a_function(llm, on_chunk):
    with pytest.raises(RequestError, match=f"on_chunk is {on_chunk!r} and must be a function"):
        llm.submit([1], on_chunk=on_chunk)


def test_a_function_called_in_a_step_may_submit_but_not_run(llm):
    submitted = []

    def on_chunk(chunk):
        submitted.append(llm.submit([2], params_for(0)))
        llm.generate([2], params_for(0))

    with pytest.raises(TinyGPTError, match="may submit requests, but not run them"):
        llm.submit([1], LONG, on_chunk).result(SECONDS)
    assert submitted[0].result(SECONDS).outputs


def test_a_step_that_fails_leaves_nobody_waiting(llm, monkeypatch):
    def fail(batch):
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        with between_steps(llm):
            patch.setattr(llm.engine.runner, "forward", fail)
            futures = [llm.submit([i], LONG) for i in range(6)]
        for future in futures:
            with pytest.raises(MemoryError, match="no more"):
                future.result(SECONDS)
    assert llm.submit([1], params_for(1)).result(SECONDS).outputs == llm.generate([[1]], params_for(1))[0].outputs


def test_the_thread_ends_without_work_and_comes_back(llm, monkeypatch):
    monkeypatch.setattr("tinygpt.engine.service.IDLE_SECONDS", 0.001)
    for _ in range(3):
        future = llm.submit([1], params_for(1))
        thread = llm._service._thread
        future.result(SECONDS)
        if thread is not None:
            thread.join(SECONDS)
            assert not thread.is_alive()
