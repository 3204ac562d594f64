"""ONNX as its exporters write it, each where it is installed: the same parameters to the bit, the same logits."""

import functools
import importlib.util
import json
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

from support.recorded import MISSING
from support.tiny_checkpoint import assert_same, write_json
from tinygpt import LLM
from tinygpt.weights.open import open_checkpoint

torch = pytest.importorskip("torch", reason=MISSING)
transformers = pytest.importorskip("transformers", reason=MISSING)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = {"vocab_size": 97, "n_positions": 32, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 80}
IDS = [5, 6, 90, 8, 0, 31]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model whose parameters all differ, so that no exporter merges any but those that are tied."""
    folder = tmp_path_factory.mktemp("source")
    config = transformers.GPT2Config(**SIZES, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"attn_implementation": "eager"})
    return folder


def by_torch(source, folder, **options):
    model = transformers.GPT2LMHeadModel.from_pretrained(source, attn_implementation="eager").eval()
    model.config.use_cache = False
    ids = torch.zeros((1, 3), dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(3)[None]}
    torch.onnx.export(model, (), folder / "model.onnx", kwargs=inputs, input_names=list(inputs), **options)


def by_optimum(source, folder, **options):
    from optimum.exporters.onnx import main_export

    with mock.patch.object(torch.onnx, "export", functools.partial(torch.onnx.export, dynamo=False)):
        main_export(
            str(source), str(folder), task="text-generation-with-past", do_validation=False, **options
        )


# The tool asks for operators that are older than torch's own attention.
TOOL = """
import runpy
from transformers.models.gpt2.modeling_gpt2 import GPT2PreTrainedModel

GPT2PreTrainedModel._supports_sdpa = False
runpy.run_module("onnxruntime.transformers.models.gpt2.convert_to_onnx", run_name="__main__")
"""


def by_onnxruntime(source, folder, *flags):
    command = [sys.executable, "-c", TOOL, "-m", str(source), "--output", "model.onnx", *flags]
    subprocess.run(command, cwd=folder, check=True)


# With the package that each needs.
EXPORTERS = {
    "torchscript": (functools.partial(by_torch, dynamo=False), "onnx"),
    "dynamo": (functools.partial(by_torch, dynamo=True), "onnxscript"),
    "dynamo as it is": (
        functools.partial(by_torch, dynamo=True, optimize=False, external_data=False),
        "onnxscript",
    ),
    "optimum": (by_optimum, "optimum"),
    "optimum, fused": (functools.partial(by_optimum, optimize="O2"), "optimum"),
    "optimum, merged decoders": (
        functools.partial(by_optimum, legacy=True),
        "optimum",
    ),  # of releases before 2
    "onnxruntime": (by_onnxruntime, "onnxruntime"),
    "onnxruntime, fused": (
        lambda source, folder: by_onnxruntime(source, folder, "-o", "-p", "fp32"),
        "onnxruntime",
    ),
}


@pytest.mark.parametrize("name", EXPORTERS)
def test_what_an_exporter_makes_of_a_model_is_that_model(source, tmp_path, name):
    export, package = EXPORTERS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    try:
        export(source, tmp_path)
    except Exception as error:
        if package == "onnx":
            raise
        pytest.skip(
            f"{package} and transformers {transformers.__version__} do not go together: {error!r:.300}"
        )
    if not (tmp_path / "config.json").exists():
        write_json(tmp_path / "config.json", {"n_head": SIZES["n_head"]})
    files = sorted(tmp_path.rglob("*.onnx"))
    assert files
    expected = open_checkpoint(source)
    with LLM(source, device="reference") as llm:
        logits = llm.logits(IDS)
    for file in files:
        checkpoint = open_checkpoint(file)
        assert_same(checkpoint, expected)
        assert checkpoint.tied
        with LLM(file, device="reference") as llm:
            np.testing.assert_array_equal(llm.logits(IDS), logits)
