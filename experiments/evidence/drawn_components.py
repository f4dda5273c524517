"""Components of a run drawn at random, to be read: can a person say what each of them does?

    python -m experiments.evidence.drawn_components runs/p-1a2b3c4d
    python -m experiments.evidence.drawn_components runs/p-1a2b3c4d --seed 1 --components 20

Drawn are components of the run's newest harvest, of all sites, that fire at 0.1 to 5 % of the positions. Prints, as
Markdown, on how few tokens all of these fire. Then, of each that is drawn: how often it fires, the tokens at which it
fires most, the predictions that are raised most there, and firings in their context, those of largest λ and a random
sample. The token that fires is in brackets.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from param_decomp_lab import load_run
from param_decomp_lab.harvest.files import Harvest

FEW = 5
AROUND = 12
"""Tokens that are shown to each side of a firing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--components", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=0.001, help="share of the positions")
    parser.add_argument("--most", type=float, default=0.05, help="share of the positions")
    parser.add_argument("--examples", type=int, default=4, help="of each kind")
    given = parser.parse_args()
    harvest = load_run(given.run, devices=1).harvest
    found = candidates(harvest, given.least, given.most)
    drawn = draw(found, given.components, given.seed)
    print(
        f"{len(drawn)} of {len(found)} components that fire at {given.least:.1%} to {given.most:.1%} of the positions\n"
    )
    if found:
        share, uses = of_few_tokens(harvest, found)
        print(f"Medians of all {len(found)}: share of the firings that are on a component's {FEW} most frequent tokens")
        print(f"{share:.0%}; share of the places with one of these tokens where it fires {uses:.0%}\n")
    for site, number in drawn:
        print(described(harvest, site, number, given.examples))


def candidates(harvest: Harvest, least: float, most: float) -> list[tuple[str, int]]:
    """Site and number of those that fire at such a share of the positions."""
    found: list[tuple[str, int]] = []
    for site in harvest.sites:
        share = harvest.densities(site)
        found += [(site, int(number)) for number in np.flatnonzero((share >= least) & (share <= most))]
    return found


def of_few_tokens(harvest: Harvest, found: Sequence[tuple[str, int]]) -> tuple[float, float]:
    """Medians over components: the share of firings on the `FEW` most frequent tokens, and the mean share of these
    tokens' places where the component fires."""
    rows = [harvest.tokens(site, number).slice(0, FEW) for site, number in found]
    shares = [sum(table["precision"].to_pylist()) for table in rows]
    uses = [float(np.mean(table["recall"].to_pylist())) for table in rows]
    return float(np.median(shares)), float(np.median(uses))


def draw(found: Sequence[tuple[str, int]], n: int, seed: int) -> list[tuple[str, int]]:
    """``n`` of them, or all where there are fewer, by site and number."""
    chosen = np.random.default_rng(seed).choice(len(found), min(n, len(found)), replace=False)
    return [found[i] for i in sorted(chosen)]


def described(harvest: Harvest, site: str, number: int, n_examples: int) -> str:
    """A section about one component."""
    tokens = harvest.tokens(site, number).to_pylist()[:6]
    outputs = harvest.outputs(site, number, 6).to_pylist()
    here = [f"`{name}` {row['precision']:.0%}" for name, row in zip(names(harvest, tokens), tokens, strict=True)]
    following = [
        f"`{name}` {row['everywhere']:.1%} → {row['mean']:.1%}"
        for name, row in zip(names(harvest, outputs), outputs, strict=True)
    ]
    lines = [
        f"## {site}:{number}\n",
        f"Fires at {harvest.component(site, number)['density']:.2%} of the positions.\n",
        f"- Tokens, and their shares of its firings: {', '.join(here)}",
        f"- Predictions, everywhere and where it fires: {', '.join(following)}",
    ]
    for kind, name in (("top", "Largest λ"), ("uniform", "A random sample")):
        lines.append(f"- {name}:")
        for example in [e for e in harvest.examples(site, number) if e.kind == kind][:n_examples]:
            text, at = harvest.names(example.tokens), example.position - example.first
            before, after = "".join(text[max(0, at - AROUND) : at]), "".join(text[at + 1 : at + 1 + AROUND])
            lines.append(f"  - `{before}[{text[at]}]{after}` (λ {example.importance:.2f})")
    return "\n".join(lines) + "\n"


def names(harvest: Harvest, rows: Sequence[dict[str, int]]) -> list[str]:
    return harvest.names([row["token"] for row in rows])


if __name__ == "__main__":
    main()
