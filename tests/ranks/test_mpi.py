"""Real ranks: processes that mpiexec starts on this machine, as users start them, and how they end.

Skipped where mpi4py or mpiexec is not there: pip install ".[mpi]".
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from support.golden_models import write_model
from support.paths import ROOT
from support.processes import below, read_to, until
from support.serving import ask
from support.tables import rows
from tinygpt.kernels.kernel_cache import ANNOUNCEMENT
from tinygpt.ranks.mpi import find_mpiexec

pytest.importorskip("mpi4py", reason="ranks are processes of mpi4py, which the extra mpi brings")
MPIEXEC = find_mpiexec()
pytestmark = pytest.mark.skipif(MPIEXEC is None, reason="there is no mpiexec, which the extra mpi brings")
SHARED_MEMORY = Path("/dev/shm")
# Once a rank is gone the others end within 5 seconds; before that it may have to compile.
TO_START, TO_END = 300, 5
DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
FIVE_HEADS = {"n_embd": 320, "n_head": 5, "n_layer": 4, "vocab_size": 101, "n_positions": 90}
XL_HEADS = {**FIVE_HEADS, "n_embd": 1600, "n_head": 25, "n_inner": 256}
GENERATE = "generate --json --temperature 0.9 --seed 5 --max-tokens 20 -t 1 wolf"
TWO = "--tensor-parallel 2"

HASHES = """
import hashlib, sys
import numpy as np
from tinygpt import LLM, SamplingParams
class Hashed:
    # Hashes the logits of every step; kinds: whether a step has sequences of one token (False), of several (True)
    def __init__(self, runner):
        self.runner, self.sum, self.kinds = runner, hashlib.sha256(), set()
    def __getattr__(self, name):
        return getattr(self.runner, name)
    def choose_num_steps(self, num_sequences, num_in_time):
        return 1
    def forward(self, batch):
        logits = self.runner.forward(batch)
        self.sum.update(logits.tobytes())
        self.kinds.add(tuple(sorted({int(n) > 1 for n in np.diff(batch.seq_starts)})))
        return logits
tensor, pipeline, *cases = sys.argv[1:]
sizes = {"tensor_parallel_size": int(tensor), "pipeline_parallel_size": int(pipeline)}
ids = [i * 7 % 101 for i in range(80)]
prompts = [ids[:3], ids[5:75], [4], ids[9:20]]
params = SamplingParams(max_tokens=9, temperature=0.9, seed=3, ignore_eos=True)
for case in cases:
    model, dtype = case.split(":")
    with LLM(model, dtype, threads=1, max_num_seqs=3, max_num_batched_tokens=70, **sizes) as llm:
        with llm.engine.wrapped(Hashed) as hashed:
            tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        assert (False, True) in hashed.kinds, "no step reads a prompt while others decode"
        whole = hashlib.sha256(llm.logits(ids).tobytes()).hexdigest()
        print(dtype, hashed.sum.hexdigest(), whole, tokens)
