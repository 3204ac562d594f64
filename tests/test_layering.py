"""The architecture's rules, read from the source: who may import whom, and what packages and tests hold."""

import ast
import configparser
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGES = {"tinygpt": ROOT / "tinygpt", "tinygpt.kernels": ROOT / "kernels", "tinygpt.weights": ROOT / "weights"}
BACKENDS = ("reference", "cpu", "cuda")
PAGE = ("forward", "embed", "attention_block", "mlp_block", "head")  # of each backend's model.py, in this order
# Who reaches past a backend's interface, and for what. Converting and compiling ahead are for the CPU's kernels alone;
# how long kernels compile is told by every backend.
INTO_KERNELS = {
    "tinygpt.execution.backend": {"tinygpt.kernels.backend"},
    "tinygpt.execution.model_runner": {"tinygpt.kernels.backend", "tinygpt.kernels.host"},
    "tinygpt.bench.work": {"tinygpt.kernels.cpu.simd.peak", "tinygpt.kernels.cuda.runtime.peak"},
    "tinygpt.bench.measure": {"tinygpt.kernels.cuda.runtime.device"},
    "tinygpt.cli.convert": {"tinygpt.kernels.cpu.packed", "tinygpt.kernels.cpu.params"},
    "tinygpt.cli.doctor": {"tinygpt.kernels.cpu.jit", "tinygpt.kernels.cuda.runtime.jit"},
    "tinygpt.cli.loading": {"tinygpt.kernels.compiling", "tinygpt.kernels.cpu.jit"},
    "tinygpt.cli.serve": {"tinygpt.kernels.compiling"},
    "tinygpt.parallel.cut": {"tinygpt.kernels.cpu.rank"},
    "tinygpt.parallel.rank_model": {"tinygpt.kernels.cpu.rank", "tinygpt.kernels.cpu.jit"},
    "tinygpt.parallel.runner": {"tinygpt.kernels.compiling"},
    "tinygpt.compile_ahead": {"tinygpt.kernels.cpu.jit", "tinygpt.kernels.compiling"},
    "tinygpt.engine.engine": {"tinygpt.kernels.compiling"},
    "tinygpt.engine.throughput": {"tinygpt.kernels.compiling"},
    "tinygpt.cli.warmup": {"tinygpt.kernels.cpu.jit", "tinygpt.kernels.kernel_archive"},
}
# What each package imports from outside the standard library.
LIBRARIES = {
    "tinygpt.kernels": {"numpy", "numba", "llvmlite"},
    "tinygpt.weights": {"numpy", "safetensors", "huggingface_hub", "yaml", "regex", "onnx", "gguf", "google_crc32c"},
    "tinygpt.server": {
        "jinja2",
        "numpy",
        "prometheus_client",
        "pydantic",
        "pydantic_core",
        "starlette",
        "typing_extensions",
        "uvicorn",
    },
    "tinygpt": {"numpy", "tiktoken", "tokenizers", "tqdm", "lm_eval", "llguidance", "rouge_score"},
}
# What single modules import besides: doctor asks LLVM for the CPU's name, parity is with transformers, matplotlib draws
# bench's pictures, and two modules alone speak to CUDA.
FOREIGN = {
    "tinygpt.kernels.cuda.runtime.device": {"cuda"},
    "tinygpt.kernels.cuda.runtime.jit": {"cuda", "numba_cuda"},
    "tinygpt.cli.doctor": {"llvmlite"},
    "tinygpt.evaluation.golden": {"torch", "transformers"},
    "tinygpt.bench.plot": {"matplotlib"},
    "tinygpt.parallel.mpi": {"mpi4py"},
    "tinygpt.on_ray.application": {"ray", "pydantic", "starlette"},
    "tinygpt.on_ray.metrics": {"ray"},
    "tinygpt.on_ray.ray_cluster": {"ray"},
}
HEAVY = {"numpy", "numba", "llvmlite", "safetensors", "tiktoken", "huggingface_hub", "torch", "transformers"}


def module_name(file: Path) -> str:
    package = next(name for name, folder in PACKAGES.items() if file.is_relative_to(folder))
    parts = file.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join((package, *parts)).removesuffix(".__init__")


FILES = {module_name(file): file for folder in PACKAGES.values() for file in sorted(folder.rglob("*.py"))}


