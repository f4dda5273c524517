"""Translates the section `pd` (losses, optimisers and the faithfulness warm-up) and the metrics of `eval`."""

from typing import Any

from param_decomp_lab.config.generations.reading import Section, Tree
from param_decomp_lab.config.generations.tables import (
    ASCENTS,
    FRESH_SCOPES,
    LACKING_TYPES,
    OBJECTIVES,
    PERSISTENT_SCOPES,
    TYPES,
)

_BY_ROW = ("bc", "bsc")
"""Shapes with a source for each row. They are the same if rows have no positions."""


class MethodTranslator:
    """Translates the method. ``is_toy``: rows have no positions. ``relative``: faithfulness is relative to each matrix
    (L5). ``is_early``: the file is from before the middle of August, when some defaults changed.
    """

    def __init__(self, *, is_toy: bool, relative: bool, is_early: bool) -> None:
        self._is_toy, self._relative, self._is_early = is_toy, relative, is_early

    def pd(self, section: Section) -> Tree:
        """Translates the section without the sites and the CI function."""
        draws = _Draws(section.take("n_mask_samples"))
        out = section.keep("seed")
        for key in ("components_optimizer", "ci_fn_optimizer"):
            inner = section.section(key, "optimizer")
            if inner is not None:
                out[key] = self._optimizer(inner)
        losses = self._terms(section, "loss_metrics", "loss", draws)
        return {**out, "n_mask_samples": draws.number(section), "loss_metrics": losses, **section.keep_rest()}

    def evaluation(self, section: Section) -> Tree:
        """Translates the section `eval`."""
        metrics = self._terms(section, "metrics", "metric", None)
        return {**section.keep_rest(), "metrics": metrics}

    def _optimizer(self, section: Section) -> Tree:
        out = section.keep_rest()
        if out.get("type") == "muon" and self._is_early:
            for key, default in (("consistent_rms", None), ("ns_dtype", "float32")):
                if key not in out:
                    out[key] = default
                    said = "null" if default is None else default
                    section.findings.notes.append(f"{section.at(key)}: is {said}, the default of these files")
        return out

    def _terms(self, section: Section, key: str, kind: str, draws: "_Draws | None") -> list[Tree]:
        found: list[Tree] = []
        for entry in section.sections(key, kind):
            new = f"{section.path}.{key}.{len(found)}"
            term = self._term(entry, new, draws)
            if term is not None:
                section.findings.origins[new] = entry.path
                found.append(term)
        return found

    def _term(self, entry: Section, new: str, draws: "_Draws | None") -> Tree | None:
        """Translates a loss or metric; returns None, and records it, if there is no counterpart. ``new``: its key in
        the current form.
        """
        given = str(entry.take("type"))
        refusal = LACKING_TYPES.get(given)
        if refusal is not None:
            entry.lack("type", refusal)
            return None
        out: Tree = {"type": TYPES.get(given, given)}
        coefficient = entry.take("coeff")
        if coefficient is not None:
            out["coeff"] = coefficient
        if given == "FaithfulnessLoss" and self._relative:
            out["normalize"] = "per_site"
        if out["type"] == "ImportanceMinimalityLoss":
            out |= _importance_minimality(entry)
        if given == "NonlinearityLocalityLoss":
            out |= _unit_kinds(entry)
            if self._is_early:
                added = "counts what o_proj and down_proj read, too, which it did not in files of this day"
                entry.findings.notes.append(f"{entry.path}: {added}")
        out |= self._sources(entry, new)
        out |= _routing(entry)
        out |= _hidden_activations(entry)
        samples = entry.take("n_mask_samples")
        if draws is not None and given.startswith("Stochastic"):
            draws.add(entry, samples)
        elif samples not in (None, 1):
            entry.lack("n_mask_samples", "a metric draws as often as pd.n_mask_samples says; set it to 1")
        return out | entry.keep_rest()

    def _sources(self, entry: Section, new: str) -> Tree:
        """Translates the shape of an attack's sources, and the optimiser of persistent ones."""
        out: Tree = {}
        origins = entry.findings.origins
        shape = entry.take("source_shape")
        is_fresh = "n_steps" in entry
        optimizer = entry.section("optimizer", "ascent")
        if optimizer is not None:
            kind = str(optimizer.take("type", "adam"))
            out["optimizer"] = {"type": ASCENTS.get(kind, kind), **optimizer.keep_rest()}
        for key, known in (("scope", PERSISTENT_SCOPES), ("mask_scope", FRESH_SCOPES)):
            value = entry.take(key)
            if shape is not None and is_fresh == (key == "mask_scope"):
                if shape not in ("c", "bc", "bsc", "sc"):
                    entry.lack("source_shape", "the shapes of sources are c, bc, bsc and, of persistent ones, sc")
                value, origins[f"{new}.{key}"] = shape, entry.at("source_shape")
            if value is None:
                continue
            extra = value if isinstance(value, dict) else {}
            name = str(extra.get("type", value))
            if self._is_toy and name in _BY_ROW:
                name = "bsc"
            name = known.get(name, name)
            if key == "mask_scope":
                out[key] = name
            else:
                renamed = {"n_sources" if inner == "n_masks" else inner: extra[inner] for inner in extra}
                out[key] = {**renamed, "type": name}
        return out


