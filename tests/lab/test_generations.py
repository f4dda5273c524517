"""Configuration files of the original project, of June and July and of August 2026.

The files are written for these tests, with the keys that the original project's have. Those of spring are in
`schema_files/torch`.
"""

import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.config.generations import generation, translate
from param_decomp_lab.config.generations.tables import LACKING_TYPES
from param_decomp_lab.config.loss_schema import LOSSES
from param_decomp_lab.config.method_schema import (
    LanguageModelFile,
    ToyFile,
)
from param_decomp_lab.config.resolve import ConfigError
from param_decomp_lab.metrics import METRICS
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.safe_io.yaml_text import dump_yaml, read_mapping
from tests.cases import slow_but
from tests.lab.tiny_run import ROOT, pd_here, saved_steps

FILES = Path(__file__).parent / "generations"
TOYS = ("june/tms_attacks", "june/resid_mlp_global", "august/tms_merged", "august/resid_mlp_pooled")
LARGE = ("june/llama8b_all", "june/llama8b_merged", "august/llama8b")
SPRING = sorted((Path(__file__).parent / "schema_files" / "torch").glob("*.yaml"))


def file(name: str) -> Path:
    return FILES / f"{name}.yaml"


@cache
def config(name: str, *sets: str) -> RunConfig:
    return load_config(file(name), sets)


def refused(path: Path) -> dict[str, str]:
    """What is said of each key of a file that is refused."""
    with pytest.raises(ConfigError) as error:
        load_config(path)
    lines = [line.removeprefix(f"{path}: ") for line in error.value.lines]
    return {line.partition(": ")[0]: line.partition(": ")[2] for line in lines}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return tmp_path


# ---- five files of each generation ----


def test_the_generation_is_recognised() -> None:
    for folder in ("june", "august"):
        names = sorted((FILES / folder).glob("*.yaml"))
        assert len(names) == 5
        assert {generation(read_mapping(name, "it")) for name in names} == {folder}
    assert {generation(read_mapping(name, "it")) for name in SPRING} == {"spring"}
    shipped = [*(ROOT / "configs" / "torch").rglob("*.yaml"), *(SPRING[0].parent.parent / "experiments").glob("*.yaml")]
    for path in shipped:
        raw = read_mapping(path, "it")
        assert generation(raw) == "spring", path
        assert translate(raw).method == raw


@pytest.mark.parametrize("name", slow_but(["august/tms_merged"], TOYS))
def test_toys_are_trained(name: str, here: Path) -> None:
    """Two steps, on a target that is trained before them, with an evaluation where the file has one."""
    assert pd_here("check", file(name)).status == 0
    outcome = pd_here("train", file(name), "--set", "run_id=p-00000001")
    assert outcome.status == 0, outcome
    run = here / "runs" / "p-00000001"
    assert saved_steps(run)[-1] == 2
    losses = {key for row in read_metrics(run) for key in row if key.startswith("train/loss/")}
    assert len(losses) >= len(config(name).method.pd.loss_metrics) + 1
    assert "made already in" in pd_here("check", file(name)).out.replace("\n", " ")


SITES = {"june/llama8b_all": 8, "june/llama8b_merged": 6, "august/llama8b": 224}


