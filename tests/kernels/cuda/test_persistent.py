"""The persistent kernel in the simulator: the bits of the graph's kernels, its barriers, and what it compiles to."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda as numba_cuda
from numba import int32

from support import cuda_simulator
from support.cuda_compile import compile_kernel, is_cooperative
from support.cuda_device import SimulatedDevice, on_a_gpu
from support.cuda_model import Model, Random, T
from support.cuda_simulator import simulate
from tinygpt.kernels import cuda
from tinygpt.kernels.batch import Batch
from tinygpt.kernels.cuda.decode_steps import DecodeSteps
from tinygpt.kernels.cuda.layers.layer_norm import NormWeights
from tinygpt.kernels.cuda.layers.linear import Heads, Weights
from tinygpt.kernels.cuda.multi_step import run_steps
from tinygpt.kernels.cuda.persistent import door
from tinygpt.kernels.cuda.persistent import kernel as persistent
from tinygpt.kernels.cuda.persistent.kernel import (
    can_persist,
    new_persistent,
    persistent_kernel,
    run_persistent,
    shared_bytes,
)
from tinygpt.kernels.cuda.persistent.phases import Barrier, Embedding, all_arrive, signal
from tinygpt.kernels.cuda.runtime import device as devices
from tinygpt.kernels.cuda.runtime.jit import kernel
from tinygpt.kernels.cuda.sampling.keys import ALL_IDS, ID_BITS
from tinygpt.sampling.metadata import Warpers

pytestmark = pytest.mark.slow

DTYPES = ("bfloat16", "int8")
EIGHT = [0, 17, 63, 64, 100, 1, 120, 3]  # positions of as many sequences


@pytest.fixture(autouse=True)
def device(request, monkeypatch) -> SimulatedDevice | None:
    if request.node.get_closest_marker("gpu"):
        return None
    device = SimulatedDevice()
    monkeypatch.setattr(devices, "the_device", lambda: device)
    return device


@dataclass(frozen=True)
class Decoding:
    """Sequences that have been prefilled, of made-up keys and values, with one new token each; two ways to go on."""

    model: Model
    batch: Batch

    @classmethod
    def of(cls, dtype: str, starts: list[int], n_layer: int = 1, n_embd: int = 64, n_inner: int = 200) -> "Decoding":
        heads = max(n_embd // 64, 2)
        checkpoint = Random(n_embd=n_embd, n_layer=n_layer, n_inner=n_inner, n_head=heads)
        checkpoint.tensors["wte.weight"] *= 4  # so that a token depends on the last
        checkpoint.tensors["ln_f.bias"] *= 0
        model, random = Model(cuda, checkpoint, dtype, num_tokens=8), np.random.default_rng(1)
        model.cache = cuda.new_kv_cache(checkpoint.config, len(starts), T, "bfloat16")
        for slot, start in enumerate(starts):
            k, v = random.standard_normal((2, n_layer, heads, start, n_embd // heads), np.float32)
            cuda.write_positions(model.cache, slot, 0, k, v)
        chunks = [[3 + i] for i in range(len(starts))]
        return cls(model, Batch.of(chunks, starts, list(range(len(starts)))))

    def steps(self, num_steps: int) -> DecodeSteps:
        count = self.batch.token_ids.size
        warpers, seeds = Warpers(*np.zeros((len(Warpers._fields), count))), np.zeros(count, np.uint64)
        m = self.model
        return DecodeSteps(m.params, self.batch, m.cache, m.workspace, warpers, seeds, seeds, num_steps)

    def run_persistent(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, and the keys of the last step's logits."""
        m, w = self.model, self.model.workspace
        state = new_persistent(m.params)
        for buffer in (w.x, w.q, w.attended, w.partials):
            unwritten = np.full(buffer.size * buffer.dtype.itemsize, 0x7F, np.uint8).view(buffer.dtype)
            w.device.write(buffer, unwritten)  # nothing of it may be read before it is written
        w.device.write(state.keys, np.full(state.keys.size, (0xF0000000 << ID_BITS) + ALL_IDS - 28))  # token 28 wins
        return run_persistent(state, m.params, self.batch, m.cache, w, steps), w.device.read(state.keys)

    def left(self) -> list[np.ndarray]:
        count, w = self.batch.token_ids.size, self.model.workspace
        inputs, cache = w.inputs, self.model.cache
        x = w.x[: count * self.model.params.config.n_embd]
        arrays = cache.k, cache.v, inputs.token_ids[:count], inputs.positions[:count], x
        return [w.device.read(array) for array in arrays]