def _importance_minimality(entry: Section) -> Tree:
    """Translates L2 with p, or with γ, for which the current schema requires a p that has no effect."""
    out: Tree = {"beta": entry.take("beta", 0)}
    if "gamma" in entry and "penalty" not in entry:
        out |= {"penalty": "smooth_l0", "gamma": entry.take("gamma"), "pnorm": entry.take("pnorm", 1.0)}
    frequency = entry.section("frequency", "frequency")
    if frequency is not None:
        count = frequency.take("reference_datapoint_count", frequency.take("reference_token_count"))
        out["frequency"] = {"reference_token_count": count, **frequency.keep_rest()}
    return out


def _unit_kinds(entry: Section) -> Tree:
    """Translates the weights of L7 by kind of unit. Gated linear attention has its own kind, which
    no target here has.
    """
    kinds = entry.section("unit_kind_coefficients", "unit_kinds")
    return {} if kinds is None else {"unit_kind_coefficients": kinds.keep_rest()}


def _routing(entry: Section) -> Tree:
    """Translates the routing; `all` is a probability of 1."""
    routing = entry.take("routing")
    if isinstance(routing, dict) and routing.get("type") == "all":
        return {"routing": {"type": "static_probability", "p": 1.0}}
    return {} if routing is None else {"routing": routing}


def _hidden_activations(entry: Section) -> Tree:
    """Translates R6, given as one mapping or, in later files, as a list of named groups."""
    objective = str(entry.take("adversary_objective", "e2e"))
    own = entry.section("hidden_acts_reconstruction", "hidden_acts")
    groups = list(entry.sections("auxiliaries", "auxiliary"))
    found: list[Tree] = []
    if own is not None:
        points = own.take("points", [])
        points = [_point(point) for point in points] if isinstance(points, list) else points
        found.append({"coeff": own.take("coeff"), "points": points})
        own.close()
    found += [group for group in map(_auxiliary, groups) if group is not None]
    if not found:
        return {}
    key = "hidden_acts_reconstruction" if own is not None else "auxiliaries"
    if len(found) > 1:
        entry.lack(key, "a term has one group of points here; keep one")
    out: Tree = {"hidden_acts_reconstruction": found[0]}
    if "optimizer" in entry:
        out["adversary_objective"] = OBJECTIVES.get(objective, objective)
    return out


def _auxiliary(group: Section) -> Tree | None:
    """Translates a group of captures to points; None for a group that is only measured, or is unsupported."""
    name, coefficient = group.take("name"), group.take("coeff")
    points = []
    for comparison in group.sections("comparisons", "comparison"):
        if comparison.take("distance", "relative_squared_error") != "relative_squared_error":
            comparison.lack("distance", "activations are compared by their relative squared error")
        points.append(_point(comparison.take("capture")))
        comparison.close()
    group.close()
    if coefficient == 0:
        group.findings.no_effect.append(f"{group.path} ({name} is measured alone, with coeff 0)")
        return None
    return {"coeff": coefficient, "points": points}


def _point(capture: Any) -> str:
    """Returns the current name of a point: `resid.n` is the residual stream that enters block n, so it comes from the
    block before.
    """
    kind, _, number = str(capture).partition(".")
    if kind != "resid" or not number.isdecimal():
        return str(capture)
    return "resid_pre.0" if int(number) == 0 else f"resid_post.{int(number) - 1}"


class _Draws:
    """How often stochastic losses draw, which is one number for all of them here. ``given``: the number in `pd`, in
    older files.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._found: list[tuple[str, Any]] = []

    def add(self, entry: Section, samples: Any) -> None:
        self._found.append((entry.at("n_mask_samples"), samples or self._given or 1))

    def number(self, section: Section) -> Any:
        numbers = [number for _, number in self._found]
        for key, number in self._found:
            if number != numbers[0]:
                why = f"is {number}, and {self._found[0][0]} is {numbers[0]}; all stochastic losses draw alike here"
                section.findings.lack(key, why)
        return numbers[0] if numbers else self._given or 1
