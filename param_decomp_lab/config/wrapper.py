"""The wrapper YAML: a run, described by a schema file of the PyTorch project plus the settings that file lacks.

The PyTorch project is goodfire-ai/param-decomp as it was until June 2026 (docs/sources.md).
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic import Strict as Strictness

from param_decomp_lab.config.memory import KEEP_ALL, Memory, Preset
from param_decomp_lab.errors import Unread
from param_decomp_lab.schema.mistakes import Wrong
from param_decomp_lab.schema.strict import Count, ListOf, Natural, PathText, Strict, expanded_path, rule

Text = Annotated[str, Field(min_length=1)]
FilePath = Annotated[Path, Strictness(False), AfterValidator(expanded_path)]
RUN_ID = r"p-[0-9a-f]{8}"
Experiment = Literal["tms", "resid_mlp"]


class Mesh(Strict):
    """Device mesh, replica × fsdp × tensor: shards the batch over the first two axes, the state over the last two.

    ``nodes``: the number of nodes over which the fsdp axis extends; node copies (`memory.held`) are made on each of
    them.
    """

    replica: Count = 1
    fsdp: Count = 1
    tensor: Count = 1
    nodes: Count = 1

    @rule
    def _nodes_divide(self) -> Iterator[Wrong]:
        if self.fsdp % self.nodes:
            yield "nodes", f"{self.nodes} does not divide fsdp {self.fsdp}"

    @property
    def batch_devices(self) -> int:
        return self.replica * self.fsdp

    @property
    def devices(self) -> int:
        return self.replica * self.fsdp * self.tensor


class Numerics(Strict):
    """Precision beyond the schema file's `autocast_bf16`.

    ``delta``: how V U is computed in Δ = W − V U on NVIDIA GPUs (N4); null: split with `autocast_bf16`, else fp32.
    """

    delta: Literal["split", "fp32"] | None = None


class DataFolders(Strict):
    """Folders of Parquet shards used instead of the schema file's `data`."""

    train: FilePath
    eval: FilePath


def _recipe_kind(raw: Any) -> str:
    return "recipe" if isinstance(raw, dict) else "file"


RecipePlace = Annotated[
    Annotated[FilePath, Tag("file")] | Annotated[dict[str, Any], Tag("recipe")], Discriminator(_recipe_kind)
]
"""A recipe for `pd pretrain`: its file, or its contents."""


class TargetSource(Strict):
    """Source of the target's weights: a folder, a recipe to pretrain it (toys), or a ``revision`` (branch, tag or
    commit) of the hub model that the schema file names.
    """

    folder: FilePath | None = None
    pretrain: RecipePlace | None = None
    revision: Text | None = None

    @rule
    def _one(self) -> Iterator[Wrong]:
        if sum(given is not None for given in (self.folder, self.pretrain, self.revision)) != 1:
            yield "", "takes exactly one of folder, pretrain and revision"


InitComponents = Literal["random", "weighted_singular_vectors", "nonlinearity_aligned"]


class MilestonesEvery(Strict):
    every: Count


def _milestones_kind(raw: Any) -> str:
    return "every" if isinstance(raw, dict | MilestonesEvery) else "steps"


Milestones = Annotated[
    Annotated[ListOf[Natural], Tag("steps")] | Annotated[MilestonesEvery, Tag("every")],
    Discriminator(_milestones_kind),
]


class Wrapper(Strict):
    """A run. ``milestones``: steps whose checkpoints are never deleted. ``out_dir``: relative to the current folder.

    ``steps_per_dispatch``: steps executed per dispatch; does not affect results. ``init_components``: the initial V and
    U (T6, T9). ``init_from``: RUN or RUN@STEP whose parameters this run starts from. ``bos``: whether rows of text that
    the run tokenizes itself begin with the tokenizer's BOS.
    """

    torch_config: FilePath
    run_name: Text
    out_dir: FilePath = Path("runs")
    run_id: Annotated[str, Field(pattern=f"^{RUN_ID}$")] | None = None
    remat_recon_forwards: bool = False
    wandb_group: Text | None = None
    wandb_tags: ListOf[Text] = ()
    experiment: Experiment | None = None
    mesh: Mesh = Mesh()
    memory: Memory = Memory()
    numerics: Numerics = Numerics()
    data: DataFolders | None = None
    bos: bool = False
    target: TargetSource | None = None
    steps_per_dispatch: Count = 1
    milestones: Milestones = ()
    init_components: InitComponents = "random"
    init_from: Annotated[PathText, Field(min_length=1)] | None = None

    @property
    def begins_with(self) -> InitComponents:
        """The components before step 0; "random" if they come from another run."""
        return self.init_components if self.init_from is None else "random"

    @property
    def parent(self) -> tuple[Path, int | None] | None:
        """Run folder and step of `init_from`; step None means the newest checkpoint. None without `init_from`."""
        if self.init_from is None:
            return None
        run, at, step = self.init_from.rpartition("@")
        return (Path(run), int(step)) if at and step.isdecimal() else (Path(self.init_from), None)

    @rule
    def _consistent(self) -> Iterator[Wrong]:
        preset, implied = self.memory.preset, _preset(self.remat_recon_forwards)
        if "remat_recon_forwards" in self.model_fields_set and preset is not None and _contradicts(preset, implied):
            says = f"remat_recon_forwards: {str(self.remat_recon_forwards).lower()} means {implied}"
            yield "memory.preset", f"is {preset}, but {says}; remove one of the two"

    def resolved(self) -> "Wrapper":
        """Returns a copy with the memory preset chosen, `remat_recon_forwards` set to match, and an absolute
        `init_from`.
        """
        preset = self.memory.preset or _preset(self.remat_recon_forwards)
        update = {"memory": self.memory.resolved(preset), "remat_recon_forwards": preset not in KEEP_ALL}
        if self.parent is not None:
            folder, step = self.parent
            update["init_from"] = str(_absolute(folder.expanduser())) + ("" if step is None else f"@{step}")
        return self.model_copy(update=update)

    def relative_to(self, folder: Path) -> "Wrapper":
        """Returns a copy with absolute paths. ``folder``: that of the wrapper, to which its paths are relative.

        Leaves out what could not be read.
        """
        update: dict[str, Any] = {}
        with suppress(Unread):
            update["torch_config"] = _absolute(folder / self.torch_config)
        for key in ("data", "target"):
            with suppress(Unread):
                part: Strict | None = getattr(self, key)
                paths = {name: _absolute(folder / path) for name, path in part or () if isinstance(path, Path)}
                update[key] = part and part.model_copy(update=paths)
        return self.model_copy(update=update)

    def is_milestone(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is kept forever."""
        match self.milestones:
            case MilestonesEvery(every=every):
                return step % every == 0
            case steps:
                return step in steps


def _absolute(path: Path) -> Path:
    # Does not follow symbolic links, so that a link changed later still takes effect.
    return Path(os.path.abspath(path))


def _contradicts(preset: Preset, implied: Preset) -> bool:
    """Whether a preset contradicts `remat_recon_forwards`, which only says whether anything is recomputed."""
    return preset != "one_card" and (preset == "plain") != (implied == "plain")


def _preset(remat_recon_forwards: bool) -> Preset:
    return "balanced" if remat_recon_forwards else "plain"
