"""Translates a file of June, July or August 2026 to a schema file and keys of the wrapper, both in their current form.

It does not validate what the current schema validates: keys with a counterpart are passed on.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from param_decomp_lab.config.generations import surroundings
from param_decomp_lab.config.generations.decomposition import ci_function, sites
from param_decomp_lab.config.generations.methods import MethodTranslator
from param_decomp_lab.config.generations.reading import Findings, Lacking, Section, Tree
from param_decomp_lab.config.generations.recognise import TITLES, Generation, generation, has_knots, is_late_august
from param_decomp_lab.schema.mistakes import Mistake


@dataclass(frozen=True)
class Translation:
    """A translated file. ``method``: the schema file. ``wrapper``: keys of the wrapper that the file has.
    ``no_effect``, ``notes``: as in `Findings`. ``origins``: keys of the file by keys of the current form.
    """

    generation: Generation
    method: Tree
    wrapper: Tree
    no_effect: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    origins: tuple[tuple[str, str], ...] = ()
    _lacking: tuple[Lacking, ...] = ()

    @property
    def is_as_it_was(self) -> bool:
        """Whether the file already has the current form, which includes that of spring."""
        return self.generation == "spring"

    @property
    def title(self) -> str:
        """Says when the original project had files of this form."""
        return TITLES[self.generation]

    def mistakes(self, given: Collection[str]) -> list[Mistake]:
        """Returns what is unsupported. ``given``: keys of the wrapper that are given elsewhere."""
        return [lacking.mistake for lacking in self._lacking if lacking.instead not in given]


def translate(raw: Mapping[str, Any]) -> Translation:
    """Translates the file ``raw``, which is not modified, to the current form. A file of spring already has it."""
    which = generation(raw)
    if which == "spring":
        return Translation(which, dict(raw), {})
    findings = Findings()
    whole = Section(dict(raw), "", "", findings)
    wrapper: Tree = whole.keep("run_name")
    method: Tree = {}
    is_toy = "spec" not in _mapping(raw.get("target"))
    target = whole.section("target", "toy" if is_toy else "target")
    data = whole.section("data", "data")
    length = None
    if target is not None:
        if is_toy:
            method["target"], more = surroundings.toy_target(target, raw.get("data"))
            wrapper |= more
        else:
            method["target"] = surroundings.language_target(target)
    if data is not None and not is_toy:
        name = _mapping(_mapping(method.get("target")).get("spec")).get("model_name")
        rows, more = surroundings.language_data(data, name if isinstance(name, str) else None)
        if rows is not None:
            method["data"], length = rows, rows.get("max_seq_len")
        wrapper |= more
    elif data is not None:
        method["data"] = data.keep_rest()
    translator = MethodTranslator(
        is_toy=is_toy, relative=has_knots(raw), is_early=which == "june" or not is_late_august(raw)
    )
    method["pd"], more = _pd(whole, translator, length)
    wrapper |= more
    runtime = whole.section("runtime", "runtime") or Section({}, "runtime", "runtime", findings)
    method["runtime"], more = surroundings.runtime(runtime, is_toy=is_toy)
    wrapper |= more
    cadence = whole.section("cadence", "cadence")
    if cadence is not None:
        method["cadence"] = surroundings.cadence(cadence)
    evaluation = whole.section("eval", "eval")
    if evaluation is not None:
        method["eval"] = translator.evaluation(evaluation)
    tracking = whole.section("wandb", "wandb")
    if tracking is not None:
        method["wandb"], more = surroundings.wandb(tracking)
        wrapper |= more
    parent = whole.section("resume_provenance", "resume_provenance")
    if parent is not None:
        surroundings.parent(parent, findings)
    whole.close()
    _note_differences(method, findings, is_toy=is_toy)
    origins = tuple(sorted(findings.origins.items(), key=lambda item: -len(item[0])))
    found = tuple(findings.no_effect), tuple(findings.notes), origins, tuple(findings.lacking)
    return Translation(which, method, wrapper, *found)


def _pd(whole: Section, translator: MethodTranslator, length: int | None) -> tuple[Tree, Tree]:
    section = whole.section("pd", "pd")
    if section is None:
        return {}, {}
    out: Tree = {}
    wrapper: Tree = {}
    ci = section.section("ci_config", "ci")
    decomposition = whole.section("decomposition", "decomposition")
    if decomposition is not None:
        chosen = decomposition.section("sites", "sites")
        if chosen is not None:
            out["decomposition_targets"], wrapper = sites(chosen)
        ci = decomposition.section("ci", "ci") or ci
        decomposition.close()
    if ci is not None:
        out["ci_config"] = ci_function(ci, length)
    return {**out, **translator.pd(section)}, wrapper


def _note_differences(method: Tree, findings: Findings, *, is_toy: bool) -> None:
    """Notes what is computed differently from the original project, whatever the file says."""
    warmup = method["pd"].get("faithfulness_warmup_steps")
    losses = [loss for loss in method["pd"].get("loss_metrics", []) if loss.get("normalize") == "per_site"]
    if warmup and losses:
        other = "the warm-up is on the mean squared entry (T3), and not on the error relative to each matrix"
        findings.notes.append(f"pd.faithfulness_warmup_steps: {other}")
    if is_toy:
        findings.notes.append("runtime: toys are decomposed in float32 here")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
