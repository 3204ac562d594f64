"""Fused ONNX graphs whose equal tensors were merged, as onnxruntime's optimizer has them: told by operations."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from support import onnx_writer as w
from support.recorded import MISSING
from support.tiny_checkpoint import CONFIG, LAYERS, V, assert_holds, assert_refused, random_tensors
from tinygpt.kernels import reference
from tinygpt.kernels.backend import Batch
from tinygpt.weights.config import HEAD
from tinygpt.weights.open import open_checkpoint

IDS = [3, 1, 4, 1, 5]
MS = {"domain": "com.microsoft"}


def plain_tensors():
    """Parameters of a model that was never trained: every norm, and every bias of one size, is alike."""
    made = random_tensors(prefix="")
    for name, array in made.items():
        if ".ln_" in f".{name}" or name.endswith("bias"):
            array[:] = name.endswith("weight")
    return made


def fused_nodes(is_post=False, **attention):
    """The graph of convert_to_onnx -o, with names of tensors as they would be if none was merged."""
    nodes = [
        w.node("Gather", ["wte.weight", "input_ids"], ["tokens"]),
        w.node("Gather", ["wpe.weight", "position_ids"], ["places"]),
        w.node("Add", ["tokens", "places"], ["x0"]),
        w.node("LayerNormalization", ["x0", "h.0.ln_1.weight", "h.0.ln_1.bias"], ["n0"], epsilon=1e-5),
    ]
    about = {"num_heads": CONFIG["n_head"], "unidirectional": 1, **attention, **MS}
    for i in range(LAYERS):
        h = f"h.{i}"
        norm = f"h.{i + 1}.ln_1" if i + 1 < LAYERS else "ln_f"
        nodes += [
            w.node(
                "Attention", [f"n{i}", f"{h}.attn.c_attn.weight", f"{h}.attn.c_attn.bias"], [f"a{i}"], **about
            ),
            w.node("MatMul", [f"a{i}", f"{h}.attn.c_proj.weight"], [f"p{i}"]),
            skip(f"p{i}", f"x{i}", f"{h}.ln_2", f"{h}.attn.c_proj.bias", f"m{i}", f"y{i}"),
            w.node("MatMul", [f"m{i}", f"{h}.mlp.c_fc.weight"], [f"f{i}"]),
            w.node("FastGelu", [f"f{i}", f"{h}.mlp.c_fc.bias"], [f"g{i}"], **MS),
            w.node("MatMul", [f"g{i}", f"{h}.mlp.c_proj.weight"], [f"q{i}"]),
            skip(
                f"q{i}",
                f"{'m' if is_post else 'y'}{i}",
                norm,
                f"{h}.mlp.c_proj.bias",
                f"n{i + 1}",
                f"x{i + 1}",
            ),
        ]
    return nodes


# By order of operations, what the norm before the MLP, and the two sums, take.
ORDERS = {"plain": ("y", "x", "y"), "post": ("y", "c", "d"), "parallel": ("x", "p", "y")}


def unfused_nodes(order="plain"):
    """The graph with norms, products and sums of their own, and a Cast of each norm's output."""
    of_norm, first, second = ORDERS[order]
    nodes = fused_nodes()[:4]
    about = {"num_heads": CONFIG["n_head"], "unidirectional": 1, **MS}

    def add(kind, *inputs, to, **more):
        nodes.append(w.node(kind, list(inputs), [to], **more, **({"to": 1} if kind == "Cast" else {})))

    for i in range(LAYERS):
        h = f"h.{i}"
        after = f"h.{i + 1}.ln_1" if i + 1 < LAYERS else "ln_f"
        add("Cast", f"n{i}", to=f"c{i}")
        add("Attention", f"c{i}", f"{h}.attn.c_attn.weight", f"{h}.attn.c_attn.bias", to=f"a{i}", **about)
        add("MatMul", f"a{i}", f"{h}.attn.c_proj.weight", to=f"m{i}")
        add("Add", f"m{i}", f"{h}.attn.c_proj.bias", to=f"p{i}")
        if order != "parallel":
            add("Add", f"p{i}", f"{first}{i}", to=f"y{i}")
        add(
            "LayerNormalization",
            f"{of_norm}{i}",
            f"{h}.ln_2.weight",
            f"{h}.ln_2.bias",
            to=f"e{i}",
            epsilon=1e-5,
        )
        add("Cast", f"e{i}", to=f"d{i}")
        add("MatMul", f"d{i}", f"{h}.mlp.c_fc.weight", to=f"f{i}")
        add("FastGelu", f"f{i}", f"{h}.mlp.c_fc.bias", to=f"g{i}", **MS)
        add("MatMul", f"g{i}", f"{h}.mlp.c_proj.weight", to=f"r{i}")
        add("Add", f"r{i}", f"{h}.mlp.c_proj.bias", to=f"q{i}")
        if order == "parallel":
            add("Add", f"p{i}", f"x{i}", to=f"y{i}")
        add("Add", f"q{i}", f"{second}{i}", to=f"x{i + 1}")
        add(
            "LayerNormalization",
            f"x{i + 1}",
            f"{after}.weight",
            f"{after}.bias",
            to=f"n{i + 1}",
            epsilon=1e-5,
        )
    return nodes


