"""`scripts/readme_outputs.py`: which blocks it runs, and that a README's untrue output is noticed."""

import sys

import pytest

from scripts import readme_outputs
from scripts.readme_outputs import ADDRESS, Place

REPORT = (
    "tinygpt: prompt 5 tokens, 1208.5 tokens/s; load 1.39 s; seed 3517\n29 kernels compiled in 11.0 s; -2.5\n"
)
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
import ray
```

```
no command
```
"""


WITH_SERVER = """
```console
$ tinygpt serve --served-model-name demo
tinygpt: serving
$ curl -s http://127.0.0.1:8000/v1/completions \\
    -d '{"n": 1}'
{[...]"text":"one","[...]}
```

```python
url = "http://127.0.0.1:8000"
```

```console
asked
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


def test_sessions_and_examples_run_but_pip_a_server_and_what_needs_ray():
    text = README + WITH_SERVER
    found = [(place.command[1:], text[place.start : place.stop]) for place in readme_outputs.places(text)]
    assert found == [
        (("a.txt",), "one 1\n"),
        (("-m", "tinygpt", "--version"), "tinygpt 1.2.3\n"),
        (("-c", 'print("two", 2)\n'), "two 2\n"),
        (("-s", f"{ADDRESS}/v1/completions", "-d", '{"n": 1}'), '{[...]"text":"one","[...]}\n'),
        (("-c", f'url = "{ADDRESS}"\n'), "asked\n"),
    ]
    assert [place.asks_server for place in readme_outputs.places(text)] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("shown", "now"),
    [
        ("1208.5 tokens/s", "9 tokens/s"),
        ("1.39 s", "12,000.1 s"),
        ("29 kernels", "7 kernels"),
        ("load 1", "load\n1"),
    ],
)
def test_times_rates_kernels_and_line_breaks_may_differ(shown, now):
    changed = REPORT.replace(shown, now)
    assert changed != REPORT
    assert readme_outputs.without_measured(changed) == readme_outputs.without_measured(REPORT)


@pytest.mark.parametrize(
    ("shown", "now"),
    [("5 tokens,", "6 tokens,"), ("seed 3517", "seed 3518"), ("-2.5", "-2.6"), ("prompt", "text")],
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


SERVER = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path("ended").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("begins", file=sys.stderr)
{}
pathlib.Path("begun").touch()
print("serving demo on http://127.0.0.1:8000", file=sys.stderr, flush=True)
time.sleep(60)
"""
ASKING = f"""```python
import pathlib
print("begun", pathlib.Path("begun").exists())
```

```
no
```

```python
print("{ADDRESS}", pathlib.Path("begun").exists(), pathlib.Path("ended").exists())
```

```
no
```
""".replace('\nprint("http', '\nimport pathlib\nprint("http')


def test_a_server_is_there_while_it_is_asked(folder, monkeypatch):
    monkeypatch.setattr(readme_outputs, "SERVE", ("stand_in",))
    (folder / "stand_in.py").write_text(SERVER.format(""))
    found = [output for _, output in readme_outputs.outputs(ASKING, str(folder))]
    assert found == ["begun False\n", f"{ADDRESS} True False\n"]
    assert (folder / "ended").exists()


def test_of_a_reply_the_text_is_shown_anew(tmp_path, monkeypatch):
    (tmp_path / "curl").write_text("""#!/bin/sh
echo "progress" >&2
printf '%s' '{"id":"x","choices":[{"index":0,"text":", \\"so\\" he said","logprobs":null}]}'
""")
    (tmp_path / "curl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    place = Place(0, 0, ("curl", ADDRESS))
    shown = '{[...],"choices":[{"index":0,"text":"an \\"old\\" one","logprobs":null,[...]}],[...]}\n'
    expected = shown.replace('an \\"old\\" one', ', \\"so\\" he said')
    assert readme_outputs.run(place, shown, str(tmp_path)) == expected != shown


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (("curl", ADDRESS), "uvicorn and curl"),
        (("x", "-c", f"from openai import A\n{ADDRESS}"), "uvicorn and openai"),
    ],
)
def test_what_cannot_be_asked_is_left_as_it_is_and_said(tmp_path, monkeypatch, capsys, command, missing):
    monkeypatch.setattr(readme_outputs.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(readme_outputs.shutil, "which", lambda name: None)
    assert readme_outputs.run(Place(0, 0, command), "shown", str(tmp_path)) == "shown"
    assert f"not run, {missing} is missing: " in capsys.readouterr().err
