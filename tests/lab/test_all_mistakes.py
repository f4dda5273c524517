"""One message names every mistake of a configuration, wherever it is, and each of them once."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from param_decomp_lab.config import load_config
from param_decomp_lab.config.method_schema import LanguageModelFile, ToyFile
from param_decomp_lab.config.wrapper import Wrapper
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.schema.strict import parse
from param_decomp_lab.setup.checked_config import load_checked
from tests.lab.tiny_run import ROOT, pd_here

CONFIGS = ROOT / "configs"
WRAPPERS = [path for path in sorted(CONFIGS.rglob("*.yaml")) if "torch_config" in path.read_text()]


def schema() -> dict[str, Any]:
    """The schema file of the example."""
    raw = yaml.safe_load((CONFIGS / "torch" / "llama8b_l18_example.yaml").read_text())
    assert isinstance(raw, dict)
    return raw


def write(folder: Path, method: dict[str, Any] | str, wrapper: dict[str, Any] | str | None = None) -> Path:
    given = {"torch_config": "torch.yaml", "run_name": "test", "data": {"train": "a", "eval": "b"}}
    for name, content in (("torch", method), ("wrapper", given if wrapper is None else wrapper)):
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        (folder / f"{name}.yaml").write_text(text)
    return folder / "wrapper.yaml"


def mistakes(path: Path, *overrides: str) -> list[tuple[str, str]]:
    """Pairs of the file (or assignment) and key that are named, and what is said of them."""
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    lines = str(caught.value).replace(f"{path.parent}/", "").splitlines()
    assert len(set(lines)) == len(lines)
    heads = [": ".join(line.split(": ")[: 2 if ".yaml" in line.split(": ")[0] else 1]) for line in lines]
    return [(head, line[len(head) + 2 :]) for head, line in zip(heads, lines, strict=True)]


def test_a_configuration_with_mistakes_of_every_kind(tmp_path: Path) -> None:
    raw = schema()
    pd = raw["pd"]
    minimality, subset, persistent, faithfulness = pd["loss_metrics"]
    raw["cadence"] = [1]  # a list for a mapping
    raw["eval"]["slow_every"] = 7  # not a multiple of every
    raw["eval"]["metrics"].append({"type": "CEandKLLosses", "rounding_threshold": 2})  # listed twice, and too large
    raw["n_mask_samples"] = pd.pop("n_mask_samples")  # a key of pd, not indented
    pd["runtime"] = raw.pop("runtime") | {"dp": 0}  # a key of the file, indented, and wrong within
    pd["stepz"] = pd.pop("steps")  # misspelled
    pd["batch_size"] = 63  # of the right type, but not for this mesh
    pd["seed"] = "0"  # text for a number
    pd["components_optimizer"]["lr_schedule"]["fn_type"] = "constant"  # with a final value
    pd["ci_fn_optimizer"]["betas"] = [0.9]
    pd["ci_config"]["simple_transformer_ci_cfg"]["attn_config"]["max_len"] = 8  # shorter than the rows
    minimality |= {
        "eps": "a",
        "coef": 1,
        "gamma": {"start_val": -1},
    }  # three in one loss, and gamma without its penalty
    subset["routing"] = {"type": "static_probabilities", "p": 2}  # a misspelled kind, and a value that is wrong for it
    persistent["type"] = "PersistentPGDReconLos"
    persistent["scope"] = {"type": "repeat_across_batch", "n_sources": 2}
    persistent["coeff"] = 0
    faithfulness["kind"] = faithfulness.pop("type")
    wrapper = {
        "torch_config": "torch.yaml",
        "run_nam": 7,
        "mesh": {"fsdp": 2, "nodes": 3, "tensr": 1},
        "memory": {"save": ["logit", "logits"], "recompute": ["logits"], "micro_batches": 0},
        "experiment": "tms",
        "data": {"train": "a"},
        "target": "folder",
    }
    path = write(tmp_path, raw, wrapper)
    found = mistakes(path, "nothing", "pd.loss_metrics.9.coeff=1", "eval.n_steps=many")
    assert [head for head, _ in found] == [
        "--set nothing",
        "--set pd.loss_metrics.9.coeff=1",
        "wrapper.yaml: run_nam",  # unknown, but probably run_name ...
        "wrapper.yaml: run_nam",  # ... so its value is checked as such
        "wrapper.yaml: mesh.tensr",
        "wrapper.yaml: mesh.nodes",
        "wrapper.yaml: memory.save.0",
        "wrapper.yaml: memory.micro_batches",
        "wrapper.yaml: memory.recompute",  # logits, which is in both lists
        "wrapper.yaml: data.eval",
        "wrapper.yaml: target",
        "torch.yaml: n_mask_samples",
        "torch.yaml: pd.runtime",
        "torch.yaml: pd.stepz",
        "torch.yaml: pd.seed",
        "torch.yaml: pd.components_optimizer.lr_schedule.final_val_frac",
        "torch.yaml: pd.ci_fn_optimizer.betas.1",
        "torch.yaml: pd.loss_metrics.0.coef",
        "torch.yaml: pd.loss_metrics.0.eps",
        "torch.yaml: pd.loss_metrics.0.gamma.start_val",
        "torch.yaml: pd.loss_metrics.0.gamma",
        "torch.yaml: pd.loss_metrics.1.routing.p",
        "torch.yaml: pd.loss_metrics.1.routing",
        "torch.yaml: pd.loss_metrics.2",
        "torch.yaml: pd.loss_metrics.2.coeff",
        "torch.yaml: pd.loss_metrics.3",
        "torch.yaml: runtime.dp",
        "torch.yaml: cadence",
        "torch.yaml with --set eval.n_steps=many: eval.n_steps",
        "torch.yaml: eval.metrics.8.rounding_threshold",
        "torch.yaml: eval.slow_every",
        "wrapper.yaml: experiment",
        "torch.yaml: eval.metrics.8.type",
        "torch.yaml: pd.batch_size",
        "torch.yaml: pd.batch_size",
        "torch.yaml: data.max_seq_len",
    ]
    for head, message in (
        ("wrapper.yaml: run_nam", "unknown key 'run_nam'; did you mean 'run_name'?"),
        ("torch.yaml: n_mask_samples", "unknown key 'n_mask_samples'; it belongs in pd: check its indentation"),
        ("torch.yaml: pd.runtime", "unknown key 'runtime'; it belongs at the top level of the file: check its"),
        ("torch.yaml: pd.loss_metrics.0.gamma", "belongs to penalty: smooth_l0"),
        ("torch.yaml: pd.loss_metrics.1.routing", "did you mean 'static_probability'?"),
        ("torch.yaml: pd.loss_metrics.2", "unknown 'type' 'PersistentPGDReconLos'; did you mean 'PersistentPGDReconLo"),
    ):
        assert any(where == head and message in said for where, said in found), head
    assert [said for head, said in found if head == "torch.yaml: pd.batch_size"] == [
        "is 63; it must be a multiple of mesh.replica · mesh.fsdp = 1 · 2",
        "is 63; it must be a multiple of the n_sources of PersistentPGDReconLoss (2)",
    ]


def test_what_is_wrong_when_it_is_right_is_not_said() -> None:
    """Rules whose values could not be read say nothing; a right file has no mistakes, and is read as ever."""
    raw = schema()
    raw["pd"]["batch_size"] = raw["pd"]["steps"] = "x"
    raw["pd"]["ci_config"]["simple_transformer_ci_cfg"]["d_model"] = -1
    del raw["eval"]["every"]
    _, found = parse(LanguageModelFile, raw)
    assert [mistake.key for mistake in found] == [
        "pd.ci_config.simple_transformer_ci_cfg.d_model",
        "pd.steps",
        "pd.batch_size",
        "eval.every",
    ]


def test_what_is_right_is_read_as_ever() -> None:
    """With one mistake beside it, which changes nothing else, and is the only one that is found."""
    for path in WRAPPERS:
        wrapper = read_mapping(path, "the wrapper")
        method = read_mapping(path.parent / wrapper["torch_config"], "the schema file")
        schema = LanguageModelFile if "spec" in method["target"] else ToyFile
        for model, raw in ((Wrapper, wrapper), (schema, method)):
            assert parse(model, raw) == (model.model_validate(raw), [])
            found, (mistake,) = parse(model, {**raw, "zzz": 1})
            assert (found, mistake.key) == (model.model_validate(raw), "zzz")


def test_indentation(tmp_path: Path) -> None:
    """A section whose keys are not indented, and one that is indented too far."""
    text = """
