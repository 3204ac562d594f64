"""The presets of bench: counts, tables and published figures, never how long anything took."""

import gc
import io
import json
import sys
import weakref
from dataclasses import replace

import pytest

import tinygpt
from support.tiny_checkpoint import write_checkpoint
from tinygpt import LLM
from tinygpt.bench.formats import table
from tinygpt.bench.presets import (
    PRESETS,
    batch_inference,
    batching_notebook,
    cpu_study,
    fastertransformer,
    onnx_study,
    run_preset,
)
from tinygpt.bench.presets import rerun as rerun_module
from tinygpt.bench.presets.options import PresetOptions
from tinygpt.bench.presets.rerun import Rerun, random_prompts
from tinygpt.bench.remote_host import served
from tinygpt.errors import CheckpointError, RequestError
from tinygpt.evaluation.perplexity import perplexity
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.random_checkpoint import SHAPES

MODULES = (batch_inference, batching_notebook, cpu_study, onnx_study, fastertransformer)
SMALL = {module: module.SMALL for module in MODULES}  # as --small has it
TEXT = "The old king and the wolf went to the house, and it was dark. " * 40
SIZE = "0M parameters"  # of the small demo
KEYS = {"preset", "model_filename", "dtype", "n_threads", "batch_size", "num_prompts", "n_prompt", "n_gen"}
KEYS |= {"avg_ns", "stddev_ns", "samples_ns", "first_token_ns", "num_steps", "peak_memory"}


@pytest.fixture(scope="module", autouse=True)
def _smaller():
    """The two studies that generate most make fewer tokens here: what is counted is not changed by how many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_inference, "SMALL", replace(batch_inference.SMALL, new_tokens=8))
        patch.setattr(onnx_study, "SMALL", replace(onnx_study.SMALL, generation_lengths=(1, 10, 20)))
        yield


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("presets") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def report_of(text_file):
    """Each preset runs once, small, on the demo checkpoint."""
    found = {}

    def get(name: str):
        if name not in found:
            text = text_file if name == "onnx-study" else None
            dtypes = ("int8", "auto") if name in ("fastertransformer", "onnx-study") else ("int8",)
            repetitions = 2 if name == "onnx-study" else None  # of five, which take half a minute
            options = PresetOptions("demo", dtypes, threads=2, repetitions=repetitions, small=True, text=text)
            found[name] = run_preset(name, options)
        return found[name]

    return get


def tables(text: str) -> list[list[dict[str, str]]]:
    """Every markdown table, as rows of column -> cell."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("|"):
            header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.split("\n")]
            found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


# What all of them have in common.


def test_the_five_studies():
    assert [module.STUDY.name for module in MODULES] == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_runs_to_its_end(name, report_of):
    report = report_of(name)
    assert report.text.startswith(f"## {name}: ")
    assert f"Here: demo, {SIZE}, 2 threads of " in report.text
    assert "with fewer sizes and runs than the study has" in report.text
    assert tables(report.text)
    for record in report.records:
        assert record.keys() >= KEYS
        assert (record["preset"], record["model_filename"], record["n_threads"]) == (name, "demo", 2)
    assert json.loads(json.dumps(report.records)) == report.records
    assert len({tuple(record) for record in report.records}) == 1, "CSV has one header"


