"""A claim about components, tested on text that the run did not train on: what they do to one token after some text."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, product
from math import isfinite

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from param_decomp_lab.errors import UserError
from param_decomp_lab.opening.run import Run
from param_decomp_lab.opening.selection import selected
from param_decomp_lab.runs.opened import ROWS_AT_ONCE
from param_decomp_lab.runs.prompt import read_output
from param_decomp_lab.safe_io.json_text import has_surrogates
from param_decomp_lab.safe_io.printable import shortened
from param_decomp_lab.ui.progress import Report
from param_decomp_lab.ui.tables import markdown_table

RESAMPLES = 2000
"""Draws of rows that an interval is made of."""
COVERED = 0.95
TEXT_BEFORE, TEXT_AFTER = 15, 5
"""Tokens that are shown around a place."""


@dataclass(frozen=True)
class ClaimRequest:
    """What is claimed: after any of the texts ``after``, these ``components`` (``SITE:NUMBER`` or ``group:NUMBER``)
    speak for ``token``.

    ``scales``: what they are multiplied by, each in turn; 0 takes them out. ``controls``: draws of other components.
    ``rows``: held-out rows to read; None for all. ``seed``: of the draws and the intervals.
    """

    components: Sequence[str]
    after: Sequence[str]
    token: str
    scales: Sequence[float] = (0.0,)
    controls: int = 0
    rows: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Change:
    """What happens to the token at some places. ``before``, ``after``: its mean probability. ``falls``: the share of
    the places at which it falls. ``log_change``: the mean change of its log-probability, in nats, with the 95 %
    ``interval`` over rows (bootstrap); None where the places are in fewer than two rows."""

    places: int
    before: float
    after: float
    falls: float
    log_change: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class ClaimLine:
    """Components multiplied by ``scale``: the change ``here``, after the texts, and ``elsewhere`` (None where every
    place is here).

    ``controls``: the components of each draw of a control, whose changes are means over the draws.
    """

    components: tuple[str, ...]
    scale: float
    here: Change
    elsewhere: Change | None
    controls: tuple[tuple[str, ...], ...] = ()
    control_here: Change | None = None
    control_elsewhere: Change | None = None


@dataclass(frozen=True)
class Counterexample:
    """A place after the texts at which the token does not move as claimed. ``text``: around it."""

    row: int
    position: int
    before: float
    after: float
    text: str


@dataclass(frozen=True)
class Claim:
    """A tested claim. ``lines``: each component alone, then all together, at every scale. ``exceptions``: the places
    after the texts at which the token does not fall with all of them at the first scale (does not rise, if that is
    above 1)."""

    run: str
    step: int
    after: tuple[str, ...]
    token: str
    token_id: int
    rows: int
    lines: tuple[ClaimLine, ...]
    exceptions: tuple[Counterexample, ...]

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False)

    def markdown(self) -> Iterator[str]:
        """The lines of a table."""
        places = self.lines[0].here.places
        after = ", ".join(map(repr, self.after))
        scaled = any(line.scale != 0 for line in self.lines)
        head = _cell(f"P({self.token!r}) after {after} ({places:,} place{'s'[: places > 1]})")
        moves = "falls | log P, 95 %"
        columns = f"{'multiplied' if scaled else 'taken out'} | {head} | {moves} | elsewhere | {moves}"

        def rows() -> Iterator[list[str]]:
            for line in self.lines:
                times = f" × {line.scale:g}" if scaled else ""
                yield [_cell(", ".join(line.components) + times), *_cells(line.here), *_cells(line.elsewhere)]
                if line.controls:
                    yield [f"as many others{times}", *_cells(line.control_here), *_cells(line.control_elsewhere)]

        yield from markdown_table(columns, rows())


def measure_claim(run: Run, request: ClaimRequest, report: Report | None = None) -> Claim:
    """Tests a claim on the run's held-out rows.

    Components are multiplied at every position, all else (Δ too) as it is; the target itself is what they are compared
    with. A control is as many components of the same sites that the claim does not name, drawn without replacement in
    proportion to how often they fire at the places after the texts: all that fire there, where these are fewer.

    Raises UserError, before anything is computed, for a toy, for what is unknown or not one token, and where a text
    does not occur.
    """
    token, chosen = _check(run, request)
    rows = run.held_out_rows(request.rows)
    here = _places(run, rows, request.after)
    sets = [(name,) for name in chosen] + ([tuple(chosen)] if len(chosen) > 1 else [])
    batches = -(-len(rows) // ROWS_AT_ONCE)
    firing_rows = np.flatnonzero(here.any(axis=1)) if request.controls else np.zeros(0, int)
    n_lines = len(sets) * len(request.scales)
    total = batches * (1 + n_lines * (1 + request.controls)) + -(-len(firing_rows) // ROWS_AT_ONCE)
    done = count(1)

    def told(what: str) -> Callable[[], None]:
        return lambda: report(what, next(done), total) if report is not None else None

    log_p = partial(_log_probabilities, run, rows, token)
    before = log_p({}, told("the model as it is"))
    sites = _masks(run, chosen)
    firings = {}
    if request.controls:
        firings = firings_at(run, rows[firing_rows], here[firing_rows], list(sites), told("what fires after the text"))
    rng = np.random.default_rng(request.seed)
    drawn = {names: draw_others(_masks(run, names), sites, firings, request.controls, rng) for names in sets}
    lines, exceptions = [], []
    for names, scale in product(sets, request.scales):
        after = log_p(_scaled(_masks(run, names), scale), told(f"{_listed(names)} times {scale:g}"))
        lines.append(_line(request, names, scale, here, before, [after]))
        if drawn[names]:
            tell = told(f"controls of {_listed(names)} times {scale:g}")
            controls = (log_p(_scaled(_masks(run, others), scale), tell) for others in drawn[names])
            control = _line(request, names, scale, here, before, controls)
            lines[-1] = ClaimLine(
                names, scale, lines[-1].here, lines[-1].elsewhere, drawn[names], control.here, control.elsewhere
            )
        if names == sets[-1] and scale == request.scales[0]:
            wrong = here & ((after >= before) if scale < 1 else (after <= before))
            exceptions = [_counterexample(run, rows, before, after, *place) for place in np.argwhere(wrong).tolist()]
    return Claim(
        run.id, run.step, tuple(request.after), request.token, token, len(rows), tuple(lines), tuple(exceptions)
    )


def _check(run: Run, request: ClaimRequest) -> tuple[int, list[str]]:
    """The token's id, and the components without repetition. Raises UserError for what needs no rows to be seen."""
    if not run.is_language_model:
        raise UserError("a toy reads features, not text: `run.intervene` tests what its components do")
    if run.text is None:
        raise UserError("no tokenizer next to the data or the target: texts cannot be read")
    if not request.components:
        raise UserError("name the components, such as layers.3.mlp.down_proj:17")
    if not request.after or not all(request.after):
        raise UserError("--after: give the text in front of the token")
    if not request.token:
        raise UserError("--token: give the token that the claim is about")
    if any(map(has_surrogates, (request.token, *request.after))):
        raise UserError("--after and --token should be text in UTF-8")
    for scale in request.scales:
        if not isfinite(scale) or scale == 1:
            raise UserError(f"--scale {scale:g}: should be a finite number other than 1, which changes nothing")
    if not request.scales or request.controls < 0:
        raise UserError("a claim needs at least one scale, and no fewer than 0 controls")
    token = read_output(run, request.token, "--token")
    if token >= run.n_outputs:
        raise UserError(f"--token: the model has {run.n_outputs:,} tokens, and this is token {token:,}")
    chosen = list(dict.fromkeys(name.strip() for name in request.components))
    _masks(run, chosen)
    return token, chosen


