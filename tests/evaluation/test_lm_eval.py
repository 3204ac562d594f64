"""lm-evaluation-harness: our adapter finds the figures of its own `hf` model, and over HTTP it finds the same."""

import json
import os
from types import SimpleNamespace

import pytest

from support.paths import DEMO

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tinygpt import LLM
from tinygpt.errors import RequestError
from tinygpt.evaluation.lm_eval_adapter import TinyGPTLM

ENDINGS = ["sea", "castle", "forest", "king's house"]
ROWS = [
    {
        "context": f"Once upon a time there was {who} who lived by himself in the",
        "endings": ENDINGS,
        "label": i % 4,
        "text": f"{who} went down to the shore, and waited there for a ship. " * (1 + 15 * (i % 3)),
    }
    for i, who in enumerate(["a king", "an old man", "the café's owner", "the fox", "a poor widow", "a wolf"])
]
COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
TASKS = {
    "endings": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{endings}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "last_words": """
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{' ' + endings[label]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "sentences": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{context + ' ' + endings[label]}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "tales": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{endings[label]}}"
generation_kwargs: {until: [".", "\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def ours():
    model = TinyGPTLM("demo")
    yield model
    model.llm.close()


@pytest.fixture(scope="module")
def theirs():
    torch.set_num_threads(1)  # two that wait for each other are far slower where the cores are shared
    return HFLM(str(DEMO), dtype="float32", device="cpu", batch_size=1)


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
def server():
    """The demo in a server, by the arguments of the harness's `local-completions`."""
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    pytest.importorskip("tenacity", reason="tenacity, of lm-eval[api], is not installed")
    from support.serving import served

    with LLM("demo", split_special_tokens=True) as llm, served(llm) as server:
        yield f"model=demo,base_url={server.url}/completions,tokenizer_backend=remote,max_length=512"


def evaluate(model, task, task_manager, **arguments):
    """Return the figures of a task and the model's answers."""
    found = lm_eval.simple_evaluate(
        model, tasks=[task], task_manager=task_manager, bootstrap_iters=0, log_samples=True, **arguments
    )
    assert found["samples"][task], "no samples"
    return found["results"][task], [sample["filtered_resps"] for sample in found["samples"][task]]


def assert_alike(mine: list, other: list, rel: float = 1e-4) -> None:
    """Texts, log probabilities, or pairs of one and a bool."""
    for one, wanted in zip(mine, other, strict=True):
        assert one == (wanted if isinstance(wanted, str) else pytest.approx(wanted, rel=rel))


@pytest.mark.parametrize("task", TASKS)
def test_results_are_those_of_the_hf_model(ours, theirs, task_manager, task):
    results, answers = evaluate(ours, task, task_manager)
    expected, expected_answers = evaluate(theirs, task, task_manager)
    for metric, value in expected.items():
        assert results[metric] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), (
            metric
        )
    for mine, other in zip(answers, expected_answers, strict=True):
        assert_alike(mine, other)


@pytest.mark.parametrize("num_concurrent", [1, 8])
# Over HTTP, the harness cuts long documents elsewhere.
@pytest.mark.parametrize("task", [name for name in TASKS if name != "texts"])
def test_results_over_http_are_those_of_the_adapter(server, ours, task_manager, task, num_concurrent):
    arguments = f"{server},num_concurrent={num_concurrent}"
    results, answers = evaluate("local-completions", task, task_manager, model_args=arguments)
    expected, expected_answers = evaluate(ours, task, task_manager)
    printed, wanted = (
        {name: f"{v:.4f}" for name, v in each.items() if isinstance(v, float)} for each in (results, expected)
    )
    assert printed == wanted != {}
    for mine, other in zip(answers, expected_answers, strict=True):
        assert_alike(mine, other, 1e-12)  # sums in another order


MARK = "<|endoftext|>"


def check_same(ours, theirs, method: str, *arguments: tuple) -> list:
    asked = [SimpleNamespace(args=args) for args in arguments]
    mine, other = (getattr(model, method)(asked, disable_tqdm=True) for model in (ours, theirs))
    assert_alike(mine, other)
    return mine


def test_documents_with_special_tokens(ours, theirs):
    """A rolling document with a mark in it, one of several windows too; pairs and contexts with marks anywhere."""
    end = ours.eot_token_id
    assert ours.tok_encode(f"a{MARK}") == theirs.tok_encode(f"a{MARK}") == [*ours.tok_encode("a"), end]
    texts = [
        f"The end.{MARK}Once upon a time",
        f"{MARK}Once{MARK}{MARK}",
        MARK.join(row["text"] for row in ROWS),
    ]
    check_same(ours, theirs, "loglikelihood_rolling", *((text,) for text in texts))
    pairs = (
        ("The end.", f"{MARK}Once"),
        (f"The end.{MARK}", "Once upon"),
        (MARK, "Once"),
        ("The end", f".{MARK}"),
    )
    check_same(ours, theirs, "loglikelihood", *pairs)
    ends = {"until": ["."], "max_gen_toks": 8}
    check_same(ours, theirs, "generate_until", (f"The end.{MARK}", ends), (f"{MARK}Once upon a time", ends))


def test_a_long_context_loses_its_beginning(ours, theirs):
    long = "the king and " * 300
    check_same(ours, theirs, "generate_until", (long, {"until": ["."], "max_gen_toks": 8}))
    pairs = (long, "the queen"), ("", "Once upon a time"), ("The sea ", "was still")
    check_same(ours, theirs, "loglikelihood", *pairs)


def test_what_greedy_decoding_writes_is_greedy(ours, theirs):
    context = "Once upon a time there"
    (written,) = check_same(ours, theirs, "generate_until", (context, {"until": [], "max_gen_toks": 8}))
    scores = check_same(ours, theirs, "loglikelihood", (context, written), (context, "after"))
    assert [is_greedy for _, is_greedy in scores] == [True, False]


def test_no_room_for_a_context_is_refused(ours):
    asked = SimpleNamespace(args=("a", {"until": [], "max_gen_toks": 512}))
    with pytest.raises(RequestError, match="max_gen_toks is 512 and must be below 512"):
        ours.generate_until([asked], disable_tqdm=True)


def test_the_harness_finds_the_model_by_its_name():
    from lm_eval.api.registry import get_model

    model = get_model("tinygpt").create_from_arg_string(
        "pretrained=demo,max_length=64,dtype=int8",
        {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"},
    )
    assert (model.max_length, model.llm.dtype) == (64, "int8")
    model.llm.close()