@functools.cache
def source(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"), str(FILES[module]))


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Every module that is named in an import, wherever in the file it stands, but for annotations alone."""
    found = set()
    for node in walk_what_runs(source(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in FILES else node.module for name in inner}
    return frozenset(found)


def walk_what_runs(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, but for those that only type checkers read."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            nodes += ast.iter_child_nodes(node)


def ours(module: str) -> set[str]:
    return {name for name in imports(module) if is_in(name, "tinygpt")} - {module}


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def part_of(package: str, module: str) -> str:
    """The folder or file of `package` that a module belongs to."""
    return module.removeprefix(package).strip(".").partition(".")[0] or "__init__"


def levels_in(package: str) -> Iterator[tuple[str, list[str]]]:
    """Each list under "Import arrows" in a package's README: the package or its folder, and the parts, top to bottom.

    A list is a fenced block whose lines begin with a part; a line such as "`cpu`:" before it names the folder.
    """
    readme = (PACKAGES[package] / "README.md").read_text(encoding="utf-8")
    arrows = readme.partition("## Import arrows")[2].partition("\n## ")[0]
    for folder, block in re.findall(r"(?:`(\w+)`:\n\n)?```\n(.*?)```", arrows, re.DOTALL):
        yield f"{package}.{folder}".strip("."), [line.split()[0] for line in block.splitlines()]


LEVELS = dict(found for package in PACKAGES for found in levels_in(package))


@pytest.mark.parametrize("package", LEVELS)
def test_a_readme_lists_all_parts(package):
    there = {part_of(package, module) for module in FILES if is_in(module, package)}
    assert {*LEVELS[package]} | {"__init__"} == there | {"__init__"}
    assert len(LEVELS[package]) == len({*LEVELS[package]})


@pytest.mark.parametrize("package", LEVELS)
def test_arrows_point_one_way(package):
    """A part imports nothing that its README lists above it."""
    levels = LEVELS[package]
    listed = [module for module in FILES if is_in(module, package) and part_of(package, module) in levels]
    assert listed
    for module in listed:
        above = {*levels[: levels.index(part_of(package, module))]}
        upwards = {name for name in ours(module) if is_in(name, package) and part_of(package, name) in above}
        assert not upwards, module


@pytest.mark.parametrize("package", [module for module, file in FILES.items() if file.name == "__init__.py"])
def test_a_folder_says_what_belongs_there(package):
    assert len(ast.get_docstring(source(package)) or "") > 40


def test_backend_alone_knows_the_kernels():
    """execution/backend.py imports them by a name made at run time; INTO_KERNELS are the exceptions."""
    outside = [module for module in FILES if not is_in(module, "tinygpt.kernels")]
    found = {module: {name for name in ours(module) if is_in(name, "tinygpt.kernels")} for module in outside}
    assert {module: names for module, names in found.items() if names} == INTO_KERNELS


def test_no_import_cycles():
    graphlib.TopologicalSorter({module: ours(module) for module in FILES}).prepare()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_imports_itself_alone(backend):
    package = f"tinygpt.kernels.{backend}"
    modules = [module for module in FILES if is_in(module, package)]
    assert package in modules
    # The reference computes what is asked for on the host.
    shared = (
        "any_machine",
        "batch",
        "cache_folder",
        "compiling",
        "errors",
        "int8_rows",
        "kernel_files",
        "names",
        "reference",
    )
    allowed = [package, *(f"tinygpt.kernels.{name}" for name in shared)]
    for module in modules:
        assert all(any(is_in(name, a) for a in allowed) for name in ours(module)), module


def test_weights_import_config_errors_and_what_files_need_alone():
    needed = ("config", "converted", "disk", "errors", "regular_file", "tokenizer_files")
    allowed = ["tinygpt.weights", *(f"tinygpt.{name}" for name in needed)]
    for module in FILES:
        if is_in(module, "tinygpt.weights"):
            assert all(any(is_in(name, a) for a in allowed) for name in ours(module)), module


def test_libraries():
    """Nothing beyond those of the package: no torch or transformers to run a model, no top-level `kernels`."""
    for module in FILES:
        package = next(name for name in LIBRARIES if is_in(module, name))
        foreign = {name.split(".")[0] for name in imports(module)} - sys.stdlib_module_names - {"tinygpt"}
        assert foreign <= LIBRARIES[package] | FOREIGN.get(module, set()), module


@pytest.mark.parametrize("package", ["tinygpt.kernels", "tinygpt.weights"])
def test_init_holds_a_docstring_and_nothing_else(package):
    """Others import top-level folders of these names: what they then run must do nothing."""
    assert ast.get_docstring(source(package))
    assert len(source(package).body) == 1


def test_setup_cfg_names_every_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["packages"].split()
    assert sorted(listed) == sorted({module_name(file.parent / "__init__.py") for file in FILES.values()})
    mapping = dict(line.split(" = ") for line in setup["options"]["package_dir"].strip().splitlines())
    assert {name: ROOT / folder for name, folder in mapping.items()} == PACKAGES


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_the_same_interface(backend):
    """The same names, and functions with the same parameters; `multi_step` and PACKED may be None."""
    names, found = interface(f"tinygpt.kernels.{backend}")
    all_names, expected = interface("tinygpt.kernels.reference")
    assert names == all_names
    assert {name: parameters for name, parameters in found.items() if name != "multi_step"} == expected
    assert {"load_params", "new_kv_cache", "new_workspace", "forward", "sample", "check_device"} <= expected.keys()


def interface(package: str) -> tuple[set[str], dict[str, list[str]]]:
    """The names that a backend exports, and the parameters of those that are functions."""
    exported = next(ast.literal_eval(n.value) for n in source(package).body if is_assignment(n, "__all__"))
    found = functions(package)
    for node in source(package).body:
        if isinstance(node, ast.ImportFrom):
            there = functions(node.module)
            found |= {a.name: there[a.name] for a in node.names if a.name in there}
    return set(exported), {name: parameters_of(found[name]) for name in exported if name in found}


def is_assignment(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_pages_are_alike(backend):
    """The same functions in one order, in the same words; arguments of one name stand in one order."""
    page, reference = (functions(f"tinygpt.kernels.{name}.model") for name in (backend, "reference"))
    assert [name for name in page if name in PAGE] == list(PAGE)
    for name in PAGE:
        assert first_sentence(page[name]) == first_sentence(reference[name])
        ours, theirs = parameters_of(page[name]), parameters_of(reference[name])
        assert [p for p in ours if p in theirs] == [p for p in theirs if p in ours]
        assert {"params", "layer", "kv_cache"} & {*theirs} <= {*ours}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_ends_where_ranks_will_sum(backend):
    page = functions(f"tinygpt.kernels.{backend}.model")
    for name in ("attention_block", "mlp_block"):
        assert ast.unparse(page[name].body[-1]).startswith("add_projection(")


# The loop over the layers, where it is not `forward` that runs it: each thread of the team, or the host that queues it.
LOOPS = {"reference": set(), "cpu": {"take_steps"}, "cuda": {"queue_step"}}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_page_holds_nothing_else(backend):
    assert functions(f"tinygpt.kernels.{backend}.model").keys() == {*PAGE} | LOOPS[backend]


def first_sentence(function: ast.FunctionDef) -> str:
    return ast.get_docstring(function).replace("\n", " ").partition(". ")[0].rstrip(".")


def parameters_of(function: ast.FunctionDef) -> list[str]:
    return [parameter.arg for parameter in function.args.args]


def functions(module: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in source(module).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("arguments", [["-c", "import tinygpt"], ["-m", "tinygpt", "--help"]], ids=["import", "help"])
def test_nothing_heavy_is_imported_before_it_is_needed(arguments):
    command = [sys.executable, "-X", "importtime", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert "tinygpt" in imported
    assert not imported & HEAVY


# --- the tests themselves

TESTS = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "tests").rglob("*.py"))}
# What may be absent where tests run. A module of ours among them would skip its tests in silence once it has moved.
OPTIONAL = {
    "gguf",
    "onnx",
    "torch",
    "transformers",
    "peft",
    "llguidance",
    "llama_cpp",
    "onnxruntime",
    "onnxscript",
    "optimum.exporters.onnx",
    "lm_eval",
    "rouge_score",
    "tenacity",
    "matplotlib",
    "numba_cuda",
    "uvicorn",
    "openai",
    "h11",
    "playwright",
    "yaml",
    "prometheus_client",
    "starlette",
    "tritonclient.grpc",
    "tritonclient.grpc.model_config_pb2",
    "mpi4py",
    "ray",
}


def test_tests_share_through_support_alone():
    """No test file imports another, and none is skipped for want of a module of ours."""
    for path, file in TESTS.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), path)):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not [name for name in names if re.match(r"(tests|conftest|test_\w+)(\.|$)", name)], path
            elif isinstance(node, ast.Call) and is_importorskip(node.func):
                (name, *_) = node.args
                assert not isinstance(name, ast.Constant) or name.value in OPTIONAL, path


def is_importorskip(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "importorskip"


def test_every_room_of_the_tests_is_one_of_the_package():
    rooms = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("**/test_*.py"))}
    packages = {path.name for path in (ROOT / "tinygpt").iterdir() if path.is_dir()}
    assert rooms <= packages | {"kernels", "weights", "scripts", "llm"}
