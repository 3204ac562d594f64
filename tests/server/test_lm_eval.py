"""lm-evaluation-harness over HTTP finds what its adapter finds in the process, to the last printed digit."""

import json
import os

import pytest

pytest.importorskip("lm_eval", reason="lm-eval, the extra `eval`, is not installed")
pytest.importorskip("tenacity", reason="tenacity, of lm-eval[api], is not installed")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval
from lm_eval.tasks import TaskManager

from support.serving import served
from tinygpt import LLM
from tinygpt.evaluation.lm_eval_adapter import TinyGPTLM

ROWS = [
    {
        "start": f"Once upon a time there was {who} who lived in the",
        "ends": [" sea", " castle", " forest"],
        "label": i % 3,
    }
    for i, who in enumerate(["a king", "an old man", "the café's owner", "the fox", "a poor widow", "a wolf"])
]
COMMON = (
    "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
)
TASKS = {
    "endings": """
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_choice: "{{ends}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "words": """
output_type: loglikelihood
doc_to_text: "{{start}}"
doc_to_target: "{{ends[label]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{start + ends[label]}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "tales": """
output_type: generate_until
doc_to_text: "{{start}}"
doc_to_target: "{{ends[label]}}"
generation_kwargs: {until: [".", "\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def task_manager(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    for name, body in TASKS.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, file=file) + body, encoding="utf-8")
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def remote():
    with LLM("demo", split_special_tokens=True) as llm, served(llm) as server:
        yield f"model=demo,base_url={server.url}/completions,tokenizer_backend=remote,max_length=512"


@pytest.fixture(scope="module")
def local():
    model = TinyGPTLM("demo")
    yield model
    model.llm.close()


def evaluate(model, task, task_manager, **arguments):
    found = lm_eval.simple_evaluate(
        model, tasks=[task], task_manager=task_manager, bootstrap_iters=0, log_samples=True, **arguments
    )
    printed = {name: f"{v:.4f}" for name, v in found["results"][task].items() if isinstance(v, float)}
    return printed, [sample["filtered_resps"] for sample in found["samples"][task]]


@pytest.mark.parametrize("num_concurrent", [1, 8])
@pytest.mark.parametrize("task", TASKS)
def test_results_are_those_of_the_adapter(remote, local, task_manager, task, num_concurrent):
    printed, answers = evaluate(
        "local-completions", task, task_manager, model_args=f"{remote},num_concurrent={num_concurrent}"
    )
    expected, expected_answers = evaluate(local, task, task_manager)
    assert printed == expected
    assert printed
    for mine, other in zip(answers, expected_answers, strict=True):
        for one, wanted in zip(mine, other, strict=True):  # sums in another order
            assert one == (wanted if isinstance(wanted, str) else pytest.approx(wanted, rel=1e-12))
