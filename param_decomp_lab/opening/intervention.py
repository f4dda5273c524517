"""Interventions: a prompt with some components off, scaled, set to an activation, or on alone (section 14 of the
method)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from param_decomp_lab.errors import UserError
from param_decomp_lab.opening.selection import Selection, selected
from param_decomp_lab.runs.generation import extended
from param_decomp_lab.runs.prompt import read_prompt
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.cards import card
from param_decomp_lab.ui.numbers import number, percent

ReadingName = Literal["ci", "random", "attack"]
READINGS: tuple[ReadingName, ...] = ("ci", "random", "attack")
"""What the components that are not selected do (I3)."""
OUTPUTS_NAMED = 8
LARGEST = float(np.finfo(np.float32).max)
"""The largest scale, or activation that is set."""
READING_TITLES: dict[ReadingName, str] = {
    "ci": "The others at their importances",
    "random": "The others at random above them",
    "attack": "The others under attack",
}


@dataclass(frozen=True)
class Masking:
    """Masks of all sites ``[T, C]``, weights of their deltas ``[T]``, and activations ``[T, C]`` that are added (F8):
    arguments of `Run.logits`."""

    masks: dict[str, Float[np.ndarray, "T C"]]
    delta: dict[str, Float[np.ndarray, " T"]] | float
    added: dict[str, Float[np.ndarray, "T C"]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """One reading: outputs ``[samples, T, d]`` without and with the intervention, and the masks that gave each."""

    before: Float[np.ndarray, "samples T d"]
    after: Float[np.ndarray, "samples T d"]
    before_masking: tuple[Masking, ...]
    after_masking: tuple[Masking, ...]

    def probabilities(self, position: int = -1) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
        """Next-token probabilities at a position, without and with the intervention; means over the samples."""
        return _softmax(self.before[:, position]).mean(axis=0), _softmax(self.after[:, position]).mean(axis=0)

    def kl(self, position: int | None = -1) -> float:
        """KL(before ‖ after) at a position, or the mean over all (None), in nats; a mean over the samples."""
        where = slice(None) if position is None else position
        log_p, log_q = (log_softmax(x[:, where]) for x in (self.before, self.after))
        return float((np.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean())

    def change(self, output: int, position: int = -1) -> float:
        """By how much an output changes: a token's logit less the mean of all logits. A mean over the samples."""

        def value(x: np.ndarray) -> np.ndarray:
            difference: np.ndarray = x[:, position, output] - x[:, position].mean(axis=-1)
            return difference

        return float((value(self.after) - value(self.before)).mean())


