"""English text that comes with every CPython: the language reference's topics and the standard library's docstrings."""

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from param_decomp_lab.data.pieces import Document

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "pydoc_data"}
    | {"site-packages", "dist-packages", "lib-dynload", "__pycache__", "__phello__"}
)
LONGEST_DOCSTRING = 20_000
# Tables and diagrams have few letters; prose and code have many more.
FEWEST_LETTERS = 0.5
# Sections of the reference occur under several topics, and methods inherit docstrings. A paragraph of at least this
# many characters is kept only once, so that held-out text does not also occur in training under another name.
REPEATABLE = 60


def stdlib_documents() -> list[Document]:
    """Returns about 2 MB of text: a document per topic and per module, in a fixed order. It is the same for each
    version of CPython.
    """
    seen: set[str] = set()
    texts = [(f"topic {name}", text) for name, text in sorted(topics.items())]
    texts += [(f"module {name}", "\n\n\n".join(docstrings)) for name, docstrings in _modules()]
    distinct = ((source, _without_repeats(text, seen)) for source, text in texts)
    return [Document(source, text) for source, text in distinct if text.strip()]


def _modules() -> Iterator[tuple[str, list[str]]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(s for s in subfolders if s not in SKIPPED_FOLDERS and not s.startswith("config-"))
        for file in sorted(f for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata")):
            path = Path(folder, file)
            yield path.relative_to(root).as_posix(), list(filter(_is_prose, _docstrings(path)))


def _docstrings(file: Path) -> Iterator[str]:
    with warnings.catch_warnings():  # invalid escapes in other people's code
        warnings.simplefilter("ignore")
        tree = ast.parse(file.read_bytes(), str(file))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _is_prose(text: str) -> bool:
    letters = sum(c.isalpha() and c.isascii() for c in text)
    dense = letters >= FEWEST_LETTERS * sum(not c.isspace() for c in text)
    return 0 < len(text) <= LONGEST_DOCSTRING and dense


def _without_repeats(text: str, seen: set[str]) -> str:
    paragraphs = []
    for paragraph in text.split("\n\n"):
        plain = " ".join(paragraph.split())
        if len(plain) < REPEATABLE or plain not in seen:
            paragraphs.append(paragraph.rstrip())
        seen.add(plain)
    return "\n\n".join(paragraphs) + "\n"
