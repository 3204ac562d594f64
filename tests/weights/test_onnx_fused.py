"""Fused ONNX graphs whose equal tensors were merged, as onnxruntime's optimizer has them: told by operations."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from support import onnx_writer as w
from support.recorded import MISSING
from support.tiny_checkpoint import (
    CONFIG,
    LAYERS,
    V,
    assert_holds,
    assert_refused,
    random_tensors,
    write_json,
)
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


def fused_nodes(is_post=False, places="position_ids", **attention):
    """The graph of convert_to_onnx -o, with names of tensors as they would be if none was merged."""
    tables = ["input_ids", "", "wte.weight", "wpe.weight", "", "h.0.ln_1.weight", "h.0.ln_1.bias", "", places]
    nodes = [w.node("EmbedLayerNormalization", tables, ["n0", "", "x0"], epsilon=1e-5, **MS)]
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


def renamed(node, names):
    inputs = [names.get(name, name) for name in node.input]
    del node.input[:]
    node.input.extend(inputs)
    return node


def skip(of, residual, norm, bias, out, total):
    given = [of, residual, f"{norm}.weight", f"{norm}.bias", bias]
    return w.node("SkipLayerNormalization", given, [out, "", "", total], epsilon=1e-5, **MS)


def write_fused(folder, tensors, nodes=None, **about):
    """Keep one of equal tensors, whose name all others' operations take."""
    table = tensors[HEAD if HEAD in tensors else "wte.weight"]
    tensors = {**tensors, "onnx::MatMul_9": np.ascontiguousarray(table.T)}
    nodes = [*(nodes or fused_nodes(**about)), w.node("MatMul", [f"n{LAYERS}", "onnx::MatMul_9"], ["logits"])]
    kept, first = {}, {}
    for name, array in tensors.items():
        if name != HEAD:
            kept[name] = first.setdefault((array.shape, array.tobytes()), name)
    nodes = [renamed(node, kept) for node in nodes]
    info = helper.make_tensor_value_info
    given = [info(name, TensorProto.INT32, ["b", "t"]) for name in ("input_ids", "position_ids")]
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
CASES = {"merged": plain_tensors(), "merged, a head of its own": plain_tensors() | OWN_HEAD}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_told_by_the_operation_that_takes_it(tmp_path, case):
    tensors = CASES[case]
    checkpoint = open_checkpoint(write_fused(tmp_path, tensors))
    assert_holds(checkpoint, tensors)
    assert checkpoint.tied == (HEAD not in tensors)
    assert (checkpoint.config.n_head, checkpoint.config.activation) == (CONFIG["n_head"], "gelu_tanh")


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_onnxruntime(tmp_path, case):
    onnxruntime = pytest.importorskip("onnxruntime", reason=MISSING)
    path = write_fused(tmp_path, CASES[case])
    given = {
        "input_ids": np.array([IDS], np.int32),
        "position_ids": np.arange(len(IDS), dtype=np.int32)[None],
    }
    (expected,) = onnxruntime.InferenceSession(path).run(None, given)
    checkpoint = open_checkpoint(path)
    cache = reference.new_kv_cache(checkpoint.config, 1, len(IDS))
    workspace = reference.new_workspace(checkpoint.config, len(IDS), len(IDS))
    batch = Batch.of([IDS], [0], [0], "all")
    found = reference.forward(reference.load_params(checkpoint), batch, cache, workspace)
    np.testing.assert_allclose(found, expected[0], atol=1e-4, rtol=0)


def with_more(of, kind, *more):
    """Let one operation more change an activation."""
    nodes = fused_nodes()
    made = next(i for i, node in enumerate(nodes) if of in node.output)
    later = [renamed(node, {of: "changed"}) for node in nodes[made + 1 :]]
    return [*nodes[: made + 1], w.node(kind, [of, *more], ["changed"]), *later]


def instead(kind, of):
    """Let another operation make an activation."""
    nodes = fused_nodes()
    for node in nodes:
        node.op_type = kind if of in node.output else node.op_type
    return nodes


def first_of(kind, **fields):
    """Let the first operation of a kind have other inputs, outputs or domain."""
    nodes = fused_nodes()
    node = next(node for node in nodes if node.op_type == kind)
    for name, value in fields.items():
        if name == "domain":
            node.domain = value
        else:
            del getattr(node, name)[:]
    return nodes


OTHERS = [
    {"nodes": [w.node("Cast", [], ["n"]), *fused_nodes()]},
    {"nodes": first_of("EmbedLayerNormalization", output=None)},
    {"nodes": first_of("SkipLayerNormalization", output=None)},
    {"nodes": first_of("FastGelu", input=None)},
    {"nodes": first_of("FastGelu", domain="own.domain")},
    *({"nodes": with_more(of, "Mul", of)} for of in ("x0", "a1", "p0", "n2", "q0", "x1")),
    {"nodes": with_more("n2", "Tanh")},
    {"nodes": with_more("a0", "FastGelu")},
    {"nodes": with_more("q1", "Add", "h.1.mlp.c_proj.bias")},
    {"nodes": instead("Relu", "g1")},
    {"nodes": instead("Add", "y0")},
    {"places": "computed"},
    {"is_post": True},
    {"unidirectional": 0},
    {"do_rotary": 1},
    {"scale": 0.25},
]


@pytest.mark.parametrize("about", OTHERS, ids=range(len(OTHERS)))
def test_a_graph_of_another_arithmetic_is_not_taken_for_one(tmp_path, about):
    assert_refused(write_fused(tmp_path, plain_tensors(), **about), "missing: ")


def test_a_tensor_that_is_left_out_by_name_is_missed(tmp_path):
    path = write_fused(tmp_path, plain_tensors())
    write_json(tmp_path / "tensor_names.json", {"wpe.*": None})
    assert_refused(path, "holds no tensor wpe.weight")
