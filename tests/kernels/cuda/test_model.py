"""GPT-2 by the CUDA backend next to the reference: steps of every kind, and the cache between them."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from support.examples import daily
from support.golden_models import golden_array
from support.kernel_tools import same_bits, warpers_of
from support.tables import fields, rows
from tinygpt.kernels import cuda, reference
from tinygpt.kernels.backend import LOOKS, Batch
from tinygpt.kernels.cuda.params import NUMBERS
from tinygpt.kernels.cuda.workspace import MaxShape, Mirror, Queries, bytes_needed
from tinygpt.kernels.numbers import from_cache
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.config import ModelConfig, parameter_shapes
from tinygpt.weights.tensor import LazyTensor

pytestmark = pytest.mark.usefixtures("compute_capability", "device")

V = 29
T = 140
SLOTS = 4
# By the dtype of weights, and that of the KV cache if it is another.
TOLERANCE = {"float32": 2e-5, "float16": 0.008, "bfloat16": 0.06, "int8": 0.15}
INT8_CACHE = "bfloat16 int8"
TOLERANCE[INT8_CACHE] = TOLERANCE["bfloat16"]


def checkpoint_of(**fields) -> Checkpoint:
    """A checkpoint of a small model whose every parameter matters."""
    sizes = {"vocab_size": V, "n_positions": T, "n_embd": 16, "n_layer": 2, "n_head": 2, **fields}
    config = ModelConfig(**sizes)
    stored = {
        name: LazyTensor(partial(parameter, name, shape), ())
        for name, shape in parameter_shapes(config).items()
    }
    return Checkpoint(Path("random"), "random weights", "GPT-2", config, stored, tied=False)


def parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return golden_array(name, shape) * np.float32(0.5)


class Model:
    def __init__(self, backend, checkpoint: Checkpoint, dtypes: str = "float32", num_logits: int = 80):
        self.backend, config = backend, checkpoint.config
        dtype, cache_dtype = dtypes_of(backend, dtypes)
        self.params = backend.load_params(checkpoint, dtype)
        self.cache = backend.new_kv_cache(config, SLOTS, config.n_positions, cache_dtype)
        self.workspace = backend.new_workspace(config, 150, num_logits, 1, dtype)

    def forward(self, *batch) -> np.ndarray:
        return self.backend.forward(self.params, Batch.of(*batch), self.cache, self.workspace).copy()


def dtypes_of(backend, dtypes: str) -> list[str]:
    (dtype, *cache) = dtypes.split()
    return [dtype, *(cache or backend.kv_cache_dtypes(dtype)[:1])]


def cuda_model(checkpoint: Checkpoint, dtypes: str = "float32") -> Model:
    return Model(cuda, checkpoint, dtypes)


def oracle_of(checkpoint: Checkpoint, dtypes: str = "float32") -> Model:
    return Model(reference, checkpoint, "float32 int8" if "int8" in dtypes.split()[1:] else "float32")


def token_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, count).tolist()


# A CPU takes long for attention in float32, whose many chunks test_attention.py looks at, and float16 has bfloat16's.
LENGTHS = dict.fromkeys(TOLERANCE, 66) | {"float32": 6, "float16": 6}


# float16 has bfloat16's kernels, of which test_linear.py runs the linear layers in both.
@pytest.mark.parametrize("dtype", daily(TOLERANCE, TOLERANCE.keys() - ["float16"]))
def test_steps_of_every_kind(dtype):
    """Two prompts, one of them in parts; a prompt beside one that decodes; decoding together, and alone."""
    checkpoint, n = checkpoint_of(), LENGTHS[dtype]
    ours = cuda_model(checkpoint, dtype)
    oracle = oracle_of(checkpoint, dtype)
    for chunks, starts, slots in (
        ([token_ids(n), token_ids(3, 1)], [0, 0], [2, 0]),
        ([token_ids(12, 2), token_ids(1, 3)], [n, 3], [2, 0]),
        ([token_ids(1, 4), token_ids(1, 5)], [4, n + 12], [0, 2]),
        ([token_ids(1, 6)], [n + 13], [2]),
    ):
        expected = oracle.forward(chunks, starts, slots)
        np.testing.assert_allclose(
            ours.forward(chunks, starts, slots), expected, atol=TOLERANCE[dtype], rtol=0
        )


FAMILIES = fields(
    """