@pytest.mark.parametrize("name", slow_but(["june/llama8b_merged"], LARGE))
def test_large_ones_are_checked_whole(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    outcome = pd_here("check", file(name))
    assert outcome.status == 0, outcome
    assert f"Sites: {SITES[name]}" in outcome.out
    assert "has the form of" in outcome.out


def test_what_is_lacking_in_june_is_named_at_once() -> None:
    assert set(refused(file("june/refused"))) == {
        "resume_provenance",
        "decomposition.sites.cs.c_fc",
        "decomposition.ci.attention.max_len",
        "pd.loss_metrics.2.n_mask_samples",
        "pd.loss_metrics.3.source_dtype",
        "runtime.gather_fp8",
        "runtime.compile_twice",
        "eval.metrics.0.density_heatmap_n_bins",
        "eval.metrics.1.type",
        "eval.metrics.2.type",
        "eval.metrics.3.type",
    }


def test_what_is_lacking_in_august_is_named_at_once() -> None:
    said = refused(file("august/refused"))
    assert set(said) == {
        "prompts",
        "nontarget",
        "target.spec.kind",
        "decomposition.sites.kind",
        "decomposition.sites.initialization",
        "decomposition.ci.type",
        "pd.ci_scaled_weight_decay",
        "pd.loss_metrics.1.source_dtype",
        "pd.loss_metrics.1.auxiliaries.0.comparisons.0.distance",
        "eval.metrics.0.type",
        "eval.metrics.1.type",
        "eval.metrics.2.type",
    }
    assert said["target.spec.kind"].startswith("is pretrained_qwen35_moe; ")
    assert said["pd.loss_metrics.1.source_dtype"].startswith("is uint16; ")


# ---- what today's schema does not have ----


@pytest.mark.parametrize("kind", LACKING_TYPES)
def test_what_is_lacking_is_lacking(kind: str) -> None:
    assert kind not in LOSSES
    assert kind not in METRICS


def test_options_of_august() -> None:
    """One file asks for all that came last."""
    found = load_config(file("august/qwen3_options"))
    assert found.method.eval is not None
    assert [metric.type for metric in found.method.eval.metrics][1:] == [
        "CIActiveCountsPerPosition",
        "SlowPGDReconLoss",
    ]
    assert found.wrapper.init_components == "nonlinearity_aligned"
    assert (found.wrapper.mesh.fsdp, found.wrapper.mesh.tensor) == (16, 2)
    transformer = found.method.pd.ci_config.simple_transformer_ci_cfg  # type: ignore[union-attr]
    assert transformer is not None
    assert (transformer.mlp_type, transformer.learned_norm_scale) == ("swiglu", True)
    assert (transformer.attn_config.causal, transformer.attn_config.n_kv_heads) == (True, 4)
    assert value(found, "pd.ci_config.input_tap") == "all_block_resids"
    assert value(found, "pd.loss_metrics.1.unit_kind_coefficients.attention_head") == 1.0
    assert value(found, "pd.loss_metrics.2.adversary_objective") == "term"
    points = value(found, "pd.loss_metrics.2.hidden_acts_reconstruction.points")
    assert points == ("resid_post.3", "resid_post.4", "resid_post.27")
    assert value(found, "pd.components_optimizer.consistent_rms") == 0.2  # the default of its day


def test_other_taps() -> None:
    raw = read_mapping(file("august/qwen3_options"), "it")
    ci = raw["decomposition"]["ci"]
    ci["input_tap"] = {"kind": "residual_boundaries", "offsets": [0, 1]}
    assert translate(raw).method["pd"]["ci_config"]["input_tap"] == {"residual_boundaries": [0, 1]}
    del ci["input_tap"]
    assert translate(raw).method["pd"]["ci_config"]["input_tap"] == "first_block_resid"
    ci["type"] = "global_transformer"
    del ci["blocks_per_chunk"]
    assert "input_tap" not in translate(raw).method["pd"]["ci_config"]


# ---- what a key becomes ----


def value(found: RunConfig, key: str) -> Any:
    """What a configuration has at a key, of the wrapper or of the schema file."""
    of_wrapper = key.split(".")[0] in type(found.wrapper).model_fields and not key.startswith(("data.", "target.spec"))
    place: Any = found.wrapper if of_wrapper else found.method
    for part in key.split("."):
        if isinstance(place, dict):
            place = place[part]
        else:
            place = place[int(part)] if part.isdecimal() else getattr(place, part)
    return place


TRANSLATED = [
    ("june/tms_attacks", "run_name", "june-tms-attacks"),
    ("june/tms_attacks", "experiment", "tms"),
    ("june/tms_attacks", "target.pretrain.model.hidden_init", "identity"),
    ("june/tms_attacks", "target.pretrain.optimizer.lr", 1e-2),
    ("june/tms_attacks", "pd.ci_config.fn_type", "shared_mlp"),
    ("june/tms_attacks", "pd.n_mask_samples", 2),
    ("june/tms_attacks", "pd.components_optimizer.consistent_rms", None),
    ("june/tms_attacks", "pd.components_optimizer.ns_dtype", "float32"),
    ("june/tms_attacks", "pd.loss_metrics.0.penalty", "smooth_l0"),
    ("june/tms_attacks", "pd.loss_metrics.0.frequency.reference_token_count", 64),
    ("june/tms_attacks", "pd.loss_metrics.1.normalize", "entries"),
    ("june/tms_attacks", "pd.loss_metrics.4.routing.p", 1.0),
    ("june/tms_attacks", "pd.loss_metrics.5.mask_scope", "unique_per_datapoint"),
    ("june/tms_attacks", "pd.loss_metrics.6.mask_scope", "shared_across_batch"),
    ("june/tms_attacks", "pd.loss_metrics.7.scope.type", "per_batch_per_position"),
    ("june/tms_attacks", "pd.loss_metrics.8.scope.type", "single_source"),
    ("june/tms_attacks", "eval.metrics.1.mask_scope", "shared_across_batch"),
    ("june/tms_attacks", "runtime.autocast_bf16", False),
    ("june/resid_mlp_global", "pd.ci_config.fn_type", "global_shared_mlp"),
    ("june/resid_mlp_global", "pd.loss_metrics.0.pnorm.final_val_frac", 0.5),
    ("june/resid_mlp_global", "pd.loss_metrics.0.beta", 0),
    ("june/llama8b_all", "mesh.replica", 2),
    ("june/llama8b_all", "mesh.fsdp", 4),
    ("june/llama8b_all", "mesh.tensor", 2),
    ("june/llama8b_all", "memory.preset", "balanced"),
    ("june/llama8b_all", "wandb_tags", ("allmat", "seq512")),
    ("june/llama8b_all", "pd.ci_config.layers_per_chunk", 1),
    ("june/llama8b_all", "pd.ci_config.simple_transformer_ci_cfg.mlp_hidden_dim", (16384,)),
    ("june/llama8b_all", "pd.loss_metrics.2.scope.type", "per_batch_per_position"),
    ("june/llama8b_all", "pd.ci_config.input_tap", "first_block_resid"),
    ("june/llama8b_merged", "pd.ci_config.input_tap", None),
    ("june/llama8b_merged", "pd.decomposition_targets.3.module_pattern", "model.layers.19.mlp.gate_proj"),
    ("june/llama8b_merged", "pd.loss_metrics.1.type", "MergedStochasticSubsetPPGDReconLoss"),
    ("june/llama8b_merged", "pd.loss_metrics.1.scope.type", "broadcast_across_batch"),
    ("june/llama8b_merged", "target.spec.model_class", "transformers.LlamaForCausalLM"),
    ("august/tms_merged", "pd.loss_metrics.2.normalize", "per_site"),
    ("august/tms_merged", "pd.loss_metrics.0.frequency.ema_halflife_steps", 2.0),
    ("august/tms_merged", "cadence.train_log_every", 20),
    ("august/tms_merged", "cadence.keep_last_n_checkpoints", 2),
    ("august/resid_mlp_pooled", "pd.loss_metrics.1.optimizer.type", "momentum"),
    ("august/resid_mlp_pooled", "pd.loss_metrics.1.pool.size_per_batch_element", 2),
    ("august/resid_mlp_pooled", "cadence.save_every", None),
    ("august/llama8b", "pd.decomposition_targets.6.module_pattern", "model.layers.*.mlp.down_proj"),
    ("august/llama8b", "mesh.replica", 8),
    ("august/llama8b", "cadence.keep_last_n_checkpoints", None),
    ("august/llama8b", "data.max_seq_len", 512),
    ("august/llama8b", "data.tokenizer_name", "meta-llama/Llama-3.1-8B"),
]


@pytest.mark.parametrize(("name", "key", "expected"), TRANSLATED)
def test_translated(name: str, key: str, expected: object) -> None:
    assert value(config(name), key) == expected


def test_shapes_of_sources_that_rows_share() -> None:
    raw = read_mapping(file("august/llama8b"), "it")
    raw["pd"]["loss_metrics"][2]["source_shape"] = "bc"
    raw["eval"]["metrics"][5]["source_shape"] = "bc"
    method = translate(raw).method
    assert method["pd"]["loss_metrics"][2]["scope"] == {"type": "per_batch"}
    assert method["eval"]["metrics"][5]["mask_scope"] == "per_row"


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value that is nested: what it is in, and its key or number."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(inner):
        yield value, key
        yield from places(part)


@pytest.mark.parametrize("path", sorted(FILES.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_any_value_in_any_place(path: Path) -> None:
    """What is wrong is for today's schema to say, or is named; the translation does not stop."""
    raw = read_mapping(path, "it")
    for inside, key in places(raw):
        kept = inside[key]
        for value in (None, "x", -1, 1.5, [1], [{}], {"a": 1}, {1: {}}):
            inside[key] = value
            translate(raw)
        inside[key] = kept


def test_what_does_not_matter_is_listed() -> None:
    ignored = config("june/llama8b_merged").ignored
    assert "runtime.remat_ci_fn (the wrapper's memory decides)" in ignored
    assert "cadence.dense_log_phase (logged every train_log_every steps)" in ignored
    assert not any("gather_fp8" in line for line in ignored)  # false asks for nothing


def test_data_by_name_say_how_long_they_are(here: Path) -> None:
    """Their folder does, if it is there; else the name."""
    folder = here / "datasets" / "fineweb_llama_tok_512_train284"
    found = load_config(file("august/llama8b"))
    assert found.wrapper.data is not None
    assert found.wrapper.data.train == folder
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text('{"seq_len": 1024, "tokenizer_name": "t"}')
    data = load_config(file("august/llama8b")).method.data
    assert (data.max_seq_len, data.tokenizer_name) == (1024, "t")  # type: ignore[union-attr]


def test_mistakes_have_the_keys_of_the_file(tmp_path: Path) -> None:
    """What today's schema refuses is named as it is in the file, beside what is lacking."""
    raw = read_mapping(file("august/tms_merged"), "it")
    raw["decomposition"]["ci"]["hidden_dims"] = ["8"]
    raw["decomposition"]["sites"]["sites"][1]["C"] = 0
    raw["pd"]["loss_metrics"][1]["source_shape"] = "cb"
    raw["cadence"]["checkpointing"]["retention"]["n"] = "two"
    raw["pd"]["steps"] = 0
    raw["prompts"] = {}
    path = tmp_path / "wrong.yaml"
    path.write_text(dump_yaml(raw))
    assert set(refused(path)) == {
        "prompts",
        "decomposition.ci.hidden_dims.0",
        "decomposition.sites.sites.1.C",
        "pd.loss_metrics.1.source_shape",
        "cadence.checkpointing.retention.n",
        "pd.steps",
    }


# ---- beside a wrapper, and with --set ----


def test_a_wrapper_has_the_last_word(tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper.yaml"
    shutil.copy(file("august/llama8b"), tmp_path / "theirs.yaml")
    wrapper.write_text("torch_config: theirs.yaml\nrun_name: mine\nmesh: {fsdp: 4}\nmemory: {preset: lean}\n")
    found = load_config(wrapper)
    assert (found.wrapper.run_name, found.wrapper.mesh.replica, found.wrapper.mesh.fsdp) == ("mine", 1, 4)
    assert found.wrapper.memory.preset == "lean"
    assert found.wrapper.wandb_group == "full32L"
    assert found.method == config("august/llama8b").method


def test_assignments_are_of_todays_keys() -> None:
    found = config("august/llama8b", "mesh.replica=2", "pd.steps=7", "data.train=mine")
    assert (found.wrapper.mesh.replica, found.wrapper.mesh.fsdp, found.method.pd.steps) == (2, 8, 7)
    toy = config("august/tms_merged", "target.folder=mine")
    assert toy.wrapper.target is not None
    assert toy.wrapper.target.pretrain is None
    with pytest.raises(ConfigError, match=r"pd\.steps=0: pd\.steps: should"):
        config("august/llama8b", "pd.steps=0")


def test_a_parent_here_stands_for_theirs() -> None:
    with pytest.raises(ConfigError) as error:
        config("june/refused", "init_from=runs/p-00000002")
    assert not any("resume_provenance" in line for line in error.value.lines)


@pytest.mark.parametrize("path", SPRING, ids=lambda path: path.stem)
def test_spring_needs_no_wrapper(path: Path) -> None:
    found = load_config(path)
    assert found.wrapper.run_name == path.stem
    assert isinstance(found.method, LanguageModelFile | ToyFile)


# ---- pd configs convert ----


@pytest.mark.parametrize("name", [*TOYS, *LARGE])
def test_converted_files_mean_the_same(name: str, here: Path) -> None:
    outcome = pd_here("configs", "convert", file(name), "--out", here / "mine")
    assert outcome.status == 0, outcome
    written = here / "mine" / file(name).name
    before, after = load_config(file(name)), load_config(written)
    assert after.method == before.method
    excluded = {"torch_config"}
    assert after.wrapper.model_dump(exclude=excluded) == before.wrapper.model_dump(exclude=excluded)
    assert generation(read_mapping(written.parent / "torch" / written.name, "it")) == "spring"
    assert not any("has the form of" in note for note in after.notes)
    header = written.read_text().partition("\ntorch_config")[0].partition("\nrun_name")[0]
    assert header.startswith(f"# Written by pd configs convert from {file(name).name}.\n# The form was that of ")
    for line in (*before.ignored, *before.warnings):
        if re.match(r"\S+ \(", line):
            assert f"#   {line}" in header


def test_convert_refuses(here: Path) -> None:
    outcome = pd_here("configs", "convert", file("june/refused"))
    assert outcome.status == 2
    assert outcome.err.count(str(file("june/refused"))) == len(refused(file("june/refused")))
    assert not (here / "configs").exists()
    (here / "mine.yaml").write_text("run_name: mine\n")
    outcome = pd_here("configs", "convert", file("june/llama8b_merged"), "--out", "mine.yaml")
    assert outcome.status == 2
    assert "pd configs convert has not written it" in outcome.err
    for _ in range(2):  # its own it replaces
        assert pd_here("configs", "convert", file("june/llama8b_merged"), "--out", "other.yaml").status == 0
    assert pd_here("configs", "convert").status == 2
