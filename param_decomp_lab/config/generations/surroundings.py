"""Translates everything but the method: devices, checkpoints, tracking, the target and the data."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from param_decomp_lab.config.generations.reading import Findings, Section, Tree, shown
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.json_text import read_json

_DEVICES_PER_NODE = 8
_LENGTH_IN_NAME = re.compile(r"(?:tok_?|docs_?)(\d+)(?!\d)")
_ACTIVATIONS = ("relu", "gelu")


def runtime(section: Section, *, is_toy: bool) -> tuple[Tree, Tree]:
    """Returns the current `runtime`, and keys of the wrapper: its mesh, and a memory preset that recomputes."""
    wrapper: Tree = {}
    if section.take("remat_recon_forwards", False):
        wrapper["memory"] = {"preset": "balanced"}
    sharding = section.take("sharding")
    if sharding not in (None, "ddp"):
        section.findings.no_effect.append(f"{section.at('sharding')} (the mesh decides where arrays lie)")
    mesh = section.section("mesh", "mesh")
    sizes = _sizes(mesh or section)
    if mesh is not None:
        mesh.close()
    if any(not _is_count(size) for size in sizes.values()):
        wrong = ", ".join(f"{name} is {shown(size)}" for name, size in sizes.items() if not _is_count(size))
        section.findings.lack((mesh or section).path, f"{wrong}; sizes of a mesh are whole numbers from 1")
    elif any(size > 1 for size in sizes.values()):
        if sharding == "ddp":
            sizes = {**sizes, "replica": sizes["replica"] * sizes["fsdp"], "fsdp": 1}
        wrapper["mesh"] = sizes
        section.findings.origins["mesh"] = (mesh or section).path
    section.close()
    return ({"autocast_bf16": False} if is_toy else {}), wrapper


def _sizes(section: Section) -> dict[str, Any]:
    """Returns the mesh with its current names, from its axes or from a number of devices over nodes of eight."""
    tensor, devices = section.take("tp", 1), section.take("dp")
    if devices is not None and _is_count(devices) and _is_count(tensor):
        on_node = min(devices, _DEVICES_PER_NODE)
        return {"replica": devices // on_node, "fsdp": max(1, on_node // tensor), "tensor": tensor}
    fsdp = section.take("data") if "data" in section else section.take("fsdp", 1)
    return {"replica": section.take("replicate", 1), "fsdp": fsdp, "tensor": tensor}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def cadence(section: Section) -> Tree:
    """Returns the current `cadence`."""
    out: Tree = {"train_log_every": section.take("train_log_every", 20)}
    out |= section.keep("save_every", "keep_last_n_checkpoints")
    checkpointing = section.section("checkpointing", "checkpointing")
    if checkpointing is not None:
        origins = section.findings.origins
        origins["cadence.save_every"] = checkpointing.at("save_every")
        kind = checkpointing.take("kind", "periodic")
        if kind == "none":
            why = "is none; the last step is saved all the same"
            section.findings.notes.append(f"{checkpointing.at('kind')}: {why}")
        elif kind == "periodic":
            out["save_every"] = checkpointing.take("save_every")
            retention = checkpointing.section("retention", "retention")
            if retention is not None:
                origins["cadence.keep_last_n_checkpoints"] = retention.at("n")
                kept = retention.take("kind", "keep_last")
                if kept == "keep_last":
                    out["keep_last_n_checkpoints"] = retention.take("n")
                elif kept != "keep_all":
                    retention.lack("kind", "what is kept is keep_last or keep_all")
                retention.close()
        else:
            checkpointing.lack("kind", "checkpointing is periodic or none")
        checkpointing.close()
    section.close()
    return out


def wandb(section: Section) -> tuple[Tree, Tree]:
    """Returns the current `wandb`, and keys of the wrapper."""
    wrapper: Tree = {}
    for key, new in (("group", "wandb_group"), ("tags", "wandb_tags")):
        value = section.take(key)
        if value:
            wrapper[new] = value
            section.findings.origins[new] = section.at(key)
    return section.keep_rest(), wrapper


def language_target(section: Section) -> Tree:
    """Returns the current `target` of a language model."""
    out: Tree = section.keep("weights_dtype")
    spec = section.section("spec", "spec")
    if spec is not None:
        kind = spec.take("kind")
        if kind == "hf_weights_in_vendored":
            spec.take("model_class")
            out["spec"] = {"kind": "hf", "model_class": "transformers.LlamaForCausalLM", **spec.keep("model_name")}
            spec.close()
        elif kind in ("hf", "pretrained"):
            out["spec"] = {"kind": kind, **spec.keep_rest()}
        else:
            spec.lack("kind", "targets are hf, pretrained or hf_weights_in_vendored here")
            out["spec"] = {"kind": kind, **spec.keep_rest()}  # so that it is read as a language model's
    section.close()
    return out


@dataclass(frozen=True)
class DataSet:
    """A data set by name or folder. ``folder``: where it would be. ``length``: of its rows, if known; ``tokenizer``:
    its name, if known.
    """

    folder: Path
    length: int | None
    tokenizer: str | None


def language_data(section: Section, tokenizer: str | None) -> tuple[Tree | None, Tree]:
    """Returns the current `data` of a language model (None if it cannot be read), and keys of the wrapper.
    ``tokenizer``: the name of the target's, if it has one.
    """
    if "train" not in section:
        return section.keep_rest(), {}
    found, findings = {key: _rows(section, key) for key in ("train", "eval")}, section.findings
    section.close()
    train = found["train"]
    if train is None or found["eval"] is None:
        return None, {}
    length = train.length
    if length is None:
        length = 512
        note = "the length of its rows is not known, and is taken to be 512; say it with --set data.max_seq_len=…"
        findings.notes.append(f"{section.at('train')}: {note}")
    method = {
        "dataset_name": "parquet",
        "column_name": "input_ids",
        "is_tokenized": True,
        "tokenizer_name": train.tokenizer or tokenizer or "unknown",
        "max_seq_len": length,
    }
    return method, {"data": {key: str(rows.folder) for key, rows in found.items() if rows is not None}}


def _rows(section: Section, key: str) -> DataSet | None:
    inner = section.section(key, "dataset")
    if inner is None:
        section.findings.lack(section.at(key), "is required: {kind: name, name: …} or {kind: dir, dir: …}")
        return None
    kind = inner.take("kind", "name")
    name = inner.take("dir" if kind == "dir" else "name")
    inner.close()
    if kind not in ("name", "dir") or not isinstance(name, str) or not name:
        inner.findings.lack(inner.path, "should be {kind: name, name: …} or {kind: dir, dir: …}")
        return None
    section.findings.origins[f"data.{key}"] = inner.at("dir" if kind == "dir" else "name")
    folder = Path(name).expanduser() if kind == "dir" else Path("datasets") / name
    if kind == "name":
        where = f"{name} is looked for in {folder}, below the current folder; another place: --set data.{key}=FOLDER"
        section.findings.notes.append(f"{inner.at('name')}: {where}")
    meta: Mapping[str, Any] = {}
    file = folder / "meta.json"
    if file.is_file():
        try:
            meta = read_json(file, "what describes a data set", dict)
        except UserError as error:
            section.findings.lack(inner.path, str(error))
    in_name = _LENGTH_IN_NAME.search(name)
    length = meta.get("seq_len") or (int(in_name[1]) if in_name else None)
    tokenizer = meta.get("tokenizer_name")
    return DataSet(folder.absolute(), length, tokenizer if isinstance(tokenizer, str) else None)


def toy_target(section: Section, data: Any) -> tuple[Tree, Tree]:
    """Returns the current `target` of a toy, and keys of the wrapper: its recipe, which the file has instead of a run.

    ``data``: the file's, on which the target is trained, too.
    """
    if "pretrain" not in section:
        return section.keep_rest(), {}
    origins, findings = section.findings.origins, section.findings
    origins["target.pretrain"] = section.at("pretrain")
    pretrain = section.section("pretrain", "toy_pretrain")
    assert pretrain is not None
    is_tms = "n_hidden" in section
    if is_tms:
        model: Tree = {"architecture": "tms", **section.keep("n_features", "n_hidden", "n_hidden_layers")}
        hidden = section.take("hidden_layer_init", "identity")
        if model.get("n_hidden_layers"):
            model["hidden_init"] = hidden
    else:
        model = {"architecture": "resid_mlp"}
        model |= section.keep("n_features", "d_embed", "d_mlp", "n_layers", "in_bias", "out_bias")
        model["activation"] = section.take("act_fn_name", "relu")
    recipe: Tree = {
        "model": model,
        "data": dict(data) if isinstance(data, dict) else data,
        "steps": pretrain.take("steps"),
        "batch_size": pretrain.take("batch_size"),
        "seed": pretrain.take("seed", 0),
        "optimizer": {
            "lr": pretrain.take("lr"),
            "schedule": "constant",
            "warmup_pct": 0.0,
            "final_val_frac": 1.0,
            "weight_decay": 0.0,
            "betas": [0.9, 0.999],
            "clip_norm": None,
        },
    }
    pretrain.close()
    section.close()
    # Each recipe has its own name, because a folder that another recipe has made is refused.
    digest = hashlib.sha256(json.dumps(recipe, default=str).encode()).hexdigest()[:8]
    recipe["out"] = f"runs/targets/{model['architecture']}-{digest}"
    findings.notes.append(f"{section.at('pretrain')}: the target is trained here, by this recipe, and is not theirs")
    return {}, {"target": {"pretrain": recipe}, "experiment": model["architecture"]}


def parent(section: Section, findings: Findings) -> None:
    """Reports `resume_provenance`, a run of the original project, which cannot be opened if it was trained in JAX."""
    folder, step = section.take("parent_run_dir"), section.take("parent_step")
    why = f"names step {shown(step)} of {shown(folder)}, a run of the original project; remove it, or give init_from"
    findings.lack(section.path, f"{why}, a run of this one", instead="init_from")
