"""Runs of the PyTorch project as run folders (`pd import`): what they compute, and what is refused.

`tests/golden/decompositions` holds the runs, and what plain torch computes with them.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console
from safetensors.numpy import load_file
from starlette.testclient import TestClient

from param_decomp_lab import load_run
from param_decomp_lab.browse.server import make_app
from param_decomp_lab.data.tokenize import tokenize_files
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.harvest import harvest
from param_decomp_lab.harvest.plan import HarvestRequest
from param_decomp_lab.importing.command import import_run
from param_decomp_lab.importing.settings import translate
from param_decomp_lab.importing.tensors import todays_name
from param_decomp_lab.runs.imported import read_imported
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.weights.safetensors_files import save_tensors
from param_decomp_lab.weights.torch_checkpoint import read_checkpoint
from tests.lab.tiny_run import pd_here

QUIET = Console(quiet=True)
GOLDEN = Path(__file__).parent.parent / "golden" / "decompositions"
RUNS = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))
DELTA = 0.3


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs."""
    folder = tmp_path_factory.mktemp("imported")
    for name in RUNS:
        import_run(str(GOLDEN / name), folder / name, QUIET)
    return folder


def close(ours: Any, theirs: np.ndarray) -> None:
    """To 1e-5 of the largest entry, or of 1: machines round differently."""
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=1e-5 * max(1.0, float(np.max(np.abs(theirs)))))


def ours(path: str) -> str:
    return path.removeprefix("model.")


@pytest.mark.parametrize("name", RUNS)
def test_it_computes_what_it_did(imported: Path, name: str) -> None:
    """Importances, and outputs with no mask, with λ as masks, and with any masks and a share of Δ."""
    run, expected = load_run(imported / name), np.load(GOLDEN / name / "expected.npz")
    x = expected["inputs"]
    with jax.default_matmul_precision("highest"):
        for kind in ("logits", "lower", "upper") if name == "tms_mlp" else ("logits", "lower"):
            found = run.causal_importances(x, kind=kind)  # type: ignore[arg-type]
            theirs = {key.removeprefix(f"{kind}/"): expected[key] for key in expected if key.startswith(f"{kind}/")}
            assert found.keys() == {ours(path) for path in theirs}
            for path, array in theirs.items():
                close(found[ours(path)], array)
        close(run.output(x), expected["clean"])
        close(run.output(x, "ci"), expected["ci_masked"])
        masks = {ours(key.removeprefix("mask/")): expected[key] for key in expected if key.startswith("mask/")}
        close(run.output(x, masks, DELTA), expected["masked"])


def test_sites_are_sorted_as_strings_there(imported: Path) -> None:
    """So the runs test what they are to test: their order and ours differ."""
    sites = list(load_run(imported / "simple_transformer").sites)
    assert sites == ["h.2.mlp.c_fc", "h.2.mlp.down_proj", "h.10.attn.q_proj", "h.10.mlp.c_fc"] != sorted(sites)


def test_what_the_folder_says(imported: Path) -> None:
    folder = imported / "simple_global_mlp"
    found = read_imported(folder)
    assert found is not None
    assert (found.step, found.checkpoint, found.configuration) == (300, "model_300.pth", "final_config.yaml")
    assert found.left_out == ["wandb_project", "output_loss_type", "gradient_accumulation_steps", "ci_alive_threshold"]
    config = load_run(folder).config
    assert config.method.pd.loss_metrics[1].model_dump()["scope"] == {"type": "per_batch_per_position"}
    assert config.method.eval is not None
    assert config.method.eval.every == 100
    assert config.method.data.eval_split == "val"  # type: ignore[union-attr]
    listed = json.loads(pd_here("runs", imported, "--json").out)
    assert {run["state"] for run in listed} == {"imported"}
    assert all(run["why"].startswith("imported from ") for run in listed)
    refused = pd_here("train", "--resume", folder)
    assert refused.status == 2
    assert "cannot be resumed; to go on from it, begin a new run with init_from" in refused.err


