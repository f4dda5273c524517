"""A claim about components, tested on text that the run did not train on: what they do to one token after some text."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, product
from math import ceil, isfinite
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from param_decomp_lab.data.row_range import TokenRows
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.errors import UserError
from param_decomp_lab.opening.run import Run
from param_decomp_lab.opening.selection import selected
from param_decomp_lab.runs.opened import ROWS_AT_ONCE
from param_decomp_lab.runs.prompt import read_output
from param_decomp_lab.safe_io.json_text import has_surrogates
from param_decomp_lab.safe_io.printable import shortened
from param_decomp_lab.setup.other_data import refuse_other_tokens, trained_on
from param_decomp_lab.ui.progress import Report
from param_decomp_lab.ui.tables import markdown_table

RESAMPLES = 2000
"""Draws of rows that an interval is made of."""
COVERED = 0.95
TEXT_BEFORE, TEXT_AFTER = 15, 5
"""Tokens that are shown around a place."""
MOST_ROWS = 4096
"""Rows that are read unless a request says how many."""
READ_AT_ONCE = 64 * ROWS_AT_ONCE
"""Rows that are in memory at once."""
ROUNDING_BATCHES = 8
ROUNDING_ROWS = ROUNDING_BATCHES * ROWS_AT_ONCE
"""Rows on which the effect of rounding is measured; where the text is in fewer, each is measured several times."""
MOST_LISTED = 1000
"""Counterexamples that are kept with their text; the others are counted."""


@dataclass(frozen=True)
class ClaimRequest:
    """What is claimed: after any of the texts ``after``, these ``components`` (``SITE:NUMBER`` or ``group:NUMBER``)
    speak for ``token``.

    ``scales``: what they are multiplied by, each in turn; 0 takes them out. ``controls``: draws of other components.
    ``rows``: how many rows to read, from the first on; None for `MOST_ROWS` at most. ``seed``: of the draws and the
    intervals. ``data``: a folder of token data to read in place of the run's held-out rows.
    """

    components: Sequence[str]
    after: Sequence[str]
    token: str
    scales: Sequence[float] = (0.0,)
    controls: int = 0
    rows: int | None = None
    seed: int = 0
    data: Path | None = None


@dataclass(frozen=True)
class Change:
    """What happens to the token at some places. ``before``, ``after``: its mean probability. ``falls``: the share of
    the places at which its log-probability falls by more than `Rounding`. ``log_change``: the mean change of its
    log-probability, in nats, with the 95 % ``interval`` over rows (bootstrap); None where the places are in fewer than
    two rows."""

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
class Rounding:
    """Changes of the token's log-probability, in nats, up to which they may be rounding and count as none: ``here``,
    after the texts, and ``elsewhere`` (as ``here`` where there is no other place).

    Twice the largest that is seen where every component of the claim's sites is off by one unit in the last place of
    the run's compute dtype, with random signs, in up to `ROUNDING_ROWS` rows with the texts. At least twice the spacing
    of float32 numbers at the largest of the logits and of the logarithms of their sums of exponentials there: a
    log-probability is the difference of two of these numbers, however small it is itself.
    """

    here: float
    elsewhere: float


@dataclass(frozen=True)
class Claim:
    """A tested claim. It has read the first ``rows`` of ``rows_available``: those that the run holds out
    (``held_out``), else those of `ClaimRequest.data`. ``data``: the folder or files that they are in; plain files hold
    the rows that the run trains on, too. ``trained_on``: whether files that the run trained on are among them, by their
    paths; None if its data are not on this machine. ``lines``: each component alone, then all together, at every scale.
    ``exceptions``: the places after the texts at which the token does not fall by more than rounding with all of them
    at the first scale (does not rise, if that is above 1): the first `MOST_LISTED` of ``n_exceptions``.
    """

    run: str
    step: int
    after: tuple[str, ...]
    token: str
    token_id: int
    data: str
    held_out: bool
    trained_on: bool | None
    rows: int
    rows_available: int
    rounding: Rounding
    lines: tuple[ClaimLine, ...]
    exceptions: tuple[Counterexample, ...]
    n_exceptions: int

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

    def notes(self) -> Iterator[str]:
        """What was read, and what counts as no change."""
        part = "all" if self.rows == self.rows_available else f"the first {self.rows:,} of"
        yield f"{part} {self.rows_available:,} {'held-out ' * self.held_out}rows of {self.data}"
        if self.trained_on is None:
            yield "whether the run trained on these rows is not known: its own are not on this machine"
        elif self.trained_on:
            yield "the run trained on rows of these files: what holds there may not hold on other text"
        anywhere = self.lines[0].elsewhere is not None
        yield (
            f"a change of log P below {self.rounding.here:.2g} nats"
            + (f" after the text and {self.rounding.elsewhere:.2g} elsewhere" if anywhere else "")
            + " may be rounding, and is not counted as a fall or rise"
        )


def measure_claim(run: Run, request: ClaimRequest, report: Report | None = None) -> Claim:
    """Tests a claim on the run's held-out rows, or on those of ``request.data``; a few are in memory at a time.

    Components are multiplied at every position, all else (Δ too) as it is; the target itself is what they are compared
    with. A control is as many components of the same sites that the claim does not name, drawn without replacement in
    proportion to how often they fire at the places after the texts: all that fire there, where these are fewer.

    Raises UserError, before the network runs, for a toy, for what is unknown or not one token, for rows that are not
    there or are of another tokenizer, and where a text does not occur.
    """
    token, chosen = _check(run, request)
    rows = ClaimRows(run, request)
    in_row = rows.count_places(report)
    with_places = np.flatnonzero(in_row)
    sets = [(name,) for name in chosen] + ([tuple(chosen)] if len(chosen) > 1 else [])
    batches, batches_here = (ceil(n / ROWS_AT_ONCE) for n in (rows.n, len(with_places)))
    total = batches * (1 + len(sets) * len(request.scales) * (1 + request.controls))
    for_rounding = min(batches_here, ROUNDING_BATCHES)
    draws = ceil(ROUNDING_BATCHES / for_rounding)
    total += for_rounding * (1 + draws) + batches_here * (request.controls > 0)
    done = count(1)

    def tell(what: str) -> None:
        if report is not None:
            report(what, next(done), total)

    sites = _masks(run, chosen)
    firings = {}
    if request.controls:
        firings = firings_at(run, rows.batches(with_places), list(sites), lambda: tell("what fires after the text"))
    rng = np.random.default_rng(request.seed)
    drawn = {names: draw_others(_masks(run, names), sites, firings, request.controls, rng) for names in sets}
    own_rng = np.random.default_rng([request.seed, 1])  # whatever controls have drawn
    few = rows.batches(with_places[:ROUNDING_ROWS])
    rounding = _rounding(run, few, token, sites, draws, own_rng, lambda: tell("what rounding does"))
    original = _Original(rows.n)
    tested = [
        _Tested(run, names, scale, drawn[names], rows.n, rounding) for names, scale in product(sets, request.scales)
    ]
    claimed = next(one for one in tested if one.names == sets[-1])
    exceptions: list[Counterexample] = []
    n_exceptions = 0
    for batch in rows.batches(np.arange(rows.n)):

        def log_p(masks: Mapping[str, np.ndarray], batch: RowBatch = batch) -> Float[np.ndarray, "n T"]:
            found = _log_probabilities(run, batch, token, masks)
            tell("with and without the components")
            return found

        before = log_p({})
        original.add(batch, before)
        for one in tested:
            after = log_p(one.masks)
            one.add(batch, before, after)
            for masks in one.control_masks:
                one.add_control(batch, before, log_p(masks))
            if one is claimed:
                moved = after.astype(np.float64) - before
                wrong = batch.here & ((moved if one.scale > 1 else -moved) <= rounding.here)
                n_exceptions += int(wrong.sum())
                for row, position in np.argwhere(wrong)[: MOST_LISTED - len(exceptions)].tolist():
                    exceptions.append(_counterexample(run, batch, before, after, row, position))
    return Claim(
        run.id, run.step, tuple(request.after), request.token, token, rows.data.source, rows.held_out,
        rows.trained_on, rows.n, len(rows.data), rounding, tuple(one.line(original, request.seed) for one in tested),
        tuple(exceptions), n_exceptions,
    )  # fmt: skip


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
    if request.rows is not None and request.rows < 1:
        raise UserError(f"--rows {request.rows}: should be at least 1")
    chosen = list(dict.fromkeys(name.strip() for name in request.components))
    _masks(run, chosen)
    return token, chosen


class RowBatch(NamedTuple):
    """`ROWS_AT_ONCE` rows. ``ids``: their numbers; fewer, if the last ones only fill the batch up, so that there is one
    program. ``here``: the places after the texts, of the rows that count."""

    ids: Int[np.ndarray, " n"]
    tokens: Int[np.ndarray, "rows T"]
    here: Bool[np.ndarray, "n T"]


class ClaimRows:
    """The rows that a claim is tested on: the first ``n`` of ``data``."""

    def __init__(self, run: Run, request: ClaimRequest) -> None:
        assert run.text is not None
        self._find, self._longest, self._after = run.text.ends_with, run.longest_row, request.after
        self.data: TokenRows
        self.held_out = request.data is None
        self.trained_on = False if request.data is None else trained_on(request.data, run.resolved)
        if request.data is not None:
            self.data = TokenData(request.data)
            self.data.check(run.n_outputs)
            refuse_other_tokens(request.data, self.data, run.text, run.resolved)
        elif run.resolved.holds_rows_out:
            self.data = run.resolved.held_out_rows
        else:
            raise UserError("the run had no eval, so it trained on all of its rows; give others: --data FOLDER")
        self.n = min(MOST_ROWS if request.rows is None else request.rows, len(self.data))

    def _read(self, ids: Int[np.ndarray, " n"]) -> Iterator[tuple[Int[np.ndarray, " n"], Int[np.ndarray, "n T"]]]:
        for first in range(0, len(ids), READ_AT_ONCE):
            these = ids[first : first + READ_AT_ONCE]
            yield these, self.data.rows(these)[:, : self._longest]

    def count_places(self, report: Report | None) -> Int[np.ndarray, " rows"]:
        """The number of places after the texts in each row. Raises UserError for a text that does not occur."""
        found, occurs = np.zeros(self.n, np.int64), dict.fromkeys(self._after, False)
        for ids, rows in self._read(np.arange(self.n)):
            each = {text: self._find(rows, text) for text in self._after}
            occurs = {text: seen or bool(each[text].any()) for text, seen in occurs.items()}
            found[ids] = np.any([*each.values()], axis=0).sum(axis=1)
            if report is not None:
                report("looking for the text", int(ids[-1]) + 1, self.n)
        for text, seen in occurs.items():
            if not seen:
                more = f"; --rows reads more of the {len(self.data):,}" if self.n < len(self.data) else ""
                raise UserError(
                    f"--after: no token of the {self.n:,} {'held-out ' * self.held_out}rows ends with "
                    f"'{shortened(text, 60)}'; spaces and capitals count{more}"
                )
        return found

    def batches(self, ids: Int[np.ndarray, " n"]) -> Iterator[RowBatch]:
        """The rows with these numbers, `ROWS_AT_ONCE` at a time."""
        for numbers, rows in self._read(ids):
            here = np.any([self._find(rows, text) for text in self._after], axis=0)
            for first in range(0, len(numbers), ROWS_AT_ONCE):
                own = slice(first, first + ROWS_AT_ONCE)
                filled = np.minimum(np.arange(first, first + ROWS_AT_ONCE), len(rows) - 1)
                yield RowBatch(numbers[own], rows[filled], here[own])


class _Original:
    """The places in each row, and the sum of the token's probabilities there: after the texts, and elsewhere."""

    def __init__(self, n_rows: int) -> None:
        self.places, self.p = np.zeros((2, n_rows), np.int64), [0.0, 0.0]

    def add(self, batch: RowBatch, log_p: Float[np.ndarray, "n T"]) -> None:
        for n, at in enumerate((batch.here, ~batch.here)):
            self.places[n, batch.ids] = at.sum(axis=1)
            self.p[n] += float(np.exp(log_p[at], dtype=np.float64).sum())


