"""Results of comparing a run with its baselines (`measure.py`). Needs no JAX, so that `pd browse` starts at once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from param_decomp_lab.baselines.matching import mixed, shares
from param_decomp_lab.baselines.parts import Choice
from param_decomp_lab.runs.position_attack import LAMBDA as LAMBDA
from param_decomp_lab.runs.position_attack import OWN as OWN
from param_decomp_lab.safe_io.printable import first_few

ON_OFF, LARGEST, BY_GRADIENT = "λ above", "largest", "by gradient"
WITH_K_ON: dict[Choice, str] = {"activation": LARGEST, "gradient": BY_GRADIENT}
"""The name, for each choice, of points with a fixed number of parts on."""
ACTIVE = "active latents"
"""The name of a replacement's point with all its latents."""


@dataclass(frozen=True)
class ReplacementPoint:
    """One choice of latents, measured on all batches. ``chosen``: `ACTIVE`, all that are above 0, or the ``number``
    `LARGEST` at each position; ``number`` is a mean over rows of the data if these differ (B5). ``l0``: the number of
    latents above 0 at a position, averaged over positions. ``error``: R1. ``cross_entropy``: in nats above that of the
    target.
    """

    chosen: str
    number: float
    l0: float
    error: float
    cross_entropy: float


@dataclass(frozen=True)
class Replacement:
    """An SAE or a transcoder. ``kind``: which of the two; ``architecture``: SAELens' name. ``reads``, ``writes``:
    hooks, by TransformerLens' names. ``d_sae``: the number of latents. ``model``: the model on which it was trained
    according to its folder, and whether rows of text began with a BOS token then. ``sites``: the run's sites whose
    outputs have no effect when it is used.
    """

    name: str
    folder: str
    kind: str
    architecture: str
    reads: str
    writes: str
    d_sae: int
    model: str | None
    prepends_bos: bool
    sites: tuple[str, ...]
    points: tuple[ReplacementPoint, ...]

    @property
    def active(self) -> ReplacementPoint:
        """The point with all latents."""
        return next(p for p in self.points if p.chosen == ACTIVE)

    def at(self, l0: float) -> list[ReplacementPoint]:
        """Returns the point with all latents and, if it has enough, the one with ``l0`` of the largest, chosen like a
        baseline's parts (B5).
        """
        has_as_many = shares(l0).keys() <= self.ladder.keys()
        return [self.active, *([mixed(self.ladder, l0)] if has_as_many else [])]

    @property
    def ladder(self) -> dict[float, ReplacementPoint]:
        """Returns the points by their number of latents."""
        return {p.number: p for p in self.points if p.chosen == LARGEST}


