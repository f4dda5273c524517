"""Writes docs/measurements/hostile_input.md from the results of `fuzz.py` and `races.py`.

python -m tests.robustness.fuzz --cases 300 --seed 1 --workers 2 --out cases.jsonl
python -m tests.robustness.races --races 50 --seed 7 --out races.jsonl
python -m tests.robustness.hostile_page cases.jsonl races.jsonl --page docs/measurements/hostile_input.md
"""

import argparse
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from tests.robustness import fuzz, races

EXAMPLES = (
    ("safetensors", r"is [IU]32"),
    ("safetensors", r"cut after"),
    ("index", r"names '\.\./"),
    ("config", r"num_hidden_layers is \d{9}"),
    ("config", r"num_attention_heads is 0"),
    ("gguf", r"block_count"),
    ("wheel", r"holds: bomb"),
    ("wheel", r"holds: encrypted"),
    ("tokenizer", r"an added token's id is 4"),
    ("tokenizer", r"no vocabulary"),
    ("parquet", r": zero"),
    ("parquet", r"in front"),
    ("meta", r"a byte that is not UTF-8"),
    ("wrapper", r"merged aliases"),
    ("schema", r"100,000"),
    ("schema", r"30000 entries|30,000 keys"),
    ("set", r"!!bool abc"),
    ("recipe", r"a FIFO"),
    ("run", r"figure.*link out"),
    ("run", r"metrics.jsonl: line \d+: step is"),
    ("checkpoint", r"files.json"),
    ("arguments", r"9999999"),
    ("arguments", r"'x{200}"),
)
"""Faults of which the page shows the first: format, and a pattern of what was done."""

HEAD = """# Hostile and unlucky input

What comes from outside (weights, data, tokenizers, configurations, run folders) is damaged at random here, and commands
are made to compete for one place, to lose their folder, and to fill a disk. Written by
`python -m tests.robustness.hostile_page`, on {machine}.

## Damaged files

`python -m tests.robustness.fuzz --cases N` does faults to whole specimens of every format: bits flipped, files cut,
numbers at their edges, other types, depth, names, links, pipes. Each case is a command in a process of its own. It must
end within 20 seconds, with status 0, 1 or 2, without a traceback, with at most 2 GiB of memory more than it began with
and a message of at most 12 KiB without control characters; it may neither change nor show what lies outside of its
folder; and what it accepts must be the numbers that were saved. `--format`, `--seed` and `--case` do one case again;
`--help` says more.

Seed {seed}:

"""


def page(cases: Sequence[fuzz.Result], of_races: Sequence[races.Result], notes: Sequence[str] = ()) -> str:
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    parts = [HEAD.format(machine=machine, seed=", ".join(map(str, sorted({case.seed for case in cases}))))]
    parts += [fuzz.table(cases), "\n", sentence(sum(bool(case.wrong) for case in cases), len(cases), "cases")]
    left = [f"- {shown(kind, 120)} ({count}): {shown(first.fault, 80)}" for kind, count, first in fuzz.kinds(cases)]
    parts.append("".join(f"\n{line}" for line in ["", *left]) if left else "")
    parts.append(
        "\n\n### What the user sees\n\n| format | what was done | status | what the user sees |\n|---|---|---|---|\n"
    )
    parts += [example(cases, name, pattern) for name, pattern in EXAMPLES]
    parts.append(
        "\n## Races\n\n`python -m tests.robustness.races --races N`, as root, since small disks are mounted. *two*: "
        "two at once into one place, begun a random moment after each other. *folder*: the folder that is written to "
        "is renamed, removed, emptied, replaced by another or by a file, or becomes read-only, at a random moment. "
        "*disk*: a disk of random size. At the place must lie the whole result of one that had status 0, or nothing; "
        "never parts of two, and nothing of somebody else's changed. Part of a run folder, or of copies of "
        "configurations, which grow file by file, may be left by a failure; such a run can be resumed.\n\n"
    )
    parts += [races.table(of_races), "\n", sentence(sum(bool(r.wrong) for r in of_races), len(of_races), "races"), "\n"]
    parts += ["\n## Notes\n\n" + "\n\n".join(notes) + "\n"] if notes else []
    return "".join(parts)


def sentence(wrong: int, count: int, what: str) -> str:
    return f"{count:,} {what}, {'none' if wrong == 0 else f'{wrong:,}'} of which ended otherwise than it must."


def example(cases: Sequence[fuzz.Result], name: str, pattern: str) -> str:
    """A row of the first case with such a fault that was refused; "" if there is none."""
    for case in cases:
        if case.format == name and case.status and not case.wrong and re.search(pattern, case.fault):
            said = re.sub(r"/tmp/[^/ ]+/[^/ ]+/work/?", "…/", case.said[case.said.find("error:") :])
            cells = (name, shown(case.fault, 100), str(case.status), shown(said, 260))
            return f"| {' | '.join(cells)} |\n"
    return ""


def shown(text: str, length: int) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
    return text if len(text) <= length else f"{text[: length // 2]} … {text[-length // 3 :]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, help="results of `tests.robustness.fuzz`")
    parser.add_argument("races", type=Path, help="results of `tests.robustness.races`")
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--note", action="append", default=[], help="a paragraph below, such as what was done again")
    given = parser.parse_args()
    given.page.write_text(page(fuzz.read(given.cases), races.read(given.races), given.note))


if __name__ == "__main__":
    main()
