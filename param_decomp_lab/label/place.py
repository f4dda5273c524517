"""Finds the run and the harvest that are labelled."""

from dataclasses import dataclass
from pathlib import Path

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Harvest, harvest_of, harvests_of
from param_decomp_lab.harvest.files.labels import Labels
from param_decomp_lab.harvest.files.plan import HARVESTS
from param_decomp_lab.harvest.files.scores import Scores
from param_decomp_lab.harvest.files.tables import PLAN_FILE
from param_decomp_lab.label.texts import Texts


@dataclass(frozen=True)
class LabelledRun:
    """A run's folder, one of its harvests, and the files kept beside it."""

    folder: Path
    texts: Texts

    @property
    def harvest(self) -> Harvest:
        return self.texts.harvest

    @property
    def labels(self) -> Labels:
        return Labels(self.folder, self.harvest.plan.step)

    @property
    def scores(self) -> Scores:
        return Scores(self.folder, self.harvest.plan.step)


def find_run(folder: Path, step: int | None) -> LabelledRun:
    """Opens a run's folder with its newest harvest (of ``step``), or the folder of a harvest. Raises UserError if there
    is no harvest of text.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a run that was harvested: pd label RUN")
    folder = folder.resolve()
    if (folder / PLAN_FILE).is_file():
        if folder.parent.name != HARVESTS:
            raise UserError(f"{folder} is a harvest without its run, where labels are kept")
        harvest, run = Harvest(folder), folder.parent.parent
        if step not in (None, harvest.plan.step):
            raise UserError(f"{folder} is of step {harvest.plan.step}, not {step}")
    else:
        run = folder
        harvest = harvest_of(run, step) if step is not None else Harvest(harvests_of(run)[0])
    return LabelledRun(run, Texts(harvest))
