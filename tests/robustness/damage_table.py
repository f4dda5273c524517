"""What a user sees when a run folder is damaged, and what is left: every case of `damage_cases.py`, done for real.

    python -m tests.robustness.damage_table                                        # all of them, some minutes; as root
    python -m tests.robustness.damage_table --only truncated --only disk-full
    python -m tests.robustness.damage_table --page docs/measurements/damage.md

Mounting a small disk takes root; without, those cases are left out and named.
"""

import argparse
import os
import tempfile
from pathlib import Path

from tests.robustness.damage_cases import CASES, Case, Rig, Seen, make_whole

PAGE = """# Damage to a run folder

**A damaged run folder costs at most the steps since the last intact checkpoint, or gives one message that says what
to do. Resumed or mended, the run finishes to the last bit like an undisturbed one.** How `pd train` does it:
[Resuming a run](../resuming.md#when-a-run-folder-is-damaged).

`python -m tests.robustness.damage_table` damages copies of the folder of a small run (a toy of 60 steps, a checkpoint
every 20), with processes of their own, as `tests/robustness/test_damage.py` does. RUN is the run folder; names and
numbers that change from time to time are examples.

The command is `pd train --resume RUN`, for *the disk full for a while* `pd train CONFIG`. No case deletes a
checkpoint. "…" stands for "a damaged checkpoint was renamed to damaged-60, and the one before it is used:", and *the
same* for a run that finishes to the last bit like the undisturbed one.

| what was done | status | what the user sees | then |
|---|---|---|---|
"""

USES_EARLIER = "a damaged checkpoint was renamed to damaged-60, and the one before it is used: "
FINISHES = "finishes, to the last bit like the undisturbed run"
"""What most rows would say, in full."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CASES, help="one case; may be repeated")
    parser.add_argument("--page", type=Path, help="write the table as this page")
    given = parser.parse_args()
    chosen = {name: case for name, case in CASES.items() if given.only is None or name in given.only}
    lines, odd = [], []
    with tempfile.TemporaryDirectory(prefix="param-decomp-damage-") as folder:
        whole = make_whole(Path(folder))
        for name, case in chosen.items():
            if case.needs_root and os.geteuid() != 0:
                odd.append(f"{name}: left out, it takes root")
                continue
            place = Path(folder) / name
            place.mkdir()
            seen = case.act(Rig(place, whole))
            lines.append(line(case, seen))
            print(f"{name}\n  status {seen.status}\n  {seen.said}\n  {seen.left}\n  then: {seen.then}", flush=True)
            odd += [f"{name}: {what}" for what in unlike(case, seen)]
    if given.page is not None:
        given.page.write_text(PAGE + "\n".join(lines) + "\n")
    if odd:
        raise SystemExit("not as it should be:\n  " + "\n  ".join(odd))


def line(case: Case, seen: Seen) -> str:
    said = seen.said.replace(USES_EARLIER, "… ").replace("|", "\\|")
    then = seen.then.replace(FINISHES, "the same")
    return f"| {case.what} | {seen.status} | {said} | {then} |"


def unlike(case: Case, seen: Seen) -> list[str]:
    """What is not as the case says."""
    found = []
    if seen.status != case.status:
        found.append(f"status {seen.status}, not {case.status}")
    if case.says not in seen.said:
        found.append(f"does not say {case.says!r}, but {seen.said!r}")
    if not seen.then.endswith(case.then):
        found.append(f"then: {seen.then!r}, not {case.then!r}")
    return found


if __name__ == "__main__":
    main()
