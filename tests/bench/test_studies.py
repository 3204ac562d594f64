"""The published studies: counts, tables and published figures, never how long anything took.

After a deliberate change, `python tests/record.py` records their pages again.
"""

import json
from dataclasses import replace

import pytest

from support.gate import noting
from support.paths import HOW_TO_RECORD, ROOT
from tinygpt import LLM
from tinygpt.bench import studies, sweep
from tinygpt.bench.measure import random_prompts
from tinygpt.bench.plan import Plan
from tinygpt.bench.record import Measured
from tinygpt.bench.roofline import Run
from tinygpt.bench.studies import ABSENT, STUDIES, Options, study_text
from tinygpt.bench.sweep import run_study
from tinygpt.errors import RequestError
from tinygpt.evaluation.tasks import perplexity
from tinygpt.llm_args import LLMArgs
from tinygpt.weights.config import ModelConfig

RECORD = ROOT / "tests" / "data" / "studies.txt"
TEXT = "The old king and the wolf went to the house, and it was dark. " * 40
KEYS = {"preset", "model_filename", "dtype", "n_threads", "batch_size", "num_prompts", "n_prompt", "n_gen"}
KEYS |= {"avg_ns", "stddev_ns", "samples_ns", "first_token_ns", "num_steps", "peak_memory"}


@pytest.fixture(scope="module")
def found():
    """Each study runs once, with fewer tokens: study, options, records and text by name."""
    runs = {}
    for name, study in STUDIES.items():
        short = tuple({replace(case, new_tokens=min(case.new_tokens, 8)): None for case in study.small})
        study = replace(study, small=short)
        dtypes = ("int8", "auto") if name in ("fastertransformer", "onnx-study") else ("int8",)
        text = TEXT if name == "onnx-study" else None
        options = Options("demo", dtypes, threads=2, repetitions=2, small=True, text=text)
        records = []
        notes = run_study(study, options, records)
        runs[name] = study, options, records, study_text(study, options, records, notes)
    return runs


def rows_of(text: str) -> list[dict[str, str]]:
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_to_its_end(name, found):
    study, _, records, text = found[name]
    assert text.startswith(f"## {name}\n\nPublished: {study.source}")
    assert "Here: demo, 0M parameters, 2 threads of " in text
    assert "with fewer sizes and runs than the study has. This is another size than" in text
    assert len(rows_of(text)) == len(records) + len(study.published_rows)
    assert json.loads(json.dumps(records)) == records
    for record in records:
        assert record.keys() >= KEYS
        assert (record["preset"], record["model_filename"], record["n_threads"]) == (name, "demo", 2)


