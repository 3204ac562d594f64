"""Causal traces, differences by bits, and control vectors with their GGUF files."""

import ctypes
import errno
from dataclasses import replace

import numpy as np
import pytest

from support.engines import log_softmax, opened
from support.golden_models import write_model
from support.kernel_tools import same_bits
from tinygpt import LLM, ControlVector, Edit, SamplingParams
from tinygpt.errors import CheckpointError, RequestError
from tinygpt.weights import files
from tinygpt.weights.convert import gguf

FIELDS = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 64, "vocab_size": 97}
CLEAN = np.random.default_rng(0).integers(0, 97, 9).tolist()
CORRUPTED = [*CLEAN[:3], 5, 6, *CLEAN[5:]]
ANSWER = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("inside"), **FIELDS)


llm = opened("folder", threads=2)


def log_probability(logits) -> float:
    return log_softmax(logits)[-1, ANSWER]


@pytest.mark.parametrize(("kind", "tail"), [("resid_pre", "hook_resid_pre"), ("z", "attn.hook_z")])
def test_a_causal_trace_restores_one_activation_at_a_time(llm, kind, tail):
    noise = Edit("blocks.0.hook_resid_pre", value=np.full(32, 0.3), at=4)
    found = llm.causal_trace(CLEAN, CORRUPTED, [ANSWER], kind, noise)
    assert found.shape == (3, 9)
    _, cache = llm.run_with_cache(CLEAN)
    for layer in range(3):
        for at in range(9):
            restored = Edit(f"blocks.{layer}.{tail}", keep=0, value=cache[kind, layer][0, at], at=at)
            expected = log_probability(llm.logits(CORRUPTED, [noise, restored]))
            assert found[layer, at] == pytest.approx(expected, abs=1e-5)
            (whole,) = llm.score(CORRUPTED, [[ANSWER]], edits=[noise, restored])  # of all layers
            assert found[layer, at] == whole.logprobs[0]
    base = log_probability(llm.logits(CORRUPTED, noise))
    assert len(set(found[:, :3].ravel())) == 1  # to the bit: nothing differs before the corruption
    assert found[0, 0] == pytest.approx(base, abs=1e-5)
    assert np.ptp(found) > 0.01


class Firsts:
    """A runner, with the layer that each step began with."""

    def __init__(self, runner):
        self._runner, self.layers = runner, []

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def forward(self, batch, look=None):
        self.layers.append(look.first if look else 0)
        return self._runner.forward(batch, look)


def test_layers_before_a_set_input_do_not_run(llm):
    _, cache = llm.run_with_cache(CORRUPTED, "resid_pre")
    edit = Edit("blocks.2.hook_resid_pre", keep=0, value=cache["resid_pre", 2][0])
    asked = {"edits": edit, "logprobs": 1, "ignore_eos": True}
    with llm.engine.wrapped(Firsts) as runner:
        (first,) = llm.generate([CLEAN], max_tokens=1, **asked)
        assert runner.layers == [2]
        # The next shares no keys with it, of which layers 0 and 1 lack.
        (longer,) = llm.generate([CLEAN], max_tokens=5, **asked)
        assert runner.layers == [2, 0, 0, 0, 0, 0]
    (whole,) = llm.generate([CLEAN], max_tokens=5, capture="z", **asked)  # the captures need all layers
    assert longer.outputs[0].logprobs == whole.outputs[0].logprobs
    assert first.outputs[0].logprobs == whole.outputs[0].logprobs[:1]


WHOLE = {"keep": 0, "value": np.ones((9, 32))}
NEEDING = {
    "keeps": [WHOLE | {"keep": 1}],
    "a unit": [{"keep": 0, "index": 0}],
    "a direction": [{"project_out": np.ones(32)}],
    "a function": [WHOLE, {"function": np.copy}],
    "too few": [WHOLE | {"value": np.ones((8, 32))}],
}


@pytest.mark.parametrize("name", [*NEEDING, "a capture"])
def test_edits_that_need_all_layers(llm, name):
    edits = [Edit("blocks.2.hook_resid_pre", **fields) for fields in NEEDING.get(name, [WHOLE])]
    capture = None if name in NEEDING else "blocks.0.hook_resid_post"
    with llm.engine.wrapped(Firsts) as runner:
        llm.generate([CLEAN], max_tokens=1, edits=edits, capture=capture)
    assert runner.layers == [0]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("max_num_batched_tokens", [64, 12, 7])