def are_equal(arrays, others) -> bool:
    return all((a == b).all() for a, b in zip(arrays, others, strict=True))


@pytest.mark.parametrize(("dtype", "starts", "steps"), [("bfloat16", [63, 5, 0], 3), ("int8", [63], 2)])
def test_steps_in_a_row_have_the_bits_of_the_graph(dtype, starts, steps):
    graph, ours = Decoding.of(dtype, starts, 2), Decoding.of(dtype, starts, 2)
    expected = np.stack(list(run_steps(graph.steps(steps))))
    tokens, _ = ours.run_persistent(steps)
    assert tokens.tolist() == expected.tolist()
    assert are_equal(ours.left(), graph.left())
    assert len(set(expected.ravel().tolist())) > 1


def test_a_launch_is_captured_once(device):
    decoding, launched = Decoding.of("bfloat16", [5]), []
    m, state = decoding.model, new_persistent(decoding.model.params)
    device_launch = device.launch
    device.launch = lambda *what, **how: launched.append(how) or device_launch(*what, **how)
    found = [run_persistent(state, m.params, decoding.batch, m.cache, m.workspace, n).tolist() for n in (2, 2, 1)]
    assert found[0] == found[1]
    assert found[2] == found[0][:1]
    assert (len(launched), device.num_captured) == (2, 1)


@pytest.mark.parametrize("in_one_kernel", [False, True])
def test_a_small_greedy_batch_goes_the_way_that_is_set(monkeypatch, device, in_one_kernel):
    launch, launched = device.launch, []
    monkeypatch.setattr(door, "IN_ONE_KERNEL", in_one_kernel)
    monkeypatch.setattr(device, "launch", lambda *what, **how: launched.append(how) or launch(*what, **how))
    decoding = Decoding.of("bfloat16", [5])
    expected = [token_ids.tolist() for token_ids in run_steps(decoding.steps(2))]
    launched.clear()
    assert [token_ids.tolist() for token_ids in cuda.multi_step(*decoding.steps(2))] == expected
    assert sum(how.get("cooperative", False) for how in launched) == in_one_kernel


def test_an_error_of_the_kernel_is_the_answer(monkeypatch):
    """After an illegal access, say, the GPU answers nothing any more: the usual way would fail, and hide why."""
    error = RuntimeError("an illegal memory access")

    def fail(*arguments):
        raise error

    monkeypatch.setattr(door, "IN_ONE_KERNEL", True)
    monkeypatch.setattr(door, "run_persistent", fail)
    with pytest.raises(RuntimeError) as caught:
        cuda.multi_step(*Decoding.of("bfloat16", [5]).steps(2))
    assert caught.value is error


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "n_embd", "starts"),
    [
        pytest.param("bfloat16", 768, [60], marks=pytest.mark.smoke),
        ("bfloat16", 768, EIGHT),
        ("bfloat16", 1600, [60]),
        ("bfloat16", 1600, EIGHT),
        ("int8", 768, [60]),
        ("int8", 768, EIGHT),
        ("int8", 1600, [60]),
        ("int8", 1600, EIGHT),
    ],
)
def test_steps_in_a_row_have_the_bits_of_the_graph_on_a_gpu(dtype, n_embd, starts):
    graph, ours = (Decoding.of(dtype, starts, 3, n_embd, 4 * n_embd) for _ in range(2))
    expected = np.stack(list(run_steps(graph.steps(16))))
    tokens, _ = ours.run_persistent(16)
    assert tokens.tolist() == expected.tolist()
    assert are_equal(ours.left(), graph.left())


