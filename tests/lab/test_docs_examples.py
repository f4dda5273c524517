"""The examples of the documentation work: Python is run, command lines are parsed and their configurations loaded."""

import ast
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from param_decomp_lab.cli import app
from param_decomp_lab.config import load_config
from param_decomp_lab.config.loss_schema import LOSSES
from param_decomp_lab.metrics import METRICS
from param_decomp_lab.opening import Run, load_run
from param_decomp_lab.pretrain.recipe import PretrainRecipe, read_recipe
from param_decomp_lab.setup.problem import make_problem
from param_decomp_lab.setup.resolved import ResolvedConfig
from tests.cases import slow_but
from tests.lab.tiny_run import SEQ_LEN, pd_here

ROOT = Path(__file__).parents[2]
PAGES = {page.name: page.read_text() for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])}
DEMO = ROOT / "configs" / "demo"

RUN = "runs/p-1a2b3c4d"
"""A run in the examples. In Python it stands for the tests' tiny run, on the command line for the demo's."""
OTHER = "runs/p-5e6f7a8b"
"""Another run of the same target; in Python the same tiny run."""
SITES = {"layers.2.mlp.up_proj": "layers.1.mlp.up_proj", "layers.3.mlp.down_proj": "layers.1.mlp.up_proj"}
"""Sites of the demo's run that are named in Python, and the tiny run's that take their place."""
FRAGMENTS = {"development.md"}
"""Pages whose Python is no program."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


# ---- Python ----


@pytest.fixture(scope="module")
def run(finished: Path) -> Run:
    return load_run(finished)


OF_PYTHON = [page for page in PAGES if blocks(page, "python") and page not in FRAGMENTS]
LONG = {"graphs.md", "walk.md"}


@pytest.mark.parametrize("page", slow_but({*OF_PYTHON} - LONG, OF_PYTHON))
def test_python(page: str, harvested: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statement by statement, in one namespace; shapes in a comment such as ``# [T, C]`` are those of the values."""
    monkeypatch.chdir(tmp_path)  # what an example saves is not to lie among the sources
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        tiny = str(harvested / "p-00000001")
        for documented, used in {RUN: tiny, OTHER: tiny, **SITES}.items():
            block = block.replace(documented, used)
        lines = block.splitlines()
        for statement in ast.parse(block).body:
            comment = lines[(statement.end_lineno or 0) - 1].partition("  # ")[2]
            value = execute(statement, names)
            shapes = [shape.split(", ") for shape in re.findall(r"\[([\w, ]+)\]", comment)]
            if not shapes:
                continue
            text = next(iter(re.findall(r'"([^"]*)"\s*[,)]', ast.unparse(statement).replace("'", '"'))), "")
            if isinstance(value, dict):
                for site, array in value.items():
                    assert array.shape == sizes(run, shapes[0], site, text), f"{page}: {comment}, {site}"
            else:
                arrays = value if isinstance(value, tuple) else (value,)
                for shape, array in zip(shapes, arrays, strict=False):
                    assert array.shape == sizes(run, shape, next(iter(SITES.values())), text), f"{page}: {comment}"


def execute(statement: ast.stmt, names: dict[str, Any]) -> Any:
    """The value of an expression, or of what is assigned."""
    if isinstance(statement, ast.Expr):
        return eval(compile(ast.Expression(statement.value), "<docs>", "eval"), names)
    exec(compile(ast.Module([statement], []), "<docs>", "exec"), names)
    assigned = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return names[assigned.id] if isinstance(assigned, ast.Name) else None


def sizes(run: Run, shape: list[str], site: str, text: str) -> tuple[int, ...]:
    """``T`` is in bytes, the tiny run's tokens; without a text, the length of its rows. ``rows``: as the page asks."""
    where = run.sites[site]
    known = {
        "T": len(text.encode()) or SEQ_LEN,
        "rows": 8,
        "C": where.C,
        "d_in": where.d_in,
        "d_out": where.d_out,
        "vocabulary": 256,
    }
    return tuple(known[name] for name in shape)


@pytest.mark.parametrize("page", [page for page in PAGES if re.search(r"`run\.(?!py\b)\w", PAGES[page])])
def test_members_of_a_run_exist(page: str, run: Run) -> None:
    for member in re.findall(r"`run\.(?!py\b)(\w+)", PAGES[page]):
        assert member in dir(run), f"{page}: run.{member}"


def test_the_printed_run_is_the_demos() -> None:
    """From the demo's configuration and the recipe of its target; nothing is trained."""
    [printed] = re.findall(r"^print\(run\)\n```\n\n```\n(.*?)```", PAGES["opening_a_run.md"], re.DOTALL | re.MULTILINE)
    resolved, recipe = ResolvedConfig(load_config(DEMO / "decompose.yaml")), read_recipe(DEMO / "pretrain.yaml")
    assert isinstance(recipe, PretrainRecipe)
    architecture: Any = recipe.model.config(1024)
    problem: Any = make_problem(resolved, architecture, DEMO)
    step = resolved.config.method.pd.steps
    shown: Any = Run(Path(RUN), resolved, step, architecture, problem, mesh=None, learned=None)  # type: ignore[arg-type]
    assert printed.rstrip("\n") == repr(shown)


# ---- command lines ----