@dataclass(frozen=True)
class BaselinePoint:
    """One way of choosing parts, measured on all batches. ``parts``: `OWN` or a baseline. ``chosen``: `LAMBDA`,
    `ON_OFF` by a threshold, or ``number`` parts at each site and position, the `LARGEST` or `BY_GRADIENT`; ``number``
    is a mean over rows of the data if these differ (B5). ``l0``: the number of parts that are on, averaged over sites
    and positions. ``error``: R1 with inactive parts masked to 0, ``random`` with random masks for them, ``attacked``
    after each of the attack's lengths, if it was attacked. ``cross_entropy``: in nats above that of the target; None
    for a toy.
    """

    parts: str
    chosen: str
    number: float
    l0: float
    error: float
    cross_entropy: float | None
    random: float
    attacked: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """All points of a run. ``lengths``: steps of the attacks. ``positions``: number of positions in all batches.
    ``n_sites``: number of the run's sites. ``replacements``: SAEs and transcoders (B6). ``choice``: how a given number
    of parts is chosen (B2, B3).
    """

    run: str
    step: int
    of_text: bool
    positions: int
    lengths: tuple[int, ...]
    points: tuple[BaselinePoint, ...]
    n_sites: int
    replacements: tuple[Replacement, ...] = ()
    choice: Choice = "activation"

    @property
    def own(self) -> BaselinePoint:
        """The point of the decomposition with λ as masks."""
        return next(p for p in self.points if p.parts == OWN and p.chosen == LAMBDA)

    @property
    def own_on_off(self) -> BaselinePoint:
        """The point of the decomposition with only firing components on."""
        return next(p for p in self.points if p.parts == OWN and p.chosen == ON_OFF and p.number == 0)

    @property
    def to_mix(self) -> dict[str, dict[float, BaselinePoint]]:
        """The points that are mixed into the one at the decomposition's L0, by their number of parts (B5): for each
        baseline, and for the decomposition if its parts are chosen by gradient as well.
        """
        numbers, chosen = shares(self.own.l0), WITH_K_ON[self.choice]
        found: dict[str, dict[float, BaselinePoint]] = {}
        for p in self.points:
            if p.parts != OWN or self.choice == "gradient":
                of_parts = found.setdefault(p.parts, {})
                if p.chosen == chosen and p.number in numbers:
                    of_parts[p.number] = p
        return found

    @property
    def matched(self) -> dict[str, BaselinePoint]:
        """Each baseline's point at the decomposition's L0 (B5)."""
        return {name: mixed(points, self.own.l0) for name, points in self.to_mix.items() if name != OWN}

    @property
    def own_by_gradient(self) -> BaselinePoint | None:
        """The point of the decomposition with as many parts on as a baseline at its L0, also chosen by gradient; None
        if λ chooses among its parts.
        """
        points = self.to_mix.get(OWN)
        return None if points is None else mixed(points, self.own.l0)

    @property
    def at_own_l0(self) -> tuple[BaselinePoint, ...]:
        """The points at the decomposition's L0, which are attacked: its own, then those of the baselines."""
        chosen = self.own_by_gradient
        return (self.own, self.own_on_off, *([] if chosen is None else [chosen]), *self.matched.values())

    @property
    def matched_only(self) -> bool:
        """Whether baselines were measured only at the decomposition's L0."""
        return {p.number for p in self.points if p.parts != OWN} <= shares(self.own.l0).keys()

    @property
    def ladder(self) -> dict[float, dict[str, float]]:
        """Returns, for each k, the errors with the k largest parts on, by name: of the decomposition, each baseline,
        and each SAE and transcoder. It has every k at which a baseline or one of the latter was measured.
        """
        found: dict[float, dict[str, float]] = {}
        for p in self.points:
            if p.chosen in WITH_K_ON.values():
                found.setdefault(p.number, {})[p.parts] = p.error
        for r in self.replacements:
            for k, with_k in r.ladder.items():
                found.setdefault(k, {})[r.name] = with_k.error
        return {k: errors for k, errors in sorted(found.items()) if errors.keys() - {OWN}}

    @property
    def names(self) -> list[str]:
        """The names in `ladder`."""
        return [OWN, *self.matched, *(r.name for r in self.replacements)]

    @property
    def best(self) -> BaselinePoint:
        """The baseline of least error at the decomposition's L0."""
        return min(self.matched.values(), key=lambda p: p.error)

    def over_best(self, point: BaselinePoint) -> dict[str, float]:
        """Returns the errors of a point, each divided by that of the baseline which is best in it at the
        decomposition's L0: ``error``, ``random``, and ``attack`` (the longest, if there was one). NaN if a baseline has
        0.
        """

        def ratio(reading: Callable[[BaselinePoint], float]) -> float:
            least = min(map(reading, self.matched.values()))
            return reading(point) / least if least > 0 else math.nan

        found = {"error": ratio(lambda p: p.error), "random": ratio(lambda p: p.random)}
        if self.lengths:
            found["attack"] = ratio(lambda p: p.attacked[-1])
        return found


def caption(replacements: Sequence[Replacement], n_sites: int, l0: float) -> list[str]:
    """Describes how they compare with a decomposition of ``n_sites`` matrices with ``l0`` components on at each; []
    without replacements.
    """
    lines = []
    for r in replacements:
        bos = " with a BOS token before each row" if r.prepends_bos else ""
        trained = "" if r.model is None else f", trained on {r.model}{bos}"
        if r.kind == "SAE":
            place = f"its reconstruction replaces {r.writes}, and every matrix stays as it is"
        else:
            sites = f"sites of the run in this MLP: {', '.join(first_few(r.sites)) or 'none'}"
            place = f"it reads {r.reads} and replaces {r.writes}, thus this MLP's matrices ({sites})"
        lines.append(f"{r.name} ({r.architecture}, {r.d_sae:,} latents{trained}): {place}.")
    if replacements:
        lines.append(
            "The L0 of an SAE or a transcoder counts latents at that one place; the rest of the network is as it "
            f"is. The decomposition replaces {n_sites} matrices at once, with {l0:.1f} components on at each, "
            f"{n_sites * l0:.1f} together."
        )
    return lines
