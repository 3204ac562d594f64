"""The library under odd conditions: forks, clocks that jump, small stacks, a thousand threads, one core."""

import os
from random import Random

from .lab import Lab, Skipped

# Each program begins with this, and ends with exit code 0 if all was right.
BEGINNING = """
import os, signal, sys, threading, time
from random import Random
generator = Random(int(sys.argv[1]))
def load(**options):
    from tinygpt import LLM
    return LLM("demo", **options)
def params(**fields):
    from tinygpt import SamplingParams
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.8, "seed": 5, **fields})
def right(llm):
    # cut from the same model by another process
    assert llm.generate("Once upon", params())[0].outputs[0].token_ids == EXPECTED, "another text"
EXPECTED = eval(sys.argv[2])
def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(200)
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"the child ended with {code}"
"""
EXPECTED = """
from tinygpt import LLM, SamplingParams
llm = LLM("demo")
print(llm.generate("Once upon", SamplingParams(max_tokens=12, temperature=0.8, seed=5))[0].outputs[0].token_ids)
"""

FORKS = """
llm, is_over = load(threads=2, max_num_seqs=4), False
def work(i):
    while not is_over:
        if i % 3 == 0:
            llm.generate([[i, 2, 3]] * 2, params())
        elif i % 3 == 1:
            list(llm.stream([i, 2], params()))
        else:
            llm.submit([i, 2], params()).result()
threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
for thread in threads:
    thread.start()
def child():
    right(llm)
    assert llm.submit("Once upon", params()).result().outputs[0].token_ids == EXPECTED
    llm.close()
for _ in range(12):
    time.sleep(0.03 * generator.random())
    in_child(child)
    right(llm)
is_over = True
for thread in threads:
    thread.join()
right(llm)
"""
FORK_WHILE_LOADING = """
import tinygpt.llm, tinygpt.kernels.cpu.model  # of an import in another thread Python itself leaves a lock behind
llms = []
def begin():
    llms.append(load(threads=2))
    right(llms[0])
thread = threading.Thread(target=begin)
thread.start()
time.sleep(generator.random() * float(sys.argv[3]))
def child():
    right(load(threads=2))
    for llm in list(llms):
        right(llm)
in_child(child)
thread.join()
right(llms[0])
"""
CLOCKS = """
def jumping(plain):
    offset = [0]
    def clock():
        if generator.random() < 0.05:
            offset[0] += generator.choice([-1e9, -3600, -1, 1, 3600, 1e9])
        return plain() + offset[0]
    return clock
import tinygpt.llm
for name in ("time", "perf_counter", "monotonic"):
    setattr(time, name, jumping(getattr(time, name)))
llm = load()
for _ in range(4):
    right(llm)
    assert llm.submit("Once upon", params()).result().outputs[0].token_ids == EXPECTED
    assert "".join(chunk.text for chunk in llm.stream("Once upon", params())) == llm.tokenizer.decode(EXPECTED)
    tokens = llm.generate("Once upon", params(max_time=5))[0].outputs[0].token_ids
    assert tokens == EXPECTED[:len(tokens)]
"""
SMALL_STACKS = """
threading.stack_size(256 * 1024)
failures = []
def work():
    try:
        llm = load()
        right(llm)
        assert llm.submit("Once upon", params()).result().outputs[0].token_ids == EXPECTED
        llm.generate("Once " * 200, params(logprobs=3, top_p=0.9, repetition_penalty=1.2, prompt_logprobs=2))
        llm.score("Once", ["upon", "a time"])
        llm.generate("Once", params(num_beams=3, temperature=0))
    except BaseException as error:
        import traceback
        traceback.print_exc()
        failures.append(error)
thread = threading.Thread(target=work)
thread.start()
thread.join()
sys.exit(len(failures))
"""
THREADS = """
count = generator.choice([1, 2, 7, 33, 100, 300, 1000])
threading.stack_size(256 * 1024)
llm, wrong = load(max_num_seqs=generator.choice([1, 4, 32])), []
alone = {i: llm.generate([[i, 2]], params(max_tokens=2 + i % 4, seed=i))[0].outputs for i in range(20)}
start = threading.Barrier(count)
def work(n):
    i = n % 20
    start.wait()
    p = params(max_tokens=2 + i % 4, seed=i)
    got = llm.generate([[i, 2]], p)[0] if n % 2 else llm.submit([i, 2], p).result()
    if got.outputs != alone[i]:
        wrong.append(n)
threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong
right(llm)
slots = llm.engine.scheduler.slots
assert not llm.engine.scheduler.running and not llm.engine.scheduler.waiting
"""
ONE_CORE = """
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
for threads in (None, 1, 2, 8):
    llm = load(threads=threads)
    right(llm)
    llm.close()
"""
CUT = """
import shutil
from tinygpt import LLM
from tinygpt.errors import TinyGPTError
shutil.copytree(sys.argv[3], sys.argv[4])
file = os.path.join(sys.argv[4], "model.tinygpt.safetensors")
llm = LLM(sys.argv[4])
before = llm.generate("Once upon", params())[0].outputs
os.truncate(file, generator.randrange(os.path.getsize(file)))
for call in (lambda: llm.generate("Once upon", params()), lambda: llm.submit("Once", params()).result(),
             lambda: llm.score("a", ["b"]), lambda: llm.embed("a"), lambda: list(llm.stream("a", params()))):
    try:
        call()
        raise AssertionError("a file that was cut is no error")
    except TinyGPTError as error:
        assert "cut short" in str(error), error
llm.close()
"""


def running(program: str, name: str, *arguments_of, **options):
    """A scenario that runs the program in a process."""

    def scenario(lab: Lab, generator: Random) -> str | None:
        if program is ONE_CORE and not hasattr(os, "sched_setaffinity"):
            raise Skipped("this system cannot bind a process to a core")
        more = [str(argument(lab)) for argument in arguments_of]
        expected = expected_ids(lab)
        env = {key: value(lab) if callable(value) else value for key, value in options.items()}
        run = lab.run_program(BEGINNING + program, str(generator.randrange(10**9)), expected, *more, env=env)
        return None if run.code == 0 else f"exit code {run.code}: {run.err[-2500:]}"

    scenario.__name__ = name
    return scenario


def expected_ids(lab: Lab) -> str:
    if "expected" not in lab.kept:
        lab.kept["expected"] = lab.run_program(EXPECTED).out
    return lab.kept["expected"]


COLD = {"XDG_CACHE_HOME": lambda lab: lab.new_folder(), "NUMBA_CACHE_DIR": None}
SCENARIOS = {
    running(FORKS, "forks"): 3,
    running(FORK_WHILE_LOADING, "fork_while_loading", lambda lab: 2.5): 4,
    running(CLOCKS, "clocks_jump"): 2,
    running(SMALL_STACKS, "small_stacks"): 1,
    running(THREADS, "threads"): 3,
    running(ONE_CORE, "one_core"): 1,
    running(CUT, "file_is_cut", lambda lab: lab.converted, lambda lab: lab.new_folder() / "copy"): 2,
}
SLOW = {
    running(FORK_WHILE_LOADING, "fork_while_compiling", lambda lab: 25, **COLD): 2,
    running(SMALL_STACKS, "small_stacks_compiling", **COLD): 1,
}