def _places(run: Run, rows: Int[np.ndarray, "rows T"], after: Sequence[str]) -> Bool[np.ndarray, "rows T"]:
    assert run.text is not None
    here = np.zeros(rows.shape, bool)
    for text in after:
        found = run.text.ends_with(rows, text)
        if not found.any():
            raise UserError(
                f"--after: no token of the {len(rows):,} held-out rows ends with '{shortened(text, 60)}'; spaces and "
                "capitals count"
            )
        here |= found
    return here


def _masks(run: Run, names: Sequence[str]) -> dict[str, Bool[np.ndarray, " C"]]:
    """By site, which components are named. Raises UserError for an unknown one."""
    found = selected(names, run.sites, 1, may_have_positions=False, groups=lambda: run.groups)
    return {site: mask[0] for site, mask in found.items()}


def _scaled(named: Mapping[str, Bool[np.ndarray, " C"]], scale: float) -> dict[str, Float[np.ndarray, " C"]]:
    return {site: np.where(mask, np.float32(scale), np.float32(1)) for site, mask in named.items()}


def _log_probabilities(
    run: Run,
    rows: Int[np.ndarray, "rows T"],
    token: int,
    masks: Mapping[str, Float[np.ndarray, " C"]],
    tell: Callable[[], None],
) -> Float[np.ndarray, "rows T"]:
    """Log-probabilities of the token after every position, with these masks and Δ; without masks, the target's own."""
    found = []
    for batch, n in _batches(rows):
        logits = run.logits(batch, masks or None, delta=1.0 if masks else 0.0)
        found.append(np.asarray(_log_probability(logits, token))[:n])
        if not np.isfinite(found[-1]).all():
            raise UserError("probabilities are not finite with these components; try a smaller --scale")
        tell()
    return np.concatenate(found)


@jax.jit
def _log_probability(logits: Float[Array, "B T vocabulary"], token: Int[Array, ""]) -> Float[Array, "B T"]:
    return logits[..., token] - jax.nn.logsumexp(logits, axis=-1)