@pytest.mark.parametrize("asked", [{}, {"prompt_logprobs": 1}], ids=str)
def test_a_step_never_runs_layers_that_a_later_edit_skips(folder, layer, max_num_batched_tokens, asked):
    """Keys that are infinite there would fail the request by how its prompt is cut, and by its neighbours."""
    prompt, neighbour, start = CLEAN * 2, [*range(40)], 10
    edits = [
        Edit(f"blocks.{layer}.attn.hook_k", value=np.inf, at=slice(start, None)),
        Edit("blocks.2.hook_resid_pre", keep=0, value=np.ones(32), at=slice(start, None)),
    ]
    params = SamplingParams(max_tokens=8, ignore_eos=True, edits=edits, logprobs=1, **asked)
    results = []
    for options in {}, {"max_num_batched_tokens": max_num_batched_tokens}:
        with LLM(folder, threads=2, max_num_seqs=4, prefix_cache_seqs=0, **options) as model:
            results.append(model.generate([neighbour, prompt], [SamplingParams(max_tokens=8), params])[1])
    with LLM(folder, threads=2) as model:
        (alone,) = model.generate([prompt], params)
        hidden = [edits[1]]
        (same,) = model.generate([prompt], replace(params, edits=hidden))
    for output in (*results, same):
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].logprobs == alone.outputs[0].logprobs
        assert output.prompt_logprobs == alone.prompt_logprobs


def test_steps_of_a_trace_take_turns_with_other_requests(llm):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    alone = llm.generate([CLEAN], params)[0].outputs[0].token_ids
    with llm.engine.wrapped(Firsts) as runner:
        future = llm.submit(CLEAN, params)
        llm.causal_trace(CLEAN * 5, CORRUPTED * 5, [ANSWER])
        assert future.result().outputs[0].token_ids == alone
    steps = "".join(map(str, runner.layers))
    assert {*"012"} == {*steps}
    assert max(map(len, steps.split("0"))) <= 2  # steps between two of the other request's
    assert "0" * 12 not in steps


def test_a_trace_compares_positions(llm):
    with pytest.raises(RequestError, match="corrupted has 8 tokens and the clean prompt 9"):
        llm.causal_trace(CLEAN, CLEAN[:8], [ANSWER])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "embed"}, "is 'hook_embed', which cannot be changed here"),
        ({"edits": Edit("z", at=-10)}, r"edits\[0\] does not fit"),
    ],
)
def test_a_trace_is_refused_before_the_clean_run(llm, monkeypatch, fields, message):
    runs = []
    monkeypatch.setattr(llm, "_look", lambda *given: runs.append(given))
    with pytest.raises(RequestError, match=message):
        llm.causal_trace(CLEAN, CORRUPTED, [ANSWER], **fields)
    assert runs == []


@pytest.mark.parametrize("names", [5, [5]])
def test_names_are_texts(llm, names):
    with pytest.raises(RequestError, match="must be None, a name, a list of names or a function") as caught:
        llm.run_with_cache(CLEAN, names)
    assert caught.value.value == names


@pytest.mark.parametrize("names", [[], (), lambda name: False])
def test_a_cache_may_have_no_names(llm, names):
    logits, cache = llm.run_with_cache(CLEAN, names)
    same_bits(logits[0], llm.logits(CLEAN))
    assert [*cache] == []


def test_prompts_are_needed(llm):
    with pytest.raises(RequestError, match="prompts is empty"):
        llm.run_with_cache([])
    with pytest.raises(RequestError, match="negative is empty"):
        llm.control_vector(CLEAN, [])


def test_an_edit_keeps_its_array_as_it_was_given():
    array = np.zeros(32, np.float32)
    views = np.broadcast_to(array, (2, 32)), array[:], array
    edits = [Edit("blocks.2.hook_resid_pre", value=view) for view in views]
    array[:] = 1
    assert not any(edit.value.any() for edit in edits)


def test_the_cone_of_an_edit(llm):
    found = llm.diff(CLEAN, Edit("blocks.1.attn.hook_z", keep=0, index=2, at=4))
    assert next(iter(found)) == "blocks.1.attn.hook_z"
    mask = found["blocks.1.attn.hook_z"]  # (T, H, D)
    assert mask[4, 2].all()
    assert not np.delete(mask, 4, axis=0).any()
    assert not np.delete(mask[4], 2, axis=0).any()
    last = found["blocks.2.hook_resid_post"].any(1)
    assert last.tolist() == [False] * 4 + [True] * 5
    assert llm.diff(CLEAN, Edit("z", keep=1, value=-0.0)) == {}


# Control vectors.


@pytest.fixture
def vector(llm):
    return llm.control_vector([CLEAN, CLEAN[:4]], [CORRUPTED])


