"""Ranks on GPUs: the bits of one GPU, from kernels that run.

Ranks are threads with a simulated GPU each, or processes of mpiexec on the fake driver (support/fake_gpu.py).
"""

import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from support import fake_gpu
from support.cuda_device import SimulatedDevice
from support.family_models import write_family
from support.golden_models import golden_array, write_model
from support.paths import ROOT
from support.tables import rows
from support.thread_world import digest, on_ranks, sized
from tinygpt import LLM, SamplingParams
from tinygpt.engine.model_runner import ModelSource
from tinygpt.errors import RequestError
from tinygpt.kernels import cuda
from tinygpt.kernels.cuda import device as devices
from tinygpt.kernels.cuda.workspace import bytes_needed
from tinygpt.llm_args import LLMArgs
from tinygpt.ranks.mpi import Layout, find_mpiexec
from tinygpt.ranks.rank import share_of_rank

SMALL = {"n_embd": 24, "n_head": 3, "n_layer": 3, "vocab_size": 61, "n_positions": 40}
MODELS = {
    "tied": SMALL,
    "untied": SMALL | {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True},
}
OPTIONS = {"device": "cuda", "max_num_seqs": 3, "max_num_batched_tokens": 8}
# By the dtypes of weights and the KV cache.
CASES = rows("""
tied    | float32  | auto | [[2, 2]]
tied    | float32  | auto | [[2, 1], [1, 2]]
tied    | bfloat16 | auto | [[3, 1]]
untied  | bfloat16 | int8 | [[1, 3], [2, 2]]
bloom-6 | float32  | auto | [[1, 2], [4, 1]]
gpt-1   | int8     | auto | [[1, 2], [3, 1]]
xglm    | float16  | auto | [[1, 2], [2, 1]]
""")
FIRST, *OTHERS = CASES


@pytest.fixture
def _gpus(monkeypatch):
    """Each rank has one, as a process has."""
    of_thread = threading.local()
    monkeypatch.setattr(
        devices, "the_device", lambda: of_thread.__dict__.setdefault("device", SimulatedDevice())
    )


@pytest.fixture
def folder(tmp_path):
    def write(model: str) -> str:
        fields = MODELS.get(model)
        return str(write_model(tmp_path, **fields) if fields else write_family(tmp_path, model))

    return write


def everything(llm: LLM) -> dict:
    """A prompt in pieces next to others that decode, tokens that are drawn, and a prefix of a finished sequence."""
    ids = [i * 7 % 61 for i in range(12)]
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    drawn = replace(greedy, temperature=0.9, top_k=20, seed=3, repetition_penalty=1.2)
    outputs = llm.generate([ids[:3], ids, [4]], [greedy, drawn, drawn])
    after_prefix = llm.generate([[*ids, 5]], replace(greedy, logprobs=2))
    embeds = golden_array("embeds", (3, llm.config.n_embd))
    embedded = llm.generate([ids[:2]], replace(greedy, prompt_embeds=embeds, max_tokens=1, logprobs=2))
    return {
        "logits": digest(llm.logits(ids)),
        "hidden states": digest(llm.hidden_states(ids)),
        "attentions": digest(llm.attentions(ids[:5])),
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "after a prefix": (after_prefix[0].outputs[0].token_ids, str(after_prefix[0].outputs[0].logprobs)),
        "embeds": str(embedded[0].outputs[0].logprobs),
    }