@dataclass(frozen=True)
class Intervention:
    """What an intervention does to a prompt. ``readings``: by name. ``continuation``: the most likely text after the
    prompt, token by token, without and with it, at the importances (reading ``ci``); empty if not asked for.

    For people: ``what``, such as ``2 components off``; ``prompt``, ``names`` of its tokens (of a toy, of its active
    features); ``output_names`` of the outputs that are largest at the last position, without or with it, by number;
    ``continuation_text``. ``of_text``: whether outputs are logits of tokens.
    """

    tokens: tuple[int, ...]
    readings: dict[ReadingName, Reading]
    continuation: tuple[tuple[int, ...], tuple[int, ...]]
    what: str = ""
    prompt: str = ""
    names: tuple[str, ...] = ()
    output_names: dict[int, str] = field(default_factory=dict)
    continuation_text: tuple[str, str] = ("", "")
    of_text: bool = True

    def outputs(self, reading: ReadingName) -> list[tuple[str, float, float]]:
        """The largest outputs at the last position: name, and probability without and with the intervention (of a toy,
        the value), means over the samples; the most changed first."""
        found = self.readings[reading]
        pair = found.probabilities() if self.of_text else [x[:, -1].mean(0) for x in (found.before, found.after)]
        before, after = pair
        rows = [(name, float(before[n]), float(after[n])) for n, name in self.output_names.items()]
        return sorted(rows, key=lambda row: -abs(row[2] - row[1]))

    def distance(self, reading: ReadingName, position: int | None = -1) -> float:
        """KL(without ‖ with) at a position or over all (None), in nats; of a toy the mean squared difference."""
        found = self.readings[reading]
        if self.of_text:
            return found.kl(position)
        return float(((found.after - found.before) ** 2).mean())

    def __repr__(self) -> str:
        show = percent if self.of_text else number
        lines = [f"Intervention on {self.prompt!r}: {self.what}"]
        for name in self.readings:
            moved = ", ".join(f"{token!r} {show(p)} → {show(q)}" for token, p, q in self.outputs(name)[:3])
            lines.append(f"  {name:7} {'KL' if self.of_text else 'MSE'} {number(self.distance(name))}  {moved}")
        if any(self.continuation_text):
            lines += [f"  goes on {self.continuation_text[0]!r}", f"  then    {self.continuation_text[1]!r}"]
        return printable("\n".join(lines))

    def _repr_html_(self) -> str:
        show = percent if self.of_text else number
        readings = [
            {
                "title": READING_TITLES[name],
                "distance": f"{'KL' if self.of_text else 'squared difference'} {number(self.distance(name))}"
                + (" nats at the last position" if self.of_text else ""),
                "outputs": [(output, show(p), show(q)) for output, p, q in self.outputs(name)[:OUTPUTS_NAMED]],
            }
            for name in self.readings
        ]
        return card(
            "intervention", what=self.what, prompt=self.prompt, readings=readings, continuations=self.continuation_text
        )


@dataclass(frozen=True)
class InterventionRequest:
    """``scale``: the mask of the selected components; 0 takes them out. ``set_to``: the activation a that they have
    instead, whatever their site reads. ``alone``: they are on, and all others count as unimportant. ``positions``:
    where; None for everywhere. ``readings``: which to compute. ``samples``: draws of ``random``. ``attack_steps``,
    ``attack_step_size``: A1. ``continue_tokens``: length of the continuation."""

    scale: float = 0.0
    alone: bool = False
    positions: tuple[int, ...] | None = None
    readings: tuple[ReadingName, ...] = READINGS
    samples: int = 8
    attack_steps: int = 20
    attack_step_size: float = 0.1
    seed: int = 0
    continue_tokens: int = 0
    set_to: float | None = None

    def __post_init__(self) -> None:
        wrong = [name for name in self.readings if name not in READINGS]
        if wrong:
            raise UserError(f"readings: '{wrong[0]}' should be one of {', '.join(READINGS)}")
        if self.samples < 1 or self.attack_steps < 1 or self.continue_tokens < 0:
            raise UserError("samples and attack_steps should be at least 1, and continue_tokens at least 0")
        if not abs(self.scale) <= LARGEST or not self.attack_step_size > 0:
            raise UserError("scale should be a finite number that float32 holds, and attack_step_size above 0")
        if self.alone and self.scale not in (0.0, 1.0):
            raise UserError("alone: the selected components are on as they are; leave out scale")
        if self.set_to is not None and not abs(self.set_to) <= LARGEST:
            raise UserError("set_to should be a finite number that float32 holds")
        if self.set_to is not None and (self.alone or self.scale != 0):
            raise UserError("set_to: the selected components have this activation; leave out scale and alone")


