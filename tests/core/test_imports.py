"""What the core may touch: pure functions on pytrees, no files, no environment, nothing of the laboratory."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from param_decomp_aot import JAX_VERSION

ROOT = Path(__file__).parents[2]
LAB = ROOT / "param_decomp_lab"
CORE = sorted([*(ROOT / "param_decomp_jax").rglob("*.py"), *(ROOT / "param_decomp_aot").rglob("*.py")])
ALLOWED = {
    "jax", "equinox", "optax", "jaxtyping", "numpy",
    "abc", "collections", "dataclasses", "functools", "itertools", "math", "typing",
}  # fmt: skip
ALLOWED_BESIDES = {"param_decomp_jax": {"fnmatch"}, "param_decomp_aot": {"csv", "re", "time", "param_decomp_jax"}}
"""`param_decomp_aot` takes texts apart and times compilations, on meshes of the method."""
FORBIDDEN_NAMES = {"open", "Path", "environ", "getenv", "input", "print", "eval", "exec", "__import__"}
FORBIDDEN_ATTRIBUTES = {"environ", "getenv", "memmap", "fromfile", "loadtxt", "save", "savez", "tofile"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield node.module or ""


def mentioned(tree: ast.AST) -> Iterator[str]:
    """Forbidden names, and forbidden attributes of something imported, that the code uses."""
    modules = {alias.asname or alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[0] in modules:
            yield from {node.attr} & FORBIDDEN_ATTRIBUTES


def test_the_core_is_found() -> None:
    assert len(CORE) > 20


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_module(path: Path) -> None:
    tree = ast.parse(path.read_text())
    package = path.relative_to(ROOT).parts[0]
    allowed = ALLOWED | ALLOWED_BESIDES[package] | {package}
    strangers = {name for name in imported(tree) if name.split(".")[0] not in allowed}
    assert not strangers
    assert not set(mentioned(tree))


def test_layers() -> None:
    """Contracts of pyproject.toml: the core's seven packages are layers, and no package or file is in a circle. The
    library reads imports within functions and under TYPE_CHECKING, too."""
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == EXIT_STATUS_SUCCESS


@pytest.mark.parametrize("name", ["param_decomp_jax", "param_decomp_aot", "param_decomp_lab", "experiments", "slurm"])
def test_nothing_imports_the_tests(name: str) -> None:
    """Tests import experiments; what both use lies where both may import it."""
    files = sorted((ROOT / name).rglob("*.py"))
    assert files
    assert not [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module in imported(ast.parse(path.read_text()))
        if module.split(".")[0] == "tests"
    ]


def test_the_root_of_the_laboratory_is_small() -> None:
    assert len(list(LAB.glob("*.py"))) <= 6


def test_the_compiler_for_gpus_has_one_version() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["probe"]
    assert {part for part in extra if part.startswith("jax")} == {
        f"{part}=={JAX_VERSION}" for part in ("jax", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    }


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the statement."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["sharding", "nn", "decomposition", "targets", "ci", "method", "analysis"])
def test_public_names_come_from_the_head_of_their_package(package: str) -> None:
    head = import_module(f"param_decomp_jax.{package}")
    assert all(hasattr(head, name) for name in head.__all__)


def test_the_package_alone_is_light() -> None:
    """`load_run` brings JAX when it is asked for, not before."""
    assert not modules_after("import param_decomp_lab") & {"jax", "equinox", "pydantic", "numpy"}
    assert "jax" in modules_after("from param_decomp_lab import load_run")


def test_the_configuration_needs_no_jax() -> None:
    """Help and the answers to a wrong configuration come at once."""
    loaded = modules_after("import param_decomp_lab.config")
    assert "param_decomp_lab" in loaded
    assert not loaded & {"jax", "jaxlib", "equinox", "optax"}
