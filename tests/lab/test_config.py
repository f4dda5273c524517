"""The configuration: schema.md key for key, the wrapper, `--set`, and what each mistake is answered with."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from param_decomp_jax import ci
from param_decomp_jax.decomposition.schedules import Anneal, Knot, Knots, Schedule
from param_decomp_jax.method import adversary, losses, masks, optim, recon, routing
from param_decomp_jax.method.state import Decomposition, FaithfulnessWarmup
from param_decomp_jax.sharding.memory import (
    BALANCED,
    FAST,
    INTERMEDIATES,
    LEAN,
    ONE_CARD,
    PLAIN,
    PUBLISHED,
    MemoryPolicy,
)
from param_decomp_lab.check.schedules import courses
from param_decomp_lab.config import RunConfig, difference, load_config, match_sites, term_names
from param_decomp_lab.config.core_specs import decomposition, measured_terms, term
from param_decomp_lab.config.loss_parts import ScheduleConfig
from param_decomp_lab.config.loss_schema import TrainingLoss
from param_decomp_lab.config.method_schema import DecompositionTarget, LanguageModelFile, ToyFile
from param_decomp_lab.config.metric_schema import Measured
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.yaml_text import dump_yaml, parse_yaml, read_mapping
from param_decomp_lab.schema.mistakes import ConfigSource
from param_decomp_lab.schema.site_names import PREFIXES
from param_decomp_lab.schema.strict import validate
from param_decomp_lab.ui.descriptions import describe_ci, describe_importance_minimality

EXAMPLE = Path(__file__).parents[2] / "configs" / "llama8b_l18_example.yaml"
TORCH = EXAMPLE.parent / "torch" / EXAMPLE.name


def example(*overrides: str) -> RunConfig:
    return load_config(EXAMPLE, overrides)


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        example(*overrides)
    return str(caught.value)


def write(folder: Path, wrapper: str = "", method: dict[str, Any] | None = None, drop: str | None = None) -> Path:
    """A wrapper with its schema file: the example's, with top-level keys replaced or one dotted key dropped."""
    raw = yaml.safe_load(TORCH.read_text()) | (method or {})
    if drop is not None:
        *above, last = drop.split(".")
        node = raw
        for key in above:
            node = node[int(key)] if isinstance(node, list) else node[key]
        del node[last]
    (folder / "torch.yaml").write_text(yaml.safe_dump(raw))
    path = folder / "wrapper.yaml"
    path.write_text(f"torch_config: torch.yaml\nrun_name: test\n{wrapper}")
    return path


# ---- the example and its defaults ----


def test_example_is_that_of_the_schema() -> None:
    config = example()
    pd = config.method.pd
    assert isinstance(config.method, LanguageModelFile)
    assert config.experiment == "language_model"
    assert [target.C for target in pd.decomposition_targets] == [20000] * 3
    assert [loss.coeff for loss in pd.loss_metrics] == [1e-6, 0.5, 0.5, 1e7]
    assert pd.components_optimizer.grad_clip_norm == 0.01
    assert pd.components_optimizer.betas == (0.9, 0.999)
    assert pd.ci_fn_optimizer.weight_decay == 0.0
    assert config.method.eval is not None
    assert len(config.method.eval.metrics) == 8
    assert config.wrapper.memory.preset == "balanced"
    assert config.wrapper.mesh.fsdp == 8
    expected = "runtime.device target.output_extract data.streaming"
    assert config.ignored == tuple(expected.split())
    assert any(line.startswith("pd.loss_metrics.0.eps") for line in config.warnings)


def test_defaults_of_a_minimal_file(tmp_path: Path) -> None:
    optimizer = {"lr_schedule": {"start_val": 1}}
    pd = {
        "n_mask_samples": 1,
        "decomposition_targets": [{"module_pattern": "x", "C": 4}],
        "ci_config": {"mode": "layerwise", "fn_type": "mlp", "hidden_dims": [8]},
        "components_optimizer": optimizer,
        "ci_fn_optimizer": optimizer,
        "steps": 10,
        "batch_size": 8,
        "loss_metrics": [{"type": "FaithfulnessLoss", "coeff": 1}],
    }
    method = {
        "pd": pd,
        "cadence": {"train_log_every": 5},
        "target": {"spec": {"kind": "hf", "model_class": "LlamaForCausalLM", "model_name": "x"}},
        "data": {
            "dataset_name": "parquet",
            "data_files": "*.parquet",
            "tokenizer_name": "x",
            "column_name": "input_ids",
            "is_tokenized": True,
        },
    }
    (tmp_path / "torch.yaml").write_text(yaml.safe_dump(method))
    (tmp_path / "wrapper.yaml").write_text("torch_config: torch.yaml\nrun_name: test\n")
    config = load_config(tmp_path / "wrapper.yaml")
    got = config.method.model_dump(mode="json")
    schedule = {"start_val": 1.0, "warmup_pct": 0.0, "final_val_frac": 1.0, "fn_type": "constant"}
    defaults = {
        "seed": 0,
        "sampling": "continuous",
        "sigmoid_type": "leaky_hard",
        "use_delta_component": True,
        "tied_weights": None,
        "identity_decomposition_targets": None,
        "faithfulness_warmup_steps": 0,
        "faithfulness_warmup_lr": 0.001,
        "faithfulness_warmup_weight_decay": 0.0,
    }
    assert got["pd"].items() >= defaults.items()
    assert got["pd"]["ci_fn_optimizer"] == {
        "type": "adamw",
        "lr_schedule": schedule,
        "weight_decay": 0.0,
        "betas": [0.9, 0.999],
        "grad_clip_norm": None,
    }
    assert got["runtime"] == {"autocast_bf16": True, "device": "cuda", "dp": None}
    assert got["cadence"] == {"train_log_every": 5, "save_every": None, "keep_last_n_checkpoints": None}
    assert got["eval"] is got["wandb"] is None
    assert got["data"]["max_seq_len"] == 512
    assert (got["data"]["train_split"], got["data"]["eval_split"]) == ("train", "test")
    assert config.ignored == config.warnings == ()
    assert config.wrapper.model_dump(mode="json") == {
        "torch_config": str(tmp_path / "torch.yaml"),
        "run_name": "test",
        "out_dir": "runs",
        "run_id": None,
        "remat_recon_forwards": False,
        "wandb_group": None,
        "wandb_tags": [],
        "experiment": None,
        "mesh": {"replica": 1, "fsdp": 1, "tensor": 1, "nodes": 1},
        "numerics": {"delta": None},
        "memory": {
            "preset": "plain",
            "save": list(INTERMEDIATES),
            "offload": [],
            "recompute": [],
            "layers": "scan",
            "layer_group": None,
            "component_block": None,
            "token_block": None,
            "vocabulary_block": None,
            "attention": "plain",
            "micro_batches": 1,
            "donate": True,
            "xla_remat": True,
            "held": {},
            "collective_mib": None,
            "state_dtypes": {},
            "optimizers": {"components": "adamw", "ci_fn": "adamw"},
        },
        "data": None,
        "bos": False,
        "target": None,
        "steps_per_dispatch": 1,
        "milestones": [],
        "init_components": "random",
        "init_from": None,
    }