@pytest.mark.parametrize("name", PRESETS)
def test_its_picture_names_the_model_and_has_units(name, report_of, tmp_path):
    picture = report_of(name).picture
    assert picture.title.endswith(f", demo, {SIZE}")
    assert picture.note.split("\n")[-1].startswith("Published: ")
    for panel in picture.panels:
        assert "(" in panel.y_label or panel.y_label.endswith("/s")
        assert "(" in panel.x_label or panel.names
        published = [line.label for line in panel.lines if line.is_published]
        assert len(published) < len(panel.lines)
        assert all("GPT-2 124M" in label or "GPT-350M" in label for label in published)
    assert published  # in the last panel
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    report_of(name).plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.STUDY.name)
def test_small_is_the_same_protocol_with_less_of_it(module):
    assert SMALL[module] != module.FULL
    for name, value in vars(module.FULL).items():
        small = getattr(SMALL[module], name)
        assert set(small) <= set(value) if isinstance(value, tuple) else small <= value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": ()}, "no dtype is given"),
        ({"dtypes": ("float32", "float99")}, "dtype is 'float99'"),
        ({"repetitions": 0}, "repetitions is 0 and must be 1 or more"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_impossible_options_are_refused_before_a_model_is_loaded(options, message, monkeypatch):
    monkeypatch.setattr("tinygpt.bench.presets.rerun.LLM", None)
    with pytest.raises(RequestError, match=message):
        run_preset("cpu-study", PresetOptions(**{"model": "demo", **options}))


def test_an_unknown_preset_is_refused():
    with pytest.raises(RequestError, match=f"'gpt-study': give one of {', '.join(PRESETS)}"):
        run_preset("gpt-study", PresetOptions("demo"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_with_too_few_positions_is_refused(name, tmp_path):
    folder = write_checkpoint(tmp_path)
    with pytest.raises(RequestError, match=r"do not fit the 6 positions of .*: give a model with more positions"):
        run_preset(name, PresetOptions(str(folder), small=True))


def test_repetitions_are_the_users_or_the_presets_own(report_of):
    (own,) = report_of("cpu-study").records
    (given,) = run_preset("cpu-study", PresetOptions("demo", ("int8",), 2, repetitions=1, small=True)).records
    assert len(own["samples_ns"]) == len(own["first_token_ns"]) == cpu_study.SMALL.repetitions
    assert len(given["samples_ns"]) == 1


def test_a_dtype_is_measured_once():
    rerun = Rerun.prepare(cpu_study.STUDY, PresetOptions("demo", ("auto", "float32", "int8", "int8")), [])
    assert rerun.options.dtypes == ("float32", "int8")


def test_cases_without_a_place_are_named():
    rerun = Rerun(cpu_study.STUDY, PresetOptions("demo"), ModelConfig(n_positions=100), [])
    fits, notes = rerun.fitting([(50, 50), (51, 50), (1, 100)])
    assert fits == [(50, 50)]
    assert notes == ["Left out (-): prompt + new tokens of 51 + 50, 1 + 100 do not fit the 100 positions of demo."]
    assert rerun.fitting([(50, 50)])[1] == []


def test_random_prompts_begin_differently_and_are_the_same_each_time():
    lengths = [3, 1, 40] * 30
    prompts = random_prompts(lengths, 1000)
    assert [len(prompt) for prompt in prompts] == lengths
    assert len({prompt[0] for prompt in prompts}) == len(prompts)
    assert all(0 <= token_id < 1000 for prompt in prompts for token_id in prompt)
    assert prompts == random_prompts(lengths, 1000)
    assert len(random_prompts([2] * 9, 4)) == 9  # more prompts than tokens


def test_markdown():
    assert table(["a", "b"], [["1", "2"]], ["b"]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


def test_memory_is_given_back_though_there_is_no_tokenizer():
    """What fastertransformer measures of a case is not to hold the weights of the one before."""
    llm = LLM("random:tiny", max_num_seqs=1)
    weights = weakref.ref(llm.engine.runner._params.wpe)
    with pytest.raises(CheckpointError, match="tokenizer"):
        llm.tokenizer  # noqa: B018
    gc.collect()
    gc.disable()
    try:
        llm.close()
        assert weights() is None
    finally:
        gc.enable()


def test_models_of_another_size_are_said_to_be(report_of):
    text = report_of("cpu-study").text
    assert "GPT-2 124M, on the CPU, not named, of a Linux workstation." in text
    assert "This is another size than the study's GPT-2 124M, so the figures are not of the same work." in text
    study, options = fastertransformer.STUDY, PresetOptions("random:355M", threads=1)
    here = Rerun(study, options, SHAPES["355M"], []).here
    assert "355M parameters" in here
    assert "another size" not in here
    assert "study's GPT-350M" in Rerun(study, options, SHAPES["124M"], []).here


def test_one_run_is_no_median():
    report = run_preset("cpu-study", PresetOptions("demo", ("int8",), 2, repetitions=1, small=True))
    assert "Ours: single runs, and the minimum of them." in report.text


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "onnx-study"])
def test_a_text_is_refused_where_there_is_no_perplexity(name, text_file, monkeypatch):
    monkeypatch.setattr("tinygpt.bench.presets.rerun.LLM", None)
    with pytest.raises(RequestError, match=f"{name} has none: omit it, or give --preset onnx-study"):
        run_preset(name, PresetOptions("demo", text=text_file))


def test_a_text_without_a_tokenizer_is_refused(text_file, monkeypatch):
    monkeypatch.setattr("tinygpt.bench.presets.rerun.LLM", None)
    with pytest.raises(RequestError, match="--text needs a tokenizer and random:tiny has none"):
        run_preset("onnx-study", PresetOptions("random:tiny", text=text_file))


@pytest.mark.parametrize("name", PRESETS)
def test_what_stops_a_preset_leaves_the_records_of_what_was_measured(name, monkeypatch):
    real, calls = rerun_module.measure, []

    def measure_once(*arguments, **names):
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*arguments, **names)

    monkeypatch.setattr(rerun_module, "measure", measure_once)
    records = []
    with pytest.raises(KeyboardInterrupt):
        run_preset(name, PresetOptions("demo", ("int8", "float32"), 2, repetitions=1, small=True), records)
    (record,) = records
    assert (record["preset"], record["dtype"]) == (name, "int8")


# batch-inference.


def test_batch_inference_counts_as_the_study(report_of):
    report = report_of("batch-inference")
    (rows,) = tables(report.text)
    assert tuple(rows[0]) == batch_inference.COLUMNS
    one, eight = rows[:2]
    assert one["Method"] == "tinygpt, int8, batch 1"
    assert one["Query Count"] == eight["Query Count"] == "20"
    assert one["Generated Token Count"] == eight["Generated Token Count"] == str(20 * 8)
    assert (one["Inference Count"], one["Avg Batch Size"], one["Max Batch Size"]) == ("160", "1", "1")
    # 20 queries, 8 at a time, all of the same length: three times 8 passes
    assert (eight["Inference Count"], eight["Avg Batch Size"], eight["Max Batch Size"]) == ("24", "6.67", "8")
    assert one["Throughput comparing to Baseline"] == "1x"
    speed_up = report.records[0]["samples_ns"][0] / report.records[1]["samples_ns"][0]
    assert eight["Throughput comparing to Baseline"] == f"{speed_up:.2g}x"
    assert [record["num_prompts"] for record in report.records] == [20, 20]


@pytest.fixture(scope="module")
def remote_report():
    """Four queries, here and behind a server."""
    pytest.importorskip("uvicorn", reason="uvicorn, of the extra `serve`, is not installed")
    few = batch_inference.Protocol(4, (3, 5), 6, (2,), num_warmup_queries=1, num_callers=3, repetitions=2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch_inference, "SMALL", few)
        options = PresetOptions("random:tiny", ("float32",), threads=1, small=True, remote=True)
        return run_preset("batch-inference", options)


def test_batch_inference_asks_a_server_the_same(remote_report):
    rows = tables(remote_report.text)[0][:2]
    assert [row["Method"] for row in rows] == ["tinygpt, float32, batch 2", "tinygpt, float32, batch 2, remote"]
    assert [row["Generated Token Count"] for row in rows] == ["24"] * 2
    assert [row["Inference Count"] for row in rows] == ["12", "-"]
    assert [row["Avg Batch Size"] for row in rows] == ["2", "-"]
    records = remote_report.records
    assert [(record["remote"], record["num_steps"]) for record in records] == [(False, 12), (True, None)]
    assert len({tuple(record) for record in records}) == 1
    baseline = sum(records[0]["samples_ns"])
    for row, record in zip(rows, records, strict=True):
        firsts, totals = record["first_token_ns"], record["samples_ns"]
        assert len(firsts) == len(totals) == 2
        assert all(0 < first <= total for first, total in zip(firsts, totals, strict=True))
        speed_up = baseline / sum(totals)  # medians of two
        assert row["Throughput comparing to Baseline"] == f"{speed_up:.2g}x"
    lines = [line.label for line in remote_report.picture.panels[0].lines]
    assert lines[:2] == ["tinygpt, float32", "tinygpt, float32, remote"]
    assert "3 connections of one RemoteLLM" in remote_report.text


def test_a_server_that_does_not_start_says_why():
    pytest.importorskip("uvicorn", reason="uvicorn, of the extra `serve`, is not installed")
    with (
        pytest.raises(RequestError, match=r"the server did not start: tinygpt: .*max.num.seqs"),
        served("random:tiny", "float32", 1, max_num_seqs=0),
    ):
        pass


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "batch-inference"])
def test_only_batch_inference_has_a_server(name, monkeypatch):
    monkeypatch.setattr("tinygpt.bench.presets.rerun.LLM", None)
    with pytest.raises(RequestError, match=f"{name} has none: omit it, or give --preset batch-inference"):
        run_preset(name, PresetOptions("demo", remote=True))