BLOOM: positions="alibi", embed_norm=True
GPT-1: norm_placement="post", final_norm=False
XGLM: embed_scale=4.0
OPT-350M: norm_placement="post", final_norm=False, embed_dim=9
experts: n_layer=3, expert_layers=(1,), num_experts=5, experts_per_token=2
experts everywhere, after norms: norm_placement="post", expert_layers=(0, 1), num_experts=3, norm_topk_prob=True
"""
)


OF_FAMILIES = [(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")]
# In bfloat16, the one whose attention has a variant of its kernel.
DAILY = [*((family, "float32") for family in FAMILIES), ("BLOOM", "bfloat16")]


@pytest.mark.parametrize(("family", "dtype"), daily(OF_FAMILIES, DAILY))
def test_families(family, dtype):
    checkpoint, n = checkpoint_of(**FAMILIES[family]), LENGTHS[dtype]
    models = [cuda_model(checkpoint, dtype), Model(reference, checkpoint)]
    embeds = np.ones((1, checkpoint.config.embedding_size), np.float32)
    for step in (
        ([token_ids(n), [3, -1, 4]], [0, 0], [2, 0], [3, 3], embeds),
        ([token_ids(1, 4), token_ids(1, 5)], [3, n], [0, 2]),
    ):
        ours, expected = (model.forward(*step) for model in models)
        np.testing.assert_allclose(ours, expected, atol=TOLERANCE[dtype], rtol=0)


EXPERTS = {"expert_layers": (0,), "num_experts": 3, "experts_per_token": 2}
# Of a dtype, plain and with experts; bfloat16's bits are compared kernel by kernel, in test_gemm.py.
CUT = [*((dtype, {}) for dtype in TOLERANCE), ("float32", EXPERTS), ("int8", EXPERTS)]


@pytest.mark.parametrize(("dtype", "family"), daily(CUT, [("float32", {}), ("int8", EXPERTS)]))
def test_a_sequence_has_the_same_bits_alone_or_not_and_however_it_is_cut(dtype, family):
    checkpoint, n = checkpoint_of(n_layer=1, **family), LENGTHS[dtype]
    ids = token_ids(n + 2)
    whole = cuda_model(checkpoint, dtype).forward([ids], [0], [1], "all")
    model, parts = cuda_model(checkpoint, dtype), []
    model.forward([token_ids(n, 1)], [0], [0])
    for start, stop in ((0, 3), (3, n), (n, n + 1), (n + 1, n + 2)):
        chunks = [ids[start:stop], token_ids(1, stop)]
        starts = [start, n + len(parts)]
        parts.append(model.forward(chunks, starts, [1, 0], "all")[: stop - start])
    assert (np.concatenate(parts) == whole).all()


@pytest.fixture
def launches(device, monkeypatch) -> list[tuple[str, tuple | int]]:
    """The names of kernels and their grids, as they are launched."""
    found, launch = [], device.launch

    def note(kernel, grid, *arguments, **options) -> None:
        found.append((kernel.py_func.__name__, grid))
        launch(kernel, grid, *arguments, **options)

    monkeypatch.setattr(device, "launch", note)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_single_tokens_far_on_have_a_launch_of_their_own_and_the_same_bits(dtype, launches):
    checkpoint = checkpoint_of(n_positions=400, n_layer=1)
    model = Model(cuda, checkpoint, dtype, num_logits=4)  # tokens are more
    steps = [([token_ids(1, i)], [start], [i]) for i, start in enumerate((300, 7, 330))]
    steps.append(([token_ids(3)], [0], [3]))
    for _, (start,), (slot,) in steps:
        values = np.random.default_rng(slot).standard_normal((2, 1, 2, start, 8), np.float32)
        model.backend.write_positions(model.cache, slot, 0, *values)
    alone = [model.forward(*step) for step in steps]
    launches.clear()
    order = 3, 0, 1, 2
    together = model.forward(*([given for i in order for given in steps[i][part]] for part in range(3)))
    same_bits(together, np.concatenate([alone[i] for i in order]))
    grids = {name: grid for name, grid in launches if name.startswith("attend")}
    assert {name: grid[0] for name, grid in grids.items()} == {"attend_prefill": 1, "attend_decode": 2}
    assert grids["attend_decode"][2] == 4  # three, rounded up
    launches.clear()
    model.forward([steps[1][0][0], steps[3][0][0]], [7, 0], [1, 3])
    assert [name for name, _ in launches if name.startswith("attend")] == ["attend_prefill"]


# New tokens and positions of sequences; then which are lone, and the runs of others.
KINDS_OF_TOKENS = rows("""
[1, 1] | [3, 900] | [0, 1] | []
[1, 3] | [256, 3] | [] | [[0, 1], [1, 4]]
[1, 3] | [257, 64] | [0] | [[1, 4]]
[70, 1, 1] | [70, 385, 2] | [70, 71] | [[0, 64], [64, 70]]
[1, 1, 1, 2] | [900, 900, 900, 2] | [] | [[0, 1], [1, 2], [2, 3], [3, 5]]
[1, 1, 1] | [9, 9, 9] | [] | [[0, 1], [1, 2], [2, 3]]
""")


@pytest.mark.parametrize(("counts", "lens", "lone", "tiles"), KINDS_OF_TOKENS)
def test_kinds_of_tokens(counts, lens, lone, tiles):
    """A step of 2 lone tokens at most."""
    starts = np.subtract(lens, counts)
    batch = Batch.of([[0] * count for count in counts], starts, range(len(lens)))
    queries = Queries.of(batch, MaxShape(100, 2, 2, 1024))
    assert queries.lone.tolist() == lone
    assert queries.tiles.tolist() == tiles


@pytest.mark.parametrize("family", [{}, EXPERTS], ids=["GPT-2", "experts"])
def test_a_kind_of_step_is_captured_once(family, device):
    checkpoint = checkpoint_of(n_layer=1, **family)
    model = cuda_model(checkpoint)
    steps = [model.forward([[3]], [i], [0]) for i in range(4)]
    assert device.num_captured == 1
    model.forward([[3]], [T // 2], [0])
    assert device.num_captured == 2  # at once, of kernels that have run
    again = cuda_model(checkpoint).forward([[3] * 4], [0], [0], "all")
    assert (np.concatenate(steps) == again).all()


def test_a_step_chooses_the_greatest_logits_itself_until_they_change(device):
    model = cuda_model(checkpoint_of(n_layer=1))
    batch = Batch.of([[3], [5], [7]], [0, 0, 0], [0, 1, 2])
    logits = cuda.forward(model.params, batch, model.cache, model.workspace)
    rows, launches = logits.copy(), device.now
    draws = warpers_of(2, temperature=0), np.zeros(2, np.uint64), np.zeros(2), np.zeros(2)
    assert cuda.sample(logits[np.array([2, 0])], *draws).tolist() == rows[[2, 0]].argmax(1).tolist()
    assert device.now == launches
    rows[1, rows[1].argmax()] = -np.inf
    logits[1] = rows[1]
    assert cuda.sample(logits[np.array([1, 0])], *draws).tolist() == rows[[1, 0]].argmax(1).tolist()


@dataclass
class Recorder:
    """Hooks that keep the arrays of some points, after `change` has written to them."""

    points: set[tuple[str, int]]
    change: Callable[[str, np.ndarray], None] = lambda kind, array: None
    first: int = 0
    changes: bool = True
    found: list[np.ndarray] = dataclasses.field(default_factory=list)

    def __call__(self, kind: str, layer: int, array: np.ndarray, sequence: int | None = None) -> None:
        if (kind, layer) in self.points:
            self.change(kind, array)
            self.found.append(array.reshape(len(array), -1).copy())


@pytest.mark.parametrize("dtype", daily(cuda.ADAPTED, ["float32", "bfloat16"]))
def test_each_sequence_has_its_own_adapter(dtype):
    checkpoint, n = checkpoint_of(), LENGTHS[dtype]
    shapes = {
        name.removesuffix(".weight"): shape
        for name, shape in parameter_shapes(checkpoint.config).items()
        if re.search(r"(c_attn|c_proj|c_fc)\.weight", name)
    }
    adapters = [
        {
            name: (parameter(f"down {name}", (rank, k)), parameter(f"up {name}", (features, rank)))
            for name, (features, k) in shapes.items()
            if layer in name
        }
        for rank, layer in ((3, "h."), (5, "h.1."))
    ]
    steps = (
        ([token_ids(n), token_ids(3, 1), token_ids(4, 2)], [0, 0, 0], [2, 0, 1], "all"),
        *(
            ([token_ids(1, i), token_ids(1, 5), token_ids(1, 6)], [4 + i, n + i, 3 + i], [1, 2, 0])
            for i in (0, 1)
        ),
    )
    bare = cuda_model(checkpoint, dtype)
    models = [cuda_model(checkpoint, dtype), Model(reference, checkpoint)]
    for model in models:
        model.params, of_slot = model.backend.with_adapters(model.params, checkpoint.config, adapters, SLOTS)
        of_slot[:3] = 1, -1, 0
    for step, plain in zip(steps, (slice(-4, None), slice(1), slice(1)), strict=True):
        ours, expected = (model.forward(*step) for model in models)
        np.testing.assert_allclose(ours, expected, atol=TOLERANCE[dtype], rtol=0)
        without = bare.forward(*step)
        same_bits(ours[plain], without[plain])
        assert (np.abs(ours - without).max(1) > 0.05).sum() == len(ours) - len(ours[plain])


LOOKED_AT = [
    Batch.of([token_ids(5), token_ids(3, 1)], [0, 0], [1, 3]),
    Batch.of([token_ids(1, 2), token_ids(2, 3)], [5, 3], [1, 3]),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", INT8_CACHE])
def test_all_that_can_be_seen(dtype):
    checkpoint = checkpoint_of()
    recorded = []
    for model in (cuda_model(checkpoint, dtype), oracle_of(checkpoint, dtype)):
        hooks = Recorder({(kind, layer) for kind in cuda.SEEN for layer in (0, 1)})
        for batch in LOOKED_AT:
            model.backend.forward(model.params, batch, model.cache, model.workspace, hooks)
        recorded.append(hooks.found)
    assert len(recorded[0]) == 2 * 2 * len(LOOKS)
    for ours, expected in zip(*recorded, strict=True):
        np.testing.assert_allclose(ours, expected, atol=TOLERANCE[dtype], rtol=0)


NARROW = ("k", "bfloat16"), ("v", "bfloat16"), ("pre", "float16"), *((kind, INT8_CACHE) for kind in "qkv")
DAILY_NARROW = ("k", "bfloat16"), ("v", INT8_CACHE)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in LOOKS), *daily(NARROW, DAILY_NARROW)]
)
def test_edits_of_all_that_can_be_seen(kind, dtype):
    """Of each sequence's third token: those before it keep their bits."""
    checkpoint = checkpoint_of()

    def change(kind: str, array: np.ndarray) -> None:
        array[[2, 7]] = 0.5 - array[[2, 7]]

    found = []
    for model in (cuda_model(checkpoint, dtype), oracle_of(checkpoint, dtype)):
        plain, hooks = Recorder({(kind, 0)}, changes=False), Recorder({(kind, 0)}, change)
        given = dataclasses.replace(LOOKED_AT[0], logit_rows=np.arange(8, dtype=np.int32))
        steps = [(given, plain), (given, hooks), (LOOKED_AT[1], Recorder(set()))]
        on = model.params, model.cache, model.workspace
        found.append([model.backend.forward(on[0], batch, *on[1:], look).copy() for batch, look in steps])
        before, after, _ = found[-1]
        same_bits(before[[0, 1, 5, 6]], after[[0, 1, 5, 6]])
        assert np.abs(before[[4, 7]] - after[[4, 7]]).max() > 0.01
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, atol=max(TOLERANCE[dtype], 5e-5), rtol=0)


