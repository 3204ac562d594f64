"""`tinygpt bench`: what it prints and writes, and what it refuses before any work."""

import json
import math
import sys
from pathlib import Path

import pytest

from support.bench_records import LIMITS
from support.family_models import write_family
from support.paths import ROOT
from tinygpt.bench import measure, plan
from tinygpt.bench.presets import rerun
from tinygpt.bench.sweep import run_case
from tinygpt.cli import main as cli
from tinygpt.cli.output import results_file
from tinygpt.cli.output.results_file import check_writable
from tinygpt.errors import CheckpointError, RequestError, TinyGPTError
from tinygpt.kernels import cpu as kernels


@pytest.fixture
def no_limits(monkeypatch):
    """Not the machine's: it takes a while."""
    monkeypatch.setattr(plan, "measure_limits", lambda dtype, threads: LIMITS)


QUICK = "bench --random tiny --batch-sizes 1,2 --prompt-lengths 4 --new-tokens 3 --repetitions 2 --threads 1"


def test_the_command_prints_a_table(no_limits, capsys):
    assert cli.main(QUICK.split()) == 0
    out, err = capsys.readouterr()
    tests = [line.split("|")[6].strip() for line in out.splitlines() if line.startswith("| random:tiny ")]
    assert tests == ["pp4", "tg3 @ d4"] * 2
    assert "4 cases of random:tiny" in err


