"""The whole path of a target: saved, checked, decomposed for two steps, opened, exported."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.sharding.memory import PLAIN
from param_decomp_jax.targets.architecture import Architecture, is_shape
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_lab import load_run
from param_decomp_lab.weights.target_folder import load_target, save_target
from tests.lab.tiny_run import LIGHT, SEQ_LEN, Tiny, pd_here, rows


def random_weights(architecture: Architecture) -> Weights:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(0, 0.4, shape), jnp.float32),
        architecture.weight_shapes(),
        is_leaf=is_shape,
    )


def from_a_folder_to_an_export(
    architecture: Architecture,
    weights: Weights,
    model_class: str,
    targets: Sequence[tuple[str, int]],
    tiny: Tiny,
    folder: Path,
) -> None:
    """``targets``: patterns of the matrices that are decomposed, with their C."""
    save_target(folder / "target", architecture, weights)
    assert load_target(folder / "target")[0] == architecture
    patterns = ", ".join(f"{{module_pattern: '{pattern}', C: {C}}}" for pattern, C in targets)
    settings = (
        *LIGHT,
        "pd.steps=2",
        f"target.folder={folder / 'target'}",
        f"target.spec.model_class={model_class}",
        f"pd.decomposition_targets=[{patterns}]",
        f"out_dir={folder}",
        "run_id=p-00000001",
    )
    arguments = (tiny.config, *(word for setting in settings for word in ("--set", setting)))
    checked = pd_here("check", *arguments)
    assert checked.status == 0, checked.err
    assert architecture.describe().split(",")[0] in checked.out

    trained = pd_here("train", *arguments)
    assert trained.status == 0, trained.err
    assert len(rows(folder / "p-00000001")) == 2

    run = load_run(folder / "p-00000001")
    assert architecture.describe() in repr(run)
    tokens = np.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) % 48
    model = architecture.target(Sites(()), PLAIN, jnp.float32)
    expected = model.predictions(weights, model.forward(weights, jnp.asarray(tokens), UNTOUCHED).output)
    np.testing.assert_allclose(run.output(tokens), expected, atol=1e-4)
    # Every component on, and what they leave unexplained: the clean network again, through every site (F1).
    everything = {site.name: np.ones(site.C, np.float32) for site in run.sites.values()}
    np.testing.assert_allclose(run.output(tokens, everything, delta=1.0), expected, atol=1e-3)
    assert np.abs(np.asarray(run.output(tokens, everything)) - expected).max() > 1e-2
    assert {name: x.shape for name, x in run.causal_importances(tokens).items()} == {
        site.name: (2, SEQ_LEN, site.C) for site in run.sites.values()
    }

    exported = pd_here("export", run.folder, "--out", folder / "exported")
    assert exported.status == 0, exported.err
    assert (folder / "exported" / "README.md").is_file()
