"""The documentation says what is there: every key with its default, every link, file, function, message and rule; its
tables are tables, and what it says of another project has a date.

Its examples are run in `test_docs_examples.py`; `make docs` finds links and docstrings that the site cannot show.
"""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from markdown_it import MarkdownIt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from param_decomp_jax.targets.registry import ARCHITECTURES
from param_decomp_jax.targets.transformer_config import TransformerConfig
from param_decomp_lab import __version__
from param_decomp_lab.config import load_config
from param_decomp_lab.config.loss_schema import LOSSES, REFUSED, Loss, ReconLoss
from param_decomp_lab.config.method_schema import LanguageModelFile, ToyFile
from param_decomp_lab.config.wrapper import Wrapper
from param_decomp_lab.metrics import METRICS, Metric
from param_decomp_lab.metrics.ce_kl import MASKINGS
from param_decomp_lab.pretrain.recipe import PretrainRecipe
from param_decomp_lab.pretrain.toy_recipe import ToyRecipe
from param_decomp_lab.safe_io.yaml_text import parse_yaml
from param_decomp_lab.schema.strict import NO_MEANING, Strict

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(ROOT / name for name in ("param_decomp_jax", "param_decomp_aot", "param_decomp_lab"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
KINDS: dict[str, tuple[type[Strict], ...]] = {
    "LOSSES": tuple(LOSSES.values()),
    "METRICS": tuple(METRICS.values()),
}
SEMANTICS = (ROOT / "docs" / "semantics.md").read_text()
RULES = re.findall(r"^- \*\*([A-Z]\d+)\*\*", SEMANTICS, re.MULTILINE)
RULE = re.compile(rf"\b(?!L0\b)([{''.join(sorted({rule[0] for rule in RULES}))}]\d{{1,2}})\b")
MEASUREMENTS = sorted((ROOT / "docs" / "measurements").glob("*.md"))

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# ---- every key of the configuration ----


def models_in(annotation: Any) -> Iterator[type[Strict]]:
    """The models that an annotation mentions, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def reachable(*roots: type[Strict]) -> dict[str, type[Strict]]:
    found: dict[str, type[Strict]] = {}
    waiting = list(roots)
    while waiting:
        model = waiting.pop()
        if model not in found.values():
            assert model.__name__ not in found, (
                f"two models are called {model.__name__}; the page needs to tell them apart"
            )
            found[model.__name__] = model
            waiting += [inner for field in model.model_fields.values() for inner in models_in(field.annotation)]
    return found


MODELS = reachable(
    *(Wrapper, LanguageModelFile, ToyFile, PretrainRecipe, ToyRecipe, *LOSSES.values(), *METRICS.values())
)
del MODELS[Metric.__name__]  # of which only those of METRICS occur
MODELS[ReconLoss.__name__] = ReconLoss
LOSS_KEYS = {"type", "coeff", "name"}
"""Documented once, for all losses."""
RECON_KEYS = ReconLoss.model_fields.keys() - LOSS_KEYS
"""Documented once, for all reconstructions."""


def tables(marker: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The names in each `<!-- marker: A, B -->` of the page, and the cells of the table that follows it."""
    for found in re.finditer(rf"<!-- {marker}: (.*?) -->\n((?:\|.*\n)+)", CONFIGURATION):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[2].splitlines()[2:]]
        yield found[1].split(", "), rows


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", cell)


def choices(annotation: Any) -> set[str]:
    """The strings that an annotation admits, those of nested models left out."""
    if get_origin(annotation) is Literal:
        return {choice for choice in get_args(annotation) if isinstance(choice, str)}
    return set().union(*(choices(part) for part in get_args(annotation)))


def plain(field: FieldInfo) -> Any:
    """The default as YAML would give it; a section with all its defaults is {}."""
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return default.model_dump(exclude_unset=True)
    if isinstance(default, tuple):
        return list(default)
    return str(default) if isinstance(default, Path) else default


def documented() -> dict[str, list[str]]:
    """By model: the keys in the tables that name it."""
    found: dict[str, list[str]] = {}
    for names, rows in tables("keys"):
        for name in names:
            keys = [key for row in rows for key in code(row[0]) if key in MODELS[name].model_fields]
            found[name] = found.get(name, []) + keys
    return found


def test_every_key_of_every_model_is_documented_once() -> None:
    found = documented()
    for name, model in MODELS.items():
        is_loss = issubclass(model, Loss) and model is not Loss
        wanted = set(model.model_fields) - (LOSS_KEYS if is_loss else set())
        wanted -= RECON_KEYS if model is not ReconLoss else set()
        if is_loss and name not in found:
            # Routing has a section of its own, and the table of losses says which of them take it.
            assert wanted <= {"routing"}, f"docs/configuration.md has no table for {name}"
        else:
            assert sorted(found.get(name, [])) == sorted(wanted), f"docs/configuration.md, {name}"


@pytest.mark.parametrize(
    ("names", "row"),
    [pytest.param(names, row, id=f"{names[0]}.{row[0]}") for names, rows in tables("keys") for row in rows],
)
def test_documented_keys_exist_with_their_defaults_and_choices(names: list[str], row: list[str]) -> None:
    (key,), default, rest = code(row[0]), row[1], " ".join(row[2:])
    fields = [MODELS[name].model_fields[key] for name in names if key in MODELS[name].model_fields]
    assert fields, f"no key {key} in {', '.join(names)}"
    for field in fields:
        if field.is_required():
            assert default == "required"
        else:
            assert parse_yaml(code(default)[0], "default") == plain(field)
        assert choices(field.annotation) <= set(code(rest))
        assert (NO_MEANING in field.metadata) == ("**no effect**" in rest)


@pytest.mark.parametrize("table", KINDS)
def test_every_loss_and_metric_has_a_row(table: str) -> None:
    ((_, rows),) = [(names, rows) for names, rows in tables("kinds") if names == [table]]
    by_name = {model.__name__: model for model in KINDS[table]}
    assert sorted(code(row[0])[0] for row in rows) == sorted(by_name)
    for row in rows:
        model = by_name[code(row[0])[0]]
        assert set(code(row[1])) == set(model.model_fields) - LOSS_KEYS - RECON_KEYS


def test_what_is_refused_is_named() -> None:
    section = CONFIGURATION.split("## What is refused for now")[1].split("\n## ")[0]
    later = {key for model in MODELS.values() for key in model.later}
    assert later | set(REFUSED) <= set(code(section))


def test_maskings_are_explained() -> None:
    assert set(MASKINGS) <= set(code(CONFIGURATION))


# ---- links, files, names ----


@pages
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """GitHub's: lower case, spaces to hyphens, everything else but letters, digits, hyphens and underscores dropped."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def names_in(file: Path) -> frozenset[str]:
    """What a module defines at its top level, and members of its classes as `Class.member`."""

    def targets(node: ast.stmt) -> list[str]:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                return [name]
            case ast.Assign(targets=assigned):
                return [t.id for t in assigned if isinstance(t, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                return [name]
        return []

    tree = parse(file)
    found = {name for node in tree.body for name in targets(node)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return frozenset(found | {f"{c.name}.{member}" for c in classes for node in c.body for member in targets(node)})


@pages
def test_files_and_names_exist(page: Path) -> None:
    """`path.py` or `path.py:name`, the path from the root or from one of the two packages."""
    for path, name in re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", page.read_text()):
        places = [base / path for base in (ROOT, *PACKAGES) if (base / path).is_file()]
        assert places, f"{page.name} names {path}"
        assert not name or any(name in names_in(place) for place in places), f"{page.name} names {path}:{name}"


def test_the_package_itself_uses_what_the_method_page_names() -> None:
    """What only tests call is not the code of a rule."""
    named = {
        (path, name)
        for path, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", SEMANTICS)
        if not path.startswith("tests/")
    }
    unused = [f"{path}:{name}" for path, name in sorted(named) if name.rpartition(".")[2] not in used_in_packages()]
    assert not unused, f"docs/semantics.md names what only tests call: {', '.join(unused)}"


@cache
def used_in_packages() -> frozenset[str]:
    """Names that code of the packages reads, those of a function within itself left out."""

    def reads(node: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[str]:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                inside = (*inside, name)
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()) if name not in inside:
                yield name
        for child in ast.iter_child_nodes(node):
            yield from reads(child, inside)

    return frozenset(name for package in PACKAGES for file in package.rglob("*.py") for name in reads(parse(file)))


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def test_messages_are_those_of_the_code() -> None:
    """The table of messages in Getting started: of each the longest part without a value (``…``, ``'x'``, a letter)."""
    page = (ROOT / "docs" / "getting_started.md").read_text()
    table = page.split("| message | what to do |")[1].split("\n\n")[0]
    texts = [text for package in PACKAGES for file in package.rglob("*.py") for text in strings(parse(file))]
    for message in (message for row in table.splitlines()[2:] for message in code(row.split("|")[1])):
        longest = max(re.split(r"…|'\w'|\b[nmF]\b|;", message), key=len).strip(" :,()")
        assert any(longest in text for text in texts), f"no code says: {message}"


def strings(tree: ast.Module) -> Iterator[str]:
    """Every string of a module; what an f-string puts in is a ``…``."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values=parts):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


# ---- tables ----


@pytest.mark.parametrize("page", [*PAGES, *MEASUREMENTS], ids=lambda page: page.name)
def test_tables_are_shown_as_tables(page: Path) -> None:
    """A row that is in no table, such as one after a blank line, is shown as text; a cell too many is dropped."""
    text = page.read_text()
    lines = text.splitlines()
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    found = {kind: [range(*token.map) for token in tokens if token.type == kind and token.map] for kind in SHOWN}
    code = {line for kind in ("fence", "code_block") for block in found[kind] for line in block}
    in_tables = {line for table in found["table_open"] for line in table}
    rows = {line for line, content in enumerate(lines) if content.lstrip().startswith("|")}
    assert not rows - code - in_tables, f"{page.name}: no table, {lines[min(rows - code - in_tables)]}"
    for table in found["table_open"]:
        widths = {len(cells(lines[line])) for line in table if lines[line].strip()}
        assert len(widths) == 1, f"{page.name}: rows of unlike lengths below {lines[table.start]}"


SHOWN = ("table_open", "fence", "code_block")


def cells(row: str) -> list[str]:
    """A ``\\|`` is part of a cell, in code as well."""
    return re.split(r"(?<!\\)\|", row.strip().removeprefix("|").removesuffix("|"))


# ---- other projects, and this one ----

DATED = re.compile(
    r"(January|February|March|April|May|June|July|August|September|October|November|December) 20\d\d|\b[0-9a-f]{7,40}\b"
)


@pages
def test_what_is_said_of_another_project_has_a_date(page: Path) -> None:
    """Another project changes, so what a page says of it is true at one time; docs/sources.md says which project."""
    for paragraph in paragraphs(page.read_text()):
        if re.search(r"\bunchanged\b", paragraph):
            assert DATED.search(paragraph), f"{page.name}: unchanged since when? {paragraph}"
    mentioned = [text for text in paragraphs(page.read_text()) if "PyTorch project" in text]
    if mentioned and page.name != "sources.md":
        assert any("[PyTorch project](sources.md)" in text for text in mentioned), f"{page.name}: which project?"
    assert not re.search(r"\btorch project", page.read_text()), f"{page.name}: it is called the PyTorch project"


def paragraphs(text: str) -> list[str]:
    """Paragraphs, items of lists and rows of tables, each in one line."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-|]|\d+\.) ?)", without_code(text))]


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_version_is_the_same_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.findall(r"^## (\S+) \((\d+) (\w+) (\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert cited["version"] == newest[0] == __version__
    assert f"{cited['date-released']:%-d %B %Y}" == " ".join(newest[1:])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert cited["license"] == project["license"] == "MIT"
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in project["authors"]]
    assert cited["authors"][0]["name"] in (ROOT / "LICENSE").read_text()


def test_papers_that_the_method_names_are_among_the_sources() -> None:
    """``(Braun et al. 2025)``: the first name and the year."""
    sources = (ROOT / "docs" / "sources.md").read_text().split("## Papers")[1]
    papers = [" ".join(text.split()) for text in sources.split("\n- ")[1:]]
    for page in PAGES:
        text = " ".join(page.read_text().split())
        for name, year in re.findall(r"([A-Z]\w+)(?: et al\.| and [A-Z]\w+)? \(?((?:19|20)\d\d)\)?", text):
            if name not in MONTHS:
                assert any(name in paper and f"{year}." in paper for paper in papers), f"{page.name}: {name} {year}"


MONTHS = {
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
}


# ---- families ----

TARGETS = (ROOT / "docs" / "your_model.md").read_text()
TINY = {
    config["model_type"]: config
    for file in sorted((ROOT / "tests" / "golden" / "families").glob("*/config.json"))
    for config in [json.loads(file.read_text())]
}
"""A ``config.json`` of each family."""
BIAS_KEYS = {"attention_bias", "mlp_bias", "attn_bias", "use_bias"}


def test_biases_of_families() -> None:
    """Which keys of `config.json` give a family biases, and what it has without them."""
    found = re.search(r"<!-- biases -->\n((?:\|.*\n)+)", TARGETS)
    assert found is not None
    documented: dict[str, list[str]] = {}
    for line in found[1].splitlines()[2:]:
        families, *rest = cells(line)
        documented |= dict.fromkeys(code(families), rest)
    assert set(documented) == {name for name, kind in ARCHITECTURES.items() if issubclass(kind, TransformerConfig)}

    for name, (matrices, keys, default) in documented.items():

        def biases(name: str = name, **given: bool) -> set[str]:
            bare = {key: value for key, value in TINY[name].items() if key not in BIAS_KEYS}
            made = ARCHITECTURES[name].from_config({**bare, **given})
            assert isinstance(made, TransformerConfig)
            return set(made.biases)

        as_is = biases()
        assert bool(as_is) == (default.strip() == "`true`" or not (code(keys) or matrices.strip() == "none")), name
        for key in BIAS_KEYS:
            decides = key in code(keys)
            assert (biases(**{key: True}) != biases(**{key: False})) == decides, f"{name}: {key}"
            assert not decides or biases(**{key: default.strip() == "`true`"}) == as_is, f"{name}: {key}"


# ---- rules and whole files ----


def test_rules_are_numbered_without_gaps() -> None:
    assert len(RULES) > 80
    for letter in {rule[0] for rule in RULES}:
        numbers = [int(rule[1:]) for rule in RULES if rule[0] == letter]
        assert numbers == list(range(1, len(numbers) + 1)), f"docs/semantics.md, the rules {letter}"


def test_every_rule_and_section_that_code_cites_is_there() -> None:
    docstrings = "\n".join(text for package in PACKAGES for file in package.rglob("*.py") for text in prose(file))
    assert set(RULE.findall(docstrings)) <= set(RULES)
    assert set(re.findall(r"[Ss]ections? (\d+)", docstrings)) <= set(
        re.findall(r"^## (\d+)\.", SEMANTICS, re.MULTILINE)
    )


def test_every_rule_that_a_page_cites_is_there() -> None:
    cited = {page.name: set(RULE.findall(prose_of(page))) for page in PAGES}
    assert not {page: rules - set(RULES) for page, rules in cited.items() if rules - set(RULES)}


def prose_of(page: Path) -> str:
    return re.sub(r"`[^`\n]+`", "", without_code(page.read_text()))


def test_every_rule_is_cited_where_it_is_computed_or_tested() -> None:
    sources = "\n".join(file.read_text() for folder in (*PACKAGES, ROOT / "tests") for file in folder.rglob("*.py"))
    assert not set(RULES) - set(RULE.findall(sources))


def prose(file: Path) -> Iterator[str]:
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


@pages
def test_example_files_are_valid(page: Path, tmp_path: Path) -> None:
    """Blocks after `<!-- file: name -->` are whole files; the wrappers among them can be loaded."""
    files = re.findall(r"<!-- file: (\S+) -->\n```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    for name, text in files:
        (tmp_path / name).write_text(text)
    for name, text in files:
        raw = yaml.safe_load(text)
        if "torch_config" in raw:
            load_config(tmp_path / name)
        elif "pd" not in raw:
            PretrainRecipe.model_validate(raw)