class Arrivals:
    """The count of a barrier whose looks are falsified.

    Block 0 is kept at barrier number - 1 while the others go on, as far as they come: if is_missing, through the next
    barrier, too, as though it were not there.
    """

    def __init__(self, blocks: int, number: int, is_missing: bool):
        self.count, self.blocks, self.number, self.is_missing = 0, blocks, number, is_missing

    def __getitem__(self, index) -> int:
        before, others = (self.number - 1) * self.blocks, self.blocks - 1
        if cuda_simulator.cuda.current.block.number == 0:
            is_kept = before <= self.count < before + others * (1 + self.is_missing)
            return before - 1 if is_kept else self.count
        is_next = before <= self.count < before + self.blocks
        return before + self.blocks if self.is_missing and is_next else self.count

    def __setitem__(self, index, value) -> None:
        self.count += 1


def run_with(monkeypatch, device, arrivals: Arrivals | None, steps: int) -> list[np.ndarray]:
    """All that two tokens' steps leave, with these arrivals in place of the barrier's."""
    launch = device.launch

    def falsified(function, grid, threads, barrier, *arguments, **options):
        launch(function, grid, threads, barrier._replace(arrivals=arrivals), *arguments, **options)

    decoding = Decoding.of("bfloat16", [2, 64])
    with monkeypatch.context() as patched:
        if arrivals is not None:
            patched.setattr(device, "launch", falsified)
        tokens, keys = decoding.run_persistent(steps)
    return [*decoding.left(), tokens, keys]


@pytest.mark.parametrize("number", range(2, 9))
def test_each_barrier_is_needed(monkeypatch, device, number):
    """With a slow block, results are the same; and others if one barrier is missing. One layer has 7 of them a step."""
    steps = 1 if number < 7 else 2
    expected = run_with(monkeypatch, device, None, steps)
    slow, missing = (Arrivals(device.multiprocessors, number, is_missing) for is_missing in (False, True))
    assert are_equal(run_with(monkeypatch, device, slow, steps), expected)
    assert not are_equal(run_with(monkeypatch, device, missing, steps), expected)


@kernel
def meet(arrivals, failed, met, max_spins, absent):
    barrier = Barrier(arrivals, failed, max_spins)
    if numba_cuda.blockIdx.x == absent:
        return
    signal(barrier)
    if all_arrive(barrier, numba_cuda.gridDim.x):
        met[numba_cuda.blockIdx.x] = int32(1)


@pytest.mark.parametrize("absent", [-1, 1])
def test_a_block_that_never_arrives_is_not_waited_for_for_ever(absent):
    arrivals, failed, met = np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(3, np.int32)
    simulate(meet, 3, 64, arrivals, failed, met, 500, absent, cooperative=True)
    assert (failed[0], met.tolist()) == ((0, [1, 1, 1]) if absent < 0 else (1, [0, 0, 0]))


def test_blocks_that_do_not_run_together_are_an_error(monkeypatch, device):
    launch = device.launch
    monkeypatch.setattr(device, "launch", lambda *given, **options: launch(*given, **options | {"cooperative": False}))
    monkeypatch.setattr(persistent, "MAX_SPINS", 50)
    with pytest.raises(RuntimeError, match="waited for each other in vain"):
        Decoding.of("bfloat16", [3]).run_persistent(1)


def test_one_launch_for_all_steps(device, monkeypatch):
    decoding, launches, launch = Decoding.of("bfloat16", [2]), [], device.launch
    monkeypatch.setattr(device, "launch", lambda *given, **options: launches.append(given) or launch(*given, **options))
    decoding.run_persistent(2)
    assert len(launches) == 1


