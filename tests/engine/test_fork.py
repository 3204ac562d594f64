"""A process forked at any moment: its engine begins idle and right, and the parent notices nothing."""

import functools
import gc
import os
import weakref
from collections.abc import Callable

import pytest

from support.apart import printed
from tinygpt import LLM

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PATIENCE = 60  # seconds after which a child is taken for hanging

# Each test's program goes between these two. in_child(work): whether `work` returned True in a forked process.
BEGINNING = f"""
import json, os, random, signal, sys, threading, time, traceback
from tinygpt import LLM, SamplingParams
from tinygpt.errors import RequestError

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm({PATIENCE})
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0

llm = LLM(sys.argv[1], threads=2, max_num_seqs=4)
short = SamplingParams(max_tokens=6, temperature=0.8, seed=1)
long = SamplingParams(max_tokens=40, ignore_eos=True)
expected = llm.generate("Once", short)[0].outputs

def is_right():
    outputs = [llm.generate("Once", short)[0], llm.submit("Once", short).result(), llm.generate("Once", short)[0]]
    return all(output.outputs == expected for output in outputs)

def is_refused(call):
    try:
        call()
    except RequestError as error:
        return "before this process was forked" in str(error)
"""
END = """
assert is_right()
print("done")
"""
DONE = "done\n"


@pytest.fixture
def run(small_demo) -> Callable[[str], str]:
    return functools.partial(run_program, small_demo)


def run_program(model: str, program: str) -> str:
    """What the program prints: DONE if nothing in it was wrong."""
    return printed(BEGINNING + program + END, model, patience=10 * PATIENCE)


def test_forks_while_other_threads_take_steps(run):
    assert (
        run("""
def work(i):
    while not is_over:
        if i % 3 == 0:
            llm.generate([[i, 2, 3]] * 2, long)
        elif i % 3 == 1:
            list(llm.stream([i, 2], long))
        else:
            llm.submit([i, 2], long).result()

is_over, generator = False, random.Random(0)
threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
for thread in threads:
    thread.start()
for _ in range(6):
    time.sleep(0.02 * generator.random())
    assert in_child(is_right)
    assert is_right()
is_over = True
for thread in threads:
    thread.join()
""")
        == DONE
    )


def test_forks_while_other_threads_have_the_locks(run):
    assert (
        run("""
for holding in (llm.engine._step_lock.held, lambda: llm.engine._step_lock._changed, lambda: llm._service._changed,
                lambda: llm.engine.runner._workspace.team._shared.changed):
    is_held, may_end = threading.Event(), threading.Event()

    def hold():
        with holding():
            is_held.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    assert in_child(lambda: is_right() and llm.close() is None), holding
    may_end.set()
    thread.join()
""")
        == DONE
    )


def test_a_fork_waits_for_the_kernel_that_is_compiled(run):
    assert (
        run("""
from numba.core.compiler_lock import global_compiler_lock
from tinygpt.kernels.cpu.jit import jit

is_held = threading.Event()

def compile():
    with global_compiler_lock:
        is_held.set()
        time.sleep(0.3)

thread = threading.Thread(target=compile)
thread.start()
is_held.wait()
kernel = jit(lambda x: x + 1)
assert in_child(lambda: kernel(1) == 2)
thread.join()
assert kernel(1) == 2
""")
        == DONE
    )


def test_what_was_asked_before_a_fork_is_the_parents(run):
    assert (
        run("""
chunks, stream, outputs = [], llm.stream("Once", short), llm.generate_as_finished(["Once"], short)
text = [next(stream).text]
with llm.engine._step_lock.held():
    future, cancelled = llm.submit("Once", short, on_chunk=chunks.append), llm.submit("Once", short)
    calls = [lambda: list(stream), lambda: list(outputs), future.result, future.exception]
    assert in_child(lambda: all(map(is_refused, calls)) and cancelled.cancel() and is_right() and not chunks)
assert "".join(text + [chunk.text for chunk in stream]) == expected[0].text
assert next(outputs)[1].outputs == future.result().outputs == cancelled.result().outputs == expected
assert in_child(lambda: future.result().outputs == expected)
""")
        == DONE
    )


def test_a_fork_within_a_step(run):
    assert (
        run("""
children = []
few = SamplingParams(max_tokens=8, ignore_eos=True)
llm.submit([1], few, on_chunk=lambda chunk: children.append(in_child(is_right))).result()
assert children == [True] * 8
""")
        == DONE
    )


def test_a_closed_llm_stays_closed(run):
    assert (
        run("""
other = LLM(sys.argv[1])
other.close()

def is_closed():
    try:
        other.generate("Once")
    except RequestError as error:
        return "has been closed" in str(error)

assert in_child(is_closed)
""")
        == DONE
    )


def test_a_forgotten_llm_is_collected():
    llm = LLM("demo")
    seen = [weakref.ref(part) for part in (llm, llm.engine, llm._service)]
    del llm
    gc.collect()
    assert [reference() for reference in seen] == [None] * 3


def test_forks_while_other_threads_compute_masks(run):
    """What a compiled grammar keeps has locks of its own, in the package."""
    pytest.importorskip("llguidance", reason="llguidance, the extra `guided`, is not installed")
    assert (
        run("""
guided = SamplingParams(max_tokens=30, guided_json={"type": "object"}, seed=1)
guided_outputs = llm.generate("Once", guided)[0].outputs
token_ids = llm.tokenizer.encode(json.dumps({"".join(chr(97 + (i * j) % 26) for j in range(9)): i for i in range(50)}))

def compute():
    while not is_over:
        guide = llm._inputs.request("Once", guided).sequences[0].guide
        for token_id in token_ids:
            guide.take(token_id)
            guide.mask()

is_over, generator = False, random.Random(0)
threads = [threading.Thread(target=compute, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(6):
    time.sleep(0.05 * generator.random())
    assert in_child(lambda: llm.generate("Once", guided)[0].outputs == guided_outputs)
is_over = True
for thread in threads:
    thread.join()
""")
        == DONE
    )


def test_a_fork_while_another_thread_makes_the_first_guide(run):
    pytest.importorskip("llguidance", reason="llguidance, the extra `guided`, is not installed")
    assert (
        run("""
import tinygpt.engine.input_processor as module
guided = SamplingParams(max_tokens=5, guided_choice=["abc"])
make, has_begun, may_end = module.Guidance, threading.Event(), threading.Event()

def slowly(*arguments):
    if threading.current_thread() is thread:
        has_begun.set()
        may_end.wait()
    return make(*arguments)

module.Guidance = slowly
thread = threading.Thread(target=llm.generate, args=("Once", guided), daemon=True)
thread.start()
has_begun.wait()
assert in_child(lambda: llm.generate("Once", guided)[0].outputs[0].text == "abc")
may_end.set()
thread.join()
""")
        == DONE
    )