def _batches(rows: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """`ROWS_AT_ONCE` rows each, and how many of them count: the last ones are filled up, so that there is one
    program."""
    for first in range(0, len(rows), ROWS_AT_ONCE):
        these = np.minimum(np.arange(first, first + ROWS_AT_ONCE), len(rows) - 1)
        yield rows[these], min(ROWS_AT_ONCE, len(rows) - first)


def firings_at(
    run: Run,
    rows: Int[np.ndarray, "rows T"],
    here: Bool[np.ndarray, "rows T"],
    sites: list[str],
    tell: Callable[[], None] = lambda: None,
) -> dict[str, Int[np.ndarray, " C"]]:
    """At how many of the places each component of these sites fires (λ > 0)."""
    counts = {site: np.zeros(run.sites[site].C, np.int64) for site in sites}
    for (batch, n), (at, _) in zip(_batches(rows), _batches(here), strict=True):
        for site, importances in run.causal_importances(batch, sites).items():
            counts[site] += (np.asarray(importances[:n]) > 0)[at[:n]].sum(axis=0)
        tell()
    return counts


def draw_others(
    named: Mapping[str, Bool[np.ndarray, " C"]],
    claimed: Mapping[str, Bool[np.ndarray, " C"]],
    firings: Mapping[str, Int[np.ndarray, " C"]],
    draws: int,
    rng: np.random.Generator,
) -> tuple[tuple[str, ...], ...]:
    """As many components as ``named`` for each draw, none of them ``claimed``; no draws where no other of the sites
    fires at the places."""
    found = []
    for _ in range(draws):
        others: list[str] = []
        for site, mask in named.items():
            weight = np.where(claimed[site], 0, firings[site])
            n = min(int(mask.sum()), int(np.count_nonzero(weight)))
            if n:
                numbers = rng.choice(len(weight), n, replace=False, p=weight / weight.sum())
                others += [f"{site}:{number}" for number in np.sort(numbers)]
        if others:
            found.append(tuple(others))
    return tuple(found)


def _line(
    request: ClaimRequest,
    names: tuple[str, ...],
    scale: float,
    here: Bool[np.ndarray, "rows T"],
    before: Float[np.ndarray, "rows T"],
    afters: "Iterator[Float[np.ndarray, 'rows T']] | list[Float[np.ndarray, 'rows T']]",
) -> ClaimLine:
    """The changes, means over ``afters``: log-probabilities, one at a time because they may be many."""
    p, falls, change = np.zeros(here.shape), np.zeros(here.shape), np.zeros(here.shape)
    n = 0
    for after in afters:
        p += np.exp(after, dtype=np.float64)
        falls += after < before
        change += after.astype(np.float64) - before
        n += 1

    def at(places: Bool[np.ndarray, "rows T"]) -> Change | None:
        if not places.any():
            return None
        total = int(places.sum())
        changes = np.where(places, change / n, 0).sum(axis=1)
        return Change(
            total, float(np.exp(before[places], dtype=np.float64).mean()), float(p[places].mean() / n),
            float(falls[places].mean() / n), float(changes.sum() / total),
            bootstrap(changes, places.sum(axis=1), request.seed),
        )  # fmt: skip

    after_texts = at(here)
    assert after_texts is not None
    return ClaimLine(names, scale, after_texts, at(~here))


def bootstrap(
    sums: Float[np.ndarray, " rows"], counts: Int[np.ndarray, " rows"], seed: int
) -> tuple[float, float] | None:
    """The 95 % interval of ``sums.sum() / counts.sum()`` when rows with places are drawn again with replacement; None
    for fewer than two of them."""
    sums, counts = sums[counts > 0], counts[counts > 0]
    n = len(sums)
    if n < 2:
        return None
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(RESAMPLES):
        these = rng.integers(0, n, n)
        means.append(sums[these].sum() / counts[these].sum())
    low, high = np.quantile(means, [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return float(low), float(high)


def _counterexample(
    run: Run, rows: np.ndarray, before: np.ndarray, after: np.ndarray, row: int, position: int
) -> Counterexample:
    assert run.text is not None
    text = run.text.text(rows[row, max(0, position + 1 - TEXT_BEFORE) : position + 1 + TEXT_AFTER].tolist())
    p, q = (float(np.exp(x[row, position], dtype=np.float64)) for x in (before, after))
    return Counterexample(row, position, p, q, text)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"all {len(names)}"


def _cells(change: Change | None) -> list[str]:
    if change is None:
        return ["–"] * 3
    interval = "" if change.interval is None else f" [{_nats(change.interval[0])}, {_nats(change.interval[1])}]"
    return [
        f"{change.before:.3f} → {change.after:.3f}",
        f"{change.falls:.0%}",
        f"{_nats(change.log_change)}{interval}",
    ]


def _nats(x: float) -> str:
    text = f"{x:+.3f}"
    return "0.000" if text.strip("+-0.") == "" else text.replace("-", "−")


def _cell(text: str) -> str:
    """In a table of Markdown."""
    return text.replace("|", "\\|")
