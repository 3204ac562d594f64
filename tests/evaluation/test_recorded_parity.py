"""Parity with transformers on checkpoints that need no torch to be written, live or as recorded."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from support.golden_models import GOLDEN_MODELS, SMALL, golden_ids, write_golden
from support.paths import DEMO
from support.recorded import HAS_TRANSFORMERS, recorded
from tinygpt import LLM, SamplingParams
from tinygpt.config import ACTIVATIONS

TOLERANCE = 1e-4  # absolute, on logits whose std is a few units
LEAD = 2 * TOLERANCE  # a best logit that leads by less may rightly differ
PROMPT, NEW = 6, 30
DEMO_TEXTS = (
    "Once upon a time, in a dark forest, there lived",
    "The king said: \u201cNo!\u201d",
    "caf\u00e9 \U0001f600",
)
HAS_GROUPS = False
if HAS_TRANSFORMERS:
    import torch
    from transformers import GenerationMixin, GPT2LMHeadModel

    HAS_GROUPS = hasattr(GenerationMixin, "_group_beam_search")  # in transformers itself before 4.57 alone


def model_of(name: str) -> "GPT2LMHeadModel":
    with tempfile.TemporaryDirectory() as folder:
        path = DEMO if name == "demo" else write_golden(Path(folder), name)
        model = GPT2LMHeadModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


@recorded
def logits_of(name: str, token_ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model_of(name)(torch.tensor([token_ids])).logits[0].numpy()  # (T, V)


@recorded
def greedy_of(name: str, prompt: list[int], count: int) -> np.ndarray:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    scores = {"output_scores": True, "return_dict_in_generate": True}
    output = model_of(name).generate(ids, attention_mask=torch.ones_like(ids), **options, **scores)
    best = torch.cat(output.scores).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > LEAD
    return output.sequences[0, len(prompt) :].numpy()


@recorded
def top_logprobs_of(name: str, token_ids: list[int], count: int) -> np.ndarray:
    """(T, 2, count): the best ids of every position, and their log probabilities."""
    with torch.no_grad():
        best = model_of(name)(torch.tensor([token_ids])).logits[0].double().log_softmax(-1).topk(count)
    return torch.stack([best.indices.double(), best.values], 1).numpy()


def search(name: str, prompt: list[int], options: dict) -> np.ndarray:
    """(num_beams, 1 + max_new_tokens): a score and the new ids, padded with the first EOS."""
    ids = torch.tensor([prompt])
    options = {**options, "num_return_sequences": options["num_beams"], "pad_token_id": options["eos_token_id"][0]}
    scores = {"output_scores": True, "return_dict_in_generate": True}
    output = model_of(name).generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options, **scores)
    new = output.sequences[:, len(prompt) :].double()
    padding = torch.full((len(new), options["max_new_tokens"] - new.shape[1]), float(options["eos_token_id"][0]))
    return torch.cat([output.sequences_scores.double()[:, None], new, padding], 1).numpy()


@recorded
def beams_of(name: str, prompt: list[int], options: dict) -> np.ndarray:
    return search(name, prompt, options)


@recorded(is_live=HAS_GROUPS)
def beam_groups_of(name: str, prompt: list[int], options: dict) -> np.ndarray:
    return search(name, prompt, options)


@pytest.fixture(params=["cpu", "reference"])
def llm_of(request, tmp_path):
    opened = []

    def open_golden(name: str) -> LLM:
        opened.append(LLM(str(write_golden(tmp_path / name, name)), device=request.param))
        return opened[-1]

    yield open_golden
    for llm in opened:
        llm.close()


def test_models_cover_every_activation_but_for_other_names_of_the_same():
    used = {ACTIVATIONS[fields.get("activation_function", "gelu_new")] for fields in GOLDEN_MODELS.values()}
    assert used == set(ACTIVATIONS.values())


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_logits(llm_of, name):
    ids = golden_ids(SMALL["n_positions"])
    expected = logits_of(name, ids)  # (T, V)
    assert expected.std() > 1
    np.testing.assert_allclose(llm_of(name).logits(ids), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_greedy_tokens(llm_of, name):
    prompt = golden_ids(PROMPT, name)
    output = llm_of(name).generate([prompt], SamplingParams(max_tokens=NEW))[0].outputs[0]
    assert output.token_ids == greedy_of(name, prompt, NEW).tolist()


@pytest.mark.parametrize("text", DEMO_TEXTS)
def test_demo(text):
    with LLM("demo") as llm:
        prompt = llm.tokenizer.encode(text)
        output = llm.generate(text, SamplingParams(max_tokens=NEW, ignore_eos=True))[0].outputs[0]
        assert output.token_ids == greedy_of("demo", prompt, NEW).tolist()
        ids = prompt + output.token_ids
        logits = llm.logits(ids).astype(np.float64)  # (T, V)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))  # (T, V)
    best, values = np.moveaxis(top_logprobs_of("demo", ids, 5), 1, 0)  # (T, 5) each
    np.testing.assert_allclose(np.take_along_axis(logprobs, best.astype(int), 1), values, rtol=0, atol=TOLERANCE)


RULES = [
    {"num_beams": 3, "max_new_tokens": 12, "eos_token_id": [5, 8], "length_penalty": 1.0, "early_stopping": False},
    {"num_beams": 4, "max_new_tokens": 9, "eos_token_id": [3], "length_penalty": -1.0, "early_stopping": True},
    {"num_beams": 2, "max_new_tokens": 15, "eos_token_id": [0], "length_penalty": 2.0, "early_stopping": "never"},
]
GROUPS = [
    {**rules, "num_beams": beams, "num_beam_groups": groups, "diversity_penalty": penalty}
    for rules, (beams, groups, penalty) in zip(RULES, [(4, 2, 0.7), (6, 3, 1.5), (6, 2, 0.3)], strict=True)
]


@pytest.mark.parametrize("name", ["plain", "relu", "untied", "gelu-fast"])
@pytest.mark.parametrize("number", range(len(RULES)))
@pytest.mark.parametrize("is_grouped", [False, True], ids=["one-group", "groups"])
def test_beams(llm_of, name, number, is_grouped):
    rules, prompt = (GROUPS if is_grouped else RULES)[number], golden_ids(PROMPT, f"{name} beams")
    expected = (beam_groups_of if is_grouped else beams_of)(name, prompt, rules)
    names = {"max_new_tokens": "max_tokens"}
    fields = {names.get(field, field): value for field, value in rules.items()}
    outputs = llm_of(name).generate([prompt], SamplingParams(n=rules["num_beams"], **fields))[0].outputs
    new, eos, ours = rules["max_new_tokens"], rules["eos_token_id"], [output.token_ids for output in outputs]
    if is_grouped:  # whichever EOS ended a sequence, the older scorer writes the first
        ours = [[eos[0] if token_id in eos else token_id for token_id in row] for row in ours]
    assert [row + eos[:1] * (new - len(row)) for row in ours] == expected[:, 1:].astype(int).tolist()
    assert [output.score for output in outputs] == pytest.approx(expected[:, 0].tolist(), abs=TOLERANCE)
