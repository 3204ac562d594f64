"""The architecture's rules, read from the source: import arrows, libraries, the pages of the backends."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT
from support.tables import rows

PACKAGES = {
    "tinygpt.kernels": ROOT / "kernels",
    "tinygpt.weights": ROOT / "weights",
    "tinygpt": ROOT / "tinygpt",
}
BACKENDS = ("reference", "cpu", "cuda")
# Of each backend's model.py, in this order, and below it on the CPU and a GPU.
PAGE = ("forward", "embed", "attention_block", "mlp_block", "head")
SEVERAL_STEPS = {"multi_step", "stop_early", "final_norm"}
# What the GPU's model.py has below its page: a launch of each layer, and decode steps without the host.
CUDA_LAUNCHES = {
    *("normed_linear", "layer_norm", "linear", "add_projection", "attend", "heads_of"),
    *(
        "look_up",
        "norm_after",
        "normalize_rows",
        "token_rows",
        "logit_rows",
        "expert_block",
        "begin",
        "products",
    ),
    *("_queued_steps", "_read_tokens", "advance", *SEVERAL_STEPS),
}
# Functions of a model.py besides PAGE: the loop over the layers, run by each CPU thread or queued by the host.
LOOPS = {
    "reference": set(),
    "cpu": {"take_steps", "_drawn", *SEVERAL_STEPS},
    "cuda": {"queue_step"} | CUDA_LAUNCHES,
}
# Libraries of the base install, and of an extra where a package or module needs it.
LIBRARIES = {
    package: {*names.split()}
    for package, names in rows("""
tinygpt.kernels | numpy numba llvmlite
tinygpt.kernels.cuda | cuda numba_cuda
tinygpt.weights | numpy safetensors huggingface_hub yaml regex
tinygpt.weights.containers | onnx gguf google_crc32c
tinygpt.weights.convert | gguf google_crc32c
tinygpt.server | fastapi starlette uvicorn httptools pydantic typing_extensions prometheus_client
tinygpt.on_ray | ray fastapi starlette pydantic
tinygpt.text.chat_template | jinja2
tinygpt.text.sentence_pieces | sentencepiece
tinygpt.remote | httpx
tinygpt.ranks | mpi4py
tinygpt.bench | matplotlib
tinygpt.evaluation | torch transformers lm_eval rouge_score
tinygpt.cli.doctor | llvmlite
tinygpt.hardware | llvmlite
tinygpt.cli.main | shtab
tinygpt.cli.flags | yaml
tinygpt | numpy tiktoken tokenizers regex tqdm llguidance
""")
}
HEAVY = {"numpy", "numba", "llvmlite", "safetensors", "tiktoken", "huggingface_hub", "torch", "transformers"}


def module_name(file: Path) -> str:
    package = next(name for name, folder in PACKAGES.items() if file.is_relative_to(folder))
    parts = file.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join((package, *parts)).removesuffix(".__init__")


def files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*.py")) if not any(p.is_symlink() for p in file.parents))


FILES = {module_name(file): file for folder in PACKAGES.values() for file in files(folder)}


@functools.cache
def source(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"), str(FILES[module]))


@functools.cache
def imports(module: str, for_types: bool = False) -> frozenset[str]:
    """Return each module named in an import of the file, in functions too; under TYPE_CHECKING for types alone."""
    found = set()
    nodes = [source(module)]
    while nodes:
        node = nodes.pop()
        is_type_checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if is_type_checking and not for_types:
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = origin_of(module, node)
            inner = [f"{origin}.{alias.name}" for alias in node.names]
            found |= {name if name in FILES else origin for name in inner}
    return frozenset(found)


def origin_of(module: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that an import names: relative in the package."""
    if not node.level:
        assert node.module.partition(".")[0] != "tinygpt", (
            f"{module}, line {node.lineno}: an absolute import of ours"
        )
        return node.module
    package = module.split(".") if FILES[module].name == "__init__.py" else module.split(".")[:-1]
    parents = package[: len(package) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def ours(module: str, for_types: bool = False) -> set[str]:
    return {name for name in imports(module, for_types) if is_in(name, "tinygpt")} - {module}


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("package", [module for module, file in FILES.items() if file.name == "__init__.py"])
def test_a_folder_says_what_belongs_there(package):
    assert len(ast.get_docstring(source(package)) or "") > 40


def test_no_import_cycles():
    """An import for annotations counts: a reader follows it, too."""
    graphlib.TopologicalSorter({module: ours(module, for_types=True) for module in FILES}).prepare()


@pytest.mark.parametrize(
    ("package", "also"), [("tinygpt.kernels", ()), ("tinygpt.weights", ("tinygpt.kernels.numbers",))]
)
def test_kernels_and_weights_import_nothing_above(package, also):
    modules = [module for module in FILES if is_in(module, package)]
    assert len(modules) > 20
    found = {
        module: {n for n in ours(module) if not any(is_in(n, a) for a in (package, *also))}
        for module in modules
    }
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_imports_no_other_but_the_reference(backend):
    others = [f"tinygpt.kernels.{name}" for name in BACKENDS if name not in (backend, "reference")]
    modules = [module for module in FILES if is_in(module, f"tinygpt.kernels.{backend}")]
    assert modules
    for module in modules:
        assert not [name for name in ours(module) if any(is_in(name, other) for other in others)], module


def test_libraries():
    """A module imports only the libraries of its package: no torch or transformers to run a model."""
    for module in FILES:
        allowed = set().union(*(names for package, names in LIBRARIES.items() if is_in(module, package)))
        foreign = {name.split(".")[0] for name in imports(module)} - sys.stdlib_module_names - {"tinygpt"}
        assert foreign <= allowed, module


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_pages_are_alike(backend):
    """model.py of each backend has the same functions in one order, with shared arguments in one order."""
    page, reference = (functions(f"tinygpt.kernels.{name}.model") for name in (backend, "reference"))
    assert [name for name in page if name in PAGE] == list(PAGE)
    assert page.keys() == {*PAGE} | LOOPS[backend]
    for name in PAGE:
        mine = parameters_of(page[name])
        theirs = parameters_of(reference[name])
        assert [p for p in mine if p in theirs] == [p for p in theirs if p in mine]
    for name in ("attention_block", "mlp_block"):  # a block ends in the sum over ranks
        assert ast.unparse(page[name].body[-1]).startswith("add_projection(")


def parameters_of(function: ast.FunctionDef) -> list[str]:
    return [parameter.arg for parameter in function.args.args]


def functions(module: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in source(module).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    "arguments", [["-c", "import tinygpt"], ["-m", "tinygpt", "--help"]], ids=["import", "help"]
)
def test_nothing_heavy_is_imported_before_it_is_needed(arguments):
    command = [sys.executable, "-X", "importtime", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert "tinygpt" in imported
    assert not imported & HEAVY