def test_edits_of_the_stream_and_a_given_one():
    checkpoint = checkpoint_of()
    vector = np.linspace(-1, 2, 16, dtype=np.float32)
    batch = Batch.of([token_ids(5)], [0], [1], "all")

    def set_rows(kind: str, array: np.ndarray) -> None:
        if kind == "resid_mid":
            array[2:4] = vector

    found = []
    for model in (cuda_model(checkpoint), Model(reference, checkpoint)):
        on = model.params, batch, model.cache, model.workspace
        plain = model.forward([token_ids(5)], [0], [2], "all")
        hooks = Recorder({("resid_mid", 0), ("resid_post", 1)}, set_rows)
        edited = model.backend.forward(*on, hooks).copy()
        stream = hooks.found[-1]
        given = Recorder({("resid_post", 1)}, lambda kind, array, s=stream: np.copyto(array, s), first=2)
        found.append([edited, stream, model.backend.forward(*on, given).copy()])
        same_bits(edited[:2], plain[:2])
        assert np.abs(edited[2:] - plain[2:]).max() > 0.1
    for of_ours, of_oracle in zip(*found, strict=True):
        np.testing.assert_allclose(of_ours, of_oracle, atol=5e-5, rtol=0)
    same_bits(found[0][2], found[0][0])  # the head's own bits


