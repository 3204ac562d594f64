"""LLM(lora=...): the engine on merged weights writes what PEFT's model writes."""

import numpy as np
import pytest

from support import factory
from tinygpt import LLM, SamplingParams
from tinygpt.cli.main import main
from tinygpt.errors import CheckpointError

peft = pytest.importorskip("peft", reason="peft, which the adapters are compared with, is not installed")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:::transformers", "ignore:::peft")
FIELDS = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 90}
ADAPTERS = {
    "layers": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "head": {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"], "fan_in_fan_out": True},
}


@pytest.fixture(scope="module", params=ADAPTERS)
def adapted(request, tmp_path_factory):
    """A checkpoint, an adapter of it, and PEFT's model of both."""
    folder = tmp_path_factory.mktemp(request.param)
    case = factory.make_case(factory.Recipe("base", FIELDS), folder / "base")
    base = factory.GPT2LMHeadModel.from_pretrained(case.folder)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, task_type="CAUSAL_LM", **ADAPTERS[request.param]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder / "adapter")
    read = factory.GPT2LMHeadModel.from_pretrained(case.folder)
    return case, folder / "adapter", peft.PeftModel.from_pretrained(read, folder / "adapter").eval()


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_tokens_and_logits_equal_those_of_peft(adapted, device):
    case, adapter, model = adapted
    prompt = case.random_ids(9)
    expected = factory.greedy(model, prompt, 20)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0].numpy()
    with LLM(str(case.folder), device=device, lora=adapter) as llm:
        np.testing.assert_allclose(llm.logits(prompt), logits, rtol=0, atol=1e-4)
        assert llm.generate([prompt], SamplingParams(max_tokens=20))[0].outputs[0].token_ids == expected.token_ids
    with LLM(str(case.folder), device=device) as plain:
        assert np.abs(plain.logits(prompt) - logits).max() > 0.1  # the adapter does something


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_dtypes_are_of_the_merged_weights(adapted, dtype):
    case, adapter, _ = adapted
    prompt = case.random_ids(9)
    with LLM(str(case.folder), lora=str(adapter)) as llm, LLM(str(case.folder), dtype=dtype, lora=adapter) as other:
        expected = llm.logits(prompt)
        np.testing.assert_allclose(other.logits(prompt), expected, rtol=0, atol=0.1 * np.abs(expected).max())


def test_what_is_refused(adapted, tmp_path):
    case, adapter, _ = adapted
    with pytest.raises(CheckpointError, match="no/such/adapter"):
        LLM(str(case.folder), lora="no/such/adapter")
    with pytest.raises(CheckpointError, match="does not hold the adapter"):
        LLM("demo", lora=adapter)
    assert main(["convert", str(case.folder), str(tmp_path / "packed")]) == 0
    with pytest.raises(CheckpointError, match="is converted, and an adapter cannot be merged"):
        LLM(str(tmp_path / "packed"), lora=adapter)
