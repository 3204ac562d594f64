"""Calibration: its statistics beside hooks on transformers' model, and files of SmoothQuant's tool."""

import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pytest

from support.family_models import write_family
from support.paths import EOS
from support.recorded import needs_transformers, recorded
from support.torch_files import torch_bytes
from tinygpt.errors import CheckpointError, RequestError
from tinygpt.evaluation.calibration import NUM_SAMPLES, calibrate, read_act_scales, samples_of
from tinygpt.weights.open import open_checkpoint

IDS = np.random.default_rng(0).integers(EOS, size=1200).tolist()


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    """What goes into each Conv1D of transformers' model, (tokens, K), over the samples of IDS."""
    import torch
    from transformers import GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    model = GPT2LMHeadModel.from_pretrained(open_checkpoint("demo").path, dtype=torch.float64)
    found: dict[str, list] = {}
    for name, module in model.transformer.named_modules():
        if isinstance(module, Conv1D):
            module.register_forward_pre_hook(
                lambda _, args, name=name: found.setdefault(name, []).append(args[0][0])
            )
    with torch.no_grad():
        for sample in samples_of(IDS, 256):
            model(torch.tensor([sample]))
    return {name: torch.cat(xs).numpy() for name, xs in found.items()}


@needs_transformers
@pytest.mark.parametrize(("dtype", "size"), [("int8", lambda x: x.max(0)), ("int4", lambda x: x.mean(0))])
def test_statistics_are_those_of_transformers_inputs(inputs, dtype, size):
    found = calibrate(open_checkpoint("demo"), "a text", IDS, dtype, 0.5)
    assert found.sizes.keys() == found.means.keys() == inputs.keys()
    for name, x in inputs.items():
        np.testing.assert_allclose(found.sizes[name], size(np.abs(x)), rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(found.means[name], x.mean(axis=0), rtol=1e-5, atol=1e-6, err_msg=name)
    assert found.about["smooth_samples"] == "4"


def test_samples_are_spread_over_the_text():
    samples = samples_of(list(range(100 * 512 + 7)), 512)
    assert len(samples) == NUM_SAMPLES
    assert (samples[0][0], samples[-1][0]) == (0, 99 * 512)
    assert all(len(sample) == 512 for sample in samples)
    assert samples_of([5, 6], 512) == [[5, 6]]
    with pytest.raises(RequestError, match="has no token"):
        samples_of([], 512)


TOOL_IDS = np.random.default_rng(0).integers(61, size=30).tolist()


def tool_scales(model: str) -> dict:
    """What get_act_scales of mit-han-lab/smoothquant (calibration.py, c61476d) returns: it hooks nn.Linear alone."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        path = open_checkpoint("demo").path if model == "demo" else write_family(Path(folder), model)
        lm = AutoModelForCausalLM.from_pretrained(path).float()
    sizes = {}

    def hook(name, inputs):
        sizes[name] = inputs.reshape(-1, inputs.shape[-1]).abs().max(0)[0].float().numpy()

    for name, module in lm.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs, name=name: hook(name, inputs[0]))
    with torch.no_grad():
        lm(torch.tensor([TOOL_IDS]))
    return sizes


@recorded
def modules_of_tool(model: str) -> np.ndarray:
    lines = [f"{name} {len(size)}" for name, size in tool_scales(model).items()]
    return np.frombuffer("\n".join(lines).encode(), np.uint8)


@recorded
def sizes_of_tool(model: str) -> np.ndarray:
    return np.concatenate(list(tool_scales(model).values()))


def scales_of(model: str) -> dict[str, np.ndarray]:
    lines = [line.split() for line in modules_of_tool(model).tobytes().decode().splitlines()]
    ends = np.cumsum([int(width) for _, width in lines])[:-1]
    return {name: size for (name, _), size in zip(lines, np.split(sizes_of_tool(model), ends), strict=True)}


def write_scales(path: Path, sizes: dict[str, np.ndarray]) -> Path:
    path.write_bytes(torch_bytes(sizes))
    return path


@pytest.mark.parametrize("model", ["opt", "opt-350m", "bloom-6", "mpt-6", "xglm", "gpt-neo"])
def test_sizes_of_the_tool_are_those_of_our_calibration(model, tmp_path):
    checkpoint = open_checkpoint(write_family(tmp_path, model))
    measured = calibrate(checkpoint, "a text", TOOL_IDS, "int8", 0.5)
    found = read_act_scales(write_scales(tmp_path / "scales.pt", scales_of(model)), checkpoint, 0.75)
    assert (found.share, found.about["smooth"], found.means) == (0.75, "0.75", {})
    assert found.sizes.keys() == measured.sizes.keys()
    for name, size in measured.sizes.items():
        np.testing.assert_allclose(found.sizes[name], size, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("model", "family"), [("demo", "GPT-2"), ("gpt-1", "GPT-1")])
def test_the_tool_sees_no_layer_of_a_gpt(model, family, tmp_path):
    sizes = scales_of(model)
    assert list(sizes) == ["lm_head"]
    checkpoint = open_checkpoint("demo" if model == "demo" else write_family(tmp_path, model))
    with pytest.raises(
        CheckpointError, match=f"attn.c_attn .* sees nn.Linear alone, and a {family} has Conv1D"
    ):
        read_act_scales(write_scales(tmp_path / "scales.pt", sizes), checkpoint, 0.5)


def test_act_scales_may_lack_all_that_follows_no_norm(tmp_path):
    """The tool itself smooths what follows a layer norm, by q_proj's sizes for all three (smooth.py, smooth_lm)."""
    some = {name: size for name, size in scales_of("opt").items() if name.endswith(("q_proj", "fc1"))}
    checkpoint = open_checkpoint(write_family(tmp_path, "opt"))
    found = read_act_scales(write_scales(tmp_path / "scales.pt", some), checkpoint, 0.5)
    assert found.sizes.keys() == {f"h.{i}.{part}" for i in range(2) for part in ("attn.c_attn", "mlp.c_fc")}


LAYER = "model.decoder.layers.1."


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda sizes: sizes.pop(f"{LAYER}fc1"), "has no scales of layers.1.fc1"),
        (
            lambda sizes: sizes.update({f"{LAYER}self_attn.q_proj": np.ones(23, np.float32)}),
            "must hold 24 sizes",
        ),
        (lambda sizes: sizes[f"{LAYER}fc2"].__setitem__(3, np.nan), "must hold 52 sizes, finite"),
        (lambda sizes: sizes[f"{LAYER}fc2"].__setitem__(3, -1), f"none below 0, for {LAYER}fc2"),
    ],
)
def test_act_scales_of_something_else_are_refused(tmp_path, change, says):
    change(sizes := scales_of("opt"))
    checkpoint = open_checkpoint(write_family(tmp_path, "opt"))
    with pytest.raises(CheckpointError, match=says):
        read_act_scales(write_scales(tmp_path / "scales.pt", sizes), checkpoint, 0.5)


def test_act_scales_are_read_once_and_no_weight_is_read_for_its_shape(tmp_path, monkeypatch):
    path = write_scales(tmp_path / "scales.pt", scales_of("opt"))
    checkpoint = open_checkpoint(write_family(tmp_path, "opt"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(type(checkpoint), "tensor", lambda *_: pytest.fail("a weight was read"))
    monkeypatch.setattr(Path, "read_bytes", lambda *_: pytest.fail("the file was opened again"))
    assert read_act_scales(path, checkpoint, 0.5).about["smooth_act_scales_sha256"] == digest