REQUIRED = [
    "pd",
    "pd.n_mask_samples",
    "pd.decomposition_targets",
    "pd.decomposition_targets.0.module_pattern",
    "pd.decomposition_targets.0.C",
    "pd.ci_config",
    "pd.ci_config.fn_type",
    "pd.ci_config.simple_transformer_ci_cfg.d_model",
    "pd.ci_config.simple_transformer_ci_cfg.n_blocks",
    "pd.ci_config.simple_transformer_ci_cfg.attn_config",
    "pd.ci_config.simple_transformer_ci_cfg.attn_config.n_heads",
    "pd.components_optimizer",
    "pd.ci_fn_optimizer",
    "pd.components_optimizer.lr_schedule",
    "pd.components_optimizer.lr_schedule.start_val",
    "pd.steps",
    "pd.batch_size",
    "pd.loss_metrics",
    "pd.loss_metrics.0.coeff",
    "pd.loss_metrics.3.coeff",
    "cadence",
    "cadence.train_log_every",
    "eval.batch_size",
    "eval.n_steps",
    "eval.every",
    "eval.slow_every",
    "wandb.project",
    "target",
    "target.spec",
    "target.spec.model_class",
    "target.spec.model_name",
    "data",
    "data.dataset_name",
    "data.tokenizer_name",
    "data.column_name",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_required_keys(key: str, tmp_path: Path) -> None:
    path = write(tmp_path, "data: {train: a, eval: b}", drop=key)
    missing = "target.spec" if key == "target" else key
    with pytest.raises(UserError, match=rf"torch\.yaml: {missing}: is required"):
        load_config(path)


@pytest.mark.parametrize("key", ["torch_config", "run_name"])
def test_required_keys_of_the_wrapper(key: str, tmp_path: Path) -> None:
    lines = write(tmp_path).read_text().splitlines()
    (tmp_path / "wrapper.yaml").write_text("\n".join(line for line in lines if not line.startswith(key)))
    with pytest.raises(UserError, match=rf"wrapper\.yaml: {key}: is required"):
        load_config(tmp_path / "wrapper.yaml")


# ---- LOSS and METRIC ----

ROUTED = {"routing": {"type": "static_probability", "p": 0.5}}
PGD = {"init": "ones", "step_size": 0.1, "n_steps": 3, "mask_scope": "unique_per_datapoint"}
RATE = {"start_val": 0.1}
PERSISTENT = {"optimizer": {"type": "sign", "lr_schedule": RATE}, "scope": {"type": "single_source"}}
LOSSES: dict[str, dict[str, Any]] = {
    "FaithfulnessLoss": {},
    "UnmaskedReconLoss": {},
    "CIMaskedReconLoss": {},
    "CIMaskedReconLayerwiseLoss": {},
    "CIMaskedReconSubsetLoss": ROUTED,
    "StochasticReconLoss": {},
    "StochasticReconLayerwiseLoss": {},
    "StochasticReconSubsetLoss": ROUTED,
    "StochasticHiddenActsReconLoss": {},
    "ChunkwiseSubsetReconLoss": ROUTED | {"sites_per_chunk": 2},
    "ImportanceMinimalityLoss": {"pnorm": 2.0, "beta": 0.5},
    "NonlinearityLocalityLoss": {"unit_kind_coefficients": {"neuron": 1.0}, "relative_threshold": 0.5},
    "PGDReconLoss": PGD,
    "PGDReconLayerwiseLoss": PGD,
    "PGDReconSubsetLoss": PGD | ROUTED,
    "PersistentPGDReconLoss": PERSISTENT,
    "PersistentPGDReconSubsetLoss": PERSISTENT | ROUTED,
}
METRICS: dict[str, dict[str, Any]] = {
    "CEandKLLosses": {"rounding_threshold": 0.5},
    "CI_L0": {"groups": {"all": ["*"]}},
    "CIHistograms": {"n_batches_accum": None},
    "ComponentActivationDensity": {},
    "CIMeanPerComponent": {},
    "CIActiveCountsPerPosition": {},
    "CIHeatMap": {},
    "CIHiddenActsReconLoss": {},
    "IdentityCIError": {"identity_ci": [{"layer_pattern": "x", "n_features": 5}], "dense_ci": None},
    "PermutedCIPlots": {"identity_patterns": ["x"], "dense_patterns": None},
    "UVPlots": {"identity_patterns": None, "dense_patterns": ["x"]},
}
LOSS: TypeAdapter[Any] = TypeAdapter(TrainingLoss)
METRIC: TypeAdapter[Any] = TypeAdapter(Measured)


@pytest.mark.parametrize("kind", LOSSES)
def test_each_loss(kind: str) -> None:
    raw = {"type": kind, **LOSSES[kind]}
    assert type(LOSS.validate_python(raw | {"coeff": 1, "name": "mine"})).__name__ == kind
    assert METRIC.validate_python(raw).coeff is None
    assert METRIC.validate_python(raw | {"coeff": None}) == METRIC.validate_python(raw)
    for adapter, wrong in ((LOSS, raw), (LOSS, raw | {"coeff": None}), (METRIC, raw | {"coeff": 0.5})):
        with pytest.raises(ValidationError, match="coeff"):
            adapter.validate_python(wrong)
    for key in LOSSES[kind].keys() - (set() if kind == "ChunkwiseSubsetReconLoss" else {"routing"}):
        with pytest.raises(ValidationError, match=rf"{key}\n  Field required"):
            METRIC.validate_python({k: v for k, v in raw.items() if k != key})
    with pytest.raises(ValidationError, match="unknown key 'nome'; did you mean 'name'"):
        METRIC.validate_python(raw | {"nome": 1})


@pytest.mark.parametrize("kind", METRICS)
def test_each_metric(kind: str) -> None:
    raw = {"type": kind, **METRICS[kind]}
    assert METRIC.validate_python(raw).type == kind
    for key in METRICS[kind]:
        with pytest.raises(ValidationError, match=rf"{key}\n  Field required"):
            METRIC.validate_python({k: v for k, v in raw.items() if k != key})
    with pytest.raises(ValidationError, match="unknown key 'coeff'"):
        METRIC.validate_python(raw | {"coeff": 1.0})


def test_defaults_of_losses_and_metrics() -> None:
    importance = LOSS.validate_python({"type": "ImportanceMinimalityLoss", "coeff": 1, "pnorm": 1, "beta": 0})
    assert (importance.eps, importance.p_anneal_start_frac, importance.p_anneal_end_frac) == (1e-12, 1.0, 1.0)
    assert (importance.p_anneal_final_p, importance.penalty) == (None, "lp")
    adam = {"type": "adam", "lr_schedule": RATE}
    persistent = METRIC.validate_python({"type": "PersistentPGDReconLoss"} | PERSISTENT | {"optimizer": adam})
    assert (persistent.optimizer.beta1, persistent.optimizer.beta2, persistent.optimizer.eps) == (0.9, 0.999, 1e-8)
    assert (persistent.n_warmup_steps, persistent.start_frac, persistent.n_samples) == (0, 0.0, 1)
    assert not persistent.use_sigmoid_parameterization
    chunkwise = {"type": "ChunkwiseSubsetReconLoss", **LOSSES["ChunkwiseSubsetReconLoss"]}
    assert METRIC.validate_python(chunkwise).n_samples == 1
    assert METRIC.validate_python({"type": "CI_L0", "groups": None}).ci_alive_threshold == 0.0


SMOOTH = "{type: ImportanceMinimalityLoss, coeff: 1, pnorm: 2, beta: 0, penalty: smooth_l0, gamma: {start_val: 0.1}"
KNOTS = (
    "{max_val: 2, points: [{at: 0, frac: 1}, {at: 0.25, frac: 1, interp: hold}, {at: 1, frac: 1e-1, interp: cosine}]}"
)
VALID = [
    f"pd.loss_metrics.2.coeff={KNOTS}",
    "pd.loss_metrics.1.coeff={start_val: 1, warmup_pct: 0.5}",
    f"pd.loss_metrics.0={{type: ImportanceMinimalityLoss, coeff: 1, beta: 0, pnorm: {KNOTS}}}",
    f"pd.components_optimizer.lr_schedule={KNOTS}",
    "pd.ci_fn_optimizer.lr_schedule=1e-4",
    f"pd.loss_metrics.2.optimizer={{type: sign, lr_schedule: {KNOTS}}}",
    "pd.loss_metrics.0=" + SMOOTH.replace("{start_val: 0.1}", KNOTS) + "}",
    "pd.loss_metrics.0=" + SMOOTH + f", frequency: {{coeff: {KNOTS}, reference_token_count: 32768}}}}",
    "pd.loss_metrics.0=" + SMOOTH + "}",
    "pd.loss_metrics.0=" + SMOOTH + ", frequency: {coeff: 1e-7, reference_token_count: 32768}}",
    "pd.loss_metrics.2.scope={type: repeat_across_batch, n_sources: 16}",
    "pd.loss_metrics.2.scope.type=broadcast_across_batch",
    "pd.loss_metrics.2.optimizer={type: sign, lr_schedule: {start_val: 0.01}}",
    "pd.ci_config={mode: layerwise, fn_type: shared_mlp, hidden_dims: []}",
    "pd.ci_config={mode: layerwise, fn_type: mlp, hidden_dims: [16]}",
    "pd.ci_config.simple_transformer_ci_cfg.mlp_hidden_dim=null",
    "pd.ci_config={mode: layerwise, fn_type: vector_mlp, hidden_dims: [4]}",
    "pd.ci_config={mode: global, fn_type: global_shared_mlp, hidden_dims: [4]}",
    "pd.loss_metrics.2.start_frac=1",
    "pd.loss_metrics.0.name=two words",
    "pd.loss_metrics.0={type: ImportanceMinimalityLoss, coeff: 1, pnorm: 1, beta: 0, p_anneal_end_frac: 0.5}",
    "pd.tied_weights=[]",
    "pd.tied_weights=[[layers.18.mlp.up_proj, layers.18.mlp.down_proj]]",
    "pd.identity_decomposition_targets=[{module_pattern: model.layers.*.mlp.up_proj, C: 2}]",
    "pd.components_optimizer.lr_schedule.start_val=1",
    "pd.components_optimizer.betas=[0, 0.99]",
    "target.weights_dtype=float32",
    "target.spec.model_name=some/folder",
    "data.revision=main",
    "eval=null",
    "wandb=null",
    "eval.metrics.0={type: PersistentPGDReconLoss, scope: {type: single_source}, optimizer: {type: sign, "
    "lr_schedule: {start_val: 0.1}}}",
    "milestones=[0, 10]",
    "steps_per_dispatch=50",
    "mesh={replica: 2, fsdp: 4}",
    "mesh={fsdp: 2, tensor: 4}",
    "memory.layers=unroll",
    "run_id=p-0123abcd",
    "wandb_tags=[a, b]",
    "target.folder=/weights",
    *(f"pd.sigmoid_type={name}" for name in ("normal", "hard", "leaky_hard", "upper_leaky_hard")),
]


@pytest.mark.parametrize("override", VALID)
def test_valid_choices_survive_saving(override: str, tmp_path: Path) -> None:
    config = example(override)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert RunConfig.from_yaml(tmp_path / "config.yaml") == config
    assert difference(config, config) == []


# ---- refusals ----

CI, TRANSFORMER = "pd.ci_config", "pd.ci_config.simple_transformer_ci_cfg"
GROUP = {"name": "all", "patterns": ["*"]}


def reverse_residual() -> str:
    keys = {"d_resid_ci_fn": 8, "block_groups": [GROUP], "reader_hidden_dims": [4]}
    return f"{CI}={json.dumps({'mode': 'global', 'fn_type': 'global_reverse_residual', **keys})}"


def knots(*points: str, max_val: float = 2) -> str:
    return f"{{max_val: {max_val}, points: [{', '.join('{' + point + '}' for point in points)}]}}"


TO_0 = knots("at: 0, frac: 1", "at: 1, frac: 0")
LR = "pd.ci_fn_optimizer.lr_schedule"
REFUSED = [
    (f"{LR}={knots('at: 0, frac: 1')}", f"{LR}.points: needs at least 2 item(s), not 1"),
    (f"{LR}={knots('at: 0, frac: 1', 'at: 1, frac: 1', max_val=0)}", f"{LR}.max_val: should be greater than 0, not 0"),
    (f"{LR}={knots('at: 0, frac: 1', 'at: 1, frac: 2')}", f"{LR}.points.1.frac: should be less than or equal to 1"),
    (
        f"{LR}={knots('at: 0.1, frac: 1', 'at: 1, frac: 1')}",
        f"{LR}.points.0.at: is 0.1; the first knot must have at: 0",
    ),
    (f"{LR}={knots('at: 0, frac: 1', 'at: 0.9, frac: 1')}", f"{LR}.points.1.at: is 0.9; the last knot must have at: 1"),
    (f"{LR}={knots('at: 0, frac: 1', 'at: 0, frac: 1', 'at: 1, frac: 1')}", f"{LR}.points.1.at: is 0.0, not above 0.0"),
    (f"{LR}={knots('at: 0, frac: 0.5', 'at: 1, frac: 0')}", "write max_val: 1 and divide every frac by 0.5"),
    (f"{LR}={knots('at: 0, frac: 0', 'at: 1, frac: 0')}", f"{LR}.points: have frac: 0 everywhere; write the number 0"),
    (f"{LR}={{max_value: 1, start_val: 1}}", f"{LR}.points: is required"),
    (f"{LR}=null", f"{LR}: should be a valid number, not null"),
    (
        f"pd.loss_metrics.2.coeff={TO_0}",
        "pd.loss_metrics.2.coeff: must stay above 0 at every step, for a persistent att",
    ),
    ("pd.loss_metrics.2.coeff={start_val: 1, warmup_pct: 0.1}", "final_val_frac above 0, and warmup_pct: 0"),
    (f"pd.loss_metrics.0.pnorm={TO_0}", "pd.loss_metrics.0.pnorm: must stay above 0: give every knot a frac above 0"),
    (f"pd.loss_metrics.0={SMOOTH.replace('{start_val: 0.1}', TO_0)}}}", "pd.loss_metrics.0.gamma: must stay above 0"),
    (
        f"pd.loss_metrics.0={{type: ImportanceMinimalityLoss, coeff: 1, beta: 0, p_anneal_final_p: 1, pnorm: {KNOTS}}}",
        "pd.loss_metrics.0.p_anneal_final_p: anneals a number, but pnorm is a schedule; remove it",
    ),
    (
        f"pd.loss_metrics.0={{type: ImportanceMinimalityLoss, coeff: 1, beta: 0, eps: 0, pnorm: {KNOTS}}}",
        "pd.loss_metrics.0.eps: is 0",
    ),
    (
        f"pd.loss_metrics.0={SMOOTH.replace('gamma: {start_val: 0.1}', 'gamma: null, start_val: 0.1')}}}",
        "unknown key 'start_val'; it belongs in pd.loss_metrics.0.gamma: check its indentation",
    ),
    (f"eval.metrics.7.coeff={KNOTS}", "eval.metrics.7.coeff: is a schedule, but metrics"),
    ("pd.sigmoid_type=swish_hard", "pd.sigmoid_type: swish_hard dips below 0"),
    ("pd.sigmoid_type=two_sided_leaky_hard", "pd.sigmoid_type: two_sided_leaky_hard falls below 0 without end"),
    ("pd.stepz=1", "pd.stepz: unknown key 'stepz'; did you mean 'steps'"),
    (
        "pd.loss_metrics.3.hidden_acts_reconstruction={coeff: 1, points: ['*']}",
        "'hidden_acts_reconstruction' is a key of losses that compare the output, not of FaithfulnessLoss; remove it",
    ),
    (
        "pd.loss_metrics.3.pnorm=1",
        "pd.loss_metrics.3.pnorm: 'pnorm' is a key of ImportanceMinimalityLoss, not of FaithfulnessLoss; remove it",
    ),
    (
        "pd.loss_metrics.3.optimizer={type: sign, lr_schedule: 0.1}",
        "is a key of PersistentPGDReconLoss, PersistentPGDReconSubsetLoss, MergedStochasticSubsetPPGDReconLoss, …, not",
    ),
    ("pd.loss_metrics.0.coef=1", "pd.loss_metrics.0.coef: unknown key 'coef'; did you mean 'coeff'"),
    ("pd.loss_metrics.0.type=ImportanceLoss", "did you mean 'ImportanceMinimalityLoss'"),
    ("pd.loss_metrics.1.routing={type: uniform}", "pd.loss_metrics.1.routing: unknown 'type' 'uniform'; did you mean"),
    ("pd.loss_metrics.1.routing={p: 0.5}", "pd.loss_metrics.1.routing: type is required"),
    ("pd.loss_metrics=[]", "pd.loss_metrics: needs at least 1 item"),
    ("pd.loss_metrics=[3]", "pd.loss_metrics.0: should be a mapping, not 3"),
    ("pd.loss_metrics.2.coeff=0", "pd.loss_metrics.2.coeff: is 0.0; a persistent attack needs coeff > 0 (A4)"),
    ("pd.loss_metrics.0.p_anneal_end_frac=-1", "pd.loss_metrics.0.p_anneal_end_frac: should be greater than or equal"),
    ("pd.loss_metrics.0.p_anneal_start_frac=2", "pd.loss_metrics.0.p_anneal_start_frac: should be less than"),
    ("pd.loss_metrics.0.gamma.start_val=1", "pd.loss_metrics.0.gamma: belongs to penalty: smooth_l0"),
    ("pd.loss_metrics.0.eps=0", "pd.loss_metrics.0.eps: is 0"),
    ("pd.loss_metrics.0=" + SMOOTH[:-1] + ", warmup_pct: 0.1}}", "pd.loss_metrics.0.gamma: must stay above 0"),
    ("pd.loss_metrics.0.name=total", "pd.loss_metrics.0.name: 'total' is the key of the sum"),
    ("pd.loss_metrics.0.name=a/b", "pd.loss_metrics.0.name: should match pattern"),
    ("pd.loss_metrics.9.coeff=1", "'9' is not an index of this list (valid: 0 to 3)"),
    ("pd.components_optimizer.betas.0=1", "the file has no list pd.components_optimizer.betas; set"),
    ("pd.steps=null", "pd.steps: should be a valid integer, not null"),
    ("pd.steps=1" + 400 * "0", "line 1: the number 10000000000000000000 … (361 more characters)"),
    ("pd.steps.x=1", "pd.steps is 100000, which has no keys"),
    ("pd.steps='100'", "pd.steps: should be a valid integer, not '100'"),
    ("pd.steps=1.0", "pd.steps: should be a valid integer, not 1.0"),
    ("pd.steps=true", "pd.steps: should be a valid integer, not true"),
    ("pd.steps=0", "pd.steps: should be greater than or equal to 1, not 0"),
    ("pd.loss_metrics.1.coeff=true", "pd.loss_metrics.1.coeff: should be a valid number, not true"),
    ("pd.loss_metrics.1.coeff='5e-5'", "pd.loss_metrics.1.coeff: should be a valid number, not '5e-5'"),
    ("pd.loss_metrics.1.coeff=.nan", "pd.loss_metrics.1.coeff: should be a finite number"),
    ("pd.sampling=binary", "pd.sampling: should be 'continuous' or 'binomial', not 'binary'"),
    ("pd.use_delta_component=1", "pd.use_delta_component: should be a valid boolean, not 1"),
    ("pd.seed=-1", "pd.seed: should be greater than or equal to 0"),
    ("pd.decomposition_targets=[]", "pd.decomposition_targets: needs at least 1 item"),
    ("pd.tied_weights=[[a, b, c]]", "pd.tied_weights.0: takes at most 2"),
    ("pd.components_optimizer.betas=[0.9]", "pd.components_optimizer.betas"),
    ("pd.components_optimizer.betas=[0.9, 1.0]", "pd.components_optimizer.betas.1: should be less than 1"),
    (f"{CI}={{mode: layerwise, fn_type: mlp, hidden_dims: []}}", f"{CI}.hidden_dims: is empty; mlp needs at least"),
    (
        f"{CI}={{mode: layerwise, fn_type: vector_mlp, hidden_dims: []}}",
        f"{CI}.hidden_dims: is empty; vector_mlp needs",
    ),
    (f"{CI}={{mode: layerwise, fn_type: global_shared_mlp, hidden_dims: [4]}}", f"{CI}.fn_type: should be 'mlp', 've"),
    (f"{CI}={{mode: global, fn_type: global_shared_mlp}}", f"{CI}.hidden_dims: is required"),
    (f"{CI}.hidden_dims=[8]", f"{CI}.hidden_dims: has no effect with fn_type: global_shared_transformer"),
    (f"{TRANSFORMER}=null", f"{TRANSFORMER}: is required with fn_type"),
    (
        f"{CI}.transition_hidden_dim=8",
        f"{CI}.transition_hidden_dim: was for fn_type: global_reverse_residual, which was removed",
    ),
    (
        f"{CI}.fn_type=global_reverse_residual",
        f"{CI}.fn_type: global_reverse_residual was removed: the PyTorch project",
    ),
    (reverse_residual(), f"{CI}.fn_type: global_reverse_residual was removed: the PyTorch project deleted its own"),
    (f"{TRANSFORMER}.d_model=4095", f"{TRANSFORMER}.d_model: is 4095, not a multiple of attn_config.n_heads (8)"),
    (f"{TRANSFORMER}.d_model=24", f"{TRANSFORMER}.d_model: gives heads of width 3; rotary"),
    (f"{TRANSFORMER}.mlp_hidden_dim=[]", f"{TRANSFORMER}.mlp_hidden_dim: needs at least 1"),
    ("data.max_seq_len=1024", f"data.max_seq_len: is 1024, longer than {TRANSFORMER}.attn_config.max_len (512)"),
    ("data.column_name=3", "data.column_name: should be a string, not 3"),
    ("target.output_extract=true", "target.output_extract: "),
    ("target.output_extract=0.5", "target.output_extract: "),
    ("pd.batch_size=60", "pd.batch_size: is 60; it must be a multiple of mesh.replica · mesh.fsdp = 1 · 8"),
    ("eval.batch_size=4", "eval.batch_size: is 4; it must be a multiple of mesh.replica"),
    (
        "memory.micro_batches=3",
        "memory.micro_batches: is 3; pd.batch_size (64 rows on 8 devices) cannot be cut into as",
    ),
    (
        "pd.ci_fn_optimizer={type: muno, lr_schedule: 1.0e-3}",
        "pd.ci_fn_optimizer: unknown 'type' 'muno'; did you mean 'muon'",
    ),
    (
        "pd.ci_fn_optimizer={typ: muon, lr_schedule: 1.0e-3}",
        "pd.ci_fn_optimizer.typ: unknown key 'typ'; did you mean 'type'",
    ),
    (
        "pd.components_optimizer={type: muon, lr_schedule: 1.0e-3, betas: [0.9, 0.9]}",
        "pd.components_optimizer.betas: unknown key 'betas'; did you mean 'beta'",
    ),
    (
        "pd.loss_metrics.2={type: MergedStochasticSubsetPPGDReconLoss, coeff: 1, adv_fraction: {start_val: 0.7, "
        "final_val_frac: 2, fn_type: linear}, scope: {type: per_batch}, optimizer: {type: sgd, lr_schedule: 1}}",
        "pd.loss_metrics.2.adv_fraction: rises to 1.4; it is a probability, at most 1",
    ),
    ("eval.slow_every=1500", "eval.slow_every: is 1500; it must be a multiple of every (1000)"),
    ("eval.metrics.0.n_batches=1", "eval.metrics.0.n_batches: unknown key 'n_batches'; did you mean 'n_batches_accum'"),
    ("eval.metrics.7.coeff=0.5", "eval.metrics.7.coeff: is 0.5, but metrics"),
    (
        "eval.metrics.5={type: PGDReconLoss, init: ones, step_size: 1, n_steps: 1, mask_scope: shared}",
        "mask_scope: shou",
    ),
    (
        "eval.metrics.0={type: StochasticAttnPatternsReconLoss, n_heads: 2}",
        "'StochasticAttnPatternsReconLoss' is not su",
    ),
    (
        "eval.metrics.0={type: UVPlots, identity_patterns: null, dense_patterns: null}",
        "eval.metrics.0.type: UVPlots nee",
    ),
    (
        "eval.metrics.0={type: CI_L0, groups: {first: ['*', 3]}}",
        "eval.metrics.0.groups.first.1: should be a string, not 3",
    ),
    ("pd.loss_metrics.0={type: CI_L0, groups: null}", "pd.loss_metrics.0: unknown 'type' 'CI_L0'; did you mean"),
    ("pd.loss_metrics.0={type: CIMaskedAttnPatternsReconLoss, coeff: 1}", "pd.loss_metrics.0.type: 'CIMaskedAttnPatt"),
    ("target.output_extract=[1]", "target.output_extract: should be a valid integer, not [1]"),
    ("target.spec.kind=hub", "target.spec: unknown 'kind' 'hub'; did you mean 'hf'"),
    ("target.weights_dtype=float16", "target.weights_dtype: should be 'float32' or 'bfloat16'"),
    ("runtime.dp=0", "runtime.dp: should be greater"),
    ("wandb.projekt=x", "wandb.projekt: unknown key 'projekt'; did you mean 'project'"),
    ("optimizer.x=1", "unknown key 'optimizer'"),
    ("pd.steps", "should be key=value with a dotted key"),
    ("pd..steps=1", "should be key=value with a dotted key"),
    ("pd.steps=[1", "not valid YAML"),
    # the wrapper
    ("mesh.fdsp=2", "mesh.fdsp: unknown key 'fdsp'; did you mean 'fsdp'"),
    ("mesh={fsdp: 8, nodes: 3}", "mesh.nodes: 3 does not divide fsdp 8"),
    ("mesh.tensor=0", "mesh.tensor: should be greater than or equal to 1"),
    ("mesh.replica=0", "mesh.replica: should be greater than or equal to 1"),
    (
        "memory.preset=best",
        "memory.preset: should be 'plain', 'one_card', 'balanced', 'lean', 'fast' or 'published', not 'best'",
    ),
    ("memory.preset=plain", "memory.preset: is plain, but remat_recon_forwards: true means balanced"),
    ("memory.layer=scan", "memory.layer: unknown key 'layer'; did you mean 'layers'"),
    *(
        (f"memory.{key}=[logit]", f"memory.{key}.0: there is no 'logit' here; did you mean 'logits'? (valid: ")
        for key in ("save", "offload", "recompute")
    ),
    (
        "memory.save=[ci_moments]",
        "memory.save.0: there is no 'ci_moments' here; did you mean ",
    ),
    (
        "memory={save: [layers, ci], recompute: [ci]}",
        "memory.recompute: 'ci' is listed in save and in recompute; keep one",
    ),
    (
        "memory={offload: [attention], save: [attention]}",
        "memory.offload: 'attention' is listed in save and in offload",
    ),
    (
        "memory.offload=[logits]",
        "memory.offload: 'logits' cannot be kept in host memory; these can: attention, site_outputs, attack_outputs, c",
    ),
    ("memory.attention=fast", "memory.attention: should be 'plain', 'blocked' or 'flash', not 'fast'"),
    *(
        (f"memory.{key}=0", f"memory.{key}: should be greater than or equal to 1")
        for key in ("layer_group", "component_block", "token_block", "vocabulary_block", "micro_batches")
    ),
    ("memory.state_dtypes={ci_moments: float16}", "memory.state_dtypes.ci_moments: should be 'float32' or 'bfloat16'"),
    ("memory.state_dtypes={components: bfloat16}", "memory.state_dtypes.components"),
    ("steps_per_dispatch=0", "steps_per_dispatch: should be greater than or equal to 1"),
    ("run_id=p-xyz", "run_id: should match pattern"),
    ("run_name=2024-01-01", "run_name: should be a string"),
    ("experiment=tms", "experiment: is tms, but the schema file has target.spec"),
    ("experiment=lm", "experiment: should be 'tms' or 'resid_mlp'"),
    ("target.pretrain=recipe.yaml", "target.pretrain: is for toys only"),
    ("target={folder: a, pretrain: b}", "target: takes exactly one of folder, pretrain and revision"),
    ("data={train: a}", "data.eval: is required"),
    ("milestones=5", "milestones: should be a list"),
    ("milestones={every: 0}", "milestones.every: should be greater"),
    ("milestones={each: 5}", "milestones.each: unknown key 'each'; did you mean 'every'"),
    ("wandb_tags=a", "wandb_tags: should be a list, not 'a'"),
]


@pytest.mark.parametrize(("override", "expected"), REFUSED)
def test_refusals_say_where_and_what(override: str, expected: str) -> None:
    message = refusal(override)
    assert expected in message
    assert f"--set {override[:90]}" in message


# The assignment is right by itself; the key it does not go with is named.
REFUSED_AT_ANOTHER_KEY = [
    ("pd.loss_metrics.0.penalty=smooth_l0", "pd.loss_metrics.0.gamma: is required with penalty: smooth_l0"),
    ("pd.loss_metrics.0.frequency={coeff: 1, reference_token_count: 1}", "pd.loss_metrics.0.beta: is 0.5, but freq"),
    ("pd.loss_metrics.0.name=FaithfulnessLoss", "pd.loss_metrics.3.name: 'FaithfulnessLoss' is the name of pd.loss_me"),
    ("pd.loss_metrics.2.scope={type: repeat_across_batch, n_sources: 3}", "pd.batch_size: is 64; it must be a multip"),
    (
        "pd.components_optimizer.lr_schedule.fn_type=constant",
        "pd.components_optimizer.lr_schedule.final_val_frac: is 0",
    ),
    (f"{CI}.fn_type=global_shared_mlp", f"{CI}.hidden_dims: is required"),
    ("eval.metrics.0={type: CIHiddenActsReconLoss}", "eval.metrics.6.type: CIHiddenActsReconLoss is listed twice"),
]


@pytest.mark.parametrize(("override", "expected"), REFUSED_AT_ANOTHER_KEY)
def test_refusals_between_keys(override: str, expected: str) -> None:
    assert expected in refusal(override)


def test_one_optimizer() -> None:
    """Muon and an optimiser that saves memory."""
    message = refusal("memory.optimizers.ci_fn=lion", "pd.ci_fn_optimizer={type: muon, lr_schedule: 1.0e-3}")
    assert "memory.optimizers.ci_fn: is lion, not AdamW, but pd.ci_fn_optimizer is muon; remove one" in message


def test_anneal_order_and_all_problems_at_once() -> None:
    message = refusal("pd.loss_metrics.0.p_anneal_start_frac=0.5", "pd.loss_metrics.0.p_anneal_end_frac=0.25", "pd.x=1")
    assert "pd.x: unknown key" in message
    message = refusal(
        "pd.loss_metrics.0.p_anneal_start_frac=0.5", "pd.loss_metrics.0.p_anneal_end_frac=0.25", "wandb.project=1"
    )
    assert "pd.loss_metrics.0.p_anneal_end_frac: is 0.25, before p_anneal_start_frac (0.5)" in message
    assert "wandb.project: should be a string, not 1" in message
    assert len(message.splitlines()) == 2


def test_the_file_is_named_without_set(tmp_path: Path) -> None:
    path = write(tmp_path, "memory: {remat: true}")
    with pytest.raises(UserError, match=rf"^{path}: memory\.remat: unknown key 'remat'; did you mean 'xla_remat'"):
        load_config(path)
    path = write(tmp_path, "data: {train: a, eval: b}", {"cadence": {"train_log_every": 1, "save_evry": 2}})
    method = tmp_path / "torch.yaml"
    with pytest.raises(
        UserError, match=rf"^{method}: cadence\.save_evry: unknown key 'save_evry'; did you mean 'save_every'"
    ):
        load_config(path)


# ---- data and experiments ----


def test_data_without_replacement(tmp_path: Path) -> None:
    def named(**data: Any) -> RunConfig:
        needed = {"tokenizer_name": "t", "column_name": "input_ids", "is_tokenized": True}
        return load_config(write(tmp_path, method={"data": needed | data}))

    assert named(dataset_name="parquet", data_files="x/*").method.data.is_in_rows
    for text in ({"is_tokenized": False}, {"column_name": "story"}, {"dataset_name": "json"}):
        assert not named(**{"dataset_name": "parquet", "data_files": "x/*"} | text).method.data.is_in_rows
    assert not named(dataset_name="somebody/stories", column_name="story", is_tokenized=False).method.data.is_in_rows
    for wrong, message in (
        ({"dataset_name": "parquet"}, "data.data_files: is required with dataset_name: parquet"),
        ({"dataset_name": "arrow", "data_files": "x", "is_tokenized": False}, "data.dataset_name: is arrow; shards of"),
        ({"dataset_name": "text", "data_files": "x"}, "data.dataset_name: is text, whose only column is text"),
    ):
        with pytest.raises(UserError, match=message):
            named(**wrong)


def test_keys_of_a_data_set_have_no_effect_on_files(tmp_path: Path) -> None:
    data = {"dataset_name": "json", "data_files": "x", "tokenizer_name": "t", "column_name": "a", "train_split": "all"}
    notes = load_config(write(tmp_path, method={"data": data})).notes
    assert [note for note in notes if note.startswith("data.")] == [
        "data.train_split: has no effect with dataset_name: json, which names files"
    ]


def toy_file(**pd: Any) -> dict[str, Any]:
    """The example's schema file with the parts that a toy has of its own."""
    changed = yaml.safe_load(TORCH.read_text())["pd"] | pd
    return {"pd": changed, "target": {"run_path": "x"}, "data": {"feature_probability": 0.05}, "eval": None}


@pytest.mark.parametrize(
    ("patterns", "wrapper", "toy"),
    [
        (["linear1", "linear2"], "", "tms"),
        (["linear*"], "", "tms"),
        (["model.linear1", "hidden_layers.0"], "", "tms"),
        (["layers.*.mlp_in", "layers.*.mlp_out"], "", "resid_mlp"),
        (["layers.0.mlp_in"], "", "resid_mlp"),
        (["*mlp_*"], "", "resid_mlp"),
        (["*"], "experiment: tms", "tms"),
        (["anything"], "experiment: resid_mlp", "resid_mlp"),
        (["*"], "", None),
        (["linear1", "layers.0.mlp_in"], "", None),
    ],
)
def test_toys_are_known(patterns: list[str], wrapper: str, toy: str | None, tmp_path: Path) -> None:
    targets = [{"module_pattern": pattern, "C": 20} for pattern in patterns]
    path = write(tmp_path, f"target: {{folder: x}}\n{wrapper}", toy_file(decomposition_targets=targets))
    if toy is None:
        with pytest.raises(
            UserError, match=r"decomposition_targets: match the modules of both toys.*experiment: tms or resid_mlp"
        ):
            load_config(path)
        return
    config = load_config(path)
    assert config.experiment == toy
    assert isinstance(config.method, ToyFile)
    assert config.method.data.data_generation_type == "at_least_zero_active"
    assert any(line.startswith("target.run_path: x is replaced by") for line in config.warnings)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert RunConfig.from_yaml(tmp_path / "config.yaml") == config


def test_identities_alone_are_something_to_decompose(tmp_path: Path) -> None:
    identities = [{"module_pattern": "linear2", "C": 20}]
    pd = {"decomposition_targets": [], "identity_decomposition_targets": identities}
    assert load_config(write(tmp_path, "target: {folder: x}", toy_file(**pd))).experiment == "tms"


def test_toys_have_targets_data_and_metrics_of_their_own(tmp_path: Path) -> None:
    method = toy_file(decomposition_targets=[{"module_pattern": "linear1", "C": 20}])
    assert load_config(write(tmp_path, "", method)).wrapper.target is None
    with pytest.raises(UserError, match=r"wrapper\.yaml: target\.revision: is for a language model on the hub"):
        load_config(write(tmp_path, "target: {revision: v1}", method))
    with pytest.raises(UserError, match=r"wrapper\.yaml: data: is for language models"):
        load_config(write(tmp_path, "target: {pretrain: x}\ndata: {train: a, eval: b}", method))
    metrics = [{"type": "CEandKLLosses", "rounding_threshold": 0}]
    method["eval"] = {"batch_size": 8, "n_steps": 1, "every": 1, "slow_every": 1, "metrics": metrics}
    with pytest.raises(UserError, match=r"eval\.metrics\.0\.type: CEandKLLosses is for language models; remove it"):
        load_config(write(tmp_path, "target: {pretrain: x}", method))


def test_pretrained_target_with_a_folder() -> None:
    spec = "target.spec={kind: pretrained, model_class: my.LlamaForCausalLM, run_path: x}"
    config = example(spec, "target.folder=weights")
    assert config.wrapper.target is not None
    assert config.wrapper.target.folder == EXAMPLE.parent / "weights"
    assert "target.revision: is for target.spec.kind hf, not pretrained" in refusal(spec, "target.revision=v1")


@pytest.mark.parametrize("given", ["0", "null", "logits", "my_logits"])
def test_where_a_class_has_its_logits_has_no_meaning_here(given: str) -> None:
    assert "target.output_extract" in example(f"target.output_extract={given}").ignored or given == "null"


# ---- wrapper ----


@pytest.mark.parametrize(
    ("given", "run", "step"),
    [
        ("runs/p-1a2b3c4d", "runs/p-1a2b3c4d", None),
        ("runs/p-1a2b3c4d@400", "runs/p-1a2b3c4d", 400),
        ("me@home/p-1a2b3c4d", "me@home/p-1a2b3c4d", None),
        ("me@home/p-1a2b3c4d@0", "me@home/p-1a2b3c4d", 0),
    ],
)
def test_parent(given: str, run: str, step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where one stands, like `out_dir`: that is where runs are."""
    (tmp_path / "configs").mkdir()
    path = write(tmp_path / "configs", f"init_from: {given}\ndata: {{train: a, eval: b}}")
    monkeypatch.chdir(tmp_path)
    config = load_config(path)
    assert config.wrapper.parent == (tmp_path / run, step)
    left_out = "pd.faithfulness_warmup_steps: has no effect with init_from, whose components are warmed up"
    assert left_out in config.warnings
    assert left_out not in load_config(path, ["pd.faithfulness_warmup_steps=0"]).warnings
    monkeypatch.chdir("/")
    assert RunConfig.from_mapping(yaml.safe_load(config.to_yaml()), "saved").wrapper.parent == (tmp_path / run, step)


def test_files_that_were_read_are_read_no_more_and_stay_as_they_were() -> None:
    """However often they are loaded, with whatever assignments."""
    path, read = Path(__file__).parents[2] / "configs" / "llama8b_l18-26_9layer_chunkwise.yaml", cache(read_mapping)
    for overrides in (["memory={preset: lean}", "pd.loss_metrics.0.coeff=7"], ["pd.steps=5"], []):
        assert load_config(path, overrides, read) == load_config(path, overrides)
    assert read.cache_info().misses == 2


def test_paths_are_relative_to_the_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    write(tmp_path / "configs", "data: {train: ../train, eval: /eval}\nout_dir: here\ntarget: {folder: w}")
    monkeypatch.chdir(tmp_path)
    wrapper = load_config(Path("configs/wrapper.yaml")).wrapper
    assert wrapper.torch_config == tmp_path / "configs/torch.yaml"
    assert wrapper.data is not None
    assert (wrapper.data.train, wrapper.data.eval) == (tmp_path / "train", Path("/eval"))
    assert wrapper.target is not None
    assert wrapper.target.folder == tmp_path / "configs/w"
    assert wrapper.out_dir == Path("here")


@pytest.mark.parametrize(
    ("lines", "preset"),
    [
        ("", "plain"),
        ("remat_recon_forwards: true", "balanced"),
        ("remat_recon_forwards: false", "plain"),
        ("memory: {preset: balanced}", "balanced"),
        ("memory: {preset: lean}", "lean"),
        ("memory: {preset: published}", "published"),
        ("remat_recon_forwards: true\nmemory: {preset: balanced}", "balanced"),
        ("remat_recon_forwards: true\nmemory: {preset: lean}", "lean"),
        ("remat_recon_forwards: false\nmemory: {preset: balanced}", None),
    ],
)
def test_remat_chooses_the_default_preset(lines: str, preset: str | None, tmp_path: Path) -> None:
    path = write(tmp_path, f"data: {{train: a, eval: b}}\n{lines}")
    if preset is None:
        with pytest.raises(
            UserError, match=r"memory\.preset: is balanced, but remat_recon_forwards: false means plain"
        ):
            load_config(path)
        return
    config = load_config(path)
    assert config.wrapper.memory.preset == preset
    assert config.wrapper.remat_recon_forwards == (preset != "plain")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert RunConfig.from_yaml(tmp_path / "config.yaml") == config


EVERYTHING = frozenset(INTERMEDIATES)


@pytest.mark.parametrize(
    ("memory", "policy"),
    [
        ("{}", BALANCED),
        ("{preset: balanced}", BALANCED),
        ("{preset: lean}", LEAN),
        ("{preset: published}", PUBLISHED),
        # Every key that is given takes the place of the preset's choice, and of that alone.
        ("{preset: lean, component_block: 64}", replace(LEAN, component_block=64)),
        ("{preset: one_card}", ONE_CARD),
        ("{preset: fast}", FAST),
        ("{preset: fast, held: {ci: node}}", replace(FAST, held=(("ci", "node"),))),
        ("{preset: fast, held: {}}", replace(FAST, held=())),
        ("{preset: fast, held: {heads: device, ci: node}}", replace(FAST, held=(("ci", "node"), ("heads", "device")))),
        ("{preset: fast, collective_mib: null}", replace(FAST, collective_mib=None)),
        ("{preset: lean, component_block: null, token_block: 7}", replace(LEAN, component_block=None, token_block=7)),
        ("{preset: lean, attention: plain}", replace(LEAN, attention="plain")),
        ("{preset: published, donate: true, layers: scan}", replace(PUBLISHED, donate=True, layers="scan")),
        ("{preset: balanced, layer_group: 4, micro_batches: 2}", replace(BALANCED, layer_group=4, micro_batches=2)),
        ("{preset: balanced, save: [logits]}", replace(BALANCED, save=BALANCED.save | {"logits"})),
        ("{preset: balanced, recompute: [attention]}", replace(BALANCED, save=BALANCED.save - {"attention"})),
        (
            "{preset: balanced, offload: [attention, ci_moments]}",
            replace(
                BALANCED, save=BALANCED.save - {"attention"}, offload=frozenset({"attention"}),
                offload_state=frozenset({"ci_moments"}),
            ),
        ),
        (
            "{state_dtypes: {sources_moments: bfloat16, ci_moments: bfloat16}}",
            replace(BALANCED, state_dtypes=(("ci_moments", "bfloat16"), ("sources_moments", "bfloat16"))),
        ),
    ],
)  # fmt: skip
def test_memory_policy(memory: str, policy: MemoryPolicy, tmp_path: Path) -> None:
    """A preset with parts replaced; what is written down says all of it, and read again it says the same."""
    config = example(f"memory={memory}")
    assert decomposition(config).memory == policy
    written = config.wrapper.memory
    assert {*written.save, *written.offload, *written.recompute} == EVERYTHING | policy.offload_state
    assert set(written.model_dump()) == written.model_fields_set
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    again = RunConfig.from_yaml(tmp_path / "config.yaml")
    assert again == config
    assert decomposition(again).memory == policy


@pytest.mark.parametrize(
    ("milestones", "kept"), [("[5, 20]", [5, 20]), ("{every: 20}", [0, 20, 40]), ("[]", [])], ids=str
)
def test_milestones(milestones: str, kept: list[int]) -> None:
    wrapper = example(f"milestones={milestones}").wrapper
    assert [step for step in range(50) if wrapper.is_milestone(step)] == kept


def test_warnings() -> None:
    config = example(
        "runtime.dp=4", "milestones=[200000]", "wandb=null", "wandb_tags=[x]", "pd.loss_metrics.2.n_samples=2"
    )
    begins = [line.split(":")[0] for line in config.warnings]
    assert begins == [
        "runtime.dp",
        "pd.loss_metrics.0.eps",
        "pd.loss_metrics.2.n_samples",
        "data.dataset_name",
        "wandb_group, wandb_tags",
        "milestones",
    ]
    assert "runtime.dp" in config.ignored
    assert not [line for line in example("runtime.dp=8").warnings if line.startswith("runtime.dp")]


def test_a_mean_over_steps_is_not_measured() -> None:
    """An evaluation has no earlier steps (L6)."""
    frequency = "frequency: {coeff: 1, reference_token_count: 9, ema_halflife_steps: 5}"
    metric = f"{{type: ImportanceMinimalityLoss, pnorm: 1, beta: 0, {frequency}}}"
    (line,) = (line for line in example(f"eval.metrics=[{metric}]").warnings if line.startswith("eval."))
    assert line.startswith("eval.metrics.0.frequency.ema_halflife_steps: has no effect in a metric")


def test_components_that_are_not_split() -> None:
    C = example().method.pd.decomposition_targets[0].C
    keys = "pd.decomposition_targets.0.C"

    def said(*sets: str) -> list[str]:
        return [line for line in example("pd.batch_size=64", "eval.batch_size=64", *sets).warnings if ".C: " in line]

    assert said() == said("mesh={fsdp: 4, tensor: 2}") == []
    assert said("mesh={replica: 2, fsdp: 4, tensor: 2}") == []
    (line, *_) = said(f"{keys}={C + 4}", "mesh={fsdp: 4, tensor: 2}")
    assert line.startswith(f"{keys}: is {C + 4}, not a multiple of fsdp x tensor (8): ")
    assert line.endswith(f"; {C + 8} would be")


def test_copies_that_would_be_none_are_pointed_out() -> None:
    """Of one node, what a node holds is what all devices together have at rest."""
    sets = ["memory.preset=fast", "memory.held={ci: node, sources: device}", "mesh.fsdp=8"]
    says = "memory.held: node has no effect on ci, for mesh.nodes is 1"
    assert says in example(*sets).warnings
    assert says not in example(*sets, "mesh.nodes=2").warnings


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: cannot read the wrapper: No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"other\.yaml: cannot read torch_config of .*example\.yaml: No such file"):
        example("torch_config=other.yaml")
    for text, found in (("", "empty"), ("[1]", "a list")):
        (tmp_path / "wrapper.yaml").write_text(text)
        with pytest.raises(UserError, match=f"should be a mapping of keys to values; this file is {found}"):
            load_config(tmp_path / "wrapper.yaml")
    (tmp_path / "wrapper.yaml").write_bytes(b"run_name: \xff")
    with pytest.raises(UserError, match="not UTF-8"):
        load_config(tmp_path / "wrapper.yaml")


# ---- overrides ----


def test_overrides_go_to_the_wrapper_first() -> None:
    config = example("data.train=x", "data.max_seq_len=256", "out_dir=y", "pd.loss_metrics.0.coeff=5e-5", "mesh.fsdp=4")
    assert config.wrapper.data is not None
    assert config.wrapper.data.train == EXAMPLE.parent / "x"
    assert isinstance(config.method, LanguageModelFile)
    assert config.method.data.max_seq_len == 256
    assert config.wrapper.out_dir == Path("y")
    assert config.method.pd.loss_metrics[0].coeff == 5e-5
    assert config.wrapper.mesh.fsdp == 4
    assert example("pd.steps=1", "pd.steps=2").method.pd.steps == 2


def test_overrides_do_not_reach_through_aliases(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {train: a, eval: b}")
    raw = yaml.safe_load(TORCH.read_text())
    raw["pd"]["ci_fn_optimizer"] = raw["pd"]["components_optimizer"]
    text = yaml.safe_dump(raw)
    assert "&id001" in text
    (tmp_path / "torch.yaml").write_text(text)
    pd = load_config(path, ["pd.ci_fn_optimizer.lr_schedule.start_val=1"]).method.pd
    assert pd.ci_fn_optimizer.lr_schedule.start_val == 1.0
    assert pd.components_optimizer.lr_schedule.start_val == 5e-5


def test_overrides_open_a_section_that_was_null() -> None:
    numbers = {"batch_size": 8, "n_steps": 1, "every": 2, "slow_every": 4}
    overrides = [f"eval.{key}={value}" for key, value in numbers.items()]
    config = example("eval=null", *overrides)
    assert config.method.eval is not None
    assert config.method.eval.metrics == ()


# ---- YAML ----


@pytest.mark.parametrize("text", ["5e-05", "5e-5", "5E-5", "0.5e-4", ".5e-4", "+5.e-5", "50.0e-06"])
def test_floats_as_people_write_them(text: str) -> None:
    assert parse_yaml(f"x: {text}", "here") == {"x": 5e-5}


@pytest.mark.parametrize("text", ["'5e-05'", "e5", "1e", "p-12e34567", "5e-5x"])
def test_strings_stay_strings(text: str) -> None:
    assert isinstance(parse_yaml(text, "here"), str)


def test_duplicate_keys_and_syntax_errors_have_lines() -> None:
    with pytest.raises(UserError, match=r"^here, line 4: the key 'b' is given twice \(first on line 2\)"):
        parse_yaml("a:\n  b: 1\n  c: 2\n  b: 3\n", "here")
    with pytest.raises(UserError, match=r"^here, line 2: not valid YAML"):
        parse_yaml("a: 1\nb: ]\n", "here")
    with pytest.raises(UserError, match="not valid YAML"):
        parse_yaml("a: \x00", "here")
    with pytest.raises(UserError, match="not valid YAML"):
        parse_yaml("a: !!python/object:os.system {}", "here")
    merged = "a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, y: 3}\n"
    assert parse_yaml(merged, "here")["c"] == {"x": 2, "y": 3}


SCALARS = (
    st.none() | st.booleans() | st.integers(1 - 2**64, 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8)
)
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner), max_leaves=8)


@given(TREES | st.from_regex(r"[-+.0-9eE_]{1,8}", fullmatch=True))
def test_yaml_round_trip(value: Any) -> None:
    assert parse_yaml(dump_yaml(value), "here") == value


# ---- saved, read back, compared ----

FRACTIONS = st.floats(0, 1)
SCHEDULES = st.builds(
    lambda kind, start, warmup, final: ScheduleConfig(
        start_val=start, warmup_pct=warmup, final_val_frac=1.0 if kind == "constant" else final, fn_type=kind
    ),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 1e300),
    FRACTIONS,
    st.floats(0, 10),
)


@given(SCHEDULES, st.text(min_size=1, max_size=10))
def test_schedules_and_names_survive_saving(schedule: ScheduleConfig, run_name: str) -> None:
    assert (
        validate(ScheduleConfig, parse_yaml(dump_yaml(schedule.model_dump(mode="json")), "x"), ConfigSource("x"))
        == schedule
    )
    assert parse_yaml(dump_yaml({"run_name": run_name}), "x") == {"run_name": run_name}


def test_a_saved_configuration_is_checked_when_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(example().with_run_id("p-00000000").to_yaml().replace("fsdp: 8", "fsdp: 7"))
    with pytest.raises(UserError, match=rf"^{path}: torch: pd.batch_size: is 64"):
        RunConfig.from_yaml(path)
    path.write_text("wrapper: {}\n")
    with pytest.raises(UserError, match="torch: is required"):
        RunConfig.from_yaml(path)


def test_difference_names_what_changed() -> None:
    old = example("pd.loss_metrics.0.name=imp")
    new = example("pd.loss_metrics.0.name=imp", "pd.steps=5", "mesh.fsdp=4", "pd.components_optimizer.betas=[0.5, 0.9]")
    assert difference(old, new) == [
        "mesh.fsdp: 8 -> 4",
        "pd.components_optimizer.betas: [0.9, 0.999] -> [0.5, 0.9]",
        "pd.steps: 100000 -> 5",
    ]
    dropped = difference(old, example("pd.loss_metrics.0.name=imp", "eval.metrics=[]", "milestones=[1]"))
    assert "milestones: (absent) -> [1]" in dropped
    assert 'eval.metrics.1.type: "ComponentActivationDensity" -> (absent)' in dropped


def test_difference_is_blind_to_what_has_no_effect() -> None:
    assert difference(example(), example("runtime.device=cpu", "data.streaming=false").with_run_id("p-00000000")) == []


# ---- names and sites ----


def test_term_names() -> None:
    kinds = [("UnmaskedReconLoss", None), ("UnmaskedReconLoss", None), ("UnmaskedReconLoss", "mine")]
    losses = [LOSS.validate_python({"type": kind, "coeff": 1, "name": name}) for kind, name in kinds]
    assert term_names(tuple(losses)) == ("UnmaskedReconLoss", "UnmaskedReconLoss_2", "mine")


MODULES = [f"layers.{n}.mlp.{kind}_proj" for n in (0, 1, 10) for kind in ("gate", "up", "down")] + ["lm_head"]


def targets(*patterns: str) -> list[DecompositionTarget]:
    return [DecompositionTarget(module_pattern=pattern, C=n + 1) for n, pattern in enumerate(patterns)]


@pytest.mark.parametrize("prefix", ["", "model.", "transformer."])
def test_patterns_with_and_without_a_prefix(prefix: str) -> None:
    found = match_sites(targets(f"{prefix}layers.1.mlp.up_proj", f"{prefix}layers.1*.mlp.[dg]*_proj"), MODULES)
    expected = {"layers.1.mlp.gate_proj": 2, "layers.1.mlp.up_proj": 1, "layers.1.mlp.down_proj": 2}
    expected |= {"layers.10.mlp.gate_proj": 2, "layers.10.mlp.down_proj": 2}
    assert found == list(expected.items())
    assert [name for name, _ in match_sites(targets(f"{prefix}layers.*"), MODULES)] == MODULES[:-1]


def test_patterns_match_something_and_nothing_twice() -> None:
    with pytest.raises(
        UserError, match=r"0\.module_pattern: 'layers.1.mlp.upproj' matches no module.*layers.1.mlp.up_proj"
    ):
        match_sites(targets("layers.1.mlp.upproj"), MODULES)
    with pytest.raises(
        UserError, match=r"1\.module_pattern: '\*up_proj' matches layers.0.mlp.up_proj, which .*targets.0"
    ):
        match_sites(targets("layers.0.*", "*up_proj"), MODULES)


# ---- the core's terms ----


def test_decomposition_of_the_example() -> None:
    cosine = Schedule(5e-5, "cosine", 0.0, 0.1)
    adam = adversary.AdamAscent(Schedule(0.01, "constant", 0.025), 0.5, 0.99, 1e-8)
    everywhere, everything = routing.Everywhere(), recon.AllSites()
    persistent = adversary.PersistentAttack(adam, adversary.PerBatchPerPosition(), n_warmup_steps=2)
    subset = "StochasticReconSubsetLoss"
    assert decomposition(example()) == Decomposition(
        seed=0,
        steps=100000,
        batch_size=64,
        squashing="leaky_hard",
        use_delta=True,
        ci=ci.GlobalTransformer(4096, 8, (16384,), 8, 512, 10000.0),
        terms=(
            losses.ImportanceMinimality(
                "ImportanceMinimalityLoss", 1e-6, losses.Lp(Anneal(2.0, 0.4, 0.0, 1.0), 1e-12), 0.5
            ),
            recon.Reconstruction(subset, 0.5, everything, routing.UniformKSubset(), masks.Stochastic("continuous")),
            recon.Reconstruction("PersistentPGDReconLoss", 0.5, everything, everywhere, persistent),
            losses.Faithfulness("FaithfulnessLoss", 1e7, "split"),
        ),
        components_optimizer=optim.AdamW(cosine, clip_norm=0.01),
        ci_optimizer=optim.AdamW(cosine),
        warmup=FaithfulnessWarmup(400, 0.001, 0.0, "split"),
        compute_dtype="bfloat16",
        memory=BALANCED,
    )


def test_schedules_reach_the_core() -> None:
    """In each of their forms, at each place."""
    points = (Knot(0.0, 1.0), Knot(0.25, 1.0, "hold"), Knot(1.0, 0.1, "cosine"))
    by_knots, with_warmup = Knots(2.0, points), Schedule(1.0, "constant", 0.5)
    spec = decomposition(
        example(
            f"pd.loss_metrics.0.pnorm={KNOTS}",
            "pd.loss_metrics.0.p_anneal_final_p=null",
            "pd.loss_metrics.0.p_anneal_start_frac=1",
            f"pd.loss_metrics.0.frequency={{coeff: {KNOTS}, reference_token_count: 3}}",
            "pd.loss_metrics.0.beta=0",
            "pd.loss_metrics.1.coeff={start_val: 1, warmup_pct: 0.5}",
            f"pd.loss_metrics.2.coeff={KNOTS}",
            f"pd.loss_metrics.2.optimizer={{type: sign, lr_schedule: {KNOTS}}}",
            f"pd.components_optimizer.lr_schedule={KNOTS}",
            "pd.ci_fn_optimizer.lr_schedule=1e-4",
        )
    )
    frequency = losses.Frequency(by_knots, 3.0)
    minimality = losses.ImportanceMinimality(
        "ImportanceMinimalityLoss", 1e-6, losses.Lp(by_knots, 1e-12), 0.0, frequency
    )
    assert spec.terms[0] == minimality
    assert [term.coeff for term in spec.terms[1:]] == [with_warmup, by_knots, 1e7]
    ((_, attack),) = spec.persistent.values()
    assert attack.optimizer == adversary.SignAscent(by_knots)
    assert (spec.components_optimizer.schedule, spec.ci_optimizer.schedule) == (by_knots, Schedule(1e-4))
    assert [course.name for course in courses(spec)] == [
        "components lr",
        "CI function lr",
        "PersistentPGDReconLoss lr",
        "ImportanceMinimalityLoss p",
        "ImportanceMinimalityLoss frequency coeff",
        "StochasticReconSubsetLoss coeff",
        "PersistentPGDReconLoss coeff",
    ]
    by = "2 to 0.2 by 3 knots, 2 at most"
    assert describe_importance_minimality(minimality) == f"(υ + 1e−12)^p, p {by}; frequency {by} at 3 positions"


def test_choices_reach_the_core() -> None:
    spec = decomposition(
        example(
            "runtime.autocast_bf16=false",
            "memory.layers=unroll",
            "remat_recon_forwards=false",
            "pd.loss_metrics.0=" + SMOOTH + ", frequency: {coeff: 2, reference_token_count: 3}}",
            "pd.loss_metrics.2.scope={type: repeat_across_batch, n_sources: 16}",
            "pd.loss_metrics.2.optimizer={type: sign, lr_schedule: {start_val: 0.5}}",
            "pd.loss_metrics.2.use_sigmoid_parameterization=true",
            "pd.loss_metrics.2.start_frac=0.5",
            "pd.ci_config={mode: layerwise, fn_type: shared_mlp, hidden_dims: []}",
            "pd.use_delta_component=false",
            "pd.components_optimizer.weight_decay=0.1",
        )
    )
    assert (spec.compute_dtype, spec.memory) == ("float32", replace(PLAIN, layers="unroll"))
    smooth, frequency = losses.SmoothL0(Schedule(0.1)), losses.Frequency(2.0, 3.0)
    assert spec.terms[0] == losses.ImportanceMinimality("ImportanceMinimalityLoss", 1.0, smooth, 0.0, frequency)
    ((_, attack),) = spec.persistent.values()
    sign = adversary.SignAscent(Schedule(0.5))
    assert attack == adversary.PersistentAttack(sign, adversary.RepeatAcrossBatch(16), True, 2, 0.5)
    assert spec.ci == ci.LayerwiseMLP("shared_mlp", ())
    assert not spec.use_delta
    assert spec.components_optimizer.weight_decay == 0.1
    assert spec.ci_optimizer.weight_decay == 0.0


FRESH = adversary.FreshAttack("ones", 0.1, 3, "unique_per_datapoint")
ATTACK = adversary.PersistentAttack(adversary.SignAscent(Schedule(0.1)), adversary.SingleSource())
EVERYWHERE, HALF, BINOMIAL = routing.Everywhere(), routing.StaticProbability(0.5), masks.Stochastic("binomial")
ALL, EACH = recon.AllSites(), recon.EachSite()
POINTS: dict[str, tuple[Any, ...]] = {  # the table of section 5 with n_mask_samples 3 and n_samples 5
    "UnmaskedReconLoss": (ALL, EVERYWHERE, masks.Constant(1.0), 1),
    "CIMaskedReconLoss": (ALL, EVERYWHERE, masks.Constant(0.0), 1),
    "CIMaskedReconSubsetLoss": (ALL, HALF, masks.Constant(0.0), 1),
    "CIMaskedReconLayerwiseLoss": (EACH, EVERYWHERE, masks.Constant(0.0), 1),
    "StochasticReconLoss": (ALL, EVERYWHERE, BINOMIAL, 3),
    "StochasticReconSubsetLoss": (ALL, HALF, BINOMIAL, 3),
    "StochasticReconLayerwiseLoss": (EACH, EVERYWHERE, BINOMIAL, 3),
    "StochasticHiddenActsReconLoss": (ALL, EVERYWHERE, BINOMIAL, 3, "hidden_acts"),
    "CIHiddenActsReconLoss": (ALL, EVERYWHERE, masks.Constant(0.0), 1, "hidden_acts"),
    "ChunkwiseSubsetReconLoss": (recon.Chunks(2), HALF, BINOMIAL, 5),
    "PGDReconLoss": (ALL, EVERYWHERE, FRESH, 1),
    "PGDReconSubsetLoss": (ALL, HALF, FRESH, 1),
    "PGDReconLayerwiseLoss": (EACH, EVERYWHERE, FRESH, 1),
    "PersistentPGDReconLoss": (ALL, EVERYWHERE, ATTACK, 1),
    "PersistentPGDReconSubsetLoss": (ALL, HALF, ATTACK, 5),
}


@pytest.mark.parametrize("kind", POINTS)
def test_each_reconstruction_is_its_point(kind: str) -> None:
    config = example("pd.n_mask_samples=3", "pd.sampling=binomial")
    drawn = kind in ("ChunkwiseSubsetReconLoss", "PersistentPGDReconLoss", "PersistentPGDReconSubsetLoss")
    raw = {"type": kind, **LOSSES.get(kind, {}), **({"n_samples": 5} if drawn else {})}
    assert measured_terms([METRIC.validate_python(raw)], config) == [recon.Reconstruction(kind, 1.0, *POINTS[kind])]
    if kind in LOSSES:
        made = term(LOSS.validate_python(raw | {"coeff": 2}), "x", config)
        assert made == recon.Reconstruction("x", 2.0, *POINTS[kind])


@pytest.mark.parametrize(
    ("sets", "product"),
    [
        (["runtime.autocast_bf16=true"], "split"),
        (["runtime.autocast_bf16=false"], "fp32"),
        (["runtime.autocast_bf16=true", "numerics.delta=fp32"], "fp32"),
        (["runtime.autocast_bf16=false", "numerics={delta: split}"], "split"),
    ],
)
def test_the_product_of_delta_follows_the_compute_type_unless_told(sets: list[str], product: str) -> None:
    """N4, in training, in the faithfulness warm-up and in evaluations alike."""
    config = example(*sets)
    made = decomposition(config)
    faithfulness = next(loss for loss in config.method.pd.loss_metrics if loss.type == "FaithfulnessLoss")
    [measured] = measured_terms([faithfulness], config)
    found = [term for term in (*made.terms, measured) if isinstance(term, losses.Faithfulness)]
    assert [term.product for term in found] == [product] * 2
    assert made.warmup.product == product


def chunkwise(**changes: Any) -> str:
    """An assignment of a valid `chunkwise_transformer`, but for these changes."""
    keys = {"simple_transformer_ci_cfg": {"d_model": 8, "n_blocks": 2, "attn_config": {"n_heads": 2}}}
    return f"{CI}={json.dumps({'mode': 'chunkwise', 'fn_type': 'chunkwise_transformer', **keys, **changes})}"


def test_chunks_reach_the_core() -> None:
    transformer = ci.GlobalTransformer(8, 2, (32,), 2)
    assert decomposition(example(chunkwise())).ci == ci.ChunkwiseTransformer(transformer)
    read = ci.InputPatterns(("*.q_proj",), PREFIXES)
    made = decomposition(example(chunkwise(layers_per_chunk=3, input_patterns=["*.q_proj"]))).ci
    assert made == ci.ChunkwiseTransformer(transformer, 3, read)
    assert ci.longest_row(made) == 2048
    short = {"d_model": 8, "n_blocks": 2, "attn_config": {"n_heads": 2, "max_len": 500}}
    for changes, message in (
        ({"layers_per_chunk": 0}, r"layers_per_chunk: should be greater than or equal to 1"),
        ({"input_patterns": []}, r"input_patterns: needs at least 1"),
        ({"simple_transformer_ci_cfg": None}, r"simple_transformer_ci_cfg: "),
        ({"simple_transformer_ci_cfg": short}, r"is 512, longer than .*simple_transformer_ci_cfg.attn_config.max_len"),
        ({"hidden_dims": [4]}, r"hidden_dims: unknown key"),
    ):
        with pytest.raises(UserError, match=message):
            example(chunkwise(**changes))


def test_options_of_a_transformer_reach_the_core() -> None:
    """C9."""
    attention = {"n_heads": 4, "causal": True, "n_kv_heads": 2}
    of = {"d_model": 8, "n_blocks": 2, "mlp_type": "swiglu", "learned_norm_scale": True, "attn_config": attention}
    made = decomposition(example(chunkwise(simple_transformer_ci_cfg=of))).ci
    options = {"causal": True, "n_kv_heads": 2, "mlp_type": "swiglu", "learned_norm_scale": True}
    want = ci.GlobalTransformer(8, 2, (32,), 4, **options)  # type: ignore[arg-type]
    assert made == ci.ChunkwiseTransformer(want)
    assert describe_ci(made).endswith("4 causal heads (2 of keys and values), SwiGLU [32], weights of norms")
    with pytest.raises(UserError, match=r"attn_config.n_kv_heads: must divide n_heads \(4\), not 3"):
        example(chunkwise(simple_transformer_ci_cfg={**of, "attn_config": {**attention, "n_kv_heads": 3}}))


@pytest.mark.parametrize("tap", ["first_block_resid", "all_block_resids", {"residual_boundaries": [0, 2]}])
def test_taps_reach_the_core(tap: Any) -> None:
    """C10."""
    choice = (0, 2) if isinstance(tap, dict) else tap
    made = decomposition(example(chunkwise(input_tap=tap))).ci
    assert made == ci.ChunkwiseTransformer(ci.GlobalTransformer(8, 2, (32,), 2), taps=ci.Taps(choice))
    said = {"first_block_resid": "stream that enters its first block", "all_block_resids": "that enter its blocks"}
    assert describe_ci(made).endswith(said.get(str(choice), "at +0, +2 from its first block"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"input_tap": "all_taps"},
            r"input_tap: should be 'first_block_resid', 'all_block_resids' or \{residual_boundaries: .*, not 'all_t",
        ),
        ({"input_tap": 3}, r"input_tap: should be 'first_block_resid', .*, not 3"),
        ({"input_tap": {"residual_boundaries": [0, "x"]}}, r"boundaries.1: should be a valid integer, not 'x'"),
        (
            {"mode": "layerwise", "fn_type": "shared_mlp", "hidden_dims": [2], "input_tap": "first_block_resid"},
            r"input_tap: goes with mode: global and mode: chunkwise",
        ),
        ({"input_tap": {"residual_boundaries": []}}, r"input_tap.*residual_boundaries: needs at least 1"),
        (
            {"input_tap": {"residual_boundaries": [0, 2, 2]}},
            r"residual_boundaries.2: is 2, not above 2; the offs",
        ),
        ({"input_tap": {"residual_boundaries": [-1]}}, r"residual_boundaries.0: should be greater than or equal to 0"),
        ({"input_tap": "first_block_resid", "input_patterns": ["*"]}, r"input_patterns: has no effect with input_tap"),
    ],
)
def test_taps_that_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        example(chunkwise(**changes))


SUBSETS = [kind for kind, point in POINTS.items() if point[1] == HALF and kind != "ChunkwiseSubsetReconLoss"]


@pytest.mark.parametrize("kind", SUBSETS)
def test_losses_on_subsets_have_a_routing_unless_told(kind: str) -> None:
    raw = {"type": kind, "coeff": 2.0, **{key: value for key, value in LOSSES[kind].items() if key != "routing"}}
    made = term(LOSS.validate_python(raw), "x", example())
    assert isinstance(made, recon.Reconstruction)
    assert made.routing == routing.UniformKSubset()


@pytest.mark.parametrize("value", ["0", "logits", "null"])
def test_the_output_may_be_an_element_an_attribute_or_itself(value: str) -> None:
    method = example(f"target.output_extract={value}", "data.column_name=story").method
    assert isinstance(method, LanguageModelFile)
    assert method.target.output_extract == {"0": 0, "logits": "logits", "null": None}[value]
    assert method.data.column_name == "story"


def test_swish_hard_with_a_constant_integer_p() -> None:
    constant = "pd.loss_metrics.0={type: ImportanceMinimalityLoss, coeff: 1.0, pnorm: 2.0, beta: 0}"
    assert example("pd.sigmoid_type=swish_hard", constant).method.pd.sigmoid_type == "swish_hard"


def test_p_on_a_schedule_is_looked_at() -> None:
    """Where υ falls below 0, in the note on small p, and where it has no effect."""
    loss = f"pd.loss_metrics.0={{type: ImportanceMinimalityLoss, coeff: 1.0, beta: 0, pnorm: {KNOTS}}}"
    with pytest.raises(UserError, match=r"give pd.loss_metrics.0 a constant integer p"):
        example("pd.sigmoid_type=swish_hard", loss)
    assert any(line.startswith("pd.loss_metrics.0.eps: with 1e-12 and p below 1") for line in example(loss).warnings)
    smooth = f"pd.loss_metrics.0={SMOOTH}}}"
    note = "pd.loss_metrics.0.pnorm: is a schedule, which has no effect with penalty: smooth_l0"
    assert note in example(smooth, f"pd.loss_metrics.0.pnorm={KNOTS}").warnings
    assert note not in example(smooth).warnings


@pytest.mark.parametrize(
    ("p", "more", "valid"),
    [
        (2, "beta: 0.5", True),
        ("{max_val: 2, points: [{at: 0, frac: 1}, {at: 1, frac: 1}]}", "beta: 0.5", True),
        (1, "beta: 0", True),
        (1, "beta: 0.5", False),
        (3, "beta: 0, frequency: {coeff: 1, reference_token_count: 10}", False),
    ],
)
def test_odd_powers_of_what_falls_below_0(p: int | str, more: str, valid: bool) -> None:
    """The logarithm's argument is 1 + a sum of υ^p, which no bound keeps above 0."""
    overrides = (
        "pd.sigmoid_type=two_sided_leaky_hard",
        f"pd.loss_metrics.0={{type: ImportanceMinimalityLoss, coeff: 1, pnorm: {p}, {more}}}",
    )
    if valid:
        assert example(*overrides).method.pd.sigmoid_type == "two_sided_leaky_hard"
    else:
        with pytest.raises(UserError, match="an odd power is negative"):
            example(*overrides)
