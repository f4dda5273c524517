"""Tests a claim about components on text that the run did not train on.

    python -m experiments.evidence.claim RUN --after th --token e layers.3.mlp.down_proj:88 layers.3.mlp.down_proj:144

The claim: after ``--after`` these components speak for ``--token``. Each is taken out alone, then all of them together,
at every token of held-out rows, with everything else as it is (all other components on, deltas too). Prints, as
Markdown, the mean probability of the token with and without them, and the share of the places at which it falls: after
that text, and elsewhere. With ``--exceptions`` the places after that text at which it does not fall without all of
them follow, with the text around them.
"""

import argparse
from pathlib import Path

import jax
import numpy as np

from param_decomp_lab import load_run
from param_decomp_lab.errors import UserError
from param_decomp_lab.opening import Run
from param_decomp_lab.opening.selection import selected
from param_decomp_lab.runs.prompt import read_output

BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("components", nargs="+", help="SITE:NUMBER, or group:NUMBER")
    parser.add_argument("--after", required=True, help="the text in front of the token")
    parser.add_argument("--token", required=True)
    parser.add_argument("--exceptions", action="store_true", help="list the places where the token does not fall")
    parser.add_argument("--rows", type=int, default=128, help="of held-out data")
    given = parser.parse_args()
    run = load_run(given.run, devices=1)
    token = read_output(run, given.token)
    data = run.resolved.held_out_rows
    rows = data.rows(np.arange(min(given.rows, len(data))))
    assert run.text is not None
    here = ends_with(rows, run.text.ids(given.after))
    if not here.any():
        raise UserError(f"'{given.after}' does not occur in {len(rows)} held-out rows; look at more with --rows")
    before = probabilities(run, rows, [], token)
    print(f"| taken out | P({given.token!r}) after {given.after!r} ({here.sum()} places) | falls | elsewhere | falls |")
    print("|---|---|---|---|---|")
    together = [given.components] if len(given.components) > 1 else []
    for chosen in [[one] for one in given.components] + together:
        after = probabilities(run, rows, chosen, token)
        cells = [
            f"{before[at].mean():.3f} → {after[at].mean():.3f} | {(after < before)[at].mean():.0%}"
            for at in (here, ~here)
        ]
        print(f"| {', '.join(chosen)} | {' | '.join(cells)} |", flush=True)
    if given.exceptions:
        for row, end in np.argwhere(here & (after >= before)):
            text = run.text.text(rows[row, max(0, end - 15) : end + 5].tolist())
            print(f"{before[row, end]:.3f} → {after[row, end]:.3f}  {text}")


def ends_with(rows: np.ndarray, text: list[int]) -> np.ndarray:
    """The positions at which the tokens of a text end."""
    found = np.zeros(rows.shape, bool)
    n = len(text)
    windows = np.lib.stride_tricks.sliding_window_view(rows, n, axis=1)
    found[:, n - 1 :] = (windows == np.asarray(text)).all(axis=-1)
    return found


def probabilities(run: Run, rows: np.ndarray, chosen: list[str], token: int) -> np.ndarray:
    """Of the token after every position, without these components."""
    masks = {}
    if chosen:
        for site, mask in selected(chosen, run.sites, 1, may_have_positions=False, groups=lambda: run.groups).items():
            masks[site] = np.where(mask[0], np.float32(0), np.float32(1))
    batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    found = [
        jax.nn.softmax(run.logits(batch, masks or None, delta=1.0 if masks else 0.0))[..., token] for batch in batches
    ]
    return np.concatenate([np.asarray(x) for x in found])


if __name__ == "__main__":
    main()
