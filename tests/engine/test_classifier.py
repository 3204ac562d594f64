"""Heads that classify, against transformers' models and pipelines; and the words on heads that nothing uses."""

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from support.golden_models import SMALL, add_tensors, golden_ids, write_model
from support.recorded import recorded
from support.tables import rows
from tinygpt import LLM
from tinygpt.errors import CheckpointError, RequestError

TOLERANCE = 1e-5
C = SMALL["n_embd"]
PAD = 3
TOKENS = "GPT2ForTokenClassification"
NAMES = {"id2label": {"0": "bad", "1": "fair", "2": "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}
# Architecture, number of labels, and fields of config.json, with NAMES if there are three.
CASES = {
    name: (architecture, count, (NAMES if count == 3 else {}) | fields)
    for name, architecture, count, fields in rows("""
labels | GPT2ForSequenceClassification | 3 | {"pad_token_id": 3}
no names | GPT2ForSequenceClassification | 5 | {"num_labels": 5}
several at once | GPT2ForSequenceClassification | 3 | {"problem_type": "multi_label_classification"}
a score | GPT2ForSequenceClassification | 1 | {"num_labels": 1}
regression | GPT2ForSequenceClassification | 1 | {"num_labels": 1, "problem_type": "regression"}
tokens | GPT2ForTokenClassification | 3 | {"problem_type": "multi_label_classification"}
a label of tokens | GPT2ForTokenClassification | 1 | {"num_labels": 1, "problem_type": "regression"}
""")
}
PROMPTS = [golden_ids(12), golden_ids(39), [5], [*golden_ids(7), PAD, PAD], [PAD, PAD]]


def write_classifier(folder, architecture, num_labels, fields):
    head = {"score.weight": (num_labels, C)}
    if architecture == TOKENS:
        head = {"classifier.weight": (num_labels, C), "classifier.bias": (num_labels,)}
    return add_tensors(write_model(folder, architectures=[architecture], **fields), head)


@recorded
def classified(case, token_ids):
    """(2, T or 1, K): transformers' logits, and the probabilities of its pipeline."""
    import torch
    import transformers

    architecture, *_ = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        write_classifier(Path(folder), *CASES[case])
        model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits.reshape(-1, model.config.num_labels)
    if architecture == TOKENS:
        return torch.stack([logits, logits.softmax(-1)]).numpy()
    of = SimpleNamespace(model=model, framework="pt")
    found = transformers.TextClassificationPipeline.postprocess(
        of, {"logits": logits}, None, top_k=None, _legacy=False
    )
    by_label = {each["label"]: each["score"] for each in found}
    names = [model.config.id2label[i] for i in range(model.config.num_labels)]
    return np.stack([logits.numpy(), np.float32([[by_label[name] for name in names]])])


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_labels_are_those_of_transformers(tmp_path, case, device):
    architecture, num_labels, fields = CASES[case]
    names = [fields.get("id2label", {}).get(str(i), f"LABEL_{i}") for i in range(num_labels)]
    with LLM(write_classifier(tmp_path, *CASES[case]), device=device, max_num_seqs=2) as llm:
        for prompt, found in zip(PROMPTS, llm.classify(PROMPTS), strict=True):
            expected = classified(case, prompt)
            rows = expected if architecture == TOKENS else expected[:, 0]
            np.testing.assert_allclose([found.logits, found.probs], rows, rtol=0, atol=TOLERANCE)
            labels = [names[i] for i in expected[0].argmax(-1)]
            assert found.label == (labels if architecture == TOKENS else labels[0])
            assert (found.prompt_token_ids, found.num_classes) == (prompt, num_labels)
            assert llm.classify([prompt]) == [found]
    assert len({tuple(np.ravel(classified(case, prompt))) for prompt in PROMPTS[:3]}) == 3


def test_a_model_without_such_a_head_is_refused(tmp_path):
    refused = pytest.raises(RequestError, match="has no head that classifies")
    with LLM(write_model(tmp_path), device="reference") as llm, refused:
        llm.classify([[1]])


MISFITS = rows(r"""
{"score.weight": [2, 37]} | {} | score.weight of shape \(2, 37\), which must be \(labels, 36\)
{"classifier.weight": [2, 36], "classifier.bias": [3]} | {} | a bias of shape \(3,\)
{"score.weight": [2, 36]} | {"problem_type": "ranking"} | problem_type 'ranking', which must be one of
""")


@pytest.mark.parametrize(("head", "fields", "message"), MISFITS)
def test_a_head_that_does_not_fit_is_refused(tmp_path, head, fields, message):
    add_tensors(write_model(tmp_path, **fields), head)
    with pytest.raises(CheckpointError, match=message):
        LLM(tmp_path, device="reference")


WITHOUT = rows(r"""
["score.weight"] | \(score\) .* only LLM.classify
["multiple_choice_head.summary.weight", "qa_outputs.bias"] | \(multiple_choice_head, qa_outputs\) .* nothing
""")


@pytest.mark.parametrize(("names", "words"), WITHOUT)
def test_a_language_model_says_once_what_its_texts_are_made_without(tmp_path, caplog, names, words):
    folder = add_tensors(write_model(tmp_path), dict.fromkeys(names, (2, C)))
    with LLM(folder, device="reference") as llm:
        llm.generate([[1, 2]], max_tokens=1)
    (message,) = caplog.messages
    assert re.search(words, message)
