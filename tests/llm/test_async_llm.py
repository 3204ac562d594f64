"""The asyncio door: awaited, streamed, cancelled; the loop goes on meanwhile."""

import asyncio
import threading

import pytest

from support.gate import Gate, Held, assert_idle, noting, paused
from support.paths import VOCAB_SIZE
from tinygpt import AsyncLLM, SamplingParams
from tinygpt.engine.guided import Guidance
from tinygpt.engine.input_processor import InputProcessor
from tinygpt.errors import FailedRequestError, RequestError

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SECONDS = 120


def params_for(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=3 + i % 7, temperature=i % 2, seed=i, ignore_eos=True)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    yield
    assert_idle(llm)


def run(main):
    """In a loop of its own, as everything here: an AsyncLLM belongs to none."""
    return asyncio.run(asyncio.wait_for(main, SECONDS))


async def read(stream) -> list:
    return [chunk async for chunk in stream]


def test_many_tasks_get_what_generate_gives(llm):
    alone = [llm.generate([[i]], params_for(i))[0].outputs for i in range(12)]

    async def main():
        door = AsyncLLM(llm)
        outputs = await asyncio.gather(*(door.generate([i], params_for(i)) for i in range(12)))
        return [output.outputs for output in outputs]

    assert run(main()) == run(main()) == alone


def test_the_loop_goes_on_meanwhile(llm):
    async def main():
        task = asyncio.ensure_future(AsyncLLM(llm).generate([1], LONG))
        rounds = 0
        while not task.done():
            await asyncio.sleep(0.001)
            rounds += 1
        return rounds

    assert run(main()) > 5  # 400 steps take far longer than that


def test_a_call_of_the_engine_wakes_the_loop_once(llm, monkeypatch):
    """For all streams of a loop, whoever has made them; an ended loop costs later steps nothing."""

    async def main():
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        woken = []
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: woken.append(call) or wake(*call))
        streams = [read(AsyncLLM(llm).stream([i], max_tokens=20, ignore_eos=True)) for i in range(4)]
        return sum(map(len, await asyncio.gather(*streams))), len(woken)

    for _ in range(3):
        num_tokens, num_woken = run(main())
        assert num_tokens == 80
        assert num_woken < num_tokens / 2
    assert len(llm.engine.after_step) == 1


def test_a_cancelled_task_frees_its_slot(llm):
    async def main():
        task = asyncio.ensure_future(AsyncLLM(llm).generate([1], LONG))
        while not llm.engine.scheduler.running:
            await asyncio.sleep(0.001)
        (sequence,) = llm.engine.scheduler.running
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return sequence

    sequence = run(main())
    with paused(llm):
        assert sequence.slot is None
    assert sequence.finish_reason is None


def test_a_stream_that_is_left_frees_its_slot(llm):
    async def main():
        stream = AsyncLLM(llm).stream([1], LONG)
        await anext(stream)
        (sequence,) = llm.engine.scheduler.running
        await stream.aclose()
        with paused(llm):
            assert sequence.slot is None
            assert sequence.finish_reason is None

    run(main())


GUIDED = SamplingParams(guided_regex="[a-z]")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[a-z]"},
        {"params": GUIDED},
        {"sampling_params": GUIDED},
        {"grammar": 'start: "a" | "b"'},
    ],
)
def test_a_grammar_is_compiled_in_a_thread_and_a_cancelled_task_still_ends_its_request(
    llm, monkeypatch, fields
):
    check = Held(Guidance.check)
    monkeypatch.setattr(Guidance, "check", lambda *given: check(*given))

    async def main():
        task = asyncio.ensure_future(AsyncLLM(llm).generate("a", **fields))
        while not check.called.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        check.release.set()
        assert (await AsyncLLM(llm).generate("a", **fields)).outputs[0].text.islower()

    with llm.engine.wrapped(Gate) as gate:
        gate.allow(2)
        run(main())


def test_errors_come_to_who_asked(llm):
    async def main():
        door = AsyncLLM(llm)
        with pytest.raises(RequestError, match="vocabulary"):
            await door.generate([VOCAB_SIZE])
        with pytest.raises(RequestError, match="best_of is 2"):
            await read(door.stream([1], best_of=2))
        bad = SamplingParams(allowed_token_ids=[5], suppress_tokens=[5])
        for ask in (door.generate([1], bad), read(door.stream([1], bad))):
            with pytest.raises(FailedRequestError, match="leave no token"):
                await ask

    run(main())


def test_who_makes_the_llm_closes_it(llm, small_demo):
    async def main():
        async with AsyncLLM(llm) as door:
            await door.generate([1], params_for(1))
        assert llm.generate([[1]], params_for(1))
        async with AsyncLLM(model=small_demo, max_num_seqs=2) as door:
            assert (await door.generate("a", params_for(1))).outputs
            own = door.llm
        with pytest.raises(RequestError, match="closed"):
            own.generate("a")

    run(main())


@pytest.mark.parametrize("fields", [{"dry_multiplier": 1.0}, {"params": SamplingParams(dry_multiplier=1.0)}])
def test_vocabularies_are_decoded_in_a_thread(llm, monkeypatch, fields):
    threads = noting(monkeypatch, InputProcessor, "_breakers", lambda *_: threading.current_thread())
    run(AsyncLLM(llm).generate("a", **fields))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