"""


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("five"), **FIVE_HEADS))


@pytest.fixture(scope="module")
def cases(five, tmp_path_factory):
    """Each model in each dtype: as it comes, and converted, of which ranks read their part."""
    folder = tmp_path_factory.mktemp("xl")
    xl = str(write_model(folder, **XL_HEADS))
    for dtype in DTYPES:
        status, _, err = command(f"convert {xl} {folder / dtype} --dtype {dtype}")
        assert status == 0, err
    return [f"{five}:{dtype}" for dtype in DTYPES] + [f"{folder / dtype}:{dtype}" for dtype in DTYPES]


@pytest.fixture(scope="module")
def alone(cases):
    return hashes(cases, 1, 1)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = {path.name for path in SHARED_MEMORY.glob("*")} if SHARED_MEMORY.is_dir() else set()
    yield
    if SHARED_MEMORY.is_dir():
        mpich = {path.name for path in SHARED_MEMORY.glob("mpich_shm_*")}
        assert not mpich - before


def start(*words: str, ranks: int = 1, front=(), environment=None, **options) -> subprocess.Popen:
    """Start Python, as mpiexec does with several ranks. front: words before `python`."""
    front = front or ([MPIEXEC, "-n", str(ranks)] if ranks > 1 else [])
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    there = {"env": {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}, "cwd": ROOT}
    return subprocess.Popen([*front, sys.executable, *words], **pipes | there | options)


def run(*words: str, **options) -> tuple[int, str, str]:
    process = start(*words, **options)
    out, err = process.communicate(timeout=TO_START)
    return process.returncode, out, err


def command(line: str, **options) -> tuple[int, str, str]:
    return run("-m", "tinygpt", *line.split(), **options)


def refused(*words: str, ranks: int) -> str:
    """Return the one sentence of ranks that all end as soon as one has said why."""
    process = start(*words, ranks=ranks)
    said = read_to(process, process.stderr, "\n")
    out, err = process.communicate(timeout=TO_END)
    assert (process.returncode, out, err) == (2, "", "")
    return said


def hashes(cases: list[str], tensor: int, pipeline: int, **options) -> list[str]:
    options = {"ranks": tensor * pipeline, **options}
    status, out, err = run("-c", HASHES, str(tensor), str(pipeline), *cases, **options)
    assert status == 0, err
    return out.splitlines()


@pytest.mark.parametrize(("dtype", "tensor", "pipeline"), [("float32", 2, 1), ("int8", 1, 2)])
def test_processes_give_the_bits_of_one(five, dtype, tensor, pipeline):
    assert hashes([f"{five}:{dtype}"], tensor, pipeline) == hashes([f"{five}:{dtype}"], 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
def test_every_layout_gives_the_bits_of_one_in_every_dtype(cases, alone, tensor, pipeline):
    """Up to 16 processes. 5 and 25 heads; steps that read prompts beside others that decode."""
    assert len(alone) == len(cases)
    assert hashes(cases, tensor, pipeline) == alone


def test_a_command_starts_its_ranks_and_says_the_same():
    status, out, err = command(f"{GENERATE} {TWO}")
    assert status == 0, err
    _, alone, _ = command(GENERATE)
    assert text_of(out) == text_of(alone)


def text_of(record: str) -> str:
    return record.partition('"outputs"')[2].partition('"metrics"')[0]


# The last three before a model is opened.
IMPOSSIBLE = rows("""
generate --tensor-parallel 2 -m /nowhere x | 1 | /nowhere
generate --tensor-parallel 2 x | 3 | takes 2 processes and mpiexec has started 3: give it -n 2
generate --pipeline-parallel 7 x | 1 | --pipeline-parallel-size is 7 and this model has 6 layers
generate --tensor-parallel 2 --top-k -4 x | 2 | --top-k is -4 and must be
eval --tensor-parallel 2 ppl no-such-file.txt | 2 | no-such-file.txt
serve --tensor-parallel 2 --port 99999 | 2 | --port is 99999
""")


@pytest.mark.parametrize(("words", "ranks", "said"), IMPOSSIBLE)
def test_what_is_impossible_is_one_sentence(words, ranks, said):
    assert said in refused("-m", "tinygpt", *words.split(), ranks=ranks)


def test_a_model_that_one_rank_lacks_is_one_sentence(tmp_path, five):
    """As on hosts whose disks differ: the second rank looks in another folder."""
    program = (
        "import os, sys; os.chdir(sys.argv[1 + int(os.environ['PMI_RANK'])]); sys.argv[1:] = sys.argv[3:]; "
        "from tinygpt.cli.main import main; sys.exit(main())"
    )
    here = tmp_path / "here"
    there = tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "model").symlink_to(five)
    words = f"{here} {there} generate --no-stream --json -m ./model {TWO} x".split()
    assert "rank 1 of 2, on " in refused("-c", program, *words, ranks=2)


FAILING = """
import os, sys
from tinygpt.ranks.rank import RankModel
forward, steps = RankModel.forward, []
rank, how, *sys.argv[1:] = sys.argv[1:]
def failing(self, batch):
    steps.append(1)
    if len(steps) == 30 and os.environ["PMI_RANK"] == rank:
        print("now", flush=True)
        if how == "raise":
            raise OSError("the disk is on fire")
        os.kill(os.getpid(), 9)
    return forward(self, batch)
