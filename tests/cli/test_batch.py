"""`tinygpt generate --input`: every line is checked first, records come as they finish, runs are continued."""

import errno
import io
import json
import os
import re
import shutil
import stat
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.gate import noting
from support.paths import DEMO, EOS
from support.tables import column
from tinygpt import LLM, SamplingParams
from tinygpt.cli import batch, streams
from tinygpt.cli import main as cli
from tinygpt.cli.batch import Earlier, open_records, read_earlier
from tinygpt.cli.streams import PromptRecord, counted
from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.weights import hub

LINES = column("""
{"id": "fox", "prompt": "The fox", "max_tokens": 12}
{"prompt": "It was", "seed": 3, "n": 2}
{"id": 17, "prompt": [11, 275, 590], "temperature": 0.0, "logprobs": 2}
{"id": "é", "prompt_token_ids": [], "stop": ["the", "."]}
""")
IDS = ["fox", 2, 17, "é"]
# Its second token can be none, which is found out when it is drawn.
FAILS = {"id": "lost", "prompt": "The", "allowed_token_ids": [11], "no_repeat_ngram_size": 1}
FLAGS = ["--max-tokens", "6", "--seed", "5"]
BASE = {"max_tokens": 6, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 5}


class Batch:
    """A folder with prompts.jsonl and, once it has run, out.jsonl."""

    def __init__(self, folder, capsys):
        self.input = folder / "prompts.jsonl"
        self.output = folder / "out.jsonl"
        self.capsys = capsys
        self.write(LINES)

    def write(self, lines):
        texts = [line if isinstance(line, (str, bytes)) else json.dumps(line) for line in lines]
        self.input.write_bytes(
            b"".join((text.encode() if isinstance(text, str) else text) + b"\n" for text in texts)
        )

    def run(self, *flags, output=True):
        target = ["--output", str(self.output)] if output else []
        code = cli.main(["generate", "--input", str(self.input), *target, *FLAGS, *flags])
        self.out, self.err = self.capsys.readouterr()
        return code

    def records(self):
        return read_records(self.output.read_text(encoding="utf-8"))


def read_records(text):
    """The records by their ids, without their times."""
    records = [json.loads(line) for line in text.splitlines()]
    by_id = {record["id"]: {k: v for k, v in record.items() if k != "metrics"} for record in records}
    assert len(by_id) == len(records)
    return by_id


def record(record_id, prompt, model="demo", dtype="float32") -> bytes:
    fields = {"id": record_id, "model": model, "dtype": dtype, "prompt": prompt, "prompt_token_ids": [1]}
    return json.dumps(fields).encode() + b"\n"


def generated(llm: LLM, prompt: object, **fields) -> dict:
    """The library's record, without what identifies it and its times."""
    (output,) = llm.generate([prompt], SamplingParams(**{**BASE, **fields}))
    record = {name: value for name, value in asdict(output).items() if name != "metrics"}
    return json.loads(json.dumps(record))


@pytest.fixture
def jobs(tmp_path, capsys):
    return Batch(tmp_path, capsys)


@pytest.fixture
def no_model(monkeypatch):
    def load(*arguments):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(batch, "load_llm", load)


def test_records_are_what_generate_returns(jobs):
    assert jobs.run() == 0
    records = jobs.records()
    assert sorted(records, key=str) == sorted(IDS, key=str)
    with LLM("demo") as llm:
        for record_id, line in zip(IDS, LINES, strict=True):
            prompt = line.get("prompt", line.get("prompt_token_ids"))
            fields = {
                name: value
                for name, value in line.items()
                if name not in ("id", "prompt", "prompt_token_ids")
            }
            expected = generated(llm, prompt, **fields) | {
                "id": record_id,
                "model": "demo",
                "dtype": "float32",
            }
            assert records[record_id] | {"num_cached_tokens": 0} == expected | {"num_cached_tokens": 0}
    assert jobs.out == ""
    figures = r"prompt \d+ tokens, .*/s; generation \d+ tokens, .*/s; load .* s"
    [said] = [line for line in jobs.err.splitlines() if "compiling kernels" not in line]
    assert re.fullmatch(rf"tinygpt: 4 prompts: {figures}; seeds .*", said)
    assert jobs.run(output=False) == 0
    assert read_records(jobs.out) == records


