"""The CUDA backend on a simulated GPU, beside transformers."""

import numpy as np
import pytest

from support.cuda_device import SimulatedDevice
from support.golden_models import golden_ids, write_golden
from support.oracles import TOLERANCE, greedy_of, logits_of
from tinygpt import LLM, SamplingParams
from tinygpt.kernels.cuda.runtime import device as devices

# A simulated GPU is slow: of each kind of field one model, of a single layer and narrow where that is not the point.
SIMULATED = ("plain", "head-size-1", "head-size-7", "head-size-64", "odd-width", "inner-narrow", "gelu", "quick-gelu")
SIMULATED += ("relu", "silu", "tanh", "scores-unscaled", "scores-by-layer", "epsilon-large")
NARROW = {"n_layer": 1, "n_embd": 12}
WIDE = ("head-size-1", "head-size-7", "head-size-64", "odd-width")


@pytest.mark.parametrize("name", ["untied", *(pytest.param(name, marks=pytest.mark.slow) for name in SIMULATED)])
def test_logits_and_greedy_tokens_on_a_simulated_gpu(name, monkeypatch, tmp_path):
    device, prompt = SimulatedDevice(), golden_ids(5)
    fields = {"n_layer": 1} if name in WIDE else NARROW | {"n_layer": 2} if name == "scores-by-layer" else NARROW
    monkeypatch.setattr(devices, "the_device", lambda: device)
    folder = write_golden(tmp_path, name, **fields)
    with LLM(str(folder), device="cuda", max_num_seqs=1, max_num_batched_tokens=8) as llm:
        expected = logits_of(name, prompt, **fields)  # (T, V)
        np.testing.assert_allclose(llm.logits(prompt), expected, rtol=0, atol=TOLERANCE)
        output = llm.generate([prompt], SamplingParams(max_tokens=2))[0].outputs[0]
        assert output.token_ids == greedy_of(name, prompt, 2, **fields).tolist()
