"""Counts what makes the text hard to read, and prints passages of two versions side by side to be judged blind.

    python -m experiments.benchmarks.voice                              # counts of the working tree
    python -m experiments.benchmarks.voice --at e78218d                 # of a commit
    python -m experiments.benchmarks.voice --at e78218d --passages 30 --seed 0 --key key.json > passages.md

It counts docstrings that begin with "Of"; "is no" and "are no"; sentences of more than 30 words in the pages, without
code, tables and link targets; words that `docs/glossary.md` avoids, in the pages and in docstrings; and the words of
all pages. Passages are sections of pages whose prose differs between the commit and the working tree. For each, a draw
decides which of the two is A and which is B; the file KEY records it.
"""

import argparse
import ast
import inspect
import json
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("param_decomp_jax", "param_decomp_aot", "param_decomp_lab", "experiments")
LONG = 30
"""The number of words above which a sentence is long."""
PASSAGE = 60
"""The least number of words of a passage."""
NEGATIVE = re.compile(r"(?<!there )\b(?:is|are) no\b(?! longer| more| larger| smaller| better| slower)", re.IGNORECASE)
Read = Callable[[str], str]


def main() -> None:
    """Prints counts or passages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="COMMIT", help="count this commit; with --passages, compare with it")
    parser.add_argument("--passages", type=int, metavar="N", help="print this many passages instead of counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key", type=Path, help="file to write which passage is which to")
    given = parser.parse_args()
    if given.passages:
        if not given.at or not given.key:
            parser.error("--passages: needs --at COMMIT and --key FILE")
        text, key = passages(given.at, given.passages, given.seed)
        print(text)
        given.key.write_text(json.dumps(key, indent=1) + "\n")
    else:
        for name, count in counts(given.at).items():
            print(f"{count:>8,}  {name}")


def counts(commit: str | None) -> dict[str, int]:
    """Returns the counts by name, for the working tree or a commit."""
    names, read = _tree(commit)
    pages = [read(name) for name in names if _is_page(name)]
    docstrings = [text for name in names if _is_code(name) for text in _docstrings(read(name))]
    prose = [_prose(page) for page in pages]
    avoided = _avoided((ROOT / "docs" / "glossary.md").read_text())
    said = "\n".join([*prose, *docstrings])
    return {
        'docstrings that begin with "Of"': sum(text.startswith("Of ") for text in docstrings),
        '"is no" and "are no", pages and docstrings': len(NEGATIVE.findall(said)),
        f"sentences of more than {LONG} words, pages": sum(len(s.split()) > LONG for p in prose for s in _sentences(p)),
        "words that the glossary avoids, pages and docstrings": sum(len(word.findall(said)) for word in avoided),
        "words of README.md and docs/": sum(len(page.split()) for page in pages),
        "words of docs/*.md without measurements, semantics and configuration": sum(
            len(read(name).split()) for name in names if _is_page(name) and not _is_reference(name)
        ),
    }


def passages(commit: str, n: int, seed: int) -> tuple[str, dict[str, str]]:
    """Returns the sections that differ, as Markdown, and which of A and B is the newer one, by number."""
    draw, (old_names, old), (_, new) = random.Random(seed), _tree(commit), _tree(None)
    found = []
    for name in sorted(filter(_is_page, old_names)):
        if not (ROOT / name).is_file():
            continue
        before, after = _sections(old(name)), _sections(new(name))
        for heading in before.keys() & after.keys():
            texts = before[heading], after[heading]
            if texts[0] != texts[1] and min(len(text.split()) for text in texts) >= PASSAGE:
                found.append((name, heading, *texts))
    chosen = draw.sample(sorted(found), min(n, len(found)))
    lines, key = [f"{len(chosen)} of {len(found)} passages, seed {seed}"], {}
    for number, (name, heading, before_text, after_text) in enumerate(chosen, 1):
        newer = draw.choice("AB")
        key[str(number)] = newer
        a, b = (after_text, before_text) if newer == "A" else (before_text, after_text)
        lines.append(f"\n## {number}. {name}, {heading}\n\n### A\n\n{a}\n\n### B\n\n{b}")
    return "\n".join(lines), key


def _tree(commit: str | None) -> tuple[list[str], Read]:
    """Returns the names of all files, and a function that reads one."""
    if commit is None:
        names = _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
        return [name for name in names if (ROOT / name).is_file()], lambda name: (ROOT / name).read_text()
    return _git("ls-tree", "-r", "--name-only", commit).splitlines(), partial(_show, commit)


def _show(commit: str, name: str) -> str:
    return _git("show", f"{commit}:{name}")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _is_page(name: str) -> bool:
    return name == "README.md" or (name.startswith("docs/") and name.endswith(".md") and name != "docs/glossary.md")


def _is_reference(name: str) -> bool:
    return name.startswith("docs/measurements/") or name in ("docs/semantics.md", "docs/configuration.md")


def _is_code(name: str) -> bool:
    return name.endswith(".py") and name.split("/")[0] in CODE


def _docstrings(source: str) -> Iterator[str]:
    """Yields the docstrings of modules, classes and functions, and those below constants and fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield inspect.cleandoc(node.value.value)


def _prose(page: str) -> str:
    """Returns a page without code blocks, tables, headings, pictures and the targets of links. List items and
    paragraphs end with an empty line."""
    page = re.sub(r"^(```|~~~).*?^\1[ \t]*$", "", page, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in page.splitlines() if not re.match(r"\s*(\||#|!\[|<)", line)]
    text = re.sub(r"^(\s*)([-*]|\d+\.)\s", r"\n\1", "\n".join(lines), flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


def _sentences(prose: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", prose):
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*\[(“\"])", " ".join(paragraph.split()))


def _sections(page: str) -> dict[str, str]:
    """Returns prose by heading; for headings that occur twice, that of the first."""
    found: dict[str, str] = {}
    for part in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        found.setdefault(heading.strip(), _prose(body).strip())
    return found


def _avoided(glossary: str) -> list[re.Pattern[str]]:
    """Returns patterns for the single words of the glossary's last column, in the singular and the plural."""
    rows = [line.split("|") for line in glossary.splitlines() if line.startswith("| ")]
    words = [word.strip() for row in rows[1:] for word in row[3].split(",") if word.strip()]
    return [re.compile(rf"\b{re.escape(word)}s?\b", re.IGNORECASE) for word in words]


if __name__ == "__main__":
    main()
