"""setup.cfg declares complete metadata, each file the installed package reads, and each extra an error names."""

import configparser
import re
import sys
from fnmatch import fnmatch

import pytest

import tinygpt
from support.paths import ROOT

CODE = ("tinygpt", "kernels", "weights")


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def words(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def names(text: str) -> set[str]:
    return {re.split(r"[<>=\[;]", line)[0] for line in words(text) if not line.startswith("#")}


def test_metadata_is_complete(setup):
    metadata = setup["metadata"]
    for name in ("name", "version", "description", "long_description", "author", "license", "keywords", "classifiers"):
        assert metadata.get(name), name
    assert metadata["version"] == "attr: tinygpt.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", tinygpt.__version__)


def test_kernels_and_weights_are_links_into_the_package():
    """So that pip, editors and type checkers see one package."""
    for name in ("kernels", "weights"):
        assert (ROOT / "tinygpt" / name).is_symlink()
        assert (ROOT / "tinygpt" / name).resolve() == ROOT / name


def test_every_extra_that_an_error_names_exists(setup):
    code = [path.read_text(encoding="utf-8") for name in CODE for path in sorted((ROOT / name).rglob("*.py"))]
    asked = {extra for text in code for extra in re.findall(r"how_to_install\(['\"](\w+)['\"]\)", text)}
    assert asked >= {"serve", "mpi", "plot", "guided"}
    assert asked <= {*setup["options.extras_require"]}


def test_every_supported_python_is_declared(setup):
    prefix = "Programming Language :: Python :: 3."
    minors = [int(c.removeprefix(prefix)) for c in words(setup["metadata"]["classifiers"]) if c.startswith(prefix)]
    assert minors == list(range(10, 15))
    assert setup["options"]["python_requires"] == f">=3.{minors[0]}"
    assert sys.version_info >= (3, minors[0])


@pytest.mark.parametrize("package", CODE)
def test_every_file_that_is_no_code_is_package_data(setup, package):
    """And each package has an __init__.py, which `find:` looks for."""
    folder, name = ROOT / package, package if package == "tinygpt" else f"tinygpt.{package}"
    patterns = words(setup["options.package_data"].get(name, ""))
    files = [f for f in folder.rglob("*") if f.is_file() and not any(p.is_symlink() for p in f.parents)]
    data = [f.relative_to(folder).as_posix() for f in files if f.suffix not in (".py", ".pyc")]
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert all(any(fnmatch(name, pattern) for name in data) for pattern in patterns)
    assert all((f.parent / "__init__.py").is_file() for f in files if f.suffix == ".py")


def test_the_demo_checkpoint_is_whole():
    files = {file.name for file in (ROOT / "weights" / "demo").iterdir()}
    assert {"config.json", "model.safetensors", "vocab.json", "merges.txt", "README.md"} <= files


def test_neither_run_time_nor_light_tests_need_torch(setup):
    assert "torch" not in names(setup["options"]["install_requires"]) | names(setup["options.extras_require"]["test"])
    assert "torch" in names(setup["options.extras_require"]["parity"])