@pytest.mark.parametrize("name", STUDIES)
def test_its_picture_has_our_lines_and_the_published(name, found, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    drawn = noting(monkeypatch, studies, "draw")
    study, options, records, _ = found[name]
    studies.draw_study(study, options, records, tmp_path / "picture.png")
    (_, title, (panel,), note) = drawn[0]
    assert (title, note) == (f"{name}, demo", f"Published: {study.source}.")
    assert panel.lines
    assert panel.gray_lines
    assert all(study.model in label for label in panel.gray_lines)
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_small_is_less_of_the_same_study():
    for study in STUDIES.values():
        few, all_of = ([(c.batch_size, c.new_tokens) for c in cases] for cases in (study.small, study.cases))
        assert {*few} <= {*all_of}
        tokens = [
            [len(c.prompt_lengths) * c.new_tokens for c in cases] for cases in (study.small, study.cases)
        ]
        small, full = map(sum, tokens)
        assert small * study.repetitions[1] < full * study.repetitions[0]


def test_whole_studies_are_those_on_record():
    """With the published figures, and ours of 1 and 2 seconds."""
    assert pages() == RECORD.read_text(encoding="utf-8"), HOW_TO_RECORD


def pages() -> str:
    """Return the sizes and the page of each study, as if each case had taken 2 and then 1 seconds in 7 passes."""
    config = ModelConfig()
    found = []
    for study in STUDIES.values():
        plans = [Plan(LLMArgs("random:tiny"), {}, (2,), (case,), 2, config) for case in study.cases]
        more = {"remote": False} if study.name == "batch-inference" else {}
        how = {"peak_memory": 10**9, "gpu": "a machine", "more": {**more, "perplexity": 9.5}}
        runs = tuple(Run(first_token=total / 4, total=total, num_steps=7) for total in (2.0, 1.0))
        records = [Measured(plan, "int8", 2, *plan.cases, runs, **how).to_study(study.name) for plan in plans]
        for case in study.cases:
            lengths = ", ".join(map(str, case.prompt_lengths[:10]))
            found.append(f"{case.batch_size} of {len(case.prompt_lengths)} x ({lengths}) + {case.new_tokens}")
        found.append(study_text(study, Options("random:tiny"), records, []))
    return "\n".join(found) + "\n"


def test_batches_take_fewer_passes(found):
    single, batched, *published = rows_of(found["batch-inference"][3])
    assert (single["Method"], batched["Method"]) == ("tinygpt, int8, batch 1", "tinygpt, int8, batch 8")
    assert single["Inference Count"] == single["Generated Token Count"] == str(20 * 8)
    assert int(batched["Inference Count"]) < 20 * 8 / 4
    assert single["Throughput comparing to Baseline"] == "1x"
    assert [row["Execution Time"] for row in published] == ["63.05s", "12.07s", "78.04s", "4.86s"]


def test_the_perplexity_is_that_of_each_dtype(found):
    records = found["onnx-study"][2]
    for dtype in ("int8", "float32"):
        with LLM("demo", dtype, threads=2) as llm:
            expected = perplexity(llm, TEXT).token_perplexity
        (found_perplexity,) = {record["perplexity"] for record in records if record["dtype"] == dtype}
        assert found_perplexity == pytest.approx(expected)


def test_cases_that_do_not_fit_are_left_out(monkeypatch):
    study = replace(STUDIES["onnx-study"], small=STUDIES["onnx-study"].cases)

    def run(plan, dtype, threads):
        return [Measured(plan, dtype, threads, case, (Run(),)) for case in plan.cases]

    monkeypatch.setattr(sweep, "run", run)
    records = []
    (note,) = run_study(study, Options("demo", small=True), records)  # 512 positions
    assert note.startswith(
        "Left out: 100 + 500, 200 + 400, 200 + 500, 300 + 400, 300 + 500, 10 + 1000 tokens do not"
    )
    assert len(records) == 13
    long = replace(study, small=study.cases[-1:])
    with pytest.raises(RequestError, match="10 \\+ 1000 tokens do not fit the 512 positions of demo"):
        run_study(long, Options("demo", small=True), [])
    (note,) = run_study(STUDIES["fastertransformer"], Options("demo"), [])  # of seven batch sizes each
    assert note.startswith("Left out: 512 + 32 tokens do not")


def test_the_model_in_another_process_generates_as_much(monkeypatch):
    pytest.importorskip("uvicorn", reason="needs a server: pip install -e '.[serve]'")
    case = replace(STUDIES["batch-inference"].small[1], new_tokens=4)
    study = replace(STUDIES["batch-inference"], small=(case,))
    records = []
    options = Options("random:tiny", ("int8",), threads=1, repetitions=1, small=True, remote=True)
    run_study(study, options, records)
    local, remote = rows_of(study_text(study, options, records, []))[:2]
    assert remote["Method"] == "tinygpt, int8, remote, batch 8"
    assert (remote["Generated Token Count"], remote["Inference Count"]) == (
        local["Generated Token Count"],
        ABSENT,
    )
    assert [record["remote"] for record in records] == [False, True]


def test_a_server_that_does_not_start_is_an_error():
    with (
        pytest.raises(RequestError, match="the server did not start"),
        sweep.served("no-such-model", "int8", {}),
    ):
        pass


def test_prompts_begin_differently():
    prompts = random_prompts([3, 9, 1] * 5, 20)
    assert [len(prompt) for prompt in prompts] == [3, 9, 1] * 5
    assert len({prompt[0] for prompt in prompts}) == 15
    assert prompts == random_prompts([3, 9, 1] * 5, 20)


if __name__ == "__main__":
    RECORD.write_text(pages(), encoding="utf-8")
