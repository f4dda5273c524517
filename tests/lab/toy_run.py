"""A toy run that takes seconds: a TMS with a hidden layer, whose two other sites are tied (T4)."""

from pathlib import Path

from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_lab.weights.target_folder import save_target
from tests.core import toys
from tests.lab.tiny_run import ROOT

CONFIG = ROOT / "configs" / "toys" / "tms_5-2-id.yaml"
ARCHITECTURE = TMSConfig(n_features=5, n_hidden=2, n_hidden_layers=1)
SMALL = (
    "pd.steps=12",
    "pd.batch_size=16",
    "pd.faithfulness_warmup_steps=3",
    "pd.loss_metrics=[{type: ImportanceMinimalityLoss, coeff: 0.003, pnorm: 1.0, beta: 0}, {type: StochasticReconLoss,"
    " coeff: 1.0}]",
    "cadence={train_log_every: 1, save_every: 5}",
    "eval.every=4",
    "eval.slow_every=12",
    "eval.batch_size=8",
    "steps_per_dispatch=1",
)


def save_toy(folder: Path) -> None:
    """The target of the runs in this folder."""
    save_target(folder / "target", ARCHITECTURE, toys.weights(ARCHITECTURE))


def settings(folder: Path, number: int, *more: str) -> list[str]:
    """Arguments of the run ``folder/p-0000000<number>``, whose target is in the folder, too."""
    given = (*SMALL, f"target={{folder: {folder / 'target'}}}", f"out_dir={folder}", f"run_id=p-{number:08x}", *more)
    return [argument for setting in given for argument in ("--set", setting)]
