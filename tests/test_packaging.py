"""pyproject.toml and setup.cfg declare complete metadata, each file that the package reads, and each extra."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import numpy
import pytest

import tinygpt
from support.examples import daily
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


def test_setup_cfg_lists_every_package():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    found = []
    for package in CODE:
        files = [
            f for f in (ROOT / package).rglob("__init__.py") if not any(p.is_symlink() for p in f.parents)
        ]
        names = [".".join(file.parent.relative_to(ROOT).parts) for file in files]
        found += names if package == "tinygpt" else [f"tinygpt.{name}" for name in names]
    assert words(parser["options"]["packages"]) == sorted(found)


def copy_checkout(folder: Path, has_links: bool) -> Path:
    """Copy all that a build reads. A zip, and a checkout on Windows, has each link as a text file."""
    folder.mkdir(exist_ok=True)
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in CODE:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in CODE[1:]:
        link = folder / "tinygpt" / name
        if not has_links:
            target = os.readlink(link)
            link.unlink()
            link.write_text(target, encoding="utf-8")
    return folder


def modules_of(root: Path) -> set[str]:
    """Return the package's modules in a folder, links included."""
    places = os.walk(root / "tinygpt", followlinks=True)
    return {
        os.path.relpath(os.path.join(place, name), root)
        for place, _, names in places
        for name in names
        if name.endswith(".py")
    }


def run(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(source: Path, target: Path, *options: str) -> Path:
    """Install without dependencies or network. Return the folder of packages."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--ignore-installed", "--prefix", str(target), *options, str(source), cwd=target.parent)
    [packages] = target.rglob("site-packages")
    return packages


def generate(packages: Path, cwd: Path) -> str:
    """Generate by the package in this folder, without the environment's own. Return the place of its kernels."""
    libraries = Path(numpy.__file__).parents[1]
    code = f"import site, sys; sys.path.insert(0, {str(packages)!r}); sys.path.append({str(libraries)!r}); "
    code += f"site.addsitedir({str(packages)!r}); "  # an editable package is found by a .pth file
    code += "import tinygpt.kernels.cpu; from tinygpt import LLM; "
    code += "[output] = LLM('demo', device='reference').generate('Once', max_tokens=2); "
    code += "assert len(output.outputs[0].token_ids) == 2; print(tinygpt.kernels.__file__)"
    return run(sys.executable, "-S", "-c", code, cwd=cwd)  # -S: no .pth file of the environment


@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no links"])
def test_a_checkout_runs_in_place(tmp_path, has_links):
    source = copy_checkout(tmp_path, has_links)
    assert str(source) in generate(source, cwd=source)


# `.ci/run` installs an editable package with links.
@pytest.mark.parametrize("has_links", daily([True, False], [False]), ids=["links", "no links"])
def test_an_editable_package_runs_elsewhere(tmp_path, has_links):
    source = copy_checkout(tmp_path, has_links)
    packages = install(source, tmp_path / "installed", "--editable")
    assert str(source) in generate(packages, cwd=packages)


@pytest.mark.parametrize("way", daily(["folder", "zip", "sdist", "wheel"], ["zip", "sdist", "wheel"]))
def test_an_installed_package_runs_elsewhere(tmp_path, way):
    source = copy_checkout(tmp_path / "checkout", has_links=way == "wheel")
    target = tmp_path / "installed"
    if way == "zip":
        given = shutil.make_archive(str(tmp_path / "main"), "zip", tmp_path, "checkout")
    elif way == "folder":
        given = source
    else:
        build = [sys.executable, "-m", "build", "--no-isolation", f"--{way}", "--outdir", str(tmp_path)]
        run(*build, str(source), cwd=tmp_path)
        (given,) = tmp_path.glob("*.whl" if way == "wheel" else "*.tar.gz")
    packages = install(given, target)
    shutil.rmtree(source)
    assert str(target) in generate(packages, cwd=tmp_path)
    assert modules_of(packages) == modules_of(ROOT)
