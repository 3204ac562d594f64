"""ONNX: every encoding of initializers, what exporters do to them, and files that are damaged or hostile."""

import re
import sys

import numpy as np
import onnx as theirs
import pytest

from support import onnx_writer as w
from support.foreign import PAST, linear, onnx, onnx_nodes, onnx_tensors
from support.tables import rows
from support.tiny_checkpoint import assert_holds, assert_refused, random_tensors, write_json
from tinygpt.weights.config import HEAD
from tinygpt.weights.containers.onnx import read_onnx
from tinygpt.weights.open import open_checkpoint

TENSORS = random_tensors(prefix="")


def write(folder, nodes=(), tensors=(), inputs=None, name="model.onnx"):
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_bytes(w.model(w.graph(list(nodes), list(tensors), inputs)))
    return path


def write_model(folder, tensors, nodes=None, inputs=PAST):
    written = [w.tensor(name, array) for name, array in tensors.items()]
    return write(folder, onnx_nodes(tensors) if nodes is None else nodes, written, inputs)


VALUES = np.arange(12, dtype=np.float32).reshape(3, 4) - 5


@pytest.mark.parametrize("encoding", ["raw", "listed"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint16"])
def test_every_encoding_of_a_tensor(tmp_path, encoding, dtype):
    array = VALUES.astype(dtype) if dtype != "uint16" else (VALUES.view(np.uint32) >> 16).astype(dtype)
    tensor = read_onnx(write(tmp_path, tensors=[w.tensor("a", array, encoding)])).tensors["a"]
    assert tensor.shape == (3, 4)
    np.testing.assert_array_equal(tensor.float32(), VALUES)
    tensor.release()


def test_tensors_in_nodes_and_in_branches(tmp_path):
    inner = w.graph([], [w.tensor("inner", VALUES + 1)])
    constant = w.node("Constant", [], ["constant"], value=w.tensor("", VALUES))
    path = write(tmp_path, [constant, w.node("If", ["x"], ["y"], then_branch=inner)], [w.tensor("a", VALUES)])
    tensors = read_onnx(path).tensors
    assert sorted(tensors) == ["a", "constant", "inner"]
    np.testing.assert_array_equal(tensors["inner"].float32(), VALUES + 1)
    np.testing.assert_array_equal(tensors["constant"].float32(), VALUES)


A = w.tensor("a", VALUES)


def sized(shape, **data):
    return w.model(w.graph([], [theirs.TensorProto(name="a", data_type=1, dims=shape, **data)]))


REFUSED = {
    "no weights": (w.model(w.graph([], [])), "holds no weights"),
    "cut": (w.model(w.graph([], [A]))[:-3], "damaged ONNX file"),
    "two of one name": (w.model(w.graph([], [A, A])), "two initializers 'a'"),
    "too few bytes": (sized((3, 5), raw_data=VALUES.tobytes()), "has 48 bytes and needs 60"),
    "too many elements": (sized((9,), float_data=VALUES.ravel()), "has 48 bytes and needs 36"),
    "a negative size": (sized((-1,), raw_data=b"1234"), "impossible shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_damaged(tmp_path, case):
    data, sentence = REFUSED[case]
    path = tmp_path / "x.onnx"
    path.write_bytes(data)
    assert_refused(path, sentence, re.escape(str(path)))


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "../x", "a/../../x", "", "C:x", "a\\b", "link", "away/x"]
)
def test_weights_outside_the_folder(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "x").write_bytes(VALUES.tobytes())
    (folder / "link").symlink_to(tmp_path / "x")
    (folder / "away").symlink_to(tmp_path)
    path = write(folder, tensors=[w.tensor("a", VALUES, "external", location=location, length=48)])
    assert_refused(path, "refused|is a link out of its folder")


def test_weights_in_the_hubs_cache(tmp_path):
    """Every file of a snapshot is a link to a blob of the same repository; one of another is refused."""
    for repository in ("models--a", "models--b"):
        (tmp_path / repository / "blobs").mkdir(parents=True)
        (tmp_path / repository / "blobs" / "123").write_bytes(VALUES.tobytes())
    folder = tmp_path / "models--a" / "snapshots" / "main" / "onnx"
    folder.mkdir(parents=True)
    (folder / "data").symlink_to("../../../blobs/123")
    path = write(folder, tensors=[w.tensor("a", VALUES, "external", location="data")])
    np.testing.assert_array_equal(read_onnx(path).tensors["a"].float32(), VALUES)
    (folder / "data").unlink()
    (folder / "data").symlink_to(tmp_path / "models--b" / "blobs" / "123")
    assert_refused(path, "is a link out of its folder")


PLACES = rows("""
{"offset": 4} | reaches to byte 52
{"length": 44} | has 44 bytes and needs 48
{"offset": 1180591620717411303424} | damaged ONNX|reaches
{"offset": "-1"} | a place '-1'
{"length": "x"} | a place 'x'
{"location": "absent"} | cannot be read
""")


@pytest.mark.parametrize(("place", "sentence"), PLACES)
def test_weights_beside_the_file_that_are_not_there(tmp_path, place, sentence):
    (tmp_path / "data").write_bytes(VALUES.tobytes())
    path = write(tmp_path, tensors=[w.tensor("a", VALUES, "external", **{"location": "data", **place})])
    assert_refused(path, sentence)


@pytest.mark.parametrize("spellings", [1, 4], ids=["one name", "names of one file"])
def test_tensors_that_share_bytes_beyond_reason(tmp_path, spellings):
    (tmp_path / "data").write_bytes(VALUES.tobytes())
    shared = [
        w.tensor(f"a{i}", VALUES, "external", location="./" * (i % spellings) + "data") for i in range(200)
    ]
    assert len(read_onnx(write(tmp_path, tensors=shared[:50])).tensors) == 50
    assert_refused(write(tmp_path, tensors=shared), "its tensors claim")


def test_equal_tensors_that_were_merged_are_followed(tmp_path):
    tensors = onnx_tensors(TENSORS)
    gone = "transformer.h.1.ln_1.weight"
    kept = "transformer.h.0.ln_1.weight"
    del tensors[gone]
    nodes = [w.node("Identity", [kept], [gone]), *onnx_nodes(tensors)]
    checkpoint = open_checkpoint(write_model(tmp_path, tensors, nodes))
    np.testing.assert_array_equal(checkpoint.tensor("h.1.ln_1.weight"), TENSORS["h.0.ln_1.weight"])
    assert_refused(
        write_model(tmp_path, tensors), r"missing: h\.1\.ln_1\.weight\n.*merge tensors that are equal"
    )


@pytest.mark.parametrize("prefix", ["", "transformer.", "m.transformer.", "/model/transformer/"])
def test_wrappers(tmp_path, prefix):
    assert_holds(open_checkpoint(write_model(tmp_path, onnx_tensors(TENSORS, prefix))), TENSORS)


@pytest.mark.parametrize("how", ["transB", "Transpose"])
def test_matrices_that_an_operation_transposes(tmp_path, how):
    tensors = onnx_tensors(linear(TENSORS))
    nodes = onnx_nodes(tensors, transB=1) if how == "transB" else onnx_nodes(())
    if how == "Transpose":
        nodes += [w.node("Transpose", [name], [name + ".T"]) for name in tensors if name.endswith(".weight")]
        nodes.append(w.node("MatMul", ["x", "onnx::MatMul_523"], ["logits"]))
    assert_holds(open_checkpoint(write_model(tmp_path, tensors, nodes)), TENSORS)


def test_the_head_is_tied_unless_it_differs(tmp_path):
    assert open_checkpoint(onnx(tmp_path / "tied", TENSORS)).tied
    own = TENSORS | {HEAD: TENSORS["wte.weight"] + 1}
    checkpoint = open_checkpoint(onnx(tmp_path / "own", own))
    assert not checkpoint.tied
    np.testing.assert_array_equal(checkpoint.tensor(HEAD), own[HEAD])


@pytest.mark.parametrize("change", [0, 1])
def test_an_embedding_by_the_name_of_the_head_beside_the_heads_copy(tmp_path, change):
    """torch's newer exporter leaves them so, where it optimizes."""
    tensors = onnx_tensors(TENSORS, head="val_251")
    nodes = [*onnx_nodes(tensors), w.node("MatMul", ["x", "val_251"], ["logits"])]
    nodes.append(w.node("Gather", ["lm_head.weight", "ids"], ["x"]))
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    tensors["val_251"] += change
    checkpoint = open_checkpoint(write_model(tmp_path, tensors, nodes))
    np.testing.assert_array_equal(checkpoint.tensor("wte.weight"), TENSORS["wte.weight"])
    np.testing.assert_array_equal(checkpoint.tensor(HEAD), TENSORS["wte.weight"] + change)
    assert checkpoint.tied == (not change)


def test_what_the_graph_computes_with_is_ignored_by_name_and_nothing_else(tmp_path):
    tensors = onnx_tensors(TENSORS) | {
        "mask": np.ones((1, 1, 6, 6), np.int64),
        "half": np.array(0.5, np.float32),
    }
    assert sorted(open_checkpoint(write_model(tmp_path, tensors)).ignored) == ["half", "mask"]
    tensors["lost"] = np.ones((3, 4), np.float32)
    assert_refused(write_model(tmp_path, tensors), "unexpected: lost")


ACTIVATIONS = rows("""
Tanh     | {}                      | gelu_tanh
Erf      | {}                      | gelu
FastGelu | {}                      | gelu_tanh
BiasGelu | {}                      | gelu
Relu     | {}                      | relu
Gelu     | {"approximate": "tanh"} | gelu_tanh
Gelu     | {}                      | gelu
""")


@pytest.mark.parametrize(("kind", "attributes", "activation"), ACTIVATIONS)
def test_the_activation_is_that_of_the_graph(tmp_path, kind, attributes, activation):
    tensors = onnx_tensors(TENSORS)
    nodes = [*onnx_nodes(tensors)[:-1], w.node(kind, ["x"], ["y"], **attributes)]
    assert open_checkpoint(write_model(tmp_path, tensors, nodes)).config.activation == activation


@pytest.mark.parametrize(
    "inputs", [{"past_0": (2, "batch", 2, "past", 4)}, PAST, {}], ids=["past_0", "keys", "none"]
)
def test_heads_are_seen_in_what_goes_in(tmp_path, inputs):
    path = write_model(tmp_path, onnx_tensors(TENSORS), inputs=inputs)
    if not inputs:
        assert_refused(path, "does not say how many heads")
        write_json(tmp_path / "config.json", {"n_head": 2})
    assert open_checkpoint(path).config.n_head == 2
    if inputs:  # shapes alone would let both through
        for config in ({"n_head": 4}, {"n_head": 4, "n_embd": 8, "model_type": "gpt2"}):
            write_json(tmp_path / "config.json", config)
            assert_refused(path, r"has n_head 2, and config\.json beside it 4: correct that one")


def test_the_epsilon_of_layer_norms_that_are_taken_apart(tmp_path):
    """Exporters did so before LayerNormalization was an operation."""
    tensors = onnx_tensors(TENSORS)
    norm = [w.node("Add", ["variance", "epsilon"], ["sum"]), w.node("Sqrt", ["sum"], ["deviation"])]
    nodes = [*onnx_nodes(tensors)[1:], w.node("Sqrt", ["size"], ["scale"])]
    tensors["epsilon"] = np.array(1e-6, np.float32)
    checkpoint = open_checkpoint(write_model(tmp_path, tensors, [*norm, *nodes]))
    assert (checkpoint.config.layer_norm_epsilon, checkpoint.quirks) == (1e-6, ())
    unknown = open_checkpoint(write_model(tmp_path, tensors, nodes))
    assert unknown.quirks == ("layer_norm_epsilon is 1e-05, as the graph does not show it",)
    write_json(tmp_path / "config.json", {"layer_norm_epsilon": 1e-4})
    said = open_checkpoint(tmp_path)
    assert (said.config.layer_norm_epsilon, said.quirks) == (1e-4, ())


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert_refused(onnx(tmp_path, TENSORS), r"tinygpt\[onnx\]")


@pytest.mark.parametrize("quantised", ["MatMulNBits", "a_quantized"])
def test_quantised_models_are_refused_by_name(tmp_path, quantised):
    tensors = onnx_tensors(TENSORS)
    nodes = onnx_nodes(tensors)
    if quantised == "MatMulNBits":
        nodes.append(w.node(quantised, ["x"], ["y"]))
    else:
        tensors[quantised] = np.ones(3, np.float32)
    assert_refused(write_model(tmp_path, tensors, nodes), f"is quantized .{quantised}")


def test_functions_of_a_files_own_are_given_no_matrix(tmp_path):
    """What one makes of it is not known, and not seen in a matrix that is square."""
    tensors = onnx_tensors(TENSORS)
    written = [w.tensor(name, array) for name, array in tensors.items()]
    for called, given in (
        ("Turned", "transformer.h.0.attn.c_proj.weight"),
        ("Rank", "transformer.ln_f.weight"),
    ):
        graph = w.graph([*onnx_nodes(tensors), w.node(called, [given], ["y"], domain="own")], written, PAST)
        functions = [theirs.FunctionProto(name=called, domain="own")]
        (tmp_path / f"{called}.onnx").write_bytes(w.model(graph, functions=functions))
    assert_refused(
        tmp_path / "Turned.onnx", r"gives weights to functions or operations of its own \(Turned\)"
    )
    assert_holds(open_checkpoint(tmp_path / "Rank.onnx"), TENSORS)


def test_weights_whose_names_are_lost(tmp_path):
    tensors = {f"onnx::MatMul_{i}": array for i, array in enumerate(TENSORS.values())}
    path = write_model(tmp_path, tensors)
    assert_refused(path, r"no weights by the names of GPT-2's layers \(onnx::MatMul_0, .* more\)")


def test_a_name_that_is_not_utf8_is_damage(tmp_path):
    path = onnx(tmp_path, TENSORS) / "decoder_model.onnx"
    path.write_bytes(path.read_bytes().replace(b"transformer.h.0.ln_1.bias", b"\xffransformer.h.0.ln_1.bias"))
    assert_refused(tmp_path, r"unexpected: b'.xffransformer")