def test_drawn_seeds_are_in_the_records_and_repeat_them(jobs):
    jobs.write([{"prompt": "The fox"}, {"prompt": "The fox"}])
    cli.main(["generate", "--input", str(jobs.input), "--output", str(jobs.output), "--max-tokens", "8"])
    first, second = (record["outputs"] for record in jobs.records().values())
    assert first[0]["seed"] != second[0]["seed"]
    assert max(first[0]["seed"], second[0]["seed"]) < 2**53  # exact in any JSON reader
    jobs.write([{"prompt": "The fox", "seed": first[0]["seed"], "max_tokens": 8}])
    jobs.run(output=False)
    assert read_records(jobs.out[jobs.out.index('{"id"') :])[1]["outputs"] == first


def test_blank_lines_hold_no_prompt_but_count(jobs):
    jobs.write(["", {"prompt": "a"}, "  ", {"prompt": "b"}, "\r"])
    assert jobs.run() == 0
    assert set(jobs.records()) == {2, 4}
    jobs.write([b"\xef\xbb\xbf" + json.dumps({"id": "marked", "prompt": "a"}).encode()])
    assert jobs.run(output=False) == 0
    assert set(read_records(jobs.out)) == {"marked"}


def test_an_empty_file_gives_no_records(jobs, no_model):
    jobs.write([])
    assert jobs.run() == 0
    assert jobs.output.read_bytes() == b""
    assert jobs.err == f"tinygpt: --input {jobs.input} holds no prompt, so there is nothing to do\n"


def test_a_line_may_be_token_ids_alone(jobs):
    """As FasterTransformer's start_ids.csv has them."""
    jobs.write(["318, 262,338 ", {"prompt": [318, 262, 338]}])
    assert jobs.run() == 0
    alone, other = (found | {"id": None} for found in jobs.records().values())
    assert (alone, alone["prompt_token_ids"]) == (other, [318, 262, 338])


def test_a_second_run_does_nothing_until_a_prompt_is_added(jobs, monkeypatch):
    jobs.run()
    before = jobs.output.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(batch, "load_llm", None)
        assert jobs.run("--temperature", "0") == 0
    assert "4 of 4 prompts skipped" in jobs.err
    assert "to make them with other flags, name another file" in jobs.err
    assert jobs.output.read_bytes() == before
    jobs.write([*LINES, {"prompt": "One more"}])
    assert jobs.run() == 0
    assert jobs.output.read_bytes().startswith(before)
    assert set(jobs.records()) == {*IDS, 5}


def test_an_interrupted_run_is_continued(jobs, monkeypatch):
    jobs.run("--max-num-seqs", "2")
    whole = jobs.records()
    jobs.output.unlink()
    written = []

    def record_line(*arguments):
        assert jobs.output.read_bytes().count(b"\n") == len(written)  # each is in the file at once
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(arguments[0])
        return batch_line(*arguments)

    batch_line = batch.record_line
    with monkeypatch.context() as patched:
        patched.setattr(batch, "record_line", record_line)
        assert jobs.run("--max-num-seqs", "2") == 130
    again = f"2 of 4 prompts answered, in {jobs.output}; give the same command again to continue"
    assert jobs.err == f"tinygpt: interrupted: {again}\n"
    assert list(jobs.records()) == written
    assert jobs.run("--max-num-seqs", "2") == 0
    assert "2 of 4 prompts skipped" in jobs.err
    assert jobs.records() == whole


def test_a_record_half_written_is_made_again(jobs):
    jobs.run()
    whole = jobs.records()
    data = jobs.output.read_bytes()
    second = data.index(b"\n") + 1
    third = data.index(b"\n", second) + 1
    for cut in (1, second - 2, second - 1, second, second + 1, second + 9, second + 40, third - 2, third - 1):
        jobs.output.write_bytes(data[:cut])
        assert jobs.run() == 0
        num_whole = (cut >= second - 1) + (cut >= third - 1)  # the end of its line is no part of a record
        assert f"{4 - num_whole} prompts: " in jobs.err
        num_lost = cut - (0, second, third)[num_whole]
        lost = f"ends in half a record of {counted(num_lost, 'byte')}, as a killed run leaves it"
        assert (lost in jobs.err, "half a record" in jobs.err) == (num_lost > 0, num_lost > 0)
        assert jobs.records() == whole


def test_a_folder_may_be_spelled_in_several_ways(jobs, monkeypatch):
    assert jobs.run("--model", str(DEMO)) == 0
    monkeypatch.chdir(DEMO.parent)
    assert jobs.run("--model", "./demo/") == 0
    assert f"{len(LINES)} of {len(LINES)} prompts skipped" in jobs.err
    assert jobs.run("--model", str(DEMO.parent)) == 2