@pytest.mark.toolchain
@pytest.mark.usefixtures("_gpus")
@pytest.mark.parametrize(
    ("model", "dtype", "cache", "layouts"),
    [FIRST, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_ranks_give_the_bits_of_one_gpu(monkeypatch, folder, model, dtype, cache, layouts):
    path = folder(model)
    choices = {"dtype": dtype, "kv_cache_dtype": cache, **OPTIONS}
    with LLM(path, **choices) as llm:
        expected = everything(llm)
    for layout in layouts:
        with on_ranks(monkeypatch, layout, path, **choices) as (llm, _):
            assert everything(llm) == expected


@pytest.mark.usefixtures("_gpus")
@pytest.mark.parametrize(
    ("model", "dtype", "layout"),
    [
        ("tied", "float16", Layout(2, 1)),
        ("untied", "int8", Layout(3, 3)),
        ("bloom-6", "float32", Layout(4, 2)),
    ],
)
def test_a_ranks_memory_is_what_was_counted(monkeypatch, folder, model, dtype, layout):
    sizes = []

    def noted(array: np.ndarray) -> np.ndarray:
        sizes.append(array.nbytes)
        return array

    zeros = SimulatedDevice.zeros
    monkeypatch.setattr(SimulatedDevice, "zeros", lambda *arguments: noted(zeros(*arguments)))
    source = ModelSource.open(LLMArgs(folder(model), dtype, device="cuda"))
    config, kv_cache_dtype = source.config, source.kv_cache_dtype
    for rank in range(layout.size):
        share = share_of_rank(cuda, layout, rank, config, dtype)
        sizes.clear()
        source.load_params(1, share=share)
        cuda.new_kv_cache(share, 3, 20, kv_cache_dtype)
        cuda.new_workspace(config, 8, 4, 1, dtype, share)
        slots = source.checkpoint.tied, dtype, kv_cache_dtype, 3, 20
        assert sum(sizes) == sum(bytes_needed(config, *slots, 8, 4, share).values())


@pytest.mark.parametrize(("ranks_of_a_gpu", "layout"), [(1, (1, 3)), (2, (1, 3)), (3, (3, 1))])
def test_ranks_that_share_a_gpu_count_each_others_memory(monkeypatch, folder, ranks_of_a_gpu, layout):
    """Each rank alone fits."""
    gpus = [SimulatedDevice() for _ in range(3)]
    threads = []  # of ranks

    def the_device() -> SimulatedDevice:
        if (thread := threading.get_ident()) not in threads:
            threads.append(thread)
        return gpus[threads.index(thread) // ranks_of_a_gpu]

    monkeypatch.setattr(devices, "the_device", the_device)
    path = folder("tied")
    args = LLMArgs(path, "float32", **sized(Layout(*layout)) | OPTIONS)
    config = ModelSource.open(args).config
    sizes = args.sizes(config, cuda.MAX_STEP_TOKENS)
    slots = sizes.num_slots, sizes.max_model_len, sizes.max_num_batched_tokens, sizes.max_num_logits
    shares = [share_of_rank(cuda, Layout(*layout), rank, config, "float32") for rank in range(3)]
    needs = [sum(bytes_needed(config, True, "float32", "float32", *slots, s).values()) for s in shares]
    for gpu in gpus:
        gpu._free = max(needs)
    refused = pytest.raises(RequestError, match=f"{ranks_of_a_gpu} ranks on this GPU take")
    ranks = on_ranks(monkeypatch, layout, path, dtype="float32", **OPTIONS)
    with refused if ranks_of_a_gpu > 1 else nullcontext(), ranks:
        pass


PROGRAM = """
import atexit, contextlib, io, json, sys
from support import fake_gpu
fake_gpu.pytest_configure()
from support.bench_records import LIMITS
from tinygpt import LLM, SamplingParams
from tinygpt.bench import sweep
from tinygpt.cli.main import main
from tinygpt.kernels.cuda.device import the_device
atexit.register(lambda: print(the_device().name))
path, tensor, pipeline = sys.argv[1:4]
sizes = {"tensor_parallel_size": int(tensor), "pipeline_parallel_size": int(pipeline)}
with LLM(path, device="cuda", max_num_seqs=2, max_num_batched_tokens=8, **sizes) as llm:
    params = SamplingParams(max_tokens=3, temperature=0.9, seed=3, ignore_eos=True)
    print(llm.logits([5, 6, 7]).tobytes().hex(), llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)
sweep.measure_limits = lambda *_: LIMITS
words = ["bench", *sys.argv[4:], "--tensor-parallel-size", tensor, "--pipeline-parallel-size", pipeline]
with contextlib.redirect_stdout(io.StringIO()) as out:
    assert main([*words, "--model", path]) == 0
print(*[(record["gpu_info"], record["split_mode"]) for record in json.loads(out.getvalue())])
"""
BENCH = "--device cuda --batch-sizes 1 --prompt-lengths 3 --new-tokens 0 --repetitions 1 --format json"


@pytest.mark.slow
@pytest.mark.toolchain
def test_processes_share_the_gpus_of_their_host(folder, tmp_path_factory):
    """Three ranks on two GPUs, of which each allocates on its own alone: the driver refuses another's memory.

    After an LLM, `tinygpt bench` opens another on the same ranks.
    """
    pytest.importorskip("mpi4py")
    if missing := fake_gpu.why_not() or ("" if find_mpiexec() else "mpiexec"):
        pytest.skip(f"needs {missing}")
    path = folder("tied")
    environment = fake_gpu.environment(tmp_path_factory.mktemp("fake-gpu"), "9.0") | {"FAKE_CUDA_GPUS": "2"}

    def printed(tensor: int, pipeline: int) -> list[str]:
        command = [find_mpiexec(), "-n", str(tensor * pipeline), sys.executable, "-c", PROGRAM]
        command += [path, str(tensor), str(pipeline), *BENCH.split()]
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        return sorted(result.stdout.splitlines())

    *measured, answer, gpu = printed(1, 1)
    assert (measured, gpu) == (["('fake GPU 0', 'none')"], "fake GPU 0")
    split = "('fake GPU 0', 'tensor {} x pipeline {}')".format
    assert printed(1, 3) == [split(1, 3), answer, "fake GPU 0", "fake GPU 0", "fake GPU 1"]
    assert printed(2, 1) == [split(2, 1), answer, "fake GPU 0", "fake GPU 1"]
