"""Tests a claim about components on text that the run did not train on.

    python -m experiments.evidence.claim RUN --after th --token e layers.3.mlp.down_proj:88 layers.3.mlp.down_proj:144
    python -m experiments.evidence.claim RUN --after th --token e layers.3.mlp.down_proj:88 --controls 5

The claim: after ``--after`` these components speak for ``--token``. Each is taken out alone, then all of them together,
at every token of held-out rows, with everything else as it is (all other components on, deltas too). Prints, as
Markdown, the mean probability of the token with and without them, and the share of the places at which it falls: after
that text, and elsewhere. With ``--controls`` every line is followed by its control: as many other components of the
same sites, drawn in proportion to how often they fire there, a mean over so many draws. With ``--exceptions`` the
places after that text at which it does not fall without all of them follow, with the text around them.
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
    parser.add_argument("--controls", type=int, default=0, help="draws of other components, for every line")
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
    counts = firing_counts(run, rows) if given.controls else {}
    rng = np.random.default_rng(0)

    def show(name: str, after: np.ndarray) -> None:
        """Prints a line. ``after``: probabilities, from one draw or several."""
        cells = [
            f"{before[at].mean():.3f} → {after[..., at].mean():.3f} | {(after < before)[..., at].mean():.0%}"
            for at in (here, ~here)
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)

    for chosen in [[one] for one in given.components] + together:
        after = probabilities(run, rows, chosen, token)
        show(", ".join(chosen), after)
        if given.controls:
            drawn = [control(run, chosen, counts, rng) for _ in range(given.controls)]
            show("as many others", np.stack([probabilities(run, rows, others, token) for others in drawn]))
    if given.exceptions:
        for row, end in np.argwhere(here & (after >= before)):
            text = run.text.text(rows[row, max(0, end - 15) : end + 5].tolist())
            print(f"{before[row, end]:.3f} → {after[row, end]:.3f}  {text}")


def ends_with(rows: np.ndarray, text: list[int]) -> np.ndarray:
    """Returns the positions at which the tokens of a text end."""
    found = np.zeros(rows.shape, bool)
    n = len(text)
    windows = np.lib.stride_tricks.sliding_window_view(rows, n, axis=1)
    found[:, n - 1 :] = (windows == np.asarray(text)).all(axis=-1)
    return found


def firing_counts(run: Run, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the number of positions at which each component fires, by site."""
    counts = {name: np.zeros(site.C) for name, site in run.sites.items()}
    for start in range(0, len(rows), BATCH):
        for name, importances in run.causal_importances(rows[start : start + BATCH]).items():
            counts[name] += (np.asarray(importances) > 0).sum(axis=(0, 1))
    return counts


def control(run: Run, chosen: list[str], counts: dict[str, np.ndarray], rng: np.random.Generator) -> list[str]:
    """Draws as many other components of the same sites as are chosen, in proportion to how often they fire; if fewer
    others fire, returns all of those."""
    others: list[str] = []
    for site, mask in selected(chosen, run.sites, 1, may_have_positions=False, groups=lambda: run.groups).items():
        weight = np.where(mask[0], 0, counts[site])
        n = min(int(mask[0].sum()), int(np.count_nonzero(weight)))
        if n:
            numbers = rng.choice(len(weight), n, replace=False, p=weight / weight.sum())
            others += [f"{site}:{number}" for number in numbers]
    return others


def probabilities(run: Run, rows: np.ndarray, chosen: list[str], token: int) -> np.ndarray:
    """Returns the probability of the token after every position, without these components."""
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