class _Tally:
    """Sums of what a change of the network does to the token; several controls are added up. The changes of the
    log-probability have a sum for each row, which intervals are made of."""

    def __init__(self, n_rows: int, rounding: Rounding) -> None:
        self._least = rounding.here, rounding.elsewhere
        self._p, self._falls = [0.0, 0.0], [0, 0]
        self._moved = np.zeros((2, n_rows))

    def add(self, batch: RowBatch, before: Float[np.ndarray, "n T"], after: Float[np.ndarray, "n T"]) -> None:
        moved = after.astype(np.float64) - before
        for n, at in enumerate((batch.here, ~batch.here)):
            self._p[n] += float(np.exp(after[at], dtype=np.float64).sum())
            self._falls[n] += int((moved[at] < -self._least[n]).sum())
            self._moved[n, batch.ids] += np.where(at, moved, 0).sum(axis=1)

    def mean(self, original: _Original, draws: int, seed: int) -> tuple[Change | None, Change | None]:
        """The change after the texts, and elsewhere, a mean over as many ``draws``."""

        def change(n: int) -> Change | None:
            places = original.places[n]
            total = int(places.sum())
            if not total or not draws:
                return None
            moved = self._moved[n] / draws
            return Change(
                total, original.p[n] / total, self._p[n] / (total * draws), self._falls[n] / (total * draws),
                float(moved.sum() / total), bootstrap(moved, places, seed),
            )  # fmt: skip

        return change(0), change(1)


