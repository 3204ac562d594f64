"""pyproject.toml and setup.cfg declare complete metadata, each file that the package reads, and each extra."""

import configparser
import os
import re
import subprocess
import sys
import zipfile
from fnmatch import fnmatch

import pytest

import tinygpt
from support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

CODE = ("tinygpt", "kernels", "weights")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def package_data():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser["options.package_data"]


def words(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[;]", requirement)[0] for requirement in requirements}


def test_metadata_is_complete(project):
    for name in ("name", "description", "readme", "authors", "license", "keywords", "classifiers", "scripts"):
        assert project.get(name), name
    assert project["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", tinygpt.__version__)
    changes = (ROOT / "tinygpt" / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## .*\d+\.\d+\.\d+.*", changes, re.MULTILINE)[0].count(tinygpt.__version__) == 1


def test_kernels_and_weights_are_links_into_the_package():
    """So that pip, editors and type checkers see one package."""
    for name in ("kernels", "weights"):
        assert (ROOT / "tinygpt" / name).is_symlink()
        assert (ROOT / "tinygpt" / name).resolve() == ROOT / name


def test_every_extra_that_an_error_names_exists(project):
    code = [path.read_text(encoding="utf-8") for name in CODE for path in sorted((ROOT / name).rglob("*.py"))]
    asked = {extra for text in code for extra in re.findall(r"how_to_install\(['\"](\w+)['\"]\)", text)}
    extras = project["optional-dependencies"]
    asked |= {
        extra for line in extras["test"] if line.startswith("tinygpt[") for extra in line[8:-1].split(",")
    }
    assert asked >= {"serve", "mpi", "plot", "guided"}
    assert asked <= {*extras}


def test_readmes_install_extras_by_name():
    """It works in a checkout, too, once the package is installed."""
    files = [ROOT / "README.md", *(f for name in (*CODE, "scripts") for f in (ROOT / name).rglob("*.md"))]
    found = {file.name: re.findall(r'install "?\.\[.*', file.read_text(encoding="utf-8")) for file in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_libraries_whose_internals_are_used_have_an_upper_bound(project):
    listed = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    assert {name for line in listed for name in names([line]) if ",<" in line} >= {"numba", "uvicorn"}


def test_every_supported_python_is_declared(project):
    prefix = "Programming Language :: Python :: 3."
    minors = [
        int(c.removeprefix(prefix)) for c in project["classifiers"] if re.match(re.escape(prefix) + r"\d", c)
    ]
    assert minors == list(range(10, 15))
    assert project["requires-python"] == f">=3.{minors[0]}"
    assert sys.version_info >= (3, minors[0])


@pytest.mark.parametrize("package", CODE)
def test_every_file_that_is_no_code_is_package_data(package_data, package):
    """And each package has an __init__.py, which `find:` looks for."""
    folder = ROOT / package
    name = package if package == "tinygpt" else f"tinygpt.{package}"
    patterns = words(package_data.get(name, ""))
    files = [f for f in folder.rglob("*") if f.is_file() and not any(p.is_symlink() for p in f.parents)]
    data = [f.relative_to(folder).as_posix() for f in files if f.suffix not in (".py", ".pyc")]
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert all(any(fnmatch(name, pattern) for name in data) for pattern in patterns)
    assert all((f.parent / "__init__.py").is_file() for f in files if f.suffix == ".py")


def test_the_demo_checkpoint_is_whole():
    files = {file.name for file in (ROOT / "weights" / "demo").iterdir()}
    assert {"config.json", "model.safetensors", "vocab.json", "merges.txt", "README.md"} <= files


def test_neither_run_time_nor_light_tests_need_torch(project):
    extras = project["optional-dependencies"]
    assert "torch" not in names(project["dependencies"]) | names(extras["test"])
    assert "torch" in names(extras["parity"])


@pytest.mark.slow
def test_the_wheel_of_the_sdist_runs_elsewhere(tmp_path):
    pytest.importorskip("build")
    command = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)]  # it fetches setuptools
    subprocess.run(command, check=True, capture_output=True)  # the wheel is made of the sdist
    [wheel] = tmp_path.glob("*.whl")
    modules = {
        f"tinygpt/{f.relative_to(ROOT).as_posix()}" for name in CODE[1:] for f in (ROOT / name).rglob("*.py")
    }
    modules |= {f.relative_to(ROOT).as_posix() for f in (ROOT / "tinygpt").rglob("*.py")}
    assert modules <= {*zipfile.ZipFile(wheel).namelist()}
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = "from tinygpt import LLM; print(LLM(device='reference').generate('Once', max_tokens=2)[0])"
    code += "; import tinygpt; print(tinygpt.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.startswith("RequestOutput(prompt='Once'"), done.stderr
    assert str(tmp_path) in done.stdout