def test_the_command_writes_records(no_limits, capsys, tmp_path):
    file = tmp_path / "records.json"
    assert cli.main([*QUICK.split(), "--json", "--dtype", "float32,int8", "--output", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("| model | dtype |")  # the table is shown as well
    assert out.count("| random:tiny |") == 8
    assert f"the results are in {file}" in err
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [(r["dtype"], r["batch_size"], r["n_prompt"], r["n_gen"], r["n_depth"]) for r in found] == [
        (dtype, size, *counts) for dtype in ("float32", "int8") for size in (1, 2) for counts in ((4, 0, 0), (0, 3, 4))
    ]
    for record in found:
        assert len(record["samples_ns"]) == len(record["samples_ts"]) == 2
        assert all(math.isfinite(v) and v >= 0 for v in record.values() if isinstance(v, (int, float)))
    assert cli.main(["bench", "--compare", str(file), str(file)]) == 0
    out = capsys.readouterr().out
    assert out.count("random:tiny, float32, threads 1, batch ") == 4
    assert out.count("+0.0%") >= 8


def test_the_kv_cache_is_the_one_that_is_asked_for(no_limits, capsys, monkeypatch):
    """It is given one of float32, for which the step is compiled already."""
    made, new_kv_cache = [], kernels.new_kv_cache
    monkeypatch.setattr(
        kernels, "new_kv_cache", lambda *sizes: made.append(sizes[-1]) or new_kv_cache(*sizes[:-1], "float32")
    )
    for flags, cache in (([], "float32"), (["--kv-cache-dtype", "BF16"], "bfloat16")):
        assert cli.main([*QUICK.split(), *flags]) == 0
        header, _, *rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line[:2] == "| "]
        assert (header[2], {row[2] for row in rows}) == ("KV cache", {cache})
    assert made == ["float32", "bfloat16"]


@pytest.mark.slow  # kernels of each kind compile for half a minute
@pytest.mark.parametrize("name", ["opt", "bloom-6"])
def test_other_families_are_measured_as_gpt2_is(name, no_limits, capsys, tmp_path):
    folder = write_family(tmp_path, name)
    flags = "--batch-sizes 1,2 --prompt-lengths 4 --new-tokens 3 --repetitions 1 --threads 1 --json"
    assert cli.main(["bench", "--model", str(folder), *flags.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    found = [(r["batch_size"], r["n_prompt"], r["n_gen"], r["n_depth"]) for r in found]
    assert found == [(size, *counts) for size in (1, 2) for counts in ((4, 0, 0), (0, 3, 4))]


def test_a_terminal_has_aligned_columns(no_limits, capsys, monkeypatch):
    printed = []
    for is_terminal, flags in ((False, []), (True, []), (True, ["--format", "md"]), (False, ["--format", "text"])):
        with monkeypatch.context() as patched:
            patched.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
            assert cli.main([*QUICK.split(), *flags]) == 0
        printed.append(capsys.readouterr().out.split()[0])
    assert printed == ["|", "model", "|", "model"]


def test_a_file_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    """Also behind a link, and where only the file may be written to."""
    file, link = tmp_path / "a.json", tmp_path / "link.json"
    file.write_text("old")
    link.symlink_to(file)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fail)
        with pytest.raises(TinyGPTError, match="could not be written"):
            results_file.write("new", link)
    assert file.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "link.json"]
    results_file.write("new", link)
    assert (file.read_text(), link.is_symlink()) == ("new\n", True)

    def refuse(path, data):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tinygpt.weights.stored.whole_file.replace_whole", refuse)
    results_file.write("newer", file)
    assert file.read_text() == "newer\n"


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_the_commands_other_formats(no_limits, capsys, form):
    assert cli.main([*QUICK.split(), "--format", form]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + (form == "csv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompt-lengths 500 --new-tokens 13", "take 513 positions and demo has 512"),
        ("--new-tokens 1", "must give 2 or more"),
        ("--random 125m", "--random is '125m' and must be one of tiny, 124M"),
        ("--random 125M", "--random is '125M' and must be one of tiny, 124M, 355M, 774M, 1.5B."),
        ("--random random:124M", "--random is 'random:124M' and must be one of tiny, 124M"),
        ("--preset cpu-study --random x", "--random is 'x' and must be one of tiny, 124M"),
        ("--preset cpu-study --text README.md", "cpu-study has none: omit it, or give --preset onnx-study"),
        ("--preset onnx-study --text no-such-file", "--text no-such-file cannot be read"),
        (
            "--preset onnx-study --random tiny --text setup.cfg",
            "--text needs a tokenizer and random:tiny has none",
        ),
        ("--output /dev/null/file", "the folder of --output /dev/null/file does not exist"),
        ("--plot x.png --output x.png", "--output and --plot are both x.png"),
        (
            "--plot x.png --dtype float32,int8 --batch-sizes 1,2,3,4,5,6,7 --prompt-lengths 1,2,3,4,5,6,7",
            "--plot would draw 14 lines into one picture and more than 12 cannot be told apart",
        ),
        ("--compare a", "--compare has 1 file: give pairs"),
        ("--compare a b a c", "--compare has a more than once on one side"),
        ("--small", "there is no --preset: omit --small"),
        ("--preset cpu-study --batch-sizes 4", "--preset has cases of its own: omit --batch-sizes"),
        ("--preset cpu-study --kv-cache-dtype int8", "--preset has cases of its own: omit --kv-cache-dtype"),
        ("--kv-cache-dtype int4", "--kv-cache-dtype is 'int4' and must be one of 'auto', 'float32', 'bfloat16', "),
        ("--preset cpu-study --threads 1,2", "a preset runs with one"),
        ("--compare a b --output b", "--output b is one of the files of --compare: name another"),
        ("--preset onnx-study --text a --output a", "--text a would be written over: name another file"),
        ("--compare a b --output ./tests/../a", "is one of the files of --compare: name another"),
        ("--compare a b --plot b.png", "measures nothing: omit --plot"),
        ("--compare a b --repetitions 2 --model x", "measures nothing: omit --model, --repetitions"),
        ("--json --format csv", "--json is --format json and --format is csv"),
        ("--output no/such/file", "the folder of --output no/such/file does not exist"),
        ("--output .", "--output . is a folder"),
        ("--plot no/such/file.png", "the folder of --plot"),
        ("--plot picture.gif", "picture.gif: its name must end in .png or .svg"),
        ("--compare no-such-file no-such-file", "no-such-file cannot be read"),
    ],
)
def test_what_is_impossible_is_refused_before_any_work(arguments, message, capsys, monkeypatch):
    def fail(*arguments, **names):
        raise AssertionError("work has begun")

    if "cannot be told apart" in message:  # asked once it is there
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(plan, "LLM", fail)
    monkeypatch.setattr(rerun, "LLM", fail)
    monkeypatch.setattr(plan, "measure_limits", fail)
    assert cli.main(["bench", *arguments.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (ROOT / "x.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--preset no-such-study", "--preset is 'no-such-study' and must be one of "),
        ("--threads one", "--threads is 'one' and must be a whole number, or several separated by commas"),
        ("--random 124M --model demo", "--model"),
        ("--dtype float32,", "--dtype is 'float32,' and must be one of auto, float32, bfloat16, int8, int4, or"),
        ("--dtype float32,half", "--dtype is 'half', a precision that is not here"),
    ],
)
def test_malformed_flags_end_with_the_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments.split()])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flag", ["--output", "--plot"])
@pytest.mark.parametrize("arguments", ["", "--preset cpu-study", "--compare a b"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(flag, arguments, capsys, monkeypatch, tmp_path):
    if "compare" in arguments and flag == "--plot":
        pytest.skip("--compare draws nothing")

    def refuse(path, *mode, **names):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert cli.main(["bench", *arguments.split(), flag, str(tmp_path / "x.png")]) == 2
    err = capsys.readouterr().err
    assert f"{flag} {tmp_path / 'x.png'} cannot be written (Permission denied): name a file in a folder" in err


def test_trying_a_file_changes_nothing(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    for path in (old, new, Path("/dev/null")):
        check_writable("--output", path)
    assert old.read_text() == "kept"
    assert not new.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full and /proc are Linux's")
def test_a_folder_of_the_system_is_refused():
    with pytest.raises(RequestError, match=r"/proc/results\.json cannot be written"):
        check_writable("--output", Path("/proc/results.json"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_results_that_cannot_be_written_are_printed(no_limits, capsys):
    assert cli.main([*QUICK.split(), "--json", "--output", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 4
    assert "/dev/full could not be written (No space left on device): the results are on stdout." in err


def test_an_interruption_leaves_what_was_measured(no_limits, capsys, monkeypatch):
    def interrupted(llm, case, repetitions, meter):
        if case.batch_size == 2:
            raise KeyboardInterrupt
        return run_case(llm, case, repetitions, meter)

    monkeypatch.setattr(plan, "run_case", interrupted)
    assert cli.main([*QUICK.split(), "--json"]) == 130
    out, err = capsys.readouterr()
    assert [record["test"] for record in json.loads(out)] == ["pp4", "tg3 @ d4"]
    assert "interrupted" in err


@pytest.mark.parametrize(("dtypes", "code", "num_records"), [("float32,int8", 1, 4), ("int8,float32", 2, 0)])
def test_a_dtype_that_cannot_be_loaded_fails_behind_others(no_limits, capsys, monkeypatch, dtypes, code, num_records):
    """Weights are damaged where only int8 reads them: a refusal where nothing was done, and else a failure."""
    llm = plan.LLM

    def load(model, dtype, **options):
        if dtype == "int8":
            raise CheckpointError("damaged.")
        return llm(model, dtype, **options)

    monkeypatch.setattr(plan, "LLM", load)
    assert cli.main([*QUICK.split(), "--format", "jsonl", "--dtype", dtypes]) == code
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == num_records
    assert "tinygpt: error: damaged." in err


@pytest.mark.parametrize(("form", "begins"), [("md", "| dtype | batch |"), ("jsonl", '{"preset": "cpu-study"')])
@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt, 130), (RequestError("No more."), 1)])
def test_a_preset_that_stops_midway_leaves_what_was_measured(capsys, monkeypatch, form, begins, stop, code):
    def measure_once(llm, *arguments, **names):
        if llm.dtype == "float32":
            raise stop
        return measure.measure(llm, *arguments, **names)

    monkeypatch.setattr("tinygpt.bench.presets.rerun.measure", measure_once)
    command = "bench --preset cpu-study --small --random tiny --dtype int8,float32 --threads 1 --repetitions 1 --format"
    assert cli.main([*command.split(), form]) == code
    out = capsys.readouterr().out
    assert out.startswith(begins)
    assert len(out.splitlines()) == (3 if form == "md" else 1)
    assert "int8" in out


def test_too_little_memory_for_a_preset_names_its_flags(monkeypatch, capsys):
    def refuse(*arguments, **names):
        raise RequestError("lower max_num_seqs.")

    monkeypatch.setattr(rerun, "LLM", refuse)
    assert cli.main(["bench", "--preset", "cpu-study", "--random", "tiny", "--threads", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "lower max_num_seqs. A preset chooses max_num_seqs and the positions itself: give another --dtype" in err


def test_too_little_memory_names_the_flags(no_limits, monkeypatch, capsys):
    def refuse(*arguments, **names):
        raise RequestError("lower max_num_seqs.")

    monkeypatch.setattr(plan, "LLM", refuse)
    assert cli.main(["bench", "--random", "tiny", "--batch-sizes", "1,100000", "--threads", "1"]) == 2
    assert (
        "lower max_num_seqs. In bench, max_num_seqs is the largest of --batch-sizes, 100000" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "more", "begins"),
    [
        ("x.json", [], "["),
        ("x.CSV", [], '"'),
        ("x.jsonl", [], "{"),
        ("x.txt", [], "|"),
        ("x.json", ["--format", "md"], "|"),
    ],
)
def test_the_format_is_what_the_file_ends_in(no_limits, tmp_path, name, more, begins):
    assert cli.main([*QUICK.split(), *more, "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(begins)


def test_help_says_what_goes_with_what(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "1.5B, or tiny",
        "They take --model or --random, --dtype, one number of --threads, --repetitions",
        "for the perplexity of onnx-study",
        "what the name of --output ends in, or md",
        "keys of their own for a preset and for --compare",
        "2 or more, as the first one comes with the prompt",
        "OLD NEW OLD NEW",
        "One that is interrupted leaves what it has measured",
    ):
        assert part in text


def test_a_plot_without_matplotlib_is_refused(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*QUICK.split(), "--plot", "picture.png"]) == 2
    assert 'pip install ".[plot]"' in capsys.readouterr().err