def test_a_prompt_that_fails_late_has_a_record_and_the_others_are_done(jobs):
    assert jobs.run() == 0
    whole = jobs.records()
    jobs.output.unlink()
    jobs.write([*LINES, FAILS])
    assert jobs.run() == 1
    failed = jobs.records().pop("lost")
    assert {name: record for name, record in jobs.records().items() if name != "lost"} == whole
    assert "leave no token to choose at position 2" in failed.pop("error")
    ids = whole["fox"]["prompt_token_ids"][:1]
    assert failed == {
        "id": "lost",
        "model": "demo",
        "dtype": "float32",
        "prompt": "The",
        "prompt_token_ids": ids,
    }
    assert "tinygpt: 5 prompts: prompt" in jobs.err
    again = f"to have them tried again, remove these lines from {jobs.output}."
    assert jobs.err.endswith(
        f'tinygpt: error: 1 of 5 prompts failed: "error" in their records says why; {again}\n'
    )


def test_what_has_failed_is_no_success_until_it_is_tried_again(jobs, no_model, monkeypatch):
    lines = [{"id": "lost", "prompt": "The"}, {"id": "fox", "prompt": "The fox"}]
    jobs.write(lines)
    found = [json.loads(record(line["id"], line["prompt"])) for line in lines]
    found[0]["error"] = "why"
    jobs.output.write_text("".join(json.dumps(one) + "\n" for one in found))
    assert jobs.run() == 1
    assert "2 of 2 prompts skipped" in jobs.err
    assert "1 of 2 prompts failed" in jobs.err
    jobs.output.write_text(json.dumps(found[1]) + "\n")
    monkeypatch.undo()
    assert jobs.run() == 0
    assert list(jobs.records()) == ["fox", "lost"]


def test_on_stdout_a_failure_is_a_record_too(jobs):
    jobs.write([FAILS, LINES[0]])
    assert jobs.run(output=False) == 1
    assert {name for name, record in read_records(jobs.out).items() if "error" in record} == {"lost"}
    assert jobs.err.endswith('tinygpt: error: 1 of 2 prompts failed: "error" in their records says why.\n')


@pytest.mark.parametrize(
    "content", [b"my only copy", b'{"id": ' + b"[" * 100_000 + b"\n"], ids=["no end of line", "deep"]
)
def test_a_file_with_anything_else_is_left_alone(jobs, no_model, content):
    jobs.output.write_bytes(content)
    assert jobs.run() == 2
    assert f"line 1 of --output {jobs.output} is not a record" in jobs.err
    assert jobs.output.read_bytes() == content


def test_lines_of_any_size_are_refused(jobs, no_model):
    jobs.write(['{"prompt": "a", "top_k": ' + "[" * 100_000, {"prompt": "a", "logit_bias": {"1" * 5000: 2}}])
    assert jobs.run() == 2
    _, deep, wide = jobs.err.splitlines()
    assert deep.startswith("  line 1: not JSON")
    assert wide.startswith("  line 2: logit_bias is ")


ODD = {"id": 1.5, "prompt": 3, "foo": 1, "bar": 2, "temperature": -1, "top_k": "x"}
FAULTS = [
    (
        [ODD, {"prompt": "a"}, "nope"],
        "2 lines of",
        [
            'line 1: unknown field "foo"',
            'line 1: unknown field "bar"',
            "line 1: id is 1.5",
            "line 1: one field prompt",
            "line 1: temperature is -1",
            "line 1: top_k is 'x'",
            "line 3: not JSON",
        ],
    ),
    (  # by the model, too
        [
            {"prompt": "a", "foo": 1, "max_tokens": 10**5},
            {"prompt": [10**8]},
            {"prompt": 3, "stop_token_ids": [10**7], "suppress_tokens": [10**8], "temperature": -1},
            {"prompt": "a", "lora_request": "pirate"},
        ],
        "4 lines of",
        [
            'line 1: unknown field "foo"',
            "line 1: prompt has 1 token and max_tokens is 100000",
            "line 2: token id 100000000 is outside",
            "line 3: one field prompt",
            "line 3: temperature is -1",
            "line 3: stop_token_ids",
            "line 3: suppress_tokens",
            "line 4: lora_request",
        ],
    ),
]


