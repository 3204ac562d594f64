"""JSON, CSV and tables of records."""

import csv
import io
import json

import pytest

from support.bench_records import (
    COMPARE_KEYS,
    LLAMA_BENCH_KEYS,
    SAMPLES,
    generation_record,
    prompt_record,
)
from tinygpt.bench.formats import COLUMNS, FORMATS, aligned, significant, table, to_markdown


@pytest.fixture
def records():
    return [prompt_record(), generation_record()]


def test_json_is_an_array_and_jsonl_a_line_each(records):
    assert json.loads(FORMATS["json"](records)) == records
    assert [json.loads(line) for line in FORMATS["jsonl"](records).split("\n")] == records


def test_csv_has_a_header_and_no_samples(records):
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](records))))
    assert len(rows) == 2
    assert set(rows[0]) == set(records[0]) - set(SAMPLES)
    assert set(rows[0]) >= {*LLAMA_BENCH_KEYS.split(), *COMPARE_KEYS.split()}
    assert float(rows[0]["avg_ts"]) == records[0]["avg_ts"]
    assert rows[0]["cpu_strict"] == "0"
    assert rows[1]["first_token_ms"] == ""


def test_csv_has_every_field_of_any_record():
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"]([{"a": 1}, {"b": "x,y"}]))))
    assert rows == [{"a": "1", "b": ""}, {"a": "", "b": "x,y"}]


def test_markdown_has_a_row_for_each_record(records):
    header, rule, *rows = to_markdown(records).split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (header, rule, *rows)]
    assert {len(row) for row in cells} == {len(COLUMNS)}
    assert cells[0] == list(COLUMNS)
    assert cells[2][:6] == ["tiny", "float32", "float32", "2", "4", "pp3"]
    assert cells[2][6:8] == ["6000000 (3000000 to 12000000)", "0.0001667"]
    assert cells[2][-1] == "5"
    assert cells[3][5] == "tg6 @ d3"
    assert cells[3][8] == cells[3][-1] == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.012345, "0.01235"),
        (1, "1.000"),
        (12.345678, "12.35"),
        (999.96, "1000.0"),
        (1234.5, "1234"),
        (123456.7, "123457"),
        (-3.14159, "-3.142"),
        (0, "0"),
        (float("inf"), "inf"),
    ],
)
def test_four_significant_digits(number, text):
    assert significant(number) == text


def test_a_terminal_has_columns_without_bars():
    rows = [["a", "1.5", ""], ["bcd", "22.5", "x y"], ["", "", ""]]
    markdown = table(["name", "n", "last"], rows, ["n"])
    assert aligned(f"# title\n\n{markdown}\n\n- note | with a bar").split("\n") == [
        "# title",
        "",
        "name     n  last",
        "a      1.5",
        "bcd   22.5  x y",
        "",
        "",
        "- note | with a bar",
    ]


def test_text_is_the_markdown_without_its_bars(records):
    text, markdown = FORMATS["text"](records), to_markdown(records)
    assert "|" not in text
    assert text.split() == [word for word in markdown.split() if word.strip("|-:") or word == "-"]
    ends = [line.index("ms/token") + len("ms/token") for line in text.splitlines()[:1]]
    assert all(line[ends[0] - 1] != " " and line[ends[0]] == " " for line in text.splitlines()[:3])


def test_only_what_occurs_is_explained(records):
    reading, generating = to_markdown(records[:1]), to_markdown(records[1:])
    assert "pp reads a prompt" in reading
    assert "first token: from" in reading
    assert "tg" not in reading.split("\n\n")[1]
    assert "tg generates after" in generating
    assert "KV cache" in generating
    assert "pp" not in generating.split("\n\n")[1]
    both = to_markdown(records)
    assert all(words in both for words in ("pp reads", "tg generates", "first token: from", "KV cache"))


def test_a_single_run_is_no_median(records):
    assert "; single runs.\n" in to_markdown(records[1:])


def test_what_is_outside_the_model_has_a_column(records):
    assert to_markdown(records).splitlines()[3].split("|")[-3].strip() == "75.0%"


def test_markdown_names_the_machine_and_its_limits(records):
    text = to_markdown(records)
    assert "A CPU, build abcdef01; medians of 3 runs" in text
    assert "40.0 GB/s with 2 threads." in text
    both = "200 in the blocks and 100 in the head"
    assert f"200 in float32 with 2 threads, {both} in int4 with 2 threads." in text
    alike = [record | {"head_peak_gflops": 200} for record in records]
    assert "200 in float32 with 2 threads, 200 in int4 with 2 threads." in to_markdown(alike)


def test_a_share_above_all_is_shown_as_it_is(records):
    text = to_markdown([record | {"bandwidth_share": 1.234} for record in records])
    assert "(123%)" in text
    assert "the limit is itself a measurement, of a plain loop" in text


def test_more_threads_than_cores_are_noted(records, monkeypatch):
    monkeypatch.setattr("tinygpt.bench.formats.logical_cores", lambda: 1)
    assert "- 2 threads share 1 logical core, and wait for one another." in to_markdown(records)
    monkeypatch.setattr("tinygpt.bench.formats.logical_cores", lambda: 2)
    assert "share" not in to_markdown(records).replace("the share", "")