def simple_commands(block: str) -> Iterator[list[str]]:
    """The words of every command in a block for the shell, loops opened and comments left out."""
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if re.fullmatch(r"[;&|()]+", word):
                if words:
                    yield words
                words = []
            elif word not in ("do", "done") or words:
                words.append(word)


def helps(command: Any, path: str = "pd") -> Iterator[tuple[str, str]]:
    """Every command of ``pd``, and the examples of its help as a block for the shell."""
    _, _, examples = (command.help or "").partition("Examples:")
    paragraphs = [" ".join(text.split()) for text in re.split(r"\n *\n", examples)]
    yield f"{path} --help", "\n".join(text for text in paragraphs if re.match(r"(pd|srun) ", text))
    for name, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, f"{path} {name}")


COMMANDS = [
    *((page, words) for page in PAGES for block in blocks(page, "sh") for words in simple_commands(block)),
    *((name, words) for name, block in helps(typer.main.get_command(app)) for words in simple_commands(block)),
]
"""Of all pages, and of the help."""


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command of ``pd`` and the values of its parameters, as `pd` itself parses them."""
    command: Any = typer.main.get_command(app)
    path, context = [], command.make_context("pd", list(words))
    while isinstance(command, typer.core.TyperGroup):
        rest = [*getattr(context, "_protected_args", []), *context.args]
        name, command, rest = command.resolve_command(context, rest)
        path.append(name)
        context = command.make_context(name, rest, parent=context)
    return " ".join(path), context.params


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages show whole (``<!-- file: name -->``)."""
    folder = tmp_path_factory.mktemp("written")
    for text in PAGES.values():
        for name, content in re.findall(r"<!-- file: (\S+) -->\n```yaml\n(.*?)```", text, re.DOTALL):
            (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(("page", "words"), [pytest.param(p, w, id=f"{p}: {shlex.join(w)}") for p, w in COMMANDS])
def test_command_line(page: str, words: list[str], written: Path) -> None:
    for word in words:
        if re.match(r"(configs|slurm|experiments|tests|docs)/", word):
            assert (ROOT / word).exists(), f"{word} is not there"
    if "pd" in words:
        words = ["0" if word.startswith("$") else word for word in words[words.index("pd") + 1 :]]
        if words != ["--help"]:
            check_pd(*parsed(words), written)
    elif words[0] == "make":
        for target in (word for word in words[1:] if "=" not in word):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {target}"
    elif words[0] == "python":
        module, rest = (words[2].replace(".", "/"), words[3:]) if words[1] == "-m" else (words[1], words[2:])
        package = ROOT / module / "__main__.py"
        source = (package if package.is_file() else (ROOT / module).with_suffix(".py")).read_text()
        for option in (word for word in rest if word.startswith("--")):
            assert option in source or option[2:].replace("-", "_") in source, f"{module} has no option {option}"
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"[\w-]+", ",".join(re.findall(r"\.\[(.*?)\]", words[-1])))) <= set(extras)


def check_pd(command: str, given: dict[str, Any], written: Path) -> None:
    """The configuration that is named can be loaded with what is assigned; so can a recipe, and metrics exist."""
    if command == "pretrain":
        read_recipe(found(next(path for path in given.values() if isinstance(path, Path)), written))
    for metric in given.get("metric") or ():
        if metric.isidentifier():
            assert metric in {*LOSSES, *METRICS}
    if "overrides" not in given or command in ("eval", "import"):
        return
    config = (
        DEMO / "decompose.yaml" if command == "demo" else found(given.get("config") or given.get("resume"), written)
    )
    if "torch_config:" in config.read_text():
        # The first value of every key that is swept.
        swept = [re.split(r",(?![^{\[]*[}\]])", assignment)[0] for assignment in given.get("sweep") or ()]
        load_config(config, [*(given["overrides"] or ()), *swept])
    else:
        read_recipe(config)


def found(path: Path | None, written: Path) -> Path:
    assert path is not None
    if str(path) == RUN:
        return DEMO / "decompose.yaml"
    return next(folder / path for folder in (ROOT, written) if (folder / path).is_file())


CHECKS = sorted({tuple(w[1:]) for _, w in COMMANDS if w[:2] == ["pd", "check"] and w[2].startswith("configs/toys/")})


@pytest.mark.parametrize("words", CHECKS, ids=shlex.join)
def test_pd_check(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    outcome = pd_here(*words)
    assert outcome.status == 0, outcome.err


@cache
def options() -> dict[str, set[str]]:
    """Of every command of ``pd``, groups among them."""
    found: dict[str, set[str]] = {}

    def visit(command: Any, path: str) -> None:
        found[path] = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
        for name, inner in getattr(command, "commands", {}).items():
            visit(inner, f"{path} {name}")

    visit(typer.main.get_command(app), "pd")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences(page: str) -> None:
    """`pd train --resume RUN`: the command and its options exist."""
    prose = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    for text in re.findall(r"`(pd(?: [^`]*)?)`", prose):
        words = text.split()
        is_group = any(known.startswith(" ".join(words[:2]) + " ") for known in options())
        named = itertools.takewhile(lambda word: not word.startswith("--"), words)
        command = " ".join(itertools.islice(named, 3 if is_group and len(words) > 1 else 2))
        assert command in options(), f"{page}: `{text}`"
        for word in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert word in options()[command] | {"--help"}, f"{page}: `{text}`"
