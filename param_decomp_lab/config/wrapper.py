"""The wrapper YAML: one run, as a schema file of the torch project and what such a file cannot say."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic import Strict as Strictness

from param_decomp_lab.config.memory import Memory, Preset
from param_decomp_lab.config.strict import Count, ListOf, Natural, Strict, rule_error

Text = Annotated[str, Field(min_length=1)]
FilePath = Annotated[Path, Strictness(False), AfterValidator(Path.expanduser)]
Experiment = Literal["tms", "resid_mlp"]


class Mesh(Strict):
    """Devices: replica × fsdp × tensor. The batch is split over the first two, the state over the last two."""

    replica: Count = 1
    fsdp: Count = 1
    tensor: Count = 1

    @property
    def batch_devices(self) -> int:
        return self.replica * self.fsdp

    @property
    def devices(self) -> int:
        return self.replica * self.fsdp * self.tensor


class DataFolders(Strict):
    """Folders of Parquet shards in place of what the schema file's `data` names."""

    train: FilePath
    eval: FilePath


class TargetSource(Strict):
    """Where the target's weights come from: a folder, or (toys) a recipe to pretrain one."""

    folder: FilePath | None = None
    pretrain: FilePath | None = None

    @model_validator(mode="after")
    def _one(self) -> "TargetSource":
        if (self.folder is None) == (self.pretrain is None):
            raise rule_error(("", "takes exactly one of folder and pretrain"))
        return self


class MilestonesEvery(Strict):
    every: Count


def _milestones_kind(raw: Any) -> str:
    return "every" if isinstance(raw, dict | MilestonesEvery) else "steps"


Milestones = Annotated[
    Annotated[ListOf[Natural], Tag("steps")] | Annotated[MilestonesEvery, Tag("every")],
    Discriminator(_milestones_kind),
]


class Wrapper(Strict):
    """A run. ``milestones``: steps whose checkpoints are never deleted; ``out_dir`` is relative to where one stands.

    ``steps_per_dispatch``: how many steps are started at once; no number depends on it. ``init_from``: a run, or
    RUN@STEP, that this one begins with.
    """

    torch_config: FilePath
    run_name: Text
    out_dir: FilePath = Path("runs")
    run_id: Annotated[str, Field(pattern=r"^p-[0-9a-f]{8}$")] | None = None
    remat_recon_forwards: bool = False
    wandb_group: Text | None = None
    wandb_tags: ListOf[Text] = ()
    experiment: Experiment | None = None
    mesh: Mesh = Mesh()
    memory: Memory = Memory()
    data: DataFolders | None = None
    target: TargetSource | None = None
    steps_per_dispatch: Count = 1
    milestones: Milestones = ()
    init_from: Text | None = None

    @property
    def parent(self) -> tuple[Path, int | None] | None:
        """The run folder that `init_from` names, and the step; None for its newest checkpoint."""
        if self.init_from is None:
            return None
        run, at, step = self.init_from.rpartition("@")
        return (Path(run), int(step)) if at and step.isdecimal() else (Path(self.init_from), None)

    @model_validator(mode="after")
    def _consistent(self) -> "Wrapper":
        preset, implied = self.memory.preset, _preset(self.remat_recon_forwards)
        if "remat_recon_forwards" in self.model_fields_set and preset is not None and _contradicts(preset, implied):
            says = f"remat_recon_forwards: {str(self.remat_recon_forwards).lower()} means {implied}"
            raise rule_error(("memory.preset", f"is {preset}, but {says}; remove one of the two"))
        return self

    def resolved(self) -> "Wrapper":
        """The same run with its memory preset chosen, `remat_recon_forwards` agreeing with it, and the path of its
        parent made absolute."""
        preset = self.memory.preset or _preset(self.remat_recon_forwards)
        update = {"memory": self.memory.resolved(preset), "remat_recon_forwards": preset != "plain"}
        if self.parent is not None:
            folder, step = self.parent
            update["init_from"] = str(_absolute(folder.expanduser())) + ("" if step is None else f"@{step}")
        return self.model_copy(update=update)

    def relative_to(self, folder: Path) -> "Wrapper":
        """The same run with the paths that were relative to ``folder``, the wrapper's own, made absolute."""

        def below(part: Strict | None) -> Strict | None:
            paths = {key: _absolute(folder / path) for key, path in part or () if path is not None}
            return part and part.model_copy(update=paths)

        update = {
            "torch_config": _absolute(folder / self.torch_config),
            "data": below(self.data),
            "target": below(self.target),
        }
        return self.model_copy(update=update)

    def is_milestone(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is never deleted."""
        match self.milestones:
            case MilestonesEvery(every=every):
                return step % every == 0
            case steps:
                return step in steps


def _absolute(path: Path) -> Path:
    # Without following links: a link that is moved later still means what was written.
    return Path(os.path.abspath(path))


def _contradicts(preset: Preset, implied: Preset) -> bool:
    """Whether `remat_recon_forwards` says another thing: it knows only whether something is recomputed."""
    return (preset == "plain") != (implied == "plain")


def _preset(remat_recon_forwards: bool) -> Preset:
    return "balanced" if remat_recon_forwards else "plain"
