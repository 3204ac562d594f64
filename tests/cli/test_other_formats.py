"""What is given to --input and is no JSONL: a sentence for each, and advice that works when it is typed as it is."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.commands import Outcome
from tinygpt import SamplingParams
from tinygpt.cli.input.prompts_file import read_lines
from tinygpt.errors import RequestError

pytestmark = pytest.mark.usefixtures("llm")  # its kernels are compiled: stderr is free of the notice of a first run
LINES = b'{"prompt": "Once", "max_tokens": 1}\n{"prompt": "Then", "max_tokens": 1}\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def read(capsys):
    """`generate --input NAME`."""
    return lambda name: Outcome(capsys, ["generate", "--input", name, "--max-tokens", "1"])


def follow(advice: str) -> tuple[str, list[dict]]:
    """Typed as it is said, in a shell: the file that it makes, and the lines there."""
    subprocess.run(advice, shell=True, check=True)
    made = shlex.split(advice)[-1]
    return made, [json.loads(line) for line in Path(made).read_text(encoding="utf-8").splitlines()]


def test_the_advice_for_lines_of_text_makes_prompts_of_them(read, folder):
    """For a name that needs quotes, beside a file that the advice must not write over."""
    (folder / "a tale.txt").write_text('Once "upon"\n\n  a $time\n', encoding="utf-8")
    for made in ("a tale.txt.jsonl", "a tale.txt-2.jsonl"):
        name, lines = follow(read("a tale.txt").err.partition("of text, type ")[2])
        assert name == made
        assert lines == [{"prompt": 'Once "upon"'}, {"prompt": "a $time"}]
        assert read(made).code == 0


@pytest.mark.parametrize(
    ("name", "table", "column", "prompts"),
    [
        (
            "a table.csv",
            'id,prompt\n1,"Once, ""upon""\n a time"\n2,Then\n',
            "prompt",
            ['Once, "upon"\n a time', "Then"],
        ),
        ("semicolons.CSV", '\ufefftale\'s;n\nOnce;1\n"Th;en";2\n', "tale's", ["Once", "Th;en"]),
        ("tabs.tsv", "prompt\tn\nOnce, then\t1\n", "prompt", ["Once, then"]),
        ("blank_lines.csv", "\n \r\nprompt\nOnce\n\nThen\n", "prompt", ["Once", "Then"]),
        ("returns.csv", "id,prompt\r1,Once\r2,Then\r", "prompt", ["Once", "Then"]),
        ("line_in_a_name.csv", '"first\nname",n\nOnce,1\n', "first\\nname", ["Once"]),
        ("called_otherwise.csv", "id,text\n1,Once\n", "text", ["Once"]),
        ("no_name.csv", ',n\n"Once",1\n', "", ["Once"]),
    ],
)
def test_the_advice_for_a_table_makes_prompts_of_its_rows(read, folder, name, table, column, prompts):
    (folder / name).write_bytes(table.encode())
    for made in (Path(name).with_suffix(".jsonl"), Path(name).with_suffix("").with_name(f"{Path(name).stem}-2.jsonl")):
        refused = read(name)
        assert refused.code == 2
        assert f"--input {name} is a table by its name, and must be JSONL" in refused.err
        target, lines = follow(refused.err.partition(f'each row\'s "{column}", type ')[2])
        assert target == str(made)
        assert lines == [{"prompt": prompt} for prompt in prompts]
        assert read(target).code == 0


@pytest.mark.parametrize("table", ["x" * 300 + "\nOnce\n", '"Once upon' + " a time" * 20_000])
def test_a_table_without_names_is_refused_alone(read, folder, table):
    (folder / "table.csv").write_text(table, encoding="utf-8")
    refused = read("table.csv")
    assert refused.code == 2
    assert refused.err.endswith("must be JSONL (a text that is one prompt is for --file).\n")


@pytest.mark.parametrize("name", ["lines.csv", "lines.TSV", "lines.jsonl"])
@pytest.mark.parametrize("begin", [b"", b"\n", b"\xef\xbb\xbf"])
def test_jsonl_may_be_called_otherwise(read, folder, name, begin):
    (folder / name).write_bytes(begin + LINES)
    assert read(name).code == 0


@pytest.mark.parametrize("begin", [b"", b"\n", b"\xef\xbb\xbf"])
def test_an_array_is_refused_as_a_whole(read, folder, begin):
    (folder / "array.json").write_bytes(begin + b'[{"prompt": "Once"}]')
    refused = read("array.json")
    assert refused.code == 2
    assert "--input array.json is a JSON array" in refused.err


PIECES = [b'{"prompt": "Once"}\n', b'"', b",", b";", b"\t", b"\r", b"\n", b"[", b"{", b"\xef\xbb\xbf"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["table.csv", "table.tsv"]),
    parts=st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=6),
)
def test_any_bytes_called_a_table_are_read_or_refused(folder, name, parts):
    """With nothing but RequestError, and no line is left out."""
    data = b"".join(parts)
    (folder / name).write_bytes(data)
    try:
        file = read_lines(Path(name), SamplingParams())
        file.refuse({})
    except RequestError:
        return
    assert len(file.records) == sum(bool(line.strip()) for line in data.split(b"\n"))
