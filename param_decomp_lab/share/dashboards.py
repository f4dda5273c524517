"""`pd share components`: components as Neuronpedia's batches of features, a source for each site.

A batch is what SAEDashboard's `neuronpedia_runner` writes (`NeuronpediaDashboardBatch`); activations and explanations
have besides the columns of Neuronpedia's tables that a batch of SAEDashboard leaves to the upload. docs/sharing.md has
the table of fields.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from param_decomp_lab.display.progress import Report, progress
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder, refuse_existing
from param_decomp_lab.harvest_files.labels import BY_MODEL, Label
from param_decomp_lab.harvest_files.tables import IMPORTANCE_BINS
from param_decomp_lab.label.choose import matching_sites
from param_decomp_lab.share.json_files import write_json
from param_decomp_lab.share.numbering import NumberedSite, run_numbering
from param_decomp_lab.share.shared_run import MARKER, SharedRun, rounded, usable_name

BATCH = 128
"""Features of a batch, as SAEDashboard's default has it."""
EMPTY_LISTS = (
    *("neuron_alignment_indices", "neuron_alignment_values", "neuron_alignment_l1"),
    *("correlated_neurons_indices", "correlated_neurons_l1", "correlated_neurons_pearson"),
    *("correlated_features_indices", "correlated_features_l1", "correlated_features_pearson"),
    *("logits_hist_data_bar_heights", "logits_hist_data_bar_values", "decoder_weights_dist"),
)
"""Of a feature: what no harvest knows."""
EDGES = [n / IMPORTANCE_BINS for n in range(IMPORTANCE_BINS + 1)]
CENTRES = [rounded((low + high) / 2) for low, high in pairwise(EDGES)]


@dataclass(frozen=True)
class Upload:
    """How the batches are named and cut. ``model``: Neuronpedia's id of the model. ``source_set``: ends the name of
    every source set. ``compressed``: `.json.gz`."""

    model: str
    source_set: str = "pd"
    batch: int = BATCH
    compressed: bool = False


@dataclass(frozen=True)
class UploadResult:
    sources: int
    features: int
    batches: int
    labels: int


def share_components(
    run: SharedRun,
    out: Path,
    upload: Upload,
    patterns: Sequence[str] = (),
    *,
    overwrite: bool = False,
    console: Console | None = None,
) -> UploadResult:
    """Writes the components that fire into the new folder ``out``: ``MODEL/SOURCE/batch-N.json``. A batch is written
    before the next one is read. ``patterns``: sites; all by default. Raises UserError for a pattern that matches no
    site, and a name that is none."""
    for option, name in (("--model", upload.model), ("--source-set", upload.source_set)):
        if usable_name(name) != name:
            raise UserError(f"{option} {name}: use letters, digits, dots, hyphens and underscores")
    refuse_existing(out, marker=MARKER, overwrite=overwrite)
    names = matching_sites(run.harvest, tuple(patterns))
    numbering = run_numbering(run.folder)
    sources = [_Source(run, upload, numbering.site(name)) for name in names]
    assert len({source.name for source in sources}) == len(sources), "two sites of one name"
    with (
        new_folder(out, marker=MARKER, overwrite=overwrite) as made,
        progress(console or Console(quiet=True)) as report,
    ):
        total = sum(len(source.numbers) for source in sources)
        result = UploadResult(0, 0, 0, 0)
        for source in sources:
            result = source.write(made, result, report, total)
        about = run.about | {"made_by": "pd share components", "model": upload.model}
        about["sources"] = {source.name: source.site.name for source in sources}
        write_json(made / MARKER, about)
    return result


