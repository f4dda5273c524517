"""Draws components of a run at random and prints them for a reader: can a person say what each of them does?

    python -m experiments.evidence.drawn_components runs/p-1a2b3c4d
    python -m experiments.evidence.drawn_components runs/p-1a2b3c4d --seed 1 --components 20
    python -m experiments.evidence.drawn_components runs/p-1a2b3c4d --listed layers.3.mlp.down_proj:7

Draws from the components of the run's newest harvest, at all sites, that fire at 0.1 to 5 % of the positions. The
output is Markdown. It begins with how few tokens account for the firings of all these components. Each drawn component
then gets what its page shows: how often it fires, on which tokens most, and which predictions rise most there. Each
sign of its activation is listed by itself, because the component writes in opposite directions: the firings of largest
λ · |a|, a random sample of firings, and the predictions that become more and less likely when it is zero-masked there.
The token at which it fires is in brackets.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from param_decomp_lab import load_run
from param_decomp_lab.browse.pages import by_sign
from param_decomp_lab.harvest.files import Example, Harvest
from param_decomp_lab.opening import Run

FEW = 5
AROUND = 12
"""The number of tokens shown on each side of a firing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--components", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=0.001, help="share of the positions")
    parser.add_argument("--most", type=float, default=0.05, help="share of the positions")
    parser.add_argument("--examples", type=int, default=4, help="examples of each kind")
    parser.add_argument("--listed", nargs="+", metavar="SITE:NUMBER", help="print these components instead of drawing")
    parser.add_argument("--places", type=int, default=64, help="firings at which a component is zero-masked; 0: none")
    given = parser.parse_args()
    run = load_run(given.run, devices=1)
    harvest = run.harvest
    found = candidates(harvest, given.least, given.most)
    drawn = draw(found, given.components, given.seed)
    if given.listed:
        drawn = [(site, int(number)) for site, _, number in (one.rpartition(":") for one in given.listed)]
    else:
        rare, often = f"{given.least:.1%}", f"{given.most:.1%}"
        print(f"{len(drawn)} of {len(found)} components that fire at {rare} to {often} of the positions\n")
    if found and not given.listed:
        share, uses = of_few_tokens(harvest, found)
        print(f"Medians of all {len(found)}: share of the firings that are on a component's {FEW} most frequent tokens")
        print(f"{share:.0%}; share of the places with one of these tokens where it fires {uses:.0%}\n")
    for site, number in drawn:
        print(described(run, site, number, given.examples, given.places))


def candidates(harvest: Harvest, least: float, most: float) -> list[tuple[str, int]]:
    """Returns site and number of the components that fire at a share of the positions between ``least`` and
    ``most``."""
    found: list[tuple[str, int]] = []
    for site in harvest.sites:
        share = harvest.densities(site)
        found += [(site, int(number)) for number in np.flatnonzero((share >= least) & (share <= most))]
    return found


def of_few_tokens(harvest: Harvest, found: Sequence[tuple[str, int]]) -> tuple[float, float]:
    """Returns two medians over components: the share of firings on the `FEW` most frequent tokens, and the mean share
    of these tokens' places at which the component fires."""
    rows = [harvest.tokens(site, number).slice(0, FEW) for site, number in found]
    shares = [sum(table["precision"].to_pylist()) for table in rows]
    uses = [float(np.mean(table["recall"].to_pylist())) for table in rows]
    return float(np.median(shares)), float(np.median(uses))


def draw(found: Sequence[tuple[str, int]], n: int, seed: int) -> list[tuple[str, int]]:
    """Draws ``n`` of them, or all if there are fewer, sorted by site and number."""
    chosen = np.random.default_rng(seed).choice(len(found), min(n, len(found)), replace=False)
    return [found[i] for i in sorted(chosen)]


def described(run: Run, site: str, number: int, n_examples: int, places: int) -> str:
    """Returns a section about one component."""
    harvest = run.harvest
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
    examples = harvest.examples(site, number)
    effects = run.effect(site, number, places=places).by_sign() if places else {}
    drawn = [e for e in examples if e.kind == "uniform"]
    top = dict(by_sign(examples))
    for sign, factor in (("a > 0", 1), ("a < 0", -1)):
        of_sign = [e for e in drawn if factor * e.activation > 0]
        if not (sign in top or of_sign or sign in effects):
            continue
        lines.append(f"\n### {sign}: {len(of_sign)} of a random sample of {len(drawn)} firings\n")
        for name, found in (("Largest λ · |a|", top.get(sign, [])), ("A random sample", of_sign)):
            lines += [f"- {name}:", *(f"  - {in_context(harvest, e)}" for e in found[:n_examples])] if found else []
        if sign in effects:
            for name, changed in (("Less", effects[sign].down), ("More", effects[sign].up)):
                moved = ", ".join(f"`{o.name}` {o.before:.1%} → {o.after:.1%}" for o in changed[:6])
                lines.append(f"- {name} likely when it is zero-masked: {moved or 'none'}")
    return "\n".join(lines) + "\n"


def in_context(harvest: Harvest, example: Example) -> str:
    """Returns the tokens around a firing, as code."""
    text, at = harvest.names(example.tokens), example.position - example.first
    before, after = "".join(text[max(0, at - AROUND) : at]), "".join(text[at + 1 : at + 1 + AROUND])
    return f"`{before}[{text[at]}]{after}` (λ {example.importance:.2f}, a {example.activation:.2g})"


def names(harvest: Harvest, rows: Sequence[dict[str, int]]) -> list[str]:
    return harvest.names([row["token"] for row in rows])


if __name__ == "__main__":
    main()