def test_a_server_without_its_extra_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr("tinygpt.bench.presets.rerun.LLM", None)
    for module in [name for name in sys.modules if name.startswith("tinygpt.server")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(tinygpt, "server", None, raising=False)  # importing it anew sets it, which is undone
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(RequestError, match=r'--remote needs uvicorn, .* pip install "\.\[serve\]"'):
        run_preset("batch-inference", PresetOptions("demo", remote=True))


def test_batch_inference_warms_up_without_a_bar(monkeypatch):
    """A terminal shows that of the cases alone."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    run_preset("batch-inference", PresetOptions("demo", ("int8",), threads=2, repetitions=1, small=True))
    assert "case" in terminal.getvalue()
    assert " prompts" not in terminal.getvalue()


def test_batch_inference_published_rows(report_of):
    published = [list(row.values()) for row in tables(report_of("batch-inference").text)[0][2:]]
    assert published == [
        ["Baseline, RTX 2080 Ti", "100", "63.05s", "1x", "1", "1", "6400", "6400"],
        ["With batch-inference, RTX 2080 Ti", "100", "12.07s", "5x", "8", "7.69", "6400", "832"],
        ["Baseline, V100", "100", "78.04s", "1x", "1", "1", "6400", "6400"],
        ["With batch-inference, V100", "100", "4.86s", "16x", "32", "25", "6400", "256"],
    ]
    for row in batch_inference.PUBLISHED:
        assert float(row.avg_batch_size) == pytest.approx(6400 / row.inference_count, rel=1e-3)


def test_batch_inference_protocol():
    protocol = batch_inference.FULL
    assert (len(protocol.lengths), protocol.new_tokens, protocol.batch_sizes) == (100, 64, (1, 8))
    assert protocol.lengths[:10] == protocol.lengths[90:] == list(protocol.prompt_lengths)


# batching-notebook.


def test_batching_notebook_has_ours_beside_published(report_of):
    report = report_of("batching-notebook")
    (rows,) = tables(report.text)
    assert [row["bs"] for row in rows] == ["1", "2", "4", "8"]
    for row, record in zip(rows, report.records, strict=True):
        size, ms = record["batch_size"], sorted(record["samples_ns"])[1] / 1e6
        assert (record["num_prompts"], record["n_gen"], record["num_steps"]) == (size, 10, 10)
        assert float(row["tinygpt, int8: duration (ms)"]) == pytest.approx(ms, abs=0.051)
        assert float(row["tinygpt, int8: throughput (tokens/ms)"]) == pytest.approx(size * 10 / ms, abs=0.0051)
        assert float(row["tinygpt, int8: avg latency (ms)"]) == pytest.approx(ms / 10, abs=0.0051)
    assert "The notebook's single run times tokenisation and making text too." in report.text
    published = [row["published: duration (ms)"] for row in rows]
    assert published == ["59.8", "59.9", "59.3", "61.6"]


def test_batching_notebook_published_figures_go_together():
    assert [row.batch_size for row in batching_notebook.PUBLISHED] == [1, 2, 4, 8, 16, 32, 64, 128]
    for row in batching_notebook.PUBLISHED:
        assert row.throughput == pytest.approx(10 * row.batch_size / row.duration_ms, abs=0.051)
        assert row.latency_ms == pytest.approx(row.duration_ms / 10, abs=0.051)
    assert (batching_notebook.PUBLISHED[0].latency_ms, batching_notebook.PUBLISHED[-1].throughput) == (6.0, 13.8)


def test_batching_notebook_draws_throughput_against_latency(report_of):
    (panel,) = report_of("batching-notebook").picture.panels
    assert (panel.x_label, panel.y_label) == ("latency (ms/token)", "throughput (tokens/ms)")
    assert [point.name for point in panel.lines[0].points] == ["1", "2", "4", "8"]


# cpu-study.


def test_cpu_study_row(report_of):
    report = report_of("cpu-study")
    (rows,), (record,) = tables(report.text), report.records
    assert tuple(rows[0]) == cpu_study.COLUMNS
    assert (record["n_prompt"], record["n_gen"], record["num_steps"], record["batch_size"]) == (13, 100, 100, 1)
    ours = rows[0]
    assert (ours["implementation"], ours["new tokens"]) == ("tinygpt, int8", "100")
    samples = sorted(record["samples_ns"])
    assert float(ours["minimum inference time (s)"]) == pytest.approx(samples[0] / 1e9, abs=0.00051)
    assert float(ours["tokens/s"]) == pytest.approx(100e9 / samples[1], rel=0.001)
    per_token = sorted(
        total - first for total, first in zip(record["samples_ns"], record["first_token_ns"], strict=True)
    )
    assert float(ours["time per output token (ms)"]) == pytest.approx(per_token[1] / 99e6, abs=0.00051)


def test_cpu_study_published_rows(report_of):
    published = tables(report_of("cpu-study").text)[0][1:]
    assert [row["minimum inference time (s)"] for row in published] == ["3.4", "1.7", "1.5"]
    assert [row["new tokens"] for row in published] == ["100", "up to 87", "up to 87"]
    assert {row["tokens/s"] for row in published} == {"not published"}
    assert "that of TensorFlow's row is of the model's inference step." in report_of("cpu-study").text


def test_cpu_study_samples_as_the_study(monkeypatch):
    seen = []
    real = rerun_module.measure
    monkeypatch.setattr(rerun_module, "measure", lambda *args: (seen.append(args[-2]), real(*args))[1])
    run_preset("cpu-study", PresetOptions("demo", ("int8",), 2, repetitions=1, small=True))
    (params,) = seen
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens, params.ignore_eos) == (
        1.0,
        40,
        1.0,
        100,
        True,
    )
    assert cpu_study.FULL.repetitions == 10


# onnx-study.


def test_onnx_study_grid(report_of):
    report = report_of("onnx-study")
    grid, _ = tables(report.text)
    names = [f"tinygpt, {dtype} - {prompt}" for dtype in ("int8", "float32") for prompt in (100, 200)]
    assert [row["model - prompt length"] for row in grid] == names
    assert list(grid[0])[1:] == ["1 generated (s)", "10 generated (s)", "20 generated (s)", "perplexity"]
    cases = [(record["dtype"], record["n_prompt"], record["n_gen"]) for record in report.records]
    sizes = [(100, 1), (100, 10), (100, 20), (200, 1), (200, 10), (200, 20), (10, 1), (10, 10), (10, 100)]
    assert cases == [(dtype, *size) for dtype in ("int8", "float32") for size in sizes]
    assert all(record["num_steps"] == record["n_gen"] for record in report.records)


def test_onnx_study_error_is_the_standard_error_of_the_mean(report_of):
    report = report_of("onnx-study")
    samples = [ns / 1e9 for ns in report.records[1]["samples_ns"]]
    mean = sum(samples) / 2
    error = (sum((sample - mean) ** 2 for sample in samples) / 1 / 2) ** 0.5
    shown = tables(report.text)[0][0]["10 generated (s)"].split(" ± ")
    assert [float(number) for number in shown] == pytest.approx([mean, error], abs=0.000051)


def test_onnx_study_perplexity_is_that_of_eval(report_of):
    grid, _ = tables(report_of("onnx-study").text)
    with LLM("demo", "int8", threads=2) as llm:
        expected = perplexity(llm, TEXT[: onnx_study.SMALL.num_characters]).token_perplexity
    assert grid[0]["perplexity"] == grid[1]["perplexity"] == f"{expected:.4f}"
    assert grid[0]["perplexity"] != grid[2]["perplexity"]
    assert report_of("onnx-study").records[0]["perplexity"] == pytest.approx(expected)


@pytest.mark.parametrize(("model", "cell"), [("random:tiny", "no tokenizer"), ("demo", "no text given")])
def test_onnx_study_says_why_there_is_no_perplexity(model, cell, monkeypatch):
    monkeypatch.setattr(onnx_study, "SMALL", onnx_study.Protocol((5,), (2,), 3, (1,), 1))
    report = run_preset("onnx-study", PresetOptions(model, ("int8",), 2, small=True))
    grid, log = tables(report.text)
    assert [row["perplexity"] for row in grid] == [cell]
    assert {record["perplexity"] for record in report.records} == {None}
    assert [row["tinygpt, int8 (s)"] == "-" for row in log] == [False, True, True, True]


def test_onnx_study_draws_like_with_like(report_of):
    """The published figures are beside those of our prompt of 10 tokens, and the grid, without any, is apart."""
    report = report_of("onnx-study")
    grid, log = report.picture.panels
    assert [panel.title for panel in (grid, log)] == ["Ours, by prompt length", "A prompt of 10 tokens"]
    assert [line.label for line in grid.lines] == [
        f"tinygpt, {dtype}, prompt of {length}" for dtype in ("int8", "float32") for length in (100, 200)
    ]
    assert [line.label for line in log.lines] == [
        "tinygpt, int8, prompt of 10",
        "tinygpt, float32, prompt of 10",
        "published: hf base, GPT-2 124M",
        "published: nanoGPT, GPT-2 124M",
    ]
    assert [[point.x for point in line.points] for line in log.lines] == [[1, 10, 100]] * 4
    assert [point.y for point in log.lines[3].points] == [0.0639, 0.6021, 6.6107]
    of_200 = grid.lines[1].points
    assert [point.x for point in of_200] == [1, 10, 20]
    assert [point.y for point in of_200] == pytest.approx([r["avg_ns"] / 1e9 for r in report.records[3:6]])


def test_onnx_study_published_log(report_of):
    _, log = tables(report_of("onnx-study").text)
    published = [[row["generated tokens"], *list(row.values())[-2:]] for row in log]
    assert published == [
        ["1", "0.0348", "0.0639"],
        ["10", "0.2157", "0.6021"],
        ["100", "2.1581", "6.6107"],
        ["1000", "26.4266", "291.9332"],
    ]
    assert [row["tinygpt, int8 (s)"] == "-" for row in log] == [False, False, False, True]


def test_what_small_leaves_out_is_named(report_of):
    assert "- Left out (-) by --small: 1000 generated tokens of the log." in report_of("onnx-study").text


def test_onnx_study_names_what_the_demo_has_no_positions_for(monkeypatch):
    monkeypatch.setattr(onnx_study, "FULL", onnx_study.Protocol((300,), (1, 500), 10, (1, 1000), 1))
    text = run_preset("onnx-study", PresetOptions("demo", ("int8",), 2)).text
    assert "- Left out (-): prompt + new tokens of 300 + 500, 10 + 1000 do not fit the 512 positions of demo." in text
    assert tables(text)[0][0]["500 generated (s)"] == "-"


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"\xff", r"not UTF-8 \(byte 0\)"), (b" \n", "is empty")]
)
def test_onnx_study_refuses_a_text_it_cannot_read(content, message, tmp_path, monkeypatch):
    monkeypatch.setattr("tinygpt.bench.presets.rerun.LLM", None)
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(RequestError, match=message):
        run_preset("onnx-study", PresetOptions("demo", text=tmp_path / "text"))


# fastertransformer.


def test_fastertransformer_table(report_of):
    report = report_of("fastertransformer")
    (rows,) = tables(report.text)
    assert [tuple(row[name] for name in fastertransformer.COLUMNS) for row in rows] == [
        (str(size), *lengths) for lengths in (("128", "8"), ("512", "32")) for size in (1, 2, 4)
    ]
    ours = [
        f"tinygpt, {dtype}: {name}" for dtype in ("int8", "float32") for name in ("Latency (ms)", "Memory Usage (GB)")
    ]
    assert list(rows[0])[3:] == [*ours, "published: FT Latency (ms)", "published: Memory Usage (GB)"]
    for row in rows[:3]:
        assert all(float(row[name]) > 0 for name in ours)
    for row in rows[3:]:
        assert {row[name] for name in ours} == {"-"}
    assert "- Left out (-): prompt + new tokens of 512 + 32 do not fit the 512 positions of demo." in report.text


def test_fastertransformer_measures_each_case(report_of):
    records = report_of("fastertransformer").records
    cases = [(r["dtype"], r["batch_size"], r["num_prompts"], r["n_prompt"], r["n_gen"]) for r in records]
    assert cases == [(dtype, size, size, 128, 8) for dtype in ("int8", "float32") for size in (1, 2, 4)]
    assert all(record["num_steps"] == 8 for record in records)


def test_fastertransformer_published_figures(report_of):
    (rows,) = tables(report_of("fastertransformer").text)
    published = [(row["published: FT Latency (ms)"], row["published: Memory Usage (GB)"]) for row in rows]
    assert published[:2] == [("25.43", "3.43"), ("26.42", "3.46")]
    assert published[3:] == [("92.01", "3.57"), ("97.87", "3.65"), ("110.70", "3.78")]
    for row in fastertransformer.PUBLISHED:
        assert tuple(row.figures) == fastertransformer.FULL.batch_sizes
        assert [*row.figures.values()] == sorted(row.figures.values())


def test_fastertransformer_draws_latency_and_memory(report_of):
    latency, memory = report_of("fastertransformer").picture.panels
    assert (latency.y_label, memory.y_label) == ("latency (ms)", "memory (GB)")
    published = [line.points[0].y for line in memory.lines if line.is_published]
    assert published == [3.43, 3.57]


def test_fastertransformer_draws_no_memory_that_is_not_known(monkeypatch):
    monkeypatch.setattr("tinygpt.bench.meter.peak_memory", lambda: 0)
    monkeypatch.setattr(fastertransformer, "SMALL", fastertransformer.Protocol(((128, 8),), (1,), repetitions=1))
    report = run_preset("fastertransformer", PresetOptions("demo", ("int8",), 2, small=True))
    latency, memory = report.picture.panels
    assert len(latency.lines) == 3
    assert all(line.is_published for line in memory.lines)
    assert "| unknown |" in report.text