class _Source:
    """A site, and its features in batches."""

    def __init__(self, run: SharedRun, upload: Upload, site: NumberedSite) -> None:
        self._run, self._upload, self.site = run, upload, site
        self.numbers = np.flatnonzero(run.harvest.summary(site.name).firings > 0).tolist()

    @property
    def set(self) -> str:
        """The source set: the site's role within its layer, and what `--source-set` says."""
        return f"{role(self.site)}-{self._upload.source_set}"

    @property
    def name(self) -> str:
        """Neuronpedia's id of the source."""
        return f"{self.site.layer}-{self.set}"

    def write(self, folder: Path, before: UploadResult, report: Report, total: int) -> UploadResult:
        place = folder / self._upload.model / self.name
        place.mkdir(parents=True)
        edits = self._run.labels.last_edits(self.site.name)
        features, batches, labels = before.features, before.batches, before.labels
        for n, first in enumerate(range(0, len(self.numbers), self._upload.batch)):
            report(f"features of {self.site.name}", features, total)
            numbers = self.numbers[first : first + self._upload.batch]
            made = [self._feature(number, edits.get(number)) for number in numbers]
            self._write_batch(place, n, made)
            features, batches = features + len(made), batches + 1
            labels += sum(bool(feature["explanations"]) for feature in made)
        return UploadResult(before.sources + 1, features, batches, labels)

    def _write_batch(self, place: Path, n: int, features: list[dict[str, Any]]) -> None:
        plan = self._run.harvest.plan
        batch = {
            "model_id": self._upload.model,
            "layer": self.site.layer,
            "sae_set": self.set,
            "sae_id_suffix": None,
            "features": features,
            "settings": {"n_prompts_total": plan.rows, "n_tokens_in_prompt": plan.length, "dataset": self._dataset},
        }
        ending = ".json.gz" if self._upload.compressed else ".json"
        write_json(place / f"batch-{n}{ending}", batch)

    @property
    def _dataset(self) -> str:
        """Without the folders of this machine."""
        return Path(self._run.harvest.plan.data).name

    def _feature(self, number: int, edit: Label | None) -> dict[str, Any]:
        run, site, plan = self._run, self.site.name, self._run.harvest.plan
        row, weights = run.harvest.component(site, number), run.harvest.weights(site, number)
        return {
            "feature_index": number,
            "frac_nonzero": rounded(row["density"]),
            "pos_str": run.words(weights["promoted"]),
            "pos_values": [rounded(value) for value in weights["promoted_logits"]],
            "neg_str": run.words(weights["suppressed"]),
            "neg_values": [rounded(value) for value in weights["suppressed_logits"]],
            "freq_hist_data_bar_values": CENTRES,
            "freq_hist_data_bar_heights": list(row["importance_histogram"]),
            **{name: [] for name in EMPTY_LISTS},
            "n_prompts_total": plan.rows,
            "n_tokens_in_prompt": plan.length,
            "dataset": self._dataset,
            "activations": list(self._activations(number, row["firings"])),
            "explanations": [_explanation(edit)] if edit is not None and edit.text else [],
        }

    def _activations(self, number: int, firings: int) -> Iterator[dict[str, Any]]:
        plan = self._run.harvest.plan
        examples = self._run.harvest.examples(self.site.name, number)
        for kind in ("top", "uniform"):
            group = [example for example in examples if example.kind == kind]
            peaks = [example.importance for example in group]
            # The top examples are the largest of all firings, the others a sample of all.
            low, contains = (min(peaks, default=0.0), len(group) / firings) if kind == "top" else (plan.threshold, 1.0)
            for example in group:
                shown = self._run.shown(example)
                most = max(shown.values)
                largest = shown.at if shown.values[shown.at] == most else shown.values.index(most)
                yield {
                    "tokens": shown.tokens,
                    "values": shown.values,
                    "bin_min": rounded(low),
                    "bin_max": rounded(max(peaks)),
                    "bin_contains": rounded(min(contains, 1.0)),
                    "qualifying_token_index": shown.at,
                    "maxValue": most,
                    "maxValueTokenIndex": largest,
                    "minValue": min(shown.values),
                    "dataIndex": f"{example.row}:{example.position}",
                    "dataSource": self._dataset,
                }


def role(site: NumberedSite) -> str:
    """The name of a site without that of its layer, as a part of an id: ``mlp_down_proj``, from
    ``layers.3.mlp.down_proj``."""
    parts = site.name.split(".")
    number = next((k for k, part in enumerate(parts) if part.isdecimal()), -1)
    return usable_name("_".join(parts[number + 1 :]) or site.name.replace(".", "_"))


def _explanation(edit: Label) -> dict[str, Any]:
    by_model = edit.author.endswith(BY_MODEL)
    return {
        "description": edit.text,
        "authorName": edit.author,
        "typeName": None,
        "explanationModelName": edit.author.removesuffix(BY_MODEL) if by_model else None,
        "createdAt": edit.time,
    }