@pytest.mark.parametrize("dtype", daily([*NUMBERS, INT8_CACHE], ["float32", "bfloat16", INT8_CACHE]))
def test_positions_move_between_slots_and_to_the_host(dtype):
    checkpoint, ids = checkpoint_of(), token_ids(9)
    model = cuda_model(checkpoint, dtype)
    backend, cache = model.backend, model.cache
    model.forward([ids[:8]], [0], [3])
    expected = model.forward([ids[8:]], [8], [3])
    backend.copy_positions(cache, 3, 1, 0, 5)
    model.forward([ids[5:8]], [5], [1])
    assert (model.forward([ids[8:]], [8], [1]) == expected).all()
    k, v = backend.read_positions(cache, 3, 0, 8, checkpoint.config.head_size)
    backend.write_positions(cache, 0, 0, k[:, :, :3], v[:, :, :3])
    backend.write_positions(cache, 0, 3, k[:, :, 3:], v[:, :, 3:])
    assert (model.forward([ids[8:]], [8], [0]) == expected).all()
    oracle = oracle_of(checkpoint, dtype)
    oracle.forward([ids[:8]], [0], [3])
    as_float32 = [np.float32(from_cache(found)) for found in (k, v)]
    for values, true in zip(as_float32, reference.read_positions(oracle.cache, 3, 0, 8, 8), strict=True):
        np.testing.assert_allclose(values, true, atol=TOLERANCE[dtype] / 2, rtol=0)
    backend.write_positions(cache, 2, 0, *as_float32)
    assert (model.forward([ids[8:]], [8], [2]) == expected).all()