# ---- with the commands ----


@pytest.fixture(scope="module")
def with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with the transformer, as `pd import` makes it, with text of our own."""
    folder = tmp_path_factory.mktemp("with_text")
    (folder / "text").mkdir()
    for n in range(20):
        (folder / "text" / f"{n}.txt").write_text("".join(f"{m} times {n} makes {m * n}.\n" for m in range(20)))
    tokenize_files([folder / "text"], folder / "data", seq_len=12, eval_fraction=0.2)
    data = f"data={{train: {folder}/data/train, eval: {folder}/data/eval}}"
    made = pd_here("import", GOLDEN / "simple_transformer", "--out", folder / "run", "--set", data)
    assert made.status == 0, made
    assert "not translated:\n  reloader_class\n  pd.loss_metrics.2.type: 'StochasticAttnPatternsReconLoss'" in made.out
    assert "run: step 300, 4 sites, 24 components, of LlamaSimpleMLP, 11 layers" in made.out
    return folder


def test_it_is_evaluated_harvested_browsed_and_graphed(with_text: Path) -> None:
    run = with_text / "run"
    made = pd_here("eval", run, "--metric", "CI_L0")
    assert made.status == 0, made
    assert "l0/0.0_h.10.attn.q_proj" in made.out
    found = harvest(load_run(run), HarvestRequest(tokens=240, examples=2))
    assert found is not None
    made = pd_here("graph", run, "12 times")
    assert made.status == 0, made
    assert "components fire" in made.out
    for address in ("/", f"/run/{found.name}", f"/run/{found.name}/sites/h.10.mlp.c_fc/0", f"/run/{found.name}/report"):
        page = TestClient(make_app([run.parent]), base_url="http://localhost:8720").get(address)
        assert page.status_code == 200, (address, page.text)
    assert "imported from" in page.text


def test_a_run_begins_with_it(imported: Path, tmp_path: Path) -> None:
    run = load_run(imported / "tms_mlp")
    raw = yaml.safe_load((run.folder / "config.yaml").read_text())
    raw["torch"]["pd"] |= {"steps": 1, "loss_metrics": [{"type": "FaithfulnessLoss", "coeff": 1.0}]}
    (tmp_path / "torch.yaml").write_text(yaml.safe_dump({**raw["torch"], "eval": None}))
    wrapper = {"torch_config": "torch.yaml", "run_name": "on", "run_id": "p-00000001", "out_dir": str(tmp_path),
               "init_from": str(run.folder), "target": {"folder": raw["wrapper"]["target"]["folder"]}}  # fmt: skip
    (tmp_path / "wrapper.yaml").write_text(yaml.safe_dump(wrapper))
    made = pd_here("train", tmp_path / "wrapper.yaml")
    assert made.status == 0, made
    moved = load_run(tmp_path / "p-00000001").factors("linear1")[0] - run.factors("linear1")[0]
    assert 0 < np.abs(moved).max() < 0.01


# ---- what is refused ----


def copied(tmp_path: Path, name: str = "tms_mlp") -> Path:
    return Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def refusal(folder: Path | str, **given: Any) -> str:
    out = Path(str(folder) + "-out")
    with pytest.raises(UserError) as error:
        import_run(str(folder), out, QUIET, **given)
    assert not out.exists()
    return str(error.value)


def resave(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """The checkpoint with other tensors."""
    state = dict(read_checkpoint(folder / "model_300.pth"))
    change(state)
    (folder / "model_300.pth").unlink()
    contiguous = {name: np.ascontiguousarray(array) for name, array in state.items()}
    save_tensors(contiguous, folder / "model_300.safetensors")


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = read_mapping(file, "the configuration")
    change(raw)
    file.write_text(yaml.safe_dump(raw))


def test_what_is_no_run(tmp_path: Path) -> None:
    assert "is neither a folder on this machine nor wandb:entity/project/id" in refusal(tmp_path / "nowhere")
    assert "is not a run of the PyTorch project: it has none of experiment_config.yaml" in refusal(tmp_path)
    folder = copied(tmp_path)
    assert "has no checkpoint of step 7; it has those of 300" in refusal(folder, step=7)
    (folder / "model_300.pth").rename(folder / "training_300.pth")
    assert "has no checkpoint (model_<step>.pth)" in refusal(folder)
    (folder / "model_40.pth").write_bytes(b"PK\x03\x04 and not much more")
    assert "model_40.pth: cannot be read as a checkpoint of torch" in refusal(folder)
    (folder / "experiment_config.yaml").rename(folder / "launch_config.yaml")
    assert "was trained with JAX" in refusal(folder)


def test_tensors_that_do_not_belong_there(tmp_path: Path) -> None:
    """All that is wrong is said at once."""
    folder = copied(tmp_path)

    def change(state: dict[str, np.ndarray]) -> None:
        del state["ci_fn._ci_fns.linear1.layers.0.b"]
        state["ci_fn._ci_fns.linear1.codes.W"] = np.zeros((2, 2), np.float32)
        state["_components.linear2.V"] = np.zeros((2, 7), np.float32)

    resave(folder, change)
    said = refusal(folder)
    assert "ci_fn._ci_fns.linear1.layers.0.b: is missing (shape [6, 4])" in said
    assert "ci_fn._ci_fns.linear1.codes.W: has no place in the decomposition of the configuration" in said
    assert "_components.linear2.V: has shape [2, 7], the configuration implies [2, 6]" in said


def test_a_configuration_of_other_sites_or_functions(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    file = folder / "experiment_config.yaml"
    rewrite(file, lambda raw: raw["pd"]["decomposition_targets"].pop(2))
    assert "its sites are not those that experiment_config.yaml chooses:\n  hidden_layers.0: is only in the check" in (
        refusal(folder)
    )
    gone = {"mode": "global", "fn_type": "global_reverse_residual", "d_resid_ci_fn": 4}
    rewrite(file, lambda raw: raw["pd"].update(ci_config=gone, sigmoid_type="half_sin"))
    said = refusal(folder)
    assert "pd.ci_config.fn_type: global_reverse_residual was removed" in said
    assert "pd.sigmoid_type: should be 'normal'" in said


def test_the_target_elsewhere(tmp_path: Path, imported: Path) -> None:
    """A folder is compared with the weights in the checkpoint; without these it is enough, and without either, said."""
    folder, target = copied(tmp_path), tmp_path / "target"
    shutil.copytree(imported / "tms_mlp" / "target", target)
    (folder / "tms_train_config.yaml").unlink()
    made = import_run(str(folder), tmp_path / "compared", QUIET, target=str(target))
    assert made.imported.target == str(target)
    assert not (tmp_path / "compared" / "target").exists()
    assert "the target of the run was not found; give with --target its folder" in refusal(
        folder, target=str(tmp_path / "x")
    )
    stored = load_file(target / "model.safetensors")
    save_tensors({**stored, "linear1": stored["linear1"] + np.float32(0.5)}, target / "model.safetensors")
    said = refusal(folder, target=str(target))
    assert "its weights are not those that" in said
    assert "linear1: differs by up to 0.5" in said
    resave(folder, lambda state: [state.pop(name) for name in list(state) if name.startswith("target_model.")])
    import_run(str(folder), tmp_path / "without", QUIET, target=str(target))
    settings = tmp_path / "tms.yaml"
    shutil.copyfile(GOLDEN / "tms_mlp" / "tms_train_config.yaml", settings)
    assert "holds no weights of the target" in refusal(folder, target=str(settings))


def test_what_has_no_counterpart(tmp_path: Path) -> None:
    folder = copied(tmp_path, "simple_global_mlp")
    file = folder / "final_config.yaml"
    rewrite(file, lambda raw: raw["module_info"].append({"module_pattern": "wte", "C": 3}))
    state = {"_components.wte.V": np.zeros((256, 3), np.float32), "_components.wte.U": np.zeros((3, 8), np.float32)}
    resave(folder, lambda own: own.update(state))
    assert "wte is an embedding: the CI function there reads" in refusal(folder)
    rewrite(file, lambda raw: raw["ci_config"].update(extra_input_module_patterns=["h.0.mlp"]))
    assert "pd.ci_config.extra_input_module_patterns: unknown key" in refusal(folder)
    rewrite(file, lambda raw: raw.update(task_config={"task_name": "ih"}))
    assert "task_config.task_name: is 'ih'; runs of lm, tms and resid_mlp can be imported" in refusal(folder)


def test_options_that_came_later(tmp_path: Path) -> None:
    """C9, C10."""
    changes = ("pd.ci_config.simple_transformer_ci_cfg.mlp_type=swiglu", "pd.ci_config.input_tap=first_block_resid")
    said = refusal(copied(tmp_path, "simple_transformer"), overrides=changes)
    assert "pd.ci_config: the PyTorch project had no mlp_type, input_tap; leave that out" in said


def test_older_settings() -> None:
    """Of the autumn of 2025, and what stands in for what cannot be read."""
    raw = read_mapping(GOLDEN / "simple_global_mlp" / "final_config.yaml", "the configuration")
    del raw["components_optimizer"], raw["eval_freq"]
    least = {"pnorm_1": 0.9, "pnorm_2": 2.0, "eps": 1e-6}
    raw |= {
        "ci_config": None, "ci_fn_type": "layerwise_global_mlp", "ci_fn_hidden_dims": [4], "grad_clip_norm": 0.5,
        "lr_schedule": {"start_val": 0.002, "warmup_pct": 0.1, "fn_type": "constant"},
        "loss_metric_configs": [
            {"classname": "ImportanceMinimalityLoss", "coeff": 1e-3, "extra_init_kwargs": least},
            {"classname": "PersistentPGDReconLoss", "coeff": 1, "scope": {"type": "batch_invariant", "n_masks": 2},
             "optimizer": {"type": "sign", "lr": 0.1}},
        ],
    }  # fmt: skip
    found = translate(raw, "final_config.yaml")
    pd = found.method["pd"]
    assert pd["ci_config"] == {"mode": "layerwise", "fn_type": "shared_mlp", "hidden_dims": [4]}
    assert pd["components_optimizer"] == {"lr_schedule": raw["lr_schedule"], "grad_clip_norm": 0.5}
    first, second = pd["loss_metrics"]
    assert first == {"type": "ImportanceMinimalityLoss", "coeff": 1e-3, "pnorm": 0.9, "eps": 1e-6, "beta": 0}
    assert second["scope"] == {"type": "repeat_across_batch", "n_sources": 2}
    assert second["optimizer"] == {"type": "sign", "lr_schedule": {"start_val": 0.1}}
    assert found.method["eval"] is None
    assert "eval.every: is required; eval is null instead" in "\n".join(found.left_out)


def test_older_names() -> None:
    for old, new in {
        "_gates.h-0-mlp.layers.0.W": "ci_fn._ci_fns.h-0-mlp.layers.0.W",
        "_ci_fns.linear1.layers.2.b": "ci_fn._ci_fns.linear1.layers.2.b",
        "patched_model.h.0.c_fc.original.weight": "target_model.h.0.c_fc.weight",
        "target_model.h.0.c_fc.components.U": "_components.h-0-c_fc.U",
        "ci_fn._global_ci_fn._output_head.W": "ci_fn._global_ci_fn._output_head.W",
    }.items():
        assert todays_name(old) == new
