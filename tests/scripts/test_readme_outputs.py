"""`scripts/readme_outputs.py`: which blocks it runs, and that a README's untrue output is noticed."""

import sys

import pytest

from scripts import readme_outputs

REPORT = "tinygpt: prompt 5 tokens, 1208.5 tokens/s; load 1.39 s; seed 3517\n29 kernels compiled in 11.0 s; -2.5\n"
README = """# A page

```
$ pip install .
$ cat a.txt
one 1
$ tinygpt --version
tinygpt 1.2.3
```

```python
print("two", 2)
```

```
two 2
```

```python
url = "http://127.0.0.1"
```

```python
import ray
```

```
no command
```
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(readme_outputs, "ROOT", tmp_path)
    monkeypatch.setattr(readme_outputs, "READMES", ("README.md",))
    return tmp_path


def main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["readme_outputs.py", *arguments])
    return readme_outputs.main()


def test_sessions_and_examples_run_but_pip_and_what_asks_a_server():
    found = [(place.command[1:], README[place.start : place.stop]) for place in readme_outputs.places(README)]
    assert found == [
        (("a.txt",), "one 1\n"),
        (("-m", "tinygpt", "--version"), "tinygpt 1.2.3\n"),
        (("-c", 'print("two", 2)\n'), "two 2\n"),
    ]


@pytest.mark.parametrize(
    ("shown", "now"),
    [("1208.5 tokens/s", "9 tokens/s"), ("1.39 s", "12,000.1 s"), ("29 kernels", "7 kernels"), ("load 1", "load\n1")],
)
def test_times_rates_kernels_and_line_breaks_may_differ(shown, now):
    changed = REPORT.replace(shown, now)
    assert changed != REPORT
    assert readme_outputs.without_measured(changed) == readme_outputs.without_measured(REPORT)


@pytest.mark.parametrize(
    ("shown", "now"), [("5 tokens,", "6 tokens,"), ("seed 3517", "seed 3518"), ("-2.5", "-2.6"), ("prompt", "text")]
)
def test_nothing_else_may(shown, now):
    changed = REPORT.replace(shown, now)
    assert changed != REPORT
    assert readme_outputs.without_measured(changed) != readme_outputs.without_measured(REPORT)


def test_check_finds_an_untrue_number_and_writing_mends_it(folder, monkeypatch, capsys):
    true = README.replace("$ tinygpt --version\ntinygpt 1.2.3\n", "")
    untrue = true.replace("two 2\n", "two 3\n")
    (folder / "README.md").write_text(untrue)
    assert main(monkeypatch, "--check") == 1
    assert {"- two 3", "+ two 2"} <= {*capsys.readouterr().out.splitlines()}
    assert (folder / "README.md").read_text() == untrue
    assert main(monkeypatch) == 0
    assert (folder / "README.md").read_text() == true
    assert main(monkeypatch, "--check") == 0


def test_a_command_that_fails_ends_it(folder, monkeypatch):
    (folder / "README.md").write_text("```python\nraise OSError('full')\n```\n")
    with pytest.raises(SystemExit, match=r"ended with 1:(.|\n)*full"):
        main(monkeypatch, "--check")