@pytest.mark.parametrize(
    ("dtype", "family"),
    [*((dtype, {}) for dtype in TOLERANCE), *(("float32", family) for family in FAMILIES.values())],
)
def test_memory_is_what_was_counted(dtype, family, device, monkeypatch):
    sizes = []

    def noted(array: np.ndarray) -> np.ndarray:
        sizes.append(array.nbytes)
        return array.ravel()

    monkeypatch.setattr(device, "zeros", lambda shape, kind: noted(np.zeros(shape, kind)))
    monkeypatch.setattr(device, "array", lambda values: noted(np.array(values)))
    checkpoint = checkpoint_of(**family)
    model = cuda_model(checkpoint, dtype)
    needed = bytes_needed(checkpoint.config, False, *dtypes_of(cuda, dtype), SLOTS, T, 150, 80)
    assert model.cache.k.nbytes * 2 == needed["KV cache"]
    assert sum(sizes) <= sum(needed.values()) <= 1.02 * sum(sizes)


def test_what_is_not_given_stays(device):
    mirror = Mirror(device, {"seeds": ((2,), np.uint64), "rows": ((3,), np.int32)})
    mirror.write(seeds=np.array([2**63 + 1, 5], np.uint64), rows=np.array([4, -1]))
    mirror.write(rows=np.array([-2]))
    assert mirror.arrays["seeds"].tolist() == [2**63 + 1, 5]
    assert mirror.arrays["rows"].tolist() == [-2, -1, 0]


def test_a_norm_that_does_not_fit_in_a_block_has_a_kernel_of_its_own_with_the_same_bits(device, launches):
    checkpoint = checkpoint_of(n_embd=64, n_layer=1)
    logits = []
    for shared_bytes in (227 << 10, 1 << 10):
        device.shared_bytes = shared_bytes
        logits.append(cuda_model(checkpoint, "bfloat16").forward([[3]], [0], [1]))
    assert (logits[0] == logits[1]).all()
    names = [name for name, _ in launches]
    assert names.count("normed_linear") == 2  # QKV and c_fc, once
    # Before the head, and of the second model each, and the first of its capture, which a new kernel ended.
    assert names.count("layer_norm") == 1 + 3 + 1