@pytest.mark.parametrize(("count", "steps"), [(9, 1), (1, 33)])
def test_what_has_no_room_is_refused(count, steps):
    decoding = Decoding.of("bfloat16", [1])
    m = decoding.model
    batch = Batch.of([[3]] * count, [1] * count, list(range(count)))
    with pytest.raises(ValueError, match=f"{count} sequences and {steps} steps: the kernel takes 8 and 32"):
        run_persistent(new_persistent(m.params), m.params, batch, m.cache, m.workspace, steps)


def test_models_that_it_is_for():
    assert can_persist(Decoding.of("bfloat16", [1]).model.params)
    for dtype, columns, inner in (("float32", 64, 256), ("int8", 16, 64), ("int8", 64, 20)):
        checkpoint = Random(n_layer=1, n_embd=columns, n_inner=inner)
        assert not can_persist(Model(cuda, checkpoint, dtype, num_tokens=8).params)


@pytest.mark.parametrize(("columns", "fits"), [(768, True), (1024, True), (1280, True), (1600, True), (2560, False)])
def test_shared_memory_has_room_for_gpt2(columns, fits):
    sizes = {"c_attn": (3, 1), "attn_proj": (1, 1), "c_fc": (4, 1), "mlp_proj": (1, 4)}
    parts = {"panels": None, "scales": None, "bias": None}
    linears = {
        name: Weights(**parts, num_panels=n * columns // 8, num_steps=k * columns // 64, features=n * columns)
        for name, (n, k) in sizes.items()
    }
    linears["lm_head"] = Weights(**parts, num_panels=-(-50257 // 8), num_steps=columns // 64, features=50257)
    config = SimpleNamespace(n_embd=columns, inner_size=4 * columns)
    device = SimpleNamespace(multiprocessors=132)
    params = SimpleNamespace(dtype="bfloat16", config=config, device=device, linears=linears)
    assert can_persist(params) == fits
    assert shared_bytes(params) % 16 == 0


FLOATS, INTS, HALVES = np.zeros(8, np.float32), np.zeros(8, np.int32), np.zeros(8, np.uint16)


def sample_arguments(dtype: str) -> tuple:
    weights = Weights({"bfloat16": HALVES, "int8": np.zeros(8, np.int8)}[dtype], FLOATS, FLOATS, 1, 1, 1)
    norm, heads = NormWeights(FLOATS, FLOATS), Heads(HALVES, HALVES, HALVES, INTS, INTS, 1, 1, 1, 1, 1)
    model = Barrier(INTS, INTS, 1), Embedding(weights, FLOATS, FLOATS), *[weights] * 5, *[norm] * 3, heads
    buffers = FLOATS, HALVES, FLOATS, HALVES, np.zeros(8, np.int64), FLOATS, *[INTS] * 5
    return *model, *buffers, np.float32(1), 1, 1, 1


@pytest.mark.parametrize("columns", [768, 1600])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.toolchain
def test_everything_stays_in_registers(dtype, columns):
    compiled = compile_kernel(persistent_kernel(dtype, 64, columns, "gelu_tanh"), *sample_arguments(dtype))
    assert compiled.spilled == compiled.stack == 0
    assert compiled.registers <= 168
    assert "ld.global.nc" not in compiled.ptx  # that may see what was there before a barrier
    for instruction in ("cp.async.cg.shared.global", "ld.global.cg", "cp.async.bulk.prefetch.L2"):
        assert instruction in compiled.ptx
    assert compiled.ptx.count("mma.sync") == 5 * 4 + 48  # of a step in each linear layer, and of a chunk of keys
    for instruction in ("red.release.gpu", "ld.acquire.gpu"):  # a barrier for each phase
        assert compiled.ptx.count(instruction) >= 7
    assert compiled.ptx.count("atom.add.acq_rel.gpu") == 1  # of the last chunk: whoever arrives at a barrier goes on


@pytest.mark.toolchain
def test_it_is_launched_cooperatively():
    assert is_cooperative(persistent_kernel("bfloat16", 64, 64, "relu"), *sample_arguments("bfloat16"))
    assert not is_cooperative(meet, INTS, INTS, INTS, 1, 1)