@pytest.mark.parametrize(("lines", "count", "told"), FAULTS)
def test_all_faults_of_all_lines_are_told_at_once(jobs, no_model, lines, count, told):
    jobs.write(lines)
    assert jobs.run() == 2
    headline, *faults = jobs.err.splitlines()
    assert count in headline
    assert [fault[: len(one) + 2] for fault, one in zip(faults, told, strict=True)] == [
        f"  {one}" for one in told
    ]


def test_faults_of_lines_are_told_without_the_model(jobs, no_model):
    jobs.write([{"prompt": "a", "foo": 1}, {"prompt": [10**8]}])
    assert jobs.run("--model", "/nowhere") == 2
    assert jobs.err.splitlines()[1:] == ['  line 1: unknown field "foo".']


@pytest.mark.parametrize("flags", [["--model", "owner/name"], ["--lora", "owner/name"]])
def test_nothing_is_downloaded_for_a_file_with_faults(jobs, no_model, monkeypatch, flags):
    fetched = noting(monkeypatch, hub, "_fetch", lambda name, patterns: name)
    jobs.write([{"prompt": "a", "foo": 1}])
    assert jobs.run(*flags) == 2
    assert jobs.err.splitlines()[1:] == ['  line 1: unknown field "foo".']
    assert fetched == []


def test_fields_that_are_null_are_not_given(jobs):
    jobs.write([{"id": None, "prompt": "a", "prompt_token_ids": None, "priority": None}, {"prompt": "a"}])
    assert jobs.run() == 0
    first, second = jobs.records().values()
    assert first | {"id": 2} == second


@pytest.mark.parametrize("flags", [["--input-format", "text", "--input"], ["--sample_input_file"]])
def test_a_text_file_has_a_prompt_in_each_line(tmp_path, capsys, flags):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfThe fox\r\n\n1, 2\n")
    assert cli.main(["generate", *flags, str(path), *FLAGS, "--sampling-top-k", "3"]) == 0
    records = read_records(capsys.readouterr().out)
    assert {name: found["prompt"] for name, found in records.items()} == {1: "The fox", 3: "1, 2"}
    path.write_bytes(b"a\nb\xff\n")
    assert cli.main(["generate", *flags, str(path)]) == 2
    assert "line 2: not UTF-8 text: see its byte 1" in capsys.readouterr().err


MARK = b"\xef\xbb\xbf"  # of UTF-8, as editors on Windows write it