class _Tested:
    """Components at a scale, and their controls, while rows are read."""

    def __init__(
        self,
        run: Run,
        names: tuple[str, ...],
        scale: float,
        others: tuple[tuple[str, ...], ...],
        n_rows: int,
        rounding: Rounding,
    ) -> None:
        self.names, self.scale, self._others = names, scale, others
        self._chosen, *self._controls = (_masks(run, components) for components in (names, *others))
        self._tally, self._control = (_Tally(n_rows, rounding) for _ in range(2))

    @property
    def masks(self) -> dict[str, Float[np.ndarray, " C"]]:
        return _scaled(self._chosen, self.scale)

    @property
    def control_masks(self) -> Iterator[dict[str, Float[np.ndarray, " C"]]]:
        return (_scaled(named, self.scale) for named in self._controls)

    def add(self, batch: RowBatch, before: Float[np.ndarray, "n T"], after: Float[np.ndarray, "n T"]) -> None:
        self._tally.add(batch, before, after)

    def add_control(self, batch: RowBatch, before: Float[np.ndarray, "n T"], after: Float[np.ndarray, "n T"]) -> None:
        self._control.add(batch, before, after)

    def line(self, original: _Original, seed: int) -> ClaimLine:
        here, elsewhere = self._tally.mean(original, 1, seed)
        assert here is not None
        controls = self._control.mean(original, len(self._others), seed)
        return ClaimLine(self.names, self.scale, here, elsewhere, self._others, *controls)


