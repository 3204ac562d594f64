"""Records as tables, CSV and JSON, their comparison, their pictures, and the work of a pass."""

import csv
import io
import json

import numpy as np
import pytest

from support.bench_records import LLAMA_BENCH_KEYS, SAMPLES, TINY, generation_record, prompt_record
from support.family_models import FAMILY_MODELS, write_family
from support.gate import noting
from support.moe_models import moe_arrays, write_moe
from tinygpt.bench import report, roofline
from tinygpt.bench.command import read_records
from tinygpt.bench.report import (
    COLUMNS,
    FORMATS,
    aligned,
    table,
    to_markdown,
)
from tinygpt.errors import RequestError
from tinygpt.weights.config import ModelConfig, parameter_shapes
from tinygpt.weights.open import open_checkpoint


@pytest.fixture
def records():
    return [prompt_record(), generation_record()]


def test_json_is_an_array_and_jsonl_a_line_each(records):
    assert json.loads(FORMATS["json"](records)) == records
    assert [json.loads(line) for line in FORMATS["jsonl"](records).split("\n")] == records


def test_csv_has_a_header_and_no_samples(records):
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](records))))
    assert len(rows) == 2
    assert set(rows[0]) == set(records[0]) - set(SAMPLES) >= set(LLAMA_BENCH_KEYS.split())
    assert float(rows[0]["avg_ts"]) == records[0]["avg_ts"]
    assert (rows[0]["cpu_strict"], rows[1]["first_token_ms"]) == ("0", "")
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"]([{"a": 1}, {"b": "x,y"}]))))
    assert rows == [{"a": "1", "b": ""}, {"a": "", "b": "x,y"}]


def test_markdown_has_a_row_for_each_record(records):
    header, rule, *rows = to_markdown(records).split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (header, rule, *rows)]
    assert {len(row) for row in cells} == {len(COLUMNS)}
    assert cells[0] == list(COLUMNS)
    assert cells[2][:6] == ["tiny", "float32", "float32", "2", "4", "pp3"]
    assert cells[2][6:8] == ["6000000 (3000000 to 12000000)", "0.0001667"]
    assert (cells[2][-1], cells[3][5], cells[3][8], cells[3][-1], cells[3][-2]) == (
        "5",
        "tg6 @ d3",
        "",
        "",
        "75.0%",
    )


def test_notes_name_the_machine_and_its_limits(records):
    text = to_markdown(records)
    assert "medians of 3 runs" in text
    assert "40.0 GB/s with 2 threads." in text
    assert (
        "200 in float32 with 2 threads, 200 in the blocks and 100 in the head in int4 with 2 threads." in text
    )
    assert "; single runs.\n" in to_markdown(records[1:])


def test_a_terminal_has_columns_without_bars(records):
    rows = [["a", "1.5", ""], ["bcd", "22.5", "x y"], ["", "", ""]]
    markdown = table(["name", "n", "last"], rows, ["n"])
    lines = [
        "# title",
        "",
        "name     n  last",
        "a      1.5",
        "bcd   22.5  x y",
        "",
        "",
        "- note | with a bar",
    ]
    assert aligned(f"# title\n\n{markdown}\n\n- note | with a bar").split("\n") == lines
    assert "|" not in FORMATS["text"](records)


@pytest.mark.parametrize(
    "text", ["", "[]", "no json", "[1]", '{"preset": "cpu-study", "model_filename": "x"}', "[" * 10**5]
)
def test_other_files_are_no_records(text, tmp_path):
    (tmp_path / "x").write_text(text)
    with pytest.raises(RequestError, match="holds no records of bench"):
        read_records(tmp_path / "x")
    with pytest.raises(RequestError, match="cannot be read"):
        read_records(tmp_path / "y")


def test_a_file_of_records_may_have_a_mark_of_utf8(tmp_path):
    (tmp_path / "x").write_bytes(b'\xef\xbb\xbf[{"samples_ts": [1.0], "model_filename": "x"}]')
    assert read_records(tmp_path / "x") == [{"samples_ts": [1.0], "model_filename": "x"}]


def test_records_are_drawn(records, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    drawn = noting(monkeypatch, report, "_draw_panel", lambda axes, panel: panel)
    found = [{**records[0], "batch_size": size} for size in (8, 1)] + records[1:]
    report.draw_records(found, tmp_path / "x.svg")
    assert [panel.title for panel in drawn] == ["Reading prompts", "Generating"]
    assert drawn[0].lines == {"float32": [(size, records[0]["samples_ts"]) for size in (1, 8)]}
    assert drawn[0].x_label == "batch size (sequences)"
    assert ">int4</text>" in (tmp_path / "x.svg").read_text()
    report.draw_records(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_work_of_a_tiny_model():
    # A layer: 4 x 12 + 4 x 4 + 4 x 6 + 6 x 4 weights, 12 + 4 + 6 + 4 biases, 2 norms of 8.
    assert roofline.block_weights(TINY) == 2 * 112
    assert roofline.num_parameters(TINY) == 2 * (112 + 26 + 16) + 10 * 4 + 5 * 4 + 8
    assert roofline.weight_bytes(TINY, "float32") == 4 * (224 + 40)
    assert roofline.weight_bytes(TINY, "int4", 3, 2) == 3 * 0.625 * 224 + 2 * 40
    assert roofline.model_bytes(TINY, "bfloat16") == 2 * (224 + 40) + 4 * (2 * 42 + 20 + 8)
    assert roofline.kv_cache_bytes(TINY, "bfloat16", 7) == 7 * 2 * 2 * 4 * 2
    assert roofline.kv_cache_bytes(TINY, "int8", 7) == 7 * 2 * 2 * (4 + 4)  # a scale of the one head
    assert roofline.block_operations(TINY, 3, 5) == 3 * (2 * 224 + 2 * 5 * 2 * 4 * 2)
    assert roofline.head_operations(TINY, 3) == 3 * 2 * 40


def test_work_of_gpt2():
    assert roofline.weight_bytes(ModelConfig(), "float32") == 4 * (124_439_808 - 1024 * 768 - 121_344)
    assert roofline.block_operations(ModelConfig(), 1, 0) == 2 * 84_934_656


def test_an_untied_head_is_counted():
    untied = ModelConfig(**{**vars(TINY), "tie_word_embeddings": False})
    assert roofline.num_parameters(untied) - roofline.num_parameters(TINY) == 40
    assert roofline.model_bytes(untied, "int4") - roofline.model_bytes(TINY, "int4") == 40
    assert roofline.weight_bytes(untied, "int4") == roofline.weight_bytes(TINY, "int4")


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_parameters_of_other_families(name, tmp_path):
    """All that are in the files, and zeros and ones for what they leave out; a table of positions begins at row 2."""
    checkpoint = open_checkpoint(write_family(tmp_path, name))
    count = sum(np.prod(shape) for shape in parameter_shapes(checkpoint.config).values())
    tied = checkpoint.tensor("wte.weight").size if checkpoint.tied else 0
    assert roofline.num_parameters(checkpoint.config) == count - tied


def test_parameters_of_experts(tmp_path):
    checkpoint = open_checkpoint(write_moe(tmp_path, moe_arrays()))
    assert roofline.num_parameters(checkpoint.config) == sum(array.size for array in moe_arrays().values())