def intervene(run: Any, prompt: Any, selection: Selection, **options: Any) -> Intervention:
    """`Run.intervene`; ``options``: fields of `InterventionRequest`."""
    request = InterventionRequest(**options)
    values = read_prompt(run, prompt)[0] if isinstance(prompt, str) else np.asarray(prompt)
    if values.ndim != 1:
        raise UserError(f"an intervention takes one row of inputs, not {list(values.shape)}")
    importances = _importances(run, values)
    n_positions = next(iter(importances.values())).shape[0]
    chosen = selected(selection, run.sites, n_positions, request.positions, groups=lambda: run.groups)
    maskings = _Maskings(importances, chosen, request)
    readings = {name: _read(run, values, name, maskings, request) for name in request.readings}
    continuation: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    if request.continue_tokens:
        if values.dtype.kind not in "iu":
            raise UserError("continue_tokens: a toy has no text to continue")
        without = _continue(run, values, None, request)
        continuation = without, _continue(run, values, selection, request)
    of_text = values.dtype.kind in "iu"
    tokens = tuple(values.tolist()) if of_text else ()
    names = tuple(run.names(tokens if of_text else np.flatnonzero(values).tolist()))
    shown = _largest(readings, of_text)
    text = run.text if of_text else None
    return Intervention(
        tokens, readings, continuation, _described(chosen, request),
        prompt if isinstance(prompt, str) else ("" if of_text else " ").join(names), names,
        dict(zip(shown, run.names(shown), strict=True)),
        ("", "") if text is None else (text.text(continuation[0]), text.text(continuation[1])), of_text,
    )  # fmt: skip


def _described(chosen: Mapping[str, np.ndarray], request: InterventionRequest) -> str:
    """``layers.1.mlp.down_proj:3 off``, ``2 components alone``, ``5 components × 0.5``."""
    components = [f"{site}:{n}" for site, mask in chosen.items() for n in np.flatnonzero(mask.any(axis=0)).tolist()]
    how = "alone" if request.alone else "off" if request.scale == 0 else f"× {request.scale:g}"
    how = how if request.set_to is None else f"set to {request.set_to:g}"
    everywhere = all(mask.any(axis=0).sum() * len(mask) == mask.sum() for mask in chosen.values())
    what = components[0] if len(components) == 1 else f"{len(components):,} components"
    return f"{what} {how}" + ("" if everywhere else ", at some positions")


def _largest(readings: Mapping[ReadingName, Reading], of_text: bool) -> list[int]:
    """Numbers of the outputs that are largest at the last position, in any reading, without or with it."""
    found: list[int] = []
    for reading in readings.values():
        pair = reading.probabilities() if of_text else [x[:, -1].mean(0) for x in (reading.before, reading.after)]
        for values in pair:
            found += np.argsort(-np.abs(values), kind="stable")[:OUTPUTS_NAMED].tolist()
    return list(dict.fromkeys(found))


def _importances(run: Any, values: np.ndarray) -> dict[str, np.ndarray]:
    found = run.causal_importances(values)
    return {name: np.asarray(x).reshape(-1, x.shape[-1]) for name, x in found.items()}