def _masks(run: Run, names: Sequence[str]) -> dict[str, Bool[np.ndarray, " C"]]:
    """By site, which components are named. Raises UserError for an unknown one."""
    found = selected(names, run.sites, 1, may_have_positions=False, groups=lambda: run.groups)
    return {site: mask[0] for site, mask in found.items()}


def _scaled(named: Mapping[str, Bool[np.ndarray, " C"]], scale: float) -> dict[str, Float[np.ndarray, " C"]]:
    return {site: np.where(mask, np.float32(scale), np.float32(1)) for site, mask in named.items()}


def _log_probabilities(
    run: Run, batch: RowBatch, token: int, masks: Mapping[str, Float[np.ndarray, " C"]]
) -> Float[np.ndarray, "n T"]:
    """Log-probabilities of the token after every position, with these masks and Δ; without masks, the target's own."""
    logits = run.logits(batch.tokens, masks or None, delta=1.0 if masks else 0.0)
    return _checked(batch, _log_probability(logits, token))


def _checked(batch: RowBatch, log_p: Float[Array, "B T"]) -> Float[np.ndarray, "n T"]:
    found = np.asarray(log_p)[: len(batch.ids)]
    if not np.isfinite(found).all():
        raise UserError("probabilities are not finite with these components; try a smaller --scale")
    return found


