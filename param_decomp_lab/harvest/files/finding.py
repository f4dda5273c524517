"""Finds the harvests of a run."""

from pathlib import Path

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files.plan import HARVESTS
from param_decomp_lab.harvest.files.reading import Harvest
from param_decomp_lab.harvest.files.tables import PLAN_FILE


def find_harvests(run_folder: Path) -> list[Path]:
    """Returns the folders of the finished harvests of a run, the newest first."""
    folder = run_folder / HARVESTS
    found = [path.parent for path in folder.glob(f"*/{PLAN_FILE}") if not path.parent.name.startswith(".")]
    return sorted(found, key=lambda path: (-path.stat().st_mtime, path.name))


def harvests_of(run_folder: Path) -> list[Path]:
    """Like `find_harvests`, but raises a UserError with the command that makes one if there are none."""
    found = find_harvests(run_folder)
    if not found:
        raise UserError(f"{run_folder} has no harvest; make one with `pd harvest {run_folder}`")
    return found


def harvest_of(run_folder: Path, step: int) -> Harvest:
    """Returns the newest harvest of a checkpoint. Raises UserError if there is none."""
    for path in find_harvests(run_folder):
        if (found := Harvest(path)).plan.step == step:
            return found
    raise UserError(
        f"{run_folder} has no harvest of step {step}; make one with `pd harvest {run_folder} --step {step}`"
    )


def chosen_harvest(folder: Path, name: str | None) -> Harvest:
    """Returns the harvest ``name`` of a run, by default the newest; or ``folder`` itself, if it is one. Raises
    UserError if there is none.
    """
    if (folder / PLAN_FILE).is_file():
        if name is not None and name != folder.resolve().name:
            raise UserError(
                f"--harvest: {folder} is a harvest itself; give the run's folder to choose among its harvests"
            )
        return Harvest(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a run folder, or a harvest")
    found = {path.name: path for path in harvests_of(folder)}
    if name is not None and name not in found:
        raise UserError(f"--harvest: {folder} has no harvest '{name}'; it has {', '.join(found)}")
    return Harvest(found[name] if name is not None else next(iter(found.values())))