RankModel.forward = failing
"""
ENDLESS = f"""{FAILING}
from tinygpt import LLM, SamplingParams
os.write(1, b"%d\\n" % os.getpid())  # whole, if stdout is unbuffered too
llm = LLM("demo", threads=1, max_num_seqs=2, tensor_parallel_size=2)
params = SamplingParams(max_tokens=20, ignore_eos=True)
while True:
    if sys.argv[1:] == ["submit"]:  # as a server does: the error is the future's
        llm.submit([5, 6, 7], params).exception()
    else:
        llm.generate([[5, 6, 7]], params)
    print("round", flush=True)
"""


@pytest.mark.parametrize(
    ("rank", "how", "call"),
    rows("""
"0" | raise | submit
"0" | kill | ""
"1" | raise | generate
"""),
)
def test_when_a_rank_ends_all_do(rank, how, call):
    process = start("-c", ENDLESS, rank, how, call, ranks=2)
    pids = pids_of_endless(process)
    read_to(process, process.stdout, "now")
    _, err = process.communicate(timeout=TO_END)
    assert process.returncode != 0
    assert_gone(pids)
    if how == "raise":
        said = f"tinygpt: error: rank {rank} of 2, on .*: OSError\\('the disk is on fire'\\)\n"
        err = re.sub(r"\[.*\] +ucp_worker\.c:.*\n", "", err)  # UCX, below MPICH, may say that it was stopped
        assert re.fullmatch(said, err.replace(f"{ANNOUNCEMENT}\n", ""))  # the first run compiles


def test_a_killed_rank_of_a_command_ends_all(five):
    """MPICH says so, in its own words, and not between the texts on stdout."""
    process = start("-m", "tinygpt", "serve", "-m", five, "-t", "1", "--port", "0", "--tensor-parallel", "2")
    pids = ranks_of(process.pid, 2)
    read_to(process, process.stderr, "serving")
    os.kill(pids[1], signal.SIGKILL)
    out, err = process.communicate(timeout=TO_END)
    assert process.returncode != 0
    assert out == ""
    assert "tinygpt: error" not in err
    assert "EXIT CODE: 9" in err
    assert_gone(pids)


DYING = f"""{FAILING}
from tinygpt.cli.main import main
sys.exit(main())
"""


def test_a_batch_goes_on_after_a_rank_was_killed(tmp_path, five):
    """The same command: what was answered stays, every prompt is answered once, and as one process would."""
    given = tmp_path / "in.jsonl"
    lines = [json.dumps({"id": i, "prompt": [5 + i, 6], "max_tokens": 3 + i}) for i in range(20)]
    given.write_text("\n".join(lines), encoding="utf-8")
    line = f"generate -m {five} --input {given} --seed 3 --max-num-seqs 2 -t 1 --output"
    broken = f"{line} {tmp_path / 'out'} {TWO}"
    status, _, _ = run("-c", DYING, "1", "kill", *broken.split(), ranks=2)
    assert status != 0
    before = records(tmp_path / "out")
    assert 0 < len(before) < 20
    status, _, err = command(broken)
    assert (status, f"{len(before)} of 20 prompts skipped" in err) == (0, True), err
    assert command(f"{line} {tmp_path / 'alone'}")[0] == 0
    assert records(tmp_path / "out") == records(tmp_path / "alone")


def records(path: Path) -> dict[int, list]:
    """The texts by id, each of which is there once; a last line that is half written is none."""
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    found = [json.loads(line) for line in complete]
    assert len({record["id"] for record in found}) == len(found)
    return {record["id"]: record["outputs"] for record in found}


UNCLOSED = """
import sys
from tinygpt import LLM, SamplingParams
llm = LLM("demo", threads=1, max_num_seqs=2, tensor_parallel_size=2)
if sys.argv[1] == "closed":
    llm.close()
    llm = LLM("demo", "int8", threads=1, max_num_seqs=3, pipeline_parallel_size=2)