def renamed(node, names):
    inputs = [names.get(name, name) for name in node.input]
    del node.input[:]
    node.input.extend(inputs)
    return node


def skip(of, residual, norm, bias, out, total):
    given = [of, residual, f"{norm}.weight", f"{norm}.bias", bias]
    return w.node("SkipLayerNormalization", given, [out, "", "", total], epsilon=1e-5, **MS)


def write_fused(folder, tensors, head="copy", nodes=None, **about):
    """Keep one of equal tensors, whose name all others' operations take."""
    nodes = nodes or fused_nodes(**about)
    last = f"n{LAYERS}"
    if head == "copy":
        table = tensors[HEAD if HEAD in tensors else "wte.weight"]
        tensors = {**tensors, "onnx::MatMul_9": np.ascontiguousarray(table.T)}
        nodes.append(w.node("MatMul", [last, "onnx::MatMul_9"], ["logits"]))
    else:
        nodes.append(w.node("Transpose", ["wte.weight"], ["turned"], perm=[1, 0]))
        nodes.append(w.node("MatMul", [last, "turned"], ["logits"]))
    kept, first = {}, {}
    for name, array in tensors.items():
        if name != HEAD:
            kept[name] = first.setdefault((array.shape, array.tobytes()), name)
    nodes = [renamed(node, kept) for node in nodes]
    info = helper.make_tensor_value_info
    given = [info(name, TensorProto.INT64, ["b", "t"]) for name in ("input_ids", "position_ids")]
    out = [info("logits", TensorProto.FLOAT, ["b", "t", V])]
    written = [w.tensor(name, tensors[name]) for name in dict.fromkeys(kept.values())]
    model = helper.make_model(
        helper.make_graph(nodes, "g", given, out, written),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
        ir_version=8,
    )
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


OWN_HEAD = {HEAD: plain_tensors()["wte.weight"] + 1}
CASES = {
    "merged": (plain_tensors(), "copy"),
    "merged, the head is the table's transpose": (plain_tensors(), "transpose"),
    "merged, a head of its own": (plain_tensors() | OWN_HEAD, "copy"),
    "merged, nothing fused": (plain_tensors(), "copy", unfused_nodes()),
}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_told_by_the_operation_that_takes_it(tmp_path, case):
    tensors = CASES[case][0]
    checkpoint = open_checkpoint(write_fused(tmp_path, *CASES[case]))
    assert_holds(checkpoint, tensors)
    assert checkpoint.tied == (HEAD not in tensors)
    assert (checkpoint.config.n_head, checkpoint.config.activation) == (CONFIG["n_head"], "gelu_tanh")


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_onnxruntime(tmp_path, case):
    onnxruntime = pytest.importorskip("onnxruntime", reason=MISSING)
    path = write_fused(tmp_path, *CASES[case])
    given = {"input_ids": np.array([IDS]), "position_ids": np.arange(len(IDS))[None]}
    (expected,) = onnxruntime.InferenceSession(path).run(None, given)
    checkpoint = open_checkpoint(path)
    cache = reference.new_kv_cache(checkpoint.config, 1, len(IDS))
    workspace = reference.new_workspace(checkpoint.config, len(IDS), len(IDS))
    batch = Batch.of([IDS], [0], [0], "all")
    found = reference.forward(reference.load_params(checkpoint), batch, cache, workspace)
    np.testing.assert_allclose(found, expected[0], atol=1e-4, rtol=0)


def with_scaled(of, kind, *more):
    """Scale or bound one activation, as models of other arithmetic do: more: inputs after it."""
    nodes = [*unfused_nodes(), w.node(kind, [of, *more], ["scaled"], **({"to": 1} if kind == "Cast" else {}))]
    made = next(i for i, node in enumerate(nodes) if of in node.output)
    for node in nodes[made + 1 : -1]:
        renamed(node, {of: "scaled"})
    return [*nodes[: made + 1], nodes[-1], *nodes[made + 1 : -1]]


OTHERS = [
    *({"nodes": with_scaled(of, "Mul", of)} for of in ("tokens", "a1", "p0", "n2", "r0", "x1")),
    {"nodes": with_scaled("n2", "Tanh")},
    {"nodes": with_scaled("q1", "Add", "h.1.mlp.c_proj.bias")},
    {"nodes": with_scaled("a0", "FastGelu")},
    {"is_post": True},
    {"nodes": unfused_nodes("post")},
    {"nodes": unfused_nodes("parallel")},
    {"unidirectional": 0},
    {"do_rotary": 1},
    {"scale": 0.25},
]


@pytest.mark.parametrize("about", OTHERS, ids=range(len(OTHERS)))
def test_a_graph_of_another_arithmetic_is_not_taken_for_one(tmp_path, about):
    assert_refused(write_fused(tmp_path, plain_tensors(), **about), "missing: ")