@jax.jit
def _log_probability(logits: Float[Array, "B T vocabulary"], token: Int[Array, ""]) -> Float[Array, "B T"]:
    of_token, of_all = _terms(logits, token)
    return of_token - of_all


def _terms(logits: Float[Array, "B T vocabulary"], token: Int[Array, ""]) -> tuple[Array, Array]:
    """The two numbers ``[B, T]`` whose difference is the log-probability."""
    return logits[..., token], jax.nn.logsumexp(logits, axis=-1)


@jax.jit
def _larger_term(logits: Float[Array, "B T vocabulary"], token: Int[Array, ""]) -> Float[Array, "B T"]:
    return jnp.maximum(*map(jnp.abs, _terms(logits, token)))


def _rounding(
    run: Run,
    batches: Iterable[RowBatch],
    token: int,
    sites: Iterable[str],
    draws: int,
    rng: np.random.Generator,
    tell: Callable[[], None],
) -> Rounding:
    """Perturbs every mask by one unit in the last place, with random signs drawn ``draws`` times for each batch, and
    measures how far the log-probability moves."""
    unit, sites = float(jnp.finfo(run.problem.compute_dtype).eps), list(sites)
    found = np.zeros(2)
    for batch in batches:
        logits = run.logits(batch.tokens)
        before = _checked(batch, _log_probability(logits, token)).astype(np.float64)
        spacing = np.spacing(np.asarray(_larger_term(logits, token))[: len(batch.ids)])
        moved = spacing.astype(np.float64)
        tell()
        for _ in range(draws):
            masks = {name: (1 + unit * rng.choice([-1, 1], run.sites[name].C)).astype(np.float32) for name in sites}
            moved = np.maximum(moved, np.abs(_log_probabilities(run, batch, token, masks) - before))
            tell()
        for n, at in enumerate((batch.here, ~batch.here)):
            found[n] = max(found[n], 2 * moved[at].max(initial=0))
    here, elsewhere = found.tolist()
    return Rounding(here, elsewhere or here)


def firings_at(
    run: Run, batches: Iterable[RowBatch], sites: list[str], tell: Callable[[], None] = lambda: None
) -> dict[str, Int[np.ndarray, " C"]]:
    """At how many of the places after the texts each component of these sites fires (λ > 0)."""
    counts = {site: np.zeros(run.sites[site].C, np.int64) for site in sites}
    for batch in batches:
        at = np.zeros(batch.tokens.shape, bool)
        at[: len(batch.here)] = batch.here
        for site, found in _count_firings(run.causal_importances(batch.tokens, sites), at).items():
            counts[site] += np.asarray(found)
        tell()
    return counts


@jax.jit
def _count_firings(
    importances: Mapping[str, Float[Array, "B T C"]], at: Bool[Array, "B T"]
) -> dict[str, Int[Array, " C"]]:
    """On the devices: λ of whole sites is large."""
    return {site: jnp.sum((x > 0) & at[..., None], axis=(0, 1)) for site, x in importances.items()}


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
    run: Run, batch: RowBatch, before: np.ndarray, after: np.ndarray, row: int, position: int
) -> Counterexample:
    """``row``: its place in the batch."""
    assert run.text is not None
    around = batch.tokens[row, max(0, position + 1 - TEXT_BEFORE) : position + 1 + TEXT_AFTER]
    p, q = (float(np.exp(x[row, position], dtype=np.float64)) for x in (before, after))
    return Counterexample(int(batch.ids[row]), position, p, q, run.text.text(around.tolist()))


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