llm.submit([5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True))
if sys.argv[1] == "raised":
    raise OSError("the disk is on fire")
sys.exit(3)
"""


@pytest.mark.parametrize(("how", "status"), [("raised", 1), ("closed", 3)])
def test_a_program_that_ends_without_close_ends_all(how, status):
    """While its engine's thread takes steps, with the program's own status; a closed LLM makes room."""
    found, out, err = run("-c", UNCLOSED, how, ranks=2)
    assert (found, out) == (status, "")
    assert ("the disk is on fire" in err) == (how == "raised")


def test_ctrl_c_ends_all():
    process = start("-c", ENDLESS, "2", "never", ranks=2)
    pids = pids_of_endless(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TO_END)
    assert_gone(pids)


SAID = rows("""
generate --nonsense x | 2 | --nonsense
generate --tensor-parallel 5 x | 2 | --tensor-parallel-size is 5
generate --help | 0 | usage: tinygpt generate
""")


@pytest.mark.parametrize(("line", "status", "said"), SAID)
def test_what_the_command_line_says_is_said_by_rank_0_alone(line, status, said):
    found, out, err = command(line, ranks=3)
    _, out_alone, err_alone = command(line)
    assert (found, out, err) == (status, out_alone, err_alone)
    assert said in out + err


def test_programs_that_share_nothing_all_speak(five):
    """Under one mpiexec, and without a flag that would make them ranks."""
    status, out, err = command(f"info {five}", ranks=2)
    _, alone, _ = command(f"info {five}")
    assert (status, err) == (0, "")
    assert sorted(out) == sorted(2 * alone)  # mpiexec mixes their lines


FOREIGN = "2 processes were started, and .*, the MPI of mpi4py, sees each of them alone: start them with the mpiexec of"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_another_mpis_mpiexec_is_refused_in_one_sentence(rank):
    """As Open MPI's would start one of two processes, each of which is a world of its own for MPICH."""
    there = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
    status, out, err = command(f"generate {TWO} x", environment=there)
    assert (status, out) == (2, "")
    assert re.fullmatch(f"tinygpt: error: {FOREIGN} .*\n", err) if rank == "0" else err == ""


WITHOUT = """
import sys
sys.modules["mpi4py"] = None
from tinygpt import LLM
try:
    LLM("/nowhere", tensor_parallel_size=2)
except Exception as error:
    print(error, "numba" in sys.modules)
"""


def test_that_mpi_is_missing_is_said_before_anything_takes_long():
    status, out, err = run("-c", WITHOUT)
    assert (status, err) == (0, "")
    assert re.fullmatch(r"several ranks need mpi4py and an MPI library \(.*\): pip install .* False\n", out)


