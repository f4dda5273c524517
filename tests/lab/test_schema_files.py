"""Schema files as users have them: every key, loss, metric and choice of the schema occurs, and every file runs."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.config.loss_schema import LOSSES, Loss
from param_decomp_lab.config.method_schema import LanguageModelFile, ToyFile
from param_decomp_lab.metrics import METRICS, Metric
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.schema.strict import NO_MEANING, Strict
from param_decomp_lab.weights.target_folder import save_target
from tests.cases import slow_but
from tests.core import toys
from tests.lab.test_docs import models_in
from tests.lab.tiny_run import ROOT, Outcome, Tiny, pd_here, saved_steps

FILES = Path(__file__).parent / "schema_files"
NAMES = sorted(path.stem for path in FILES.glob("*.yaml"))
SHIPPED = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if "torch_config:" in path.read_text())


@pytest.fixture(scope="module")
def place(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files, with the targets and the data that they name, as the current folder."""
    folder = tmp_path_factory.mktemp("schema")
    shutil.copytree(FILES, folder, dirs_exist_ok=True)
    for name, config in (
        ("tms", TMSConfig(n_features=5, n_hidden=3, n_hidden_layers=2)),
        ("resid_mlp", ResidMLPConfig(5, 6, 4, 2, "gelu", True, True)),
    ):
        save_target(folder / "targets" / name, config, toys.weights(config))
    (folder / "targets" / "llama").symlink_to(tiny.folder / "target")
    (folder / "data").symlink_to(tiny.folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WANDB_MODE", "disabled")
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_file_runs(name: str, place: Path) -> None:
    """Two steps, an evaluation before and after them, a checkpoint, a report: as `pd check` said it would."""
    checked = pd_here("check", f"{name}.yaml")
    assert checked.status == 0, checked
    run_id = f"p-{NAMES.index(name):08x}"
    outcome = pd_here("train", f"{name}.yaml", "--set", f"run_id={run_id}")
    assert outcome.status == 0, outcome
    run, config = place / "runs" / run_id, load_config(place / f"{name}.yaml")
    assert saved_steps(run)[-1] == 2
    assert (run / "report.html").is_file()
    rows = read_metrics(run)
    losses = {key for row in rows for key in row if key.startswith("train/loss/")}
    assert len(losses) >= len(config.method.pd.loss_metrics) + 1
    if config.method.eval is not None and config.method.eval.metrics:
        assert {row["step"] for row in rows if any(key.startswith("eval/") for key in row)} >= {0, 2}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert load_config(path).method.pd.steps > 0


LLAMA_8B = {
    "llama8b_l18": (3, 24_576),
    "llama8b_l18_C49k": (3, 49_152),
    "llama8b_l18_example": (3, 20_000),
    "llama8b_l18-26_9layer_chunkwise": (27, 49_152),
    "llama8b_l18-26_9layer_chunkwise_seq2048": (27, 49_152),
    "llama8b_all_mlp": (96, 49_152),
    "llama8b_l18_august": (3, 14_336),
    "llama8b_l18-26_august": (27, 14_336),
}


def test_every_llama_8b_configuration_is_checked() -> None:
    checked = {*LLAMA_8B, "llama8b_full"}
    assert {path.stem for path in (ROOT / "configs").glob("llama8b_*.yaml")} == checked


def test_the_whole_llama_8b(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many components and parameters as were published."""
    monkeypatch.setenv("COLUMNS", "200")
    outcome = pd_here("check", ROOT / "configs" / "llama8b_full.yaml")
    assert outcome.status == 0, outcome
    assert "Sites: 224" in outcome.out
    total = next(line for line in outcome.out.splitlines() if line.strip().startswith("total"))
    assert total.split() == ["total", "1,245,184", "18.3", "B"]
    of_ci = next(line for line in outcome.out.splitlines() if line.strip().startswith("CI function  "))
    assert of_ci.split()[2:4] == ["31.4", "B"]


@pytest.mark.parametrize("name", slow_but(["llama8b_l18", "llama8b_l18-26_9layer_chunkwise"], LLAMA_8B))
def test_llama_8b_configurations_can_be_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither weights nor data are at hand: as many sites as the name says, all of the same C, and no advice."""
    monkeypatch.setenv("COLUMNS", "200")
    outcome = pd_here("check", ROOT / "configs" / f"{name}.yaml")
    assert outcome.status == 0, outcome
    n_sites, C = LLAMA_8B[name]
    assert f"Sites: {n_sites}" in outcome.out
    rows = [line for line in outcome.out.splitlines() if "_proj" in line]
    assert [f"{C:,}" in row for row in rows] == [True, True, True]
    notes = [line for line in outcome.out.splitlines() if line.startswith("note: ")]
    if not name.endswith("example"):
        assert all("replaced by the folders" in note or "without effect" in note for note in notes), notes


# ---- nothing of the schema is left out ----


def parts(value: Any) -> Iterator[Strict]:
    """A configuration and everything in it."""
    if isinstance(value, Strict):
        yield value
        for _, inner in value:
            yield from parts(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from parts(inner)


def owner(model: type[Strict], key: str) -> str:
    """The class that brings a key: keys that all losses share count once."""
    return next(m.__name__ for m in reversed(model.__mro__) if issubclass(m, Strict) and key in m.model_fields)


def choices(field: FieldInfo) -> set[Any]:
    def of(annotation: Any) -> Iterator[Any]:
        if get_origin(annotation) is Literal:
            yield from get_args(annotation)
        else:
            for part in get_args(annotation):
                yield from of(part)

    return set(of(field.annotation))


def documented() -> set[tuple[str, str, Any]]:
    """(class, key, choice), for keys without choices (class, key, None)."""
    found: set[tuple[str, str, Any]] = set()
    seen: set[type[Strict]] = set()
    waiting: list[type[Strict]] = [LanguageModelFile, ToyFile, *LOSSES.values(), *METRICS.values()]
    while waiting:
        model = waiting.pop()
        if model in seen or model in (Loss, Metric):  # each loss and metric is a model of its own
            continue
        seen.add(model)
        for key, field in model.model_fields.items():
            found |= {(owner(model, key), key, choice) for choice in choices(field) or {None}}
            waiting += list(models_in(field.annotation))
    return found


def given(configs: list[RunConfig]) -> set[tuple[str, str, Any]]:
    """As `documented`, of what the files say; a key without choices counts where it differs from its default."""
    found: set[tuple[str, str, Any]] = set()
    for part in (part for config in configs for part in parts(config.method)):
        for key, field in type(part).model_fields.items():
            value, name = getattr(part, key), owner(type(part), key)
            if choices(field):
                found.add((name, key, value))
            elif value != field.get_default(call_default_factory=True) or (
                NO_MEANING in field.metadata and key in part.model_fields_set
            ):
                found.add((name, key, None))
    return found


def test_every_key_and_choice_occurs() -> None:
    configs = [load_config(FILES / f"{name}.yaml") for name in NAMES]
    assert documented() - given(configs) == set()
    trained = {loss.type for config in configs for loss in config.method.pd.loss_metrics}
    measured = {m.type for config in configs if config.method.eval for m in config.method.eval.metrics}
    assert trained == {name for name, loss in LOSSES.items() if not loss.slow}
    assert measured == LOSSES.keys() | METRICS.keys()


# ---- what is refused, with the reason ----

ATTENTION = "n_heads: 2, q_proj_path: a, k_proj_path: b, c_attn_path: null"
REFUSED = {
    "attention patterns": (
        "llama_transformer",
        f"eval.metrics.0={{type: CIMaskedAttnPatternsReconLoss, {ATTENTION}}}",
        "eval.metrics.0.type: 'CIMaskedAttnPatternsReconLoss' is not supported; remove this entry",
    ),
    "attention patterns, trained": (
        "llama_transformer",
        f"pd.loss_metrics.0={{type: StochasticAttnPatternsReconLoss, coeff: 1, {ATTENTION}}}",
        "pd.loss_metrics.0.type: 'StochasticAttnPatternsReconLoss' is not supported",
    ),
    "files that are not named": ("llama_transformer", "data.data_files=null", "data.data_files: is required with data"),
    "files that are not there": (
        "llama_transformer", "data.column_name=story", "data/train/*.parquet: no such text file"
    ),
    "another architecture": (
        "llama_transformer",
        "target.spec.model_class=transformers.GPT2LMHeadModel",
        "holds a Llama; say LlamaForCausalLM",
    ),
    "a name that no hub has": (
        "llama_transformer", "target.spec.model_name=no/such/model", "target.spec.model_name: 'no/such/model' is nei"
    ),
    "a metric of toys": (
        "llama_transformer",
        "eval.metrics=[{type: IdentityCIError, identity_ci: null, dense_ci: [{layer_pattern: '*', k: 1}]}]",
        "eval.metrics.0.type: IdentityCIError needs a toy",
    ),
    "a metric of language models": (
        "resid_mlp_metrics",
        "eval.metrics.0={type: CEandKLLosses, rounding_threshold: 0}",
        "eval.metrics.0.type: CEandKLLosses is for language models",
    ),
    "a run that cannot be": ("tms_attacks", "target=null", "target.run_path: 'tms' is neither a folder or a"),
    "a toy that is not here": ("tms_stochastic", "target.folder=nowhere", "nowhere"),
    "a pattern without a match": (
        "tms_attacks", "pd.decomposition_targets.0.module_pattern=model.linear3", "'model.linear3' matches no module"
    ),
    "a tie of no site": ("tms_stochastic", "pd.tied_weights=[[linear1, W]]", "tied_weights.0: unknown site 'W'"),
    "a tie of what is no transpose": (
        "llama_layerwise",
        "pd.tied_weights=[[layers.1.mlp.up_proj.pre_identity, layers.1.self_attn.q_proj]]",
        "tied sites are each other's transpose",
    ),
    "inputs that nothing has": (
        "llama_chunkwise", "pd.ci_config.input_patterns=['*.q_proj']", "pd.ci_config.input_patterns: '*.q_proj' matches"
    ),
    "points that are not there": (
        "llama_merged",
        "pd.loss_metrics.6.hidden_acts_reconstruction.points=[resid_mid.0]",
        "pd.loss_metrics.6.hidden_acts_reconstruction.points: 'resid_mid.0' matches no point; there are resid_pre, at",
    ),
    "an activation twice, measured": (
        "llama_merged",
        "eval.metrics.3.hidden_acts_reconstruction.points=['resid_*.*']",
        "eval.metrics.3.hidden_acts_reconstruction.points: resid_post.0 and resid_pre.1 are one activation",
    ),
    "points of a TMS": (
        "tms_attacks",
        "pd.loss_metrics=[{type: CIMaskedReconLoss, coeff: 1, hidden_acts_reconstruction: {coeff: 1, points: ['*']}}]",
        "pd.loss_metrics.0.hidden_acts_reconstruction.points: the target has no residual stream",
    ),
    "units that no site faces": (
        "llama_merged",
        "pd.loss_metrics.5.unit_kind_coefficients.attention_head=1",
        "pd.loss_metrics.5.unit_kind_coefficients: gives attention_head a weight, but the sites face no atten",
    ),
    "no kind of unit": (
        "llama_merged",
        "pd.loss_metrics.5.unit_kind_coefficients={neuron: null}",
        "pd.loss_metrics.5.unit_kind_coefficients: gives no kind of unit a weight",
    ),
    "a threshold that reaches 0": (
        "llama_merged",
        "pd.loss_metrics.5.relative_threshold={max_val: 1, points: [{at: 0, frac: 1}, {at: 1, frac: 0}]}",
        "pd.loss_metrics.5.relative_threshold: must stay above 0 (0/0 where a component does not touch a unit): give",
    ),
    "hidden activations of a hidden loss": (
        "llama_merged",
        "pd.loss_metrics.0={type: StochasticHiddenActsReconLoss, coeff: 1, hidden_acts_reconstruction: {coeff: 1, "
        "points: ['*']}}",
        "pd.loss_metrics.0.hidden_acts_reconstruction: 'hidden_acts_reconstruction' is a key of losses that compare "
        "the output, not of StochasticHiddenActsReconLoss; remove it",
    ),
    "a tap without a residual stream": (
        "tms_attacks",
        "pd.ci_config={mode: global, fn_type: global_shared_mlp, hidden_dims: [3], input_tap: first_block_resid}",
        "pd.ci_config.input_tap: a TMS has no residual stream",
    ),
    "a tap behind the last block": (
        "llama_transformer",
        "pd.ci_config.input_tap={residual_boundaries: [0, 9]}",
        "pd.ci_config.input_tap.residual_boundaries: reach the residual stream that enters block 9 (9 after block 0, "
        "the first of its group with a site), but the target has",
    ),
    "an offset that is text": (
        "llama_transformer",
        "pd.ci_config.input_tap={residual_boundaries: [0, x]}",
        "pd.ci_config.input_tap.residual_boundaries.1: should be a valid integer, not 'x'",
    ),
    "the wrong toy": ("tms_attacks", "experiment=resid_mlp", "the target's architecture is tms"),
    "features that are not there": (
        "tms_stochastic", "eval.metrics.4.identity_ci.0.n_features=6", "n_features: is 6, but the target has 5 features"
    ),
    "an unknown key": ("tms_stochastic", "pd.n_mask_sample=2", "did you mean 'n_mask_samples'"),
    "a number in quotes": ("tms_stochastic", "pd.steps='2'", "pd.steps: should be a valid integer, not '2'"),
    "a key of another choice": (
        "tms_stochastic", "pd.loss_metrics.4.routing={type: uniform_k_subset, p: 0.5}", "routing.p: unknown key 'p'"
    ),
    "a slash in a name": ("tms_stochastic", "pd.loss_metrics.0.name=a/b", "pd.loss_metrics.0.name: should match"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
@pytest.mark.parametrize("command", ["check", "train"])
def test_refused_with_the_reason(command: Literal["check", "train"], mistake: str, place: Path) -> None:
    name, assignment, reason = REFUSED[mistake]
    before = set((place / "runs").glob("*"))
    outcome: Outcome = pd_here(command, f"{name}.yaml", "--set", assignment)
    assert outcome.status == 2, outcome
    assert outcome.err.startswith("error: ")
    assert reason in outcome.err
    assert set((place / "runs").glob("*")) == before


def test_taps_that_a_group_lacks_hide_no_other_mistake(place: Path) -> None:
    sites = (
        "pd.decomposition_targets=[{module_pattern: model.embed_tokens, C: 4}, {module_pattern: 'layers.0.*', C: 4}]"
    )
    tap = "pd.ci_config.input_tap={residual_boundaries: [0, 9]}"
    outcome = pd_here("check", "llama_merged.yaml", "--set", sites, "--set", tap)
    assert outcome.status == 2, outcome
    assert "a group has no site but the embedding" in outcome.err
    assert "reach the residual stream that enters block 9 (9 after block 0" in outcome.err