class _Maskings:
    """The masks of I1 to I3. ``before``: without the intervention."""

    def __init__(
        self, importances: Mapping[str, np.ndarray], chosen: Mapping[str, np.ndarray], request: InterventionRequest
    ) -> None:
        self._importances, self._chosen = importances, chosen
        self._value = 1.0 if request.alone else request.scale
        self._alone, self._set_to = request.alone, request.set_to

    def importance(self, before: bool) -> dict[str, np.ndarray]:
        """λ of I1: of what is not selected."""
        if before or not self._alone:
            return dict(self._importances)
        return {name: np.zeros_like(x) for name, x in self._importances.items()}

    def fixed(self, before: bool) -> dict[str, np.ndarray]:
        """Where masks are set whatever the sources are."""
        return {
            name: np.zeros(x.shape, bool) if before or name not in self._chosen else self._chosen[name]
            for name, x in self._importances.items()
        }

    def with_sources(self, before: bool, sources: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
        """I2; None: sources are 0."""
        importance, fixed = self.importance(before), self.fixed(before)
        found = {}
        for name, x in importance.items():
            mask = x if sources is None else x + (1 - x) * sources[name]
            found[name] = np.where(fixed[name], np.float32(self._value), mask).astype(np.float32)
        return found

    def added(self, before: bool) -> dict[str, np.ndarray]:
        """The activations of I1 that are added, at the components that are set."""
        if before or self._set_to is None:
            return {}
        return {name: np.where(own, np.float32(self._set_to), np.float32(0)) for name, own in self._chosen.items()}

    @property
    def value(self) -> float:
        return self._value


def _read(
    run: Any, values: np.ndarray, name: ReadingName, maskings: _Maskings, request: InterventionRequest
) -> Reading:
    def outputs(found: Sequence[Masking]) -> np.ndarray:
        rows = [
            np.asarray(
                run.output(values, _shaped(values, m.masks), _shaped_delta(values, m.delta), _shaped(values, m.added))
            )
            for m in found
        ]
        return np.stack([row.reshape(-1, row.shape[-1]) for row in rows])

    before, after = (_masked(run, values, name, maskings, request, without) for without in (True, False))
    return Reading(_finite(outputs(before)), _finite(outputs(after)), tuple(before), tuple(after))


def _masked(
    run: Any, values: np.ndarray, name: ReadingName, maskings: _Maskings, request: InterventionRequest, before: bool
) -> list[Masking]:
    match name:
        case "ci":
            return [Masking(maskings.with_sources(before, None), 0.0, maskings.added(before))]
        case "random":
            found = []
            for sample in range(request.samples):  # the same draws without and with the intervention
                rng = np.random.default_rng([request.seed, sample])
                found.append(_drawn(rng, maskings, before, with_delta=run.problem.decomposition.use_delta))
            return found
        case "attack":
            rng = np.random.default_rng([request.seed, request.samples])
            start = _draw_sources(rng, maskings.importance(before), run.problem.decomposition.use_delta)
            sources, deltas = run.attack_masks(
                values, maskings.importance(before), maskings.fixed(before), maskings.value, start,
                request.attack_steps, request.attack_step_size, maskings.added(before),
            )  # fmt: skip
            masks = maskings.with_sources(before, sources)
            return [Masking(masks, 0.0 if deltas is None else deltas, maskings.added(before))]


Sources = tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None]


def _draw_sources(rng: np.random.Generator, like: Mapping[str, np.ndarray], with_delta: bool) -> Sources:
    """Uniform sources of components ``[T, C]`` and of deltas ``[T]``."""
    sources = {name: rng.random(x.shape, np.float32) for name, x in like.items()}
    deltas = {name: rng.random(x.shape[:1], np.float32) for name, x in like.items()} if with_delta else None
    return sources, deltas


def _drawn(rng: np.random.Generator, maskings: _Maskings, before: bool, with_delta: bool) -> Masking:
    sources, deltas = _draw_sources(rng, maskings.importance(before), with_delta)
    masks = maskings.with_sources(before, sources)
    return Masking(masks, 0.0 if deltas is None else deltas, maskings.added(before))


def _shaped(values: np.ndarray, masks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A toy's row has no axis of positions."""
    return dict(masks) if values.dtype.kind in "iu" else {name: mask[0] for name, mask in masks.items()}


def _shaped_delta(values: np.ndarray, delta: Mapping[str, np.ndarray] | float) -> Any:
    if not isinstance(delta, Mapping) or values.dtype.kind in "iu":
        return delta
    return {name: own[0] for name, own in delta.items()}


def _finite(found: np.ndarray) -> np.ndarray:
    if not np.isfinite(found).all():
        raise UserError("outputs are not finite; try smaller numbers")
    return found


def _continue(
    run: Any, values: np.ndarray, selection: Selection | None, request: InterventionRequest
) -> tuple[int, ...]:
    """The most likely tokens after the prompt, each read with the importances of the text so far."""

    def next_token(tokens: list[int]) -> int:
        row = np.asarray(tokens, np.int32)
        importances = _importances(run, row)
        chosen = (
            {}
            if selection is None
            else selected(selection, run.sites, len(tokens), request.positions, groups=lambda: run.groups)
        )
        maskings, before = _Maskings(importances, chosen, request), selection is None
        logits = run.logits(row, maskings.with_sources(before, None), added=maskings.added(before))
        return int(_finite(np.asarray(logits)[-1]).argmax())

    return extended(values.tolist(), request.continue_tokens, run.longest_row, next_token)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    shifted = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(x))
