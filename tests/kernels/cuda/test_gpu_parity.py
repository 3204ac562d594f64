"""The CUDA backend on a real GPU, beside transformers."""

import numpy as np
import pytest

from support.cuda_device import on_a_gpu
from support.golden_models import GOLDEN_MODELS, golden_ids, write_model
from support.oracles import TOLERANCE, greedy, live_model, logits, model_of
from support.recorded import needs_transformers
from support.tables import rows
from tinygpt import LLM, SamplingParams

pytestmark = needs_transformers
NEW_TOKENS = 64  # of a greedy run, or as many as there are positions for
MORE = rows("""
gelu            | {"activation_function": "gelu", "seed": "1"}
head-size-80    | {"n_embd": 160, "n_head": 2}
head-size-128   | {"n_embd": 256, "n_head": 2, "n_layer": 1}
head-size-300   | {"n_embd": 300, "n_head": 1, "n_layer": 1}
one-token-wider | {"n_embd": 65, "n_head": 5, "vocab_size": 129, "n_positions": 129}
vocab-50304     | {"n_embd": 16, "n_head": 4, "n_layer": 1, "vocab_size": 50304}
vocab-3         | {"n_embd": 16, "n_head": 2, "vocab_size": 3}
short           | {"n_embd": 20, "n_head": 4, "n_positions": 16}
inner-333       | {"n_embd": 40, "n_head": 5, "n_inner": 333, "activation_function": "gelu_python_tanh"}
scores-both     | {"scale_attn_weights": false, "scale_attn_by_inverse_layer_idx": true, "n_layer": 3}
mistral-like    | {"reorder_and_upcast_attn": true, "scale_attn_by_inverse_layer_idx": true, "n_layer": 3}
untied-gelu     | {"tie_word_embeddings": false, "activation_function": "gelu_accurate"}
""")
MODELS = GOLDEN_MODELS | dict(MORE)


def check(llm: LLM, model, ids: list[int], prompt: list[int]) -> None:
    expected = logits(model, ids)  # (T, V)
    assert expected.std() > 1
    np.testing.assert_allclose(llm.logits(ids), expected, rtol=0, atol=TOLERANCE)
    count = min(NEW_TOKENS, model.config.n_positions - len(prompt))
    found = llm.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))[0].outputs[0]
    assert found.token_ids == greedy(model, prompt, count).tolist()


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens(name, tmp_path):
    fields = {"n_positions": 90} | MODELS[name]
    ids = golden_ids(fields["n_positions"], vocab_size=fields.get("vocab_size", 71))
    with LLM(str(write_model(tmp_path, **fields)), device="cuda") as llm:
        check(llm, live_model(**fields), ids, ids[:5])


@on_a_gpu
@pytest.mark.gpu
def test_the_demo_in_float32():
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with LLM("demo", device="cuda") as llm, LLM("demo") as on_cpu:
        ids = llm.tokenizer.encode("Once upon a time there was a king who had three sons.")
        check(llm, model_of("demo"), ids, ids)
        ours, theirs = (each.generate([ids], params)[0].outputs[0].token_ids for each in (llm, on_cpu))
        assert ours == theirs