@pytest.mark.parametrize(
    ("name", "whom", "status"),
    rows("""
chat | rank 0 | 143
generate | mpiexec | 143
serve | rank 0 | 0
"""),
)
def test_sigterm_ends_all(tmp_path, five, name, whom, status):
    """With the status of one process. stdout has texts, and nothing of MPI's."""
    given = tmp_path / "in.jsonl"
    out = tmp_path / "out"
    line = json.dumps({"prompt": [5, 6], "max_tokens": 80, "ignore_eos": True}) + "\n"
    given.write_text(line * 3000, encoding="utf-8")
    batch = f"-m {five} --input {given} --output {out} --seed 3"
    options = {"generate": batch, "serve": f"-m {five} --port 0"}.get(name, "")
    line = f"-m tinygpt {name} {options} -t 1 {TWO}"
    process = start(*line.split(), start_new_session=True, stdin=subprocess.PIPE)
    pids = ranks_of(process.pid, 2)
    if name == "serve":
        port = int(read_to(process, process.stderr, "serving").rpartition(":")[2])
        body = {"prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
        assert len(ask(port, "/v1/completions", body).json["choices"][0]["token_ids"]) == 5
    elif name == "chat":
        read_to(process, process.stderr, "type a message")
    else:
        until(lambda: out.exists() and b"\n" in out.read_bytes())
    os.kill(process.pid if whom == "mpiexec" else pids[0], signal.SIGTERM)
    said, err = process.communicate(timeout=TO_END)
    assert (process.returncode, said) == (status, "")
    assert "error" not in err
    assert_gone(pids)


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def ranks_of(pid: int, count: int) -> list[int]:
    """Processes that an mpiexec has started, by rank, once they are there."""
    found = {}

    def all_are_there() -> bool:
        for child in below(pid):
            with suppress(OSError):  # it has ended
                names = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                found.update({int(name[9:]): child for name in names if name.startswith(b"PMI_RANK=")})
        return len(found) == count

    until(all_are_there)
    return [found[rank] for rank in range(count)]


def pids_of_endless(process: subprocess.Popen) -> list[int]:
    """Of its two ranks, once they generate."""
    *pids, last = read_to(process, process.stdout, "round").split()
    assert (len(pids), last) == (2, "round")
    return [int(pid) for pid in pids]


# Two hosts, played by network namespaces of this machine (Linux, as root): between their ranks there is TCP alone.
# mpiexec starts the rank of the other host as it would by ssh; in its place a script enters the host's namespace.

NAMES = [f"tinygpt{os.getpid()}n{i}" for i in (1, 2)]
ADDRESSES = ["10.213.77.1", "10.213.77.2"]
ENTER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec %s${host##*.} /bin/sh -c "$*"
"""


@pytest.fixture(scope="module")
def hosts():
    """Two namespaces with a cable between them; bytes that have come through it to the first."""
    ends = [f"tgv{os.getpid() % 10000}n{i}" for i in (1, 2)]
    lines = [f"netns add {name}" for name in NAMES]
    lines.append(f"link add {ends[0]} type veth peer name {ends[1]}")
    for name, end, address in zip(NAMES, ends, ADDRESSES, strict=True):
        lines.append(f"link set {end} netns {name}")
        lines.append(f"-n {name} addr add {address}/24 dev {end}")
        lines += [f"-n {name} link set {device} up" for device in (end, "lo")]
    try:
        for line in lines:
            subprocess.run(["ip", *line.split()], check=True, capture_output=True)
        yield lambda: received(NAMES[0], ends[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"there can be no network namespaces here: {error}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def received(name: str, device: str) -> int:
    listed = subprocess.check_output(["ip", "netns", "exec", name, "cat", "/proc/net/dev"], text=True)
    line = next(line for line in listed.splitlines() if device in line)
    return int(line.partition(":")[2].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_two_hosts_give_the_bits_of_one_process(tmp_path, five, hosts, tensor, pipeline):
    enter = tmp_path / "enter"
    enter.write_text(ENTER % NAMES[0][:-1], encoding="utf-8")
    enter.chmod(0o755)
    launcher = f"-launcher ssh -launcher-exec {enter} -hosts {','.join(ADDRESSES)} -ppn 1 -n 2"
    front = ["ip", "netns", "exec", NAMES[0], MPIEXEC, *launcher.split()]
    before = hosts()
    # The hosts are one machine, whose shared memory MPI would find.
    there = hashes([f"{five}:float32"], tensor, pipeline, front=front, environment={"UCX_TLS": "tcp,self"})
    assert there == hashes([f"{five}:float32"], 1, 1)
    # The other rank's part of the sums, or of the logits, of the last prompt: 80 tokens.
    floats = 2 * 4 * 80 * 320 + 80 * 50 if tensor == 2 else 80 * 101
    assert hosts() - before >= 4 * floats
