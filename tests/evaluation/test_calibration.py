"""Calibration: its statistics beside hooks on transformers' model, and act-scales files."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from support.paths import EOS
from support.recorded import needs_transformers
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
            module.register_forward_pre_hook(lambda _, args, name=name: found.setdefault(name, []).append(args[0][0]))
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


# Act-scales files.


def write_scales(path: Path, sizes: dict[str, np.ndarray]) -> Path:
    path.write_bytes(torch_bytes({f"transformer.{name}": size for name, size in sizes.items()}))
    return path


@pytest.fixture
def sizes() -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint("demo")
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = [f"h.{i}.{part}" for i in range(checkpoint.config.n_layer) for part in parts]
    generator = np.random.default_rng(0)
    return {name: generator.random(checkpoint.tensor(f"{name}.weight").shape[1], np.float32) for name in names}


def test_act_scales_are_read_by_name(sizes, tmp_path):
    found = read_act_scales(write_scales(tmp_path / "scales.pt", sizes), open_checkpoint("demo"), 0.75)
    assert (found.share, found.about["smooth"], found.means) == (0.75, "0.75", {})
    assert found.sizes.keys() == sizes.keys()
    for name, size in sizes.items():
        np.testing.assert_array_equal(found.sizes[name], size)


def test_act_scales_may_lack_c_proj(sizes, tmp_path):
    """The published tool's own pairs are layer norms and the matrices behind them."""
    some = {name: size for name, size in sizes.items() if not name.endswith("c_proj")}
    found = read_act_scales(write_scales(tmp_path / "scales.pt", some), open_checkpoint("demo"), 0.5)
    assert found.sizes.keys() == some.keys()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda sizes: sizes.pop("h.3.mlp.c_fc"), "has no scales of h.3.mlp.c_fc"),
        (lambda sizes: sizes.update({"h.2.attn.c_attn": np.ones(255, np.float32)}), "must hold 256 sizes"),
        (lambda sizes: sizes["h.1.mlp.c_proj"].__setitem__(3, np.nan), "must hold 1024 sizes, finite"),
        (lambda sizes: sizes["h.1.mlp.c_proj"].__setitem__(3, -1), "none below 0, for h.1.mlp.c_proj"),
    ],
)
def test_act_scales_of_something_else_are_refused(sizes, tmp_path, change, says):
    change(sizes)
    with pytest.raises(CheckpointError, match=says):
        read_act_scales(write_scales(tmp_path / "scales.pt", sizes), open_checkpoint("demo"), 0.5)


def test_act_scales_are_read_once_and_no_weight_is_read_for_its_shape(sizes, tmp_path, monkeypatch):
    path = write_scales(tmp_path / "scales.pt", sizes)
    checkpoint, digest = open_checkpoint("demo"), hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(type(checkpoint), "tensor", lambda *_: pytest.fail("a weight was read"))
    monkeypatch.setattr(Path, "read_bytes", lambda *_: pytest.fail("the file was opened again"))
    assert read_act_scales(path, checkpoint, 0.5).about["smooth_act_scales_sha256"] == digest