pd:
decomposition_targets: {module_pattern: linear1, C: 20}
loss_metrics:
  - FaithfulnessLoss: {coeff: 1}
  - type: FaithfulnessLoss
ci_config: {mode: layerwise, fn_type: mlp, hidden_dims: [16]}
components_optimizer: {lr_schedule: {start_val: 1}}
ci_fn_optimizer:
  lr_schedule:
    start_val: 1
    weight_decay: 0
n_mask_samples: 1
steps: 1
batch_size: 1
target: {run_path: x, data: {feature_probability: 2}}
cadence: {train_log_every: 1}
"""
    found = mistakes(write(tmp_path, text, {"torch_config": "torch.yaml", "run_name": "a", "experiment": "tms"}))
    assert [head.removeprefix("torch.yaml: ") for head, said in found if "check its indentation" in said] == [
        *("decomposition_targets", "loss_metrics", "ci_config", "components_optimizer", "ci_fn_optimizer"),
        *("n_mask_samples", "steps", "batch_size", "pd.ci_fn_optimizer.lr_schedule.weight_decay", "target.data"),
    ]
    assert [(head.removeprefix("torch.yaml: "), said[:40]) for head, said in found if "indentation" not in said] == [
        ("pd.decomposition_targets", "should be a list, not {'module_pattern':"),
        ("pd.loss_metrics.0", "type is required, to say which kind this"),
        ("pd.loss_metrics.1.coeff", "is required for a loss"),
        ("data.feature_probability", "should be less than or equal to 1, not 2"),
    ]


def test_keys_that_are_given_twice(tmp_path: Path) -> None:
    """In both files, beside what is wrong otherwise."""
    method = yaml.safe_dump(schema() | {"cadence": {"train_log_every": 0}}) + "runtime: {}\n"
    wrapper = (
        "torch_config: torch.yaml\nrun_name: a\nrun_name: b\nmesh: {fsdp: 1, fsdp: 0}\ndata: {train: a, eval: b}\n"
    )
    found = mistakes(write(tmp_path, method, wrapper))
    assert [head for head, _ in found] == [
        "wrapper.yaml, line 3: the key 'run_name' is given twice (first on line 2); keep one of the two",
        "wrapper.yaml, line 4: the key 'fsdp' is given twice (first on line 4); keep one of the two",
        f"torch.yaml, line {len(method.splitlines())}: {found[2][0].split(': ')[1]}",
        "wrapper.yaml: mesh.fsdp",
        "torch.yaml: cadence.train_log_every",
    ]


def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    path = write(tmp_path, {"torch_config": "x", "run_name": "y"})
    assert mistakes(path) == [("torch.yaml: is a wrapper; torch_config should name a schema file", "")]
    path = write(tmp_path, "", {"torch_config": "nowhere.yaml", "run_name": "a", "mesh": []})
    assert [head for head, _ in mistakes(path)] == [
        "wrapper.yaml: mesh",
        "nowhere.yaml: cannot read torch_config of wrapper.yaml",
    ]
    raw = schema()
    del raw["target"]
    raw["cadence"]["train_log_every"] = 0
    found = mistakes(write(tmp_path, raw))  # of which kind it is nobody knows
    assert [head for head, _ in found] == ["torch.yaml: target.spec", "torch.yaml: cadence.train_log_every"]


@pytest.mark.parametrize("command", ["check", "train"])
def test_patterns_beside_mistakes_of_the_file(command: str, tmp_path: Path) -> None:
    """The target's shapes are known, so the patterns that match nothing are named at once."""
    raw = schema()
    raw["pd"]["steps"] = 0
    raw["pd"]["decomposition_targets"][0]["module_pattern"] = "layers.18.mlp.upproj"
    del raw["pd"]["decomposition_targets"][1]["C"]
    raw["pd"]["decomposition_targets"][2]["module_pattern"] = "layers.99.mlp.down_proj"
    outcome = pd_here(command, write(tmp_path, raw), "--set", f"out_dir={tmp_path / 'runs'}")
    assert outcome.status == 2
    assert "Traceback" not in outcome.err
    heads = [line.replace(f"{tmp_path}/", "").removeprefix("error: ").split(": ") for line in outcome.err.splitlines()]
    assert [": ".join(head[:2]) if ".yaml" in head[0] else head[0] for head in heads] == [
        "torch.yaml: pd.decomposition_targets.1.C",
        "torch.yaml: pd.steps",
        "pd.decomposition_targets.0.module_pattern",
        "pd.decomposition_targets.2.module_pattern",
    ]
    assert not (tmp_path / "runs").exists()