def test_a_control_vector_is_a_difference_of_means(llm, vector):
    prompts = CLEAN, CLEAN[:4], CORRUPTED
    states = [llm.hidden_states(ids, before_norm=True)[:, -1] for ids in prompts]  # (L + 1, C)
    expected = (states[0] + states[1]) / 2 - states[2]
    assert list(vector.directions) == [1, 2]
    assert repr(vector) == "ControlVector(2 layers, 1 to 2, 32)"
    for layer, direction in vector.directions.items():
        np.testing.assert_allclose(direction, expected[layer + 1], atol=1e-6)


def test_it_steers(llm, vector):
    edits = vector.edits(1.5, range(2, 9))
    assert edits == [Edit("blocks.2.hook_resid_post", value=1.5 * vector.directions[2])]
    _, cache = llm.run_with_cache(CLEAN, edits=edits)
    _, plain = llm.run_with_cache(CLEAN)
    same_bits(cache["resid_post", 2], plain["resid_post", 2] + np.float32(1.5) * vector.directions[2])


def test_it_comes_back_from_its_file(tmp_path, vector):
    gguf = pytest.importorskip("gguf")
    path = vector.save(tmp_path / "happy.gguf")
    found = ControlVector.load(path)
    for layer, direction in vector.directions.items():
        same_bits(found.directions[layer], direction)
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.architecture").contents() == "controlvector"
    assert {t.name: t.data.tolist() for t in reader.tensors} == {
        f"direction.{i}": d.tolist() for i, d in vector.directions.items()
    }


def test_a_file_of_another_library_is_read(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "controlvector")  # as repeng's export_gguf
    writer.add_string("controlvector.model_hint", "gpt2")
    writer.add_uint32("controlvector.layer_count", 1)
    writer.add_tensor("direction.7", np.arange(5, dtype=np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    assert ControlVector.load(tmp_path / "theirs.gguf").directions[7].tolist() == [0, 1, 2, 3, 4]


def test_files_that_are_none(tmp_path):
    with pytest.raises(CheckpointError, match="from layer 1 on, and none of layer 0"):
        ControlVector({0: np.zeros(3)}).save(tmp_path / "x.gguf")
    path = ControlVector({1: np.zeros(3), 2: np.zeros(4)}).save(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match="vectors of one length"):
        ControlVector.load(path)
    with pytest.raises(CheckpointError, match="must hold vectors direction"):
        ControlVector.load(ControlVector({1: np.zeros((3, 2))}).save(tmp_path / "y.gguf"))
    with pytest.raises(CheckpointError, match="whose values are not all finite"):
        ControlVector.load(ControlVector({1: np.array([1, np.inf])}).save(tmp_path / "z.gguf"))
    path = gguf.write_tensors(tmp_path / "x.gguf", "x" * 9999, {}, {})
    with pytest.raises(CheckpointError, match=r"holds 'x{1,999}\.\.\. and must hold 'controlvector'"):
        ControlVector.load(path)


def test_a_full_disk_leaves_the_old_vector(tmp_path, monkeypatch):
    path = ControlVector({1: np.ones(3)}).save(tmp_path / "x.gguf")

    def sync(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in (files, gguf):
        monkeypatch.setattr(module, "sync", sync)
    with pytest.raises(CheckpointError, match=r"x\.gguf cannot be written: No space left on device"):
        ControlVector({1: np.zeros(3)}).save(path)
    assert ControlVector.load(path).directions[1].tolist() == [1, 1, 1]
    assert [*tmp_path.iterdir()] == [path]


def test_llama_cpp_steers_alike(tmp_path, folder, llm, vector):
    llama_cpp = pytest.importorskip("llama_cpp")
    from tinygpt.weights.convert.gguf import write_gguf
    from tinygpt.weights.open import open_checkpoint

    model = write_gguf(tmp_path, open_checkpoint(str(folder)), "float32", None)
    theirs = llama_cpp.Llama(str(model), n_ctx=64, logits_all=True, verbose=False)
    for layers, low, high in (((1, 2), 1, 2), ((2,), 2, 2)):
        data = np.concatenate([vector.directions[i] for i in (1, 2)])
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        assert llama_cpp.llama_set_adapter_cvec(theirs._ctx.ctx, pointer, data.size, 32, low, high) == 0
        theirs.reset()
        theirs.eval(CLEAN)
        steered = theirs.scores[: len(CLEAN)]
        ours = llm.logits(CLEAN, vector.edits(layers=layers))
        np.testing.assert_allclose(ours, steered, atol=2e-3 * np.abs(ours).max())
        assert np.abs(llm.logits(CLEAN) - ours).max() > 0.1
