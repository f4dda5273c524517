"""`pd share components`: the components of a harvest as features of Neuronpedia, a source for each site."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from param_decomp_lab.config.site_patterns import chosen_sites
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder, refuse_existing
from param_decomp_lab.harvest.files.labels import Label
from param_decomp_lab.share.dashboards import dashboard_batch, explanation
from param_decomp_lab.share.json_files import write_json
from param_decomp_lab.share.numbering import NumberedSite, run_numbering
from param_decomp_lab.share.readers import refuse_model, refuse_source_set
from param_decomp_lab.share.shared_run import MARKER, SharedRun
from param_decomp_lab.share.uploads import MOST_FEATURES, upload_batch
from param_decomp_lab.ui.progress import Report, progress

BATCH = 128
"""Features of a batch: SAEDashboard's default, and the most that an upload takes."""
EXPLANATIONS = "explanations"
Form = Literal["neuronpedia", "sae-dashboard"]


@dataclass(frozen=True)
class Upload:
    """How the batches are named and cut. ``model``: Neuronpedia's id of the model. ``source_set``: the name that all
    sources have behind their layer number. ``compressed``: `.json.gz`. Raises UserError for names that Neuronpedia
    refuses, and what it does not take in one upload."""

    model: str
    source_set: str = "pd"
    batch: int = BATCH
    compressed: bool = False
    form: Form = "sae-dashboard"

    def __post_init__(self) -> None:
        refuse_model(self.model)
        refuse_source_set(self.source_set)
        if self.form == "neuronpedia" and self.batch > MOST_FEATURES:
            raise UserError(f"--batch {self.batch}: Neuronpedia takes at most {MOST_FEATURES} features in an upload")
        if self.form == "neuronpedia" and self.compressed:
            raise UserError("--gzip: an upload to Neuronpedia is JSON as it is; --gzip is for --for sae-dashboard")

    def source(self, site: NumberedSite) -> str:
        """Neuronpedia's id of a site's source, in which a graph of `pd share graph` looks for its components."""
        return f"{site.layer}-{self.source_set}"


@dataclass(frozen=True)
class UploadResult:
    """What was written. ``model_layers``: that the model there needs."""

    model_layers: int
    sources: int = 0
    features: int = 0
    batches: int = 0
    labels: int = 0


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
    site."""
    refuse_existing(out, marker=MARKER, overwrite=overwrite)
    names = chosen_sites(run.harvest.sites, tuple(patterns) or None, "--sites ")
    numbering = run_numbering(run.folder)
    sources = [_Source(run, upload, numbering.site(name)) for name in names]
    with (
        new_folder(out, marker=MARKER, overwrite=overwrite) as made,
        progress(console or Console(quiet=True)) as report,
    ):
        total = sum(len(source.numbers) for source in sources)
        result = UploadResult(numbering.n_layers)
        for source in sources:
            result = source.write(made, result, report, total)
        about = run.about | {"made_by": "pd share components", "for": upload.form, "model": upload.model}
        about["sources"] = {upload.source(source.site): source.site.name for source in sources}
        write_json(made / MARKER, about | {"numbering": numbering.to_json()})
    return result


class _Source:
    """A site, and its features in batches."""

    def __init__(self, run: SharedRun, upload: Upload, site: NumberedSite) -> None:
        self._run, self._upload, self.site = run, upload, site
        self.numbers = np.flatnonzero(run.harvest.summary(site.name).firings > 0).tolist()

    def write(self, folder: Path, before: UploadResult, report: Report, total: int) -> UploadResult:
        upload = self._upload
        place = folder / upload.model / upload.source(self.site)
        place.mkdir(parents=True)
        edits = {n: edit for n, edit in self._run.labels.last_edits(self.site.name).items() if edit.text}
        ending = ".json.gz" if upload.compressed else ".json"
        firsts = range(0, len(self.numbers), upload.batch)
        for n, first in enumerate(firsts):
            report(f"features of {self.site.name}", before.features + first, total)
            write_json(place / f"batch-{n}{ending}", self._batch(self.numbers[first : first + upload.batch], edits))
        labelled = [n for n in self.numbers if n in edits]
        if labelled and upload.form == "sae-dashboard":
            write_json(place / f"{EXPLANATIONS}{ending}", [explanation(n, edits[n]) for n in labelled])
        return replace(
            before,
            sources=before.sources + 1,
            features=before.features + len(self.numbers),
            batches=before.batches + len(firsts),
            labels=before.labels + len(labelled),
        )

    def _batch(self, numbers: Sequence[int], edits: Mapping[int, Label]) -> dict[str, Any]:
        upload, site = self._upload, self.site
        match upload.form:
            case "neuronpedia":
                return upload_batch(self._run, site.name, numbers, edits, upload.model, upload.source(site))
            case "sae-dashboard":
                return dashboard_batch(self._run, site.name, site.layer, numbers, upload.model, upload.source_set)
