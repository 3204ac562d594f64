"""What setup.cfg promises: complete metadata, and every file that the installed package reads."""

import configparser
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import tinygpt
import tinygpt.__main__ as module
from support.paths import ROOT
from tinygpt import errors
from tinygpt.cli import main as cli

CODE = ("tinygpt", "kernels", "weights")
SUFFIXES_OF_CODE = {".py", ".pyc"}


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def words(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def test_metadata_is_complete(setup):
    """Complete: what it is, which version, whose, under which licence, for whom. An address (url, project_urls) is
    no part of it, as the project has none."""
    metadata = setup["metadata"]
    for name in ("name", "version", "description", "long_description", "author", "license", "keywords", "classifiers"):
        assert metadata.get(name), name
    assert metadata["version"] == "attr: tinygpt.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", tinygpt.__version__)
    assert (ROOT / metadata["long_description"].removeprefix("file: ")).is_file()
    assert all((ROOT / name).is_file() for name in words(metadata["license_files"]))


def test_every_extra_that_is_missed_is_asked_for_in_one_way(setup):
    code = [path.read_text(encoding="utf-8") for name in CODE for path in sorted((ROOT / name).rglob("*.py"))]
    asked = {extra for text in code for extra in re.findall(r"how_to_install\(['\"](\w+)['\"]\)", text)}
    assert asked == {"eval", "guided", "mpi", "parity", "plot", "ray", "serve", "tokenizers"}
    assert asked <= {*setup["options.extras_require"]}
    assert errors.how_to_install("plot") == 'pip install "tinygpt[plot]" (or pip install ".[plot]" in a clone)'
    assert [errors.how_to_install("cuda") in text for text in code if 'pip install "tinygpt[cuda]' in text] == [True]


def test_every_supported_python_is_declared(setup):
    prefix = "Programming Language :: Python :: 3."
    minors = [int(c.removeprefix(prefix)) for c in words(setup["metadata"]["classifiers"]) if c.startswith(prefix)]
    assert minors == list(range(10, 15))
    assert setup["options"]["python_requires"] == f">=3.{minors[0]}"
    assert sys.version_info >= (3, minors[0])


def test_every_file_that_is_no_code_is_package_data(setup):
    folders = dict(line.split(" = ") for line in words(setup["options"]["package_dir"]))
    for package in ("tinygpt", "tinygpt.kernels", "tinygpt.weights"):
        folder = ROOT / folders[package]
        patterns = words(setup["options.package_data"].get(package, ""))
        files = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        data = [name for name in files if Path(name).suffix not in SUFFIXES_OF_CODE]
        assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []
        assert all(any(fnmatch(name, pattern) for name in data) for pattern in patterns)


def test_the_demo_checkpoint_is_whole():
    names = {file.name for file in (ROOT / "weights" / "demo").iterdir()}
    assert {"config.json", "model.safetensors", "vocab.json", "merges.txt", "README.md"} <= names


def test_the_command_is_the_module(setup):
    scripts = dict(line.split(" = ") for line in words(setup["options.entry_points"]["console_scripts"]))
    assert scripts == {"tinygpt": f"{module.__name__}:{module.main.__name__}"}
    assert module.main.__wrapped__ is cli.main


def test_run_time_needs_no_torch(setup):
    names = [re.split(r"[<>=]", line)[0] for line in words(setup["options"]["install_requires"])]
    assert sorted(names) == ["huggingface-hub", "numba", "numpy", "safetensors", "tiktoken", "tqdm"]


def test_tests_need_no_torch_but_to_compare_with_it(setup):
    light, parity, plot = (words(setup["options.extras_require"][extra]) for extra in ("test", "parity", "plot"))
    compared = {re.split(r"[<>=]", line)[0] for line in [*parity, *plot]}
    assert compared == {"torch", "transformers", "peft", "openai", "gguf", "onnx", "matplotlib"}
    assert not compared & {re.split(r"[<>=]", line)[0] for line in light}
    assert "torch==2.13.0" in parity