WRONG = (None, -1, 3, "x", [], {}, [1, "a"], [[1]], {"type": "x"}, True, "global_shared_mlp", {"train": 3})


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*path, key))


def damage(raw: Any, draw: random.Random) -> None:
    """Takes away, renames, misplaces or replaces one value."""
    *above, key = draw.choice([path for path in places(raw) if path])
    node = raw
    for part in above:
        node = node[part]
    how = draw.randrange(5) if isinstance(node, dict) else 4
    if how == 0:
        del node[key]
    elif how == 1:
        node[f"{key}s"] = node.pop(key)
    elif how == 2:
        raw[key] = node.pop(key)
    else:
        node[key] = copy.deepcopy(draw.choice(WRONG))


def test_what_could_be_read_of_damaged_files_is_checked_without_an_accident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is missing: further checks say what they can, each mistake once, or nothing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for seed in range(60):
        draw = random.Random(seed)
        path = draw.choice([CONFIGS / "llama8b_l18_example.yaml", *sorted((CONFIGS / "toys").glob("*.yaml"))])
        wrapper = yaml.safe_load(path.read_text())
        method = yaml.safe_load((path.parent / wrapper["torch_config"]).read_text())
        for _ in range(draw.randrange(1, 5)):
            damage(draw.choice((method, method, wrapper)), draw)
        try:
            load_checked(write(tmp_path, method, wrapper | {"torch_config": "torch.yaml"}))
        except UserError as error:
            lines = str(error).splitlines()
            assert len(set(lines)) == len(lines), (seed, lines)