@pytest.mark.parametrize(
    ("flags", "content", "prompts"),
    [
        (["--input"], MARK + b"1, 2\n", [[1, 2]]),
        (["--input"], MARK + b"\r\n" + MARK + b'{"prompt": "a"}\n', ["a"]),
        (["--input-format", "text", "--input"], MARK + b"\na\n" + MARK + b"b\n", ["a", "b"]),
        (["--json", "--file"], MARK + b"The fox", ["The fox"]),
    ],
)
def test_a_mark_of_utf8_is_no_part_of_a_text(tmp_path, capsys, flags, content, prompts):
    path = tmp_path / "prompts"
    path.write_bytes(content)
    assert cli.main(["generate", *flags, str(path), *FLAGS]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    key = "prompt_token_ids" if prompts == [[1, 2]] else "prompt"
    assert [record[key] for record in records] == prompts


@pytest.mark.parametrize("flags", [[], ["--input-format", "text"]])
def test_the_byte_at_fault_is_counted_with_the_mark(tmp_path, capsys, flags):
    path = tmp_path / "prompts"
    path.write_bytes(MARK + b'{"b\xff"}\n')
    assert cli.main(["generate", "--input", str(path), *flags]) == 2
    assert "line 1: not UTF-8 text: see its byte 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "content"), [("--grammar-file", b'start: "a"'), ("--config", b"guided-regex: a")]
)
def test_files_of_flags_may_have_the_mark(tmp_path, capsys, flag, content):
    path = tmp_path / "file"
    path.write_bytes(MARK + content)
    pytest.importorskip("llguidance")
    assert cli.main(["generate", "The fox", flag, str(path), *FLAGS]) == 0
    assert capsys.readouterr().out == "a\n"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("dangling", "absent of --output"),
        ("loop", "cannot be written"),
        ("n" * 300, "cannot be written"),
    ],
    ids=lambda value: value[:20],
)
def test_an_output_that_cannot_be_one(jobs, no_model, path, says):
    for name, target in (("dangling", "absent/x"), ("loop", "loop")):
        (jobs.input.parent / name).symlink_to(target)
    jobs.output, before = jobs.input.parent / path, jobs.input.read_bytes()
    assert jobs.run() == 2
    assert says in jobs.err
    assert jobs.input.read_bytes() == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_reported(jobs):
    jobs.output = Path("/dev/full")
    assert jobs.run() == 1
    assert "--output /dev/full cannot be written (No space left on device)" in jobs.err


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that takes any bytes for a name")
def test_a_folder_whose_name_is_not_text(jobs, tmp_path, capsys):
    folder = str(tmp_path / os.fsdecode(b"caf\xe9"))
    shutil.copytree(DEMO, folder)
    assert jobs.run("--model", folder) == 0
    assert {record["model"] for record in jobs.records().values()} == {folder}
    assert jobs.run("--model", folder) == 0
    assert "4 of 4 prompts skipped" in jobs.err
    assert cli.main(["info", "--json", folder]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == folder


def test_a_terminal_shows_a_progress_bar(jobs, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert jobs.run() == 0
    assert "4/4" in terminal.getvalue()


def test_a_log_has_a_line_now_and_then(jobs, monkeypatch):
    assert jobs.run() == 0
    assert "answered" not in jobs.err  # it takes less
    jobs.output.unlink()
    monkeypatch.setattr(streams, "INTERVAL", 0.0)
    assert jobs.run() == 0
    said = [line for line in jobs.err.splitlines() if "answered" in line]
    assert said == [f"tinygpt: {number} of 4 prompts answered" for number in (1, 2, 3)]


def test_lines_take_every_field(jobs, llm):
    """As JSON spells them: token ids of logit_bias are texts there."""
    embeds = [[0.5] * llm.config.n_embd] * 3
    lines = [
        {"prompt": "The fox", "logit_bias": {"11": -5, "13": 2.5}, "repetition_penalty": 1.2, "min_p": 0.1},
        {
            "prompt": "The fox",
            "num_beams": 3,
            "n": 2,
            "early_stopping": "never",
        },  # temperature 0, as none is given
        {
            "prompt": "The fox",
            "repetition_detection": {"max_pattern_size": 2, "min_count": 3},
            "bad_words": ["the"],
        },
        {"prompt": "The fox", "prompt_logprobs": 1, "logprobs_mode": "processed", "logprobs": 0},
        {"prompt": "The fox", "prompt_embeds": embeds, "top_p_rule": "openai", "typical_p": 0.9},
    ]
    jobs.write(lines)
    assert jobs.run() == 0
    records = jobs.records()
    lines[0]["logit_bias"] = {11: -5, 13: 2.5}
    lines[1]["temperature"] = 0
    for number, line in enumerate(lines, 1):
        expected = generated(llm, **line)
        assert records[number]["outputs"] == expected["outputs"]
        assert records[number]["prompt_logprobs"] == expected["prompt_logprobs"]


def test_what_was_cut_off_is_counted_and_in_the_records(jobs, monkeypatch):
    ids = [11] * 40
    jobs.write([{"prompt": ids}, {"prompt": [5]}, {"prompt": ids, "overflow": "slide"}])
    flags = ["--max-model-len", "32", "--overflow", "truncate"]
    assert jobs.run(*flags) == 0
    assert "tinygpt: 2 prompts truncated" in jobs.err
    records = jobs.records()
    assert [records[i]["num_truncated_tokens"] for i in (1, 2, 3)] == [14, 0, 16]
    monkeypatch.setattr(batch, "load_llm", None)  # all are answered: the whole prompts are in the records
    assert jobs.run(*flags) == 0


def test_soft_prompts_are_for_all_lines_or_chosen_by_name(jobs, llm, tmp_path):
    paths, width = {}, llm.config.n_embd
    for name in ("one", "two"):
        embeds = np.random.default_rng(len(paths)).normal(size=(4, width)).astype(np.float32)
        paths[name] = tmp_path / f"{name}.safetensors"
        save_file({"prompt_embeddings": embeds}, paths[name])
    jobs.write(
        [{"prompt": "The"}, {"prompt": "The", "soft_prompt": "two"}, {"prompt": "The", "soft_prompt": None}]
    )
    flags = [flag for name, path in paths.items() for flag in ("--soft-prompt", f"{name}={path}")]
    assert jobs.run("--logprobs", "0", *flags) == 0
    records = jobs.records()
    with LLM("demo", soft_prompts=paths) as llm:
        for number, name in enumerate(("one", "two", None), 1):
            expected = generated(llm, "The", soft_prompt=name, logprobs=0)
            assert records[number]["outputs"] == expected["outputs"]


@pytest.mark.parametrize("flags", [[], ["--no-special-tokens"]])
def test_a_line_says_how_special_tokens_in_its_prompt_are_read(jobs, flags):
    text = "The end.<|endoftext|>"
    given = {"said": None, "split": True, "not split": False}
    jobs.write([{"id": name, "prompt": text, "split_special_tokens": split} for name, split in given.items()])
    assert jobs.run(*flags) == 0, jobs.err
    with LLM("demo", split_special_tokens=bool(flags)) as llm:
        for name, split in given.items():
            assert jobs.records()[name]["prompt_token_ids"] == llm.read_prompt(text, split).token_ids
    ends = {name: record["prompt_token_ids"][-1] == EOS for name, record in jobs.records().items()}
    assert ends == {"said": not flags, "split": False, "not split": True}


PROMPTS = [
    PromptRecord(*fields, None, SamplingParams()) for fields in ((1, 1, "The fox"), (2, "é", "It was"))
]


def test_records_are_on_the_disk_a_second_later(tmp_path, monkeypatch):
    synced, now = [], 0.0

    def fsync(descriptor: int) -> None:
        synced.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(batch.time, "monotonic", lambda: now)
    with open_records(tmp_path / "out", Earlier()) as write:
        assert synced == ["folder"]  # that the file is there at all
        for now, count in [(0.1, 1), (0.9, 1), (1.0, 2), (1.5, 2), (30, 3)]:
            write("line")
            assert len(synced) == count, now
    assert synced == ["folder", *["file"] * 3]
    assert (tmp_path / "out").read_bytes() == b"line\n" * 5


@pytest.mark.parametrize("room", range(12))
def test_a_full_disk_names_the_file(tmp_path, monkeypatch, room):
    path = tmp_path / "out"
    text = '{"id": 1}\n{"id": 1}'

    class File(io.FileIO):
        def write(self, data) -> int:
            left = room - self.tell()
            if not left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data[:left])

    monkeypatch.setattr(Path, "open", lambda path, mode, **_: File(path, mode.replace("b", "")))
    says = rf"--output {path} cannot be written \(No space left on device\): .* give the same command again"
    with open_records(path, Earlier()) as write, pytest.raises(TinyGPTError, match=says):
        write(text)
    assert path.read_bytes() == text.encode()[:room]


def test_a_failing_sync_is_an_error(tmp_path, monkeypatch):
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    says = "--output .* cannot be written"
    with pytest.raises(TinyGPTError, match=says), open_records(tmp_path / "out", Earlier()):
        monkeypatch.setattr(os, "fsync", fsync)


def test_a_complete_record_without_the_end_of_its_line_is_kept(tmp_path):
    path = tmp_path / "out"
    line = record(1, "The fox").decode().rstrip()
    path.write_text(line)
    earlier = read_earlier(path, PROMPTS, "demo", "auto")
    assert (earlier.ids, earlier.num_lost_bytes) == ({1}, 0)
    with open_records(path, earlier) as write:
        write("next")
    assert path.read_text() == f"{line}\nnext\n"
    for cut in range(1, len(line)):
        path.write_text(line[:-cut])
        found = read_earlier(path, PROMPTS, "demo", "auto")
        assert (found.ids, found.num_lost_bytes, found.lacks_newline) == (frozenset(), len(line) - cut, False)


def test_two_runs_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "out"
    with open_records(path, Earlier()) as write:
        write("first")
        with pytest.raises(RequestError, match="is being written by another run: wait for its end"):
            open_records(path, Earlier()).__enter__()
    with pytest.raises(RequestError, match="has been written to by another run meanwhile"):
        open_records(path, Earlier()).__enter__()  # it had looked before the first run wrote
    with open_records(path, Earlier(size=6)) as write:
        write("second")
    assert path.read_text() == "first\nsecond\n"


def test_a_fault_is_told_of_the_line_and_not_of_a_field_alone(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a", "min_tokens": 50, "max_tokens": 100, "top_p": 7, "temperature": -1}\n')
    with pytest.raises(RequestError) as caught:
        streams.read_prompts(path, SamplingParams(), path.read_bytes())
    assert "min_tokens" not in str(caught.value)
    assert "top_p is 7" in str(caught.value)
    assert "temperature is -1" in str(caught.value)
