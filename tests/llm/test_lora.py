"""LLM(lora=...): the engine on merged weights writes what PEFT's model writes."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support.engines import log_softmax, sample_of
from support.family_models import write_any
from support.golden_models import golden_ids, write_lora
from support.oracles import TOLERANCE, generate, live_peft_model
from support.recorded import recorded
from tinygpt import LLM
from tinygpt.cli.main import main
from tinygpt.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:::transformers", "ignore:::peft")
V = 90
FIELDS = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": V}
NEO = {"model_type": "gpt_neo", "hidden_size": 32, "num_heads": 2, "window_size": 5, "vocab_size": V}
ADAPTERS = {
    "layers": {"targets": ["c_attn", "c_proj", "c_fc"], "has_head": False},
    "head": {"targets": ["c_attn"], "has_head": True},
    "neo": {"targets": ["q_proj", "k_proj", "v_proj"], "has_head": False},
}
MODELS = {"layers": FIELDS, "head": FIELDS, "neo": NEO}
PROMPT = golden_ids(9, vocab_size=V)


@dataclass(frozen=True)
class Adapted:
    """A checkpoint, and an adapter of it."""

    name: str
    base: Path
    adapter: Path


def write_adapter(folder: Path, name: str) -> Path:
    return write_lora(folder, rank=3, **ADAPTERS[name], **MODELS[name])


@pytest.fixture(scope="module", params=ADAPTERS)
def adapted(request, tmp_path_factory) -> Adapted:
    folder = tmp_path_factory.mktemp(request.param)
    base = write_any(folder / "base", **MODELS[request.param])
    return Adapted(request.param, base, write_adapter(folder / "adapter", request.param))


def live(name: str):
    with tempfile.TemporaryDirectory() as folder:
        return live_peft_model(Path(folder), lambda adapter: write_adapter(adapter, name), **MODELS[name])


@recorded
def lora_logits_of_peft(name: str, token_ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return live(name)(torch.tensor([token_ids])).logits[0].numpy()  # (T, V)


@recorded
def lora_greedy_of_peft(name: str, prompt: list[int], count: int) -> np.ndarray:
    output = generate(live(name), prompt, max_new_tokens=count, pad_token_id=0)
    return output.sequences[0, len(prompt) :].numpy()


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_tokens_and_logits_equal_those_of_peft(adapted, device):
    logits = lora_logits_of_peft(adapted.name, PROMPT)
    with LLM(adapted.base, device=device, lora=adapted.adapter) as llm:
        np.testing.assert_allclose(llm.logits(PROMPT), logits, rtol=0, atol=TOLERANCE)
        tokens = sample_of(llm, PROMPT, max_tokens=20).token_ids
    assert tokens == lora_greedy_of_peft(adapted.name, PROMPT, 20).tolist()
    with LLM(adapted.base, device=device) as plain:
        assert np.abs(plain.logits(PROMPT) - logits).max() > 0.1  # the adapter does something


@pytest.mark.parametrize("adapted", ["layers", "neo"], indirect=True)
@pytest.mark.parametrize(
    "device", ["reference", pytest.param("cpu", marks=pytest.mark.slow)]
)  # a step with adapters compiles
def test_a_request_with_an_adapter_equals_peft(adapted, device):
    expected = log_softmax(lora_logits_of_peft(adapted.name, PROMPT))  # (T, V)
    with LLM(adapted.base, device=device, lora_modules={"it": adapted.adapter}) as llm:
        (output,) = llm.generate([PROMPT], max_tokens=20, prompt_logprobs=-1, lora_request="it")
    found = np.array([[row[i] for i in range(V)] for row in output.prompt_logprobs[1:]])  # (T - 1, V)
    np.testing.assert_allclose(found, expected[:-1], rtol=0, atol=TOLERANCE)
    assert output.outputs[0].token_ids == lora_greedy_of_peft(adapted.name, PROMPT, 20).tolist()


def test_what_is_refused(adapted, tmp_path):
    base = str(adapted.base)
    adapter = adapted.adapter
    with pytest.raises(CheckpointError, match="does not hold the adapter"):
        LLM("demo", lora=adapter)
    assert main(["convert", base, str(tmp_path / "packed")]) == 0
    with pytest.raises(CheckpointError, match="is converted, and takes no adapter"):
        LLM(tmp_path / "packed", lora=adapter)
