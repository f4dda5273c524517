"""Writes tiny runs of the PyTorch project, in plain torch of our own, with what they compute.

Needs torch, which nothing else does; in an environment of its own:

    pip install torch==2.13.0 numpy pyyaml
    python tests/golden/make_decomposition_fixtures.py tests/golden/decompositions

``decompositions/README.md`` says what is in a folder. The script ends with an error unless the importances change where
a global CI function's inputs or outputs are taken in another order, or a matrix of its attention is transposed.
"""

import argparse
import json
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch_family_models import SIMPLE, causal_attention, heads, llama_simple_mlp_shapes, rms_norm, rotate

Tensors = dict[str, torch.Tensor]
Linear = Callable[[str, torch.Tensor], torch.Tensor]
EPS = 2.0**-23
"""Of torch's rms_norm in float32."""
MATTERS = 1e-2
DELTA = 0.3
BATCH, LENGTH = 2, 12

# ---- targets: plain forward passes that apply each matrix by `linear(path, x)` ----


def llama_simple_mlp(c: Mapping[str, Any], w: Tensors, linear: Linear, tokens: torch.Tensor) -> torch.Tensor:
    x = w["wte.weight"][tokens]
    for h in (f"h.{n}" for n in range(c["n_layer"])):
        y = rms_norm(x, w[f"{h}.rms_1.weight"])
        x = x + _attended({n: linear(f"{h}.attn.{n}", y) for n in ("q_proj", "k_proj", "v_proj")}, c,
                          lambda z, h=h: linear(f"{h}.attn.o_proj", z))  # fmt: skip
        y = linear(f"{h}.mlp.c_fc", rms_norm(x, w[f"{h}.rms_2.weight"]))
        x = x + linear(f"{h}.mlp.down_proj", F.gelu(y, approximate="tanh"))
    return rms_norm(x, w["ln_f.weight"]) @ w["wte.weight"].T


def llama(c: Mapping[str, Any], w: Tensors, linear: Linear, tokens: torch.Tensor) -> torch.Tensor:
    x = w["model.embed_tokens.weight"][tokens]
    for h in (f"model.layers.{n}" for n in range(c["n_layer"])):
        y = rms_norm(x, w[f"{h}.input_layernorm.weight"])
        x = x + _attended({n: linear(f"{h}.self_attn.{n}", y) for n in ("q_proj", "k_proj", "v_proj")}, c,
                          lambda z, h=h: linear(f"{h}.self_attn.o_proj", z))  # fmt: skip
        y = rms_norm(x, w[f"{h}.post_attention_layernorm.weight"])
        gated = F.silu(linear(f"{h}.mlp.gate_proj", y)) * linear(f"{h}.mlp.up_proj", y)
        x = x + linear(f"{h}.mlp.down_proj", gated)
    return linear("lm_head", rms_norm(x, w["model.norm.weight"]))


def _attended(qkv: Tensors, c: Mapping[str, Any], out: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    q, k, v = (heads(qkv[name], c) for name in ("q_proj", "k_proj", "v_proj"))
    repeats = c["n_head"] // c["n_key_value_heads"]
    k, v = (t.repeat_interleave(repeats, dim=1) for t in (rotate(k, c), v))
    return out(causal_attention(rotate(q, c), k, v))


def llama_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, hidden = c["n_embd"], c["n_intermediate"]
    d_kv = d // c["n_head"] * c["n_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], d), "model.norm.weight": (d,),
              "lm_head.weight": (c["vocab_size"], d)}  # fmt: skip
    for h in (f"model.layers.{n}" for n in range(c["n_layer"])):
        shapes |= {f"{h}.{norm}_layernorm.weight": (d,) for norm in ("input", "post_attention")}
        for name, out in {"q": d, "k": d_kv, "v": d_kv, "o": d}.items():
            shapes[f"{h}.self_attn.{name}_proj.weight"] = (out, d)
        for name, shape in {"gate": (hidden, d), "up": (hidden, d), "down": (d, hidden)}.items():
            shapes[f"{h}.mlp.{name}_proj.weight"] = shape
    return shapes


def tms(c: Mapping[str, Any], w: Tensors, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    for name in ("linear1", *(f"hidden_layers.{n}" for n in range(c["n_hidden_layers"])), "linear2"):
        x = linear(name, x)
    return F.relu(x)


def tms_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    n, h = c["n_features"], c["n_hidden"]
    between = {f"hidden_layers.{i}.weight": (h, h) for i in range(c["n_hidden_layers"])}
    return {"linear1.weight": (h, n), "linear2.weight": (n, h), "linear2.bias": (n,), **between}


def resid_mlp(c: Mapping[str, Any], w: Tensors, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    x = x @ w["W_E"]
    for n in range(c["n_layers"]):
        x = x + linear(f"layers.{n}.mlp_out", F.relu(linear(f"layers.{n}.mlp_in", x)))
    return x @ w["W_E"].T


def resid_mlp_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, m = c["d_embed"], c["d_mlp"]
    layers = {}
    for n in (f"layers.{n}" for n in range(c["n_layers"])):
        layers |= {f"{n}.mlp_in.weight": (m, d), f"{n}.mlp_in.bias": (m,), f"{n}.mlp_out.weight": (d, m),
                   f"{n}.mlp_out.bias": (d,)}  # fmt: skip
    return {"W_E": (c["n_features"], d), **layers}


# ---- CI functions: logits by site, from the clean inputs of the sites ----


def mlp(w: Tensors, prefix: str, x: torch.Tensor, n_linears: int) -> torch.Tensor:
    """Linears ``x W + b`` at even indices, exact GELUs between them. A leading axis of W is one of components."""
    for n in range(n_linears):
        W, b = w[f"{prefix}{2 * n}.W"], w[f"{prefix}{2 * n}.b"]
        x = x @ W + b if W.ndim == 2 else torch.einsum("...cd,cdk->...ck", x, W) + b
        x = F.gelu(x) if n < n_linears - 1 else x
    return x


def mlp_shapes(prefix: str, widths: Sequence[int], lead: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for n, (d_in, d_out) in enumerate(pairwise(widths)):
        shapes |= {f"{prefix}{2 * n}.W": (*lead, d_in, d_out), f"{prefix}{2 * n}.b": (*lead, d_out)}
    return shapes


def layerwise(ci: Mapping[str, Any], w: Tensors, inputs: Tensors) -> Tensors:
    found = {}
    for path, x in inputs.items():
        V = w[f"_components.{path.replace('.', '-')}.V"]
        if ci["fn_type"] == "mlp":
            x = (x @ V)[..., None]
        elif ci["fn_type"] == "vector_mlp":
            x = x[..., None, :].expand(*x.shape[:-1], V.shape[1], x.shape[-1])
        z = mlp(w, f"ci_fn._ci_fns.{path.replace('.', '-')}.layers.", x, len(ci["hidden_dims"]) + 1)
        found[path] = z if ci["fn_type"] == "shared_mlp" else z[..., 0]
    return found


def split(w: Tensors, z: torch.Tensor, order: Sequence[str]) -> Tensors:
    sizes = [w[f"_components.{path.replace('.', '-')}.V"].shape[1] for path in order]
    return dict(zip(order, z.split(sizes, dim=-1), strict=True))


def global_shared_mlp(ci: Mapping[str, Any], w: Tensors, inputs: Tensors) -> Tensors:
    order = sorted(inputs)
    x = torch.cat([inputs[path] for path in order], dim=-1)
    return split(w, mlp(w, "ci_fn._global_ci_fn.layers.", x, len(ci["hidden_dims"]) + 1), order)


def global_shared_transformer(ci: Mapping[str, Any], w: Tensors, inputs: Tensors) -> Tensors:
    order, c = sorted(inputs), ci["simple_transformer_ci_cfg"]
    n_heads, base = c["attn_config"]["n_heads"], c["attn_config"]["rope_base"]
    of = {name.removeprefix("ci_fn._global_ci_fn."): tensor for name, tensor in w.items()}
    x = torch.cat([normed(inputs[path]) for path in order], dim=-1)
    x = x @ of["_input_projector.W"] + of["_input_projector.b"]
    turn = {"rotary_dim": c["d_model"] // n_heads, "rotary_base": base, "rotary_adjacent_pairs": False}
    for block in (f"_blocks.{n}" for n in range(c["n_blocks"])):
        h = normed(x)
        q, k, v = (
            (h @ of[f"{block}.attn.{m}_proj.weight"].T).unflatten(-1, (n_heads, -1)).transpose(1, 2) for m in "qkv"
        )
        scores = rotate(q, turn) @ rotate(k, turn).transpose(-1, -2) / q.shape[-1] ** 0.5
        read = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + read @ of[f"{block}.attn.out_proj.weight"].T
        x = x + mlp(of, f"{block}.mlp.", normed(x), len(c["mlp_hidden_dim"]) + 1)
    return split(w, x @ of["_output_head.W"] + of["_output_head.b"], order)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


CI: dict[str, Callable[[Mapping[str, Any], Tensors, Tensors], Tensors]] = {
    "mlp": layerwise, "vector_mlp": layerwise, "shared_mlp": layerwise, "global_shared_mlp": global_shared_mlp,
    "global_shared_transformer": global_shared_transformer,
}  # fmt: skip


def ci_shapes(ci: Mapping[str, Any], sites: Mapping[str, tuple[int, int, int]]) -> dict[str, tuple[int, ...]]:
    """``sites``: d_in, d_out and C by path."""
    order, kind, shapes = sorted(sites), ci["fn_type"], {}
    inputs, outputs = sum(sites[path][0] for path in order), sum(sites[path][2] for path in order)
    if kind == "global_shared_mlp":
        return mlp_shapes("ci_fn._global_ci_fn.layers.", (inputs, *ci["hidden_dims"], outputs))
    if kind == "global_shared_transformer":
        c, prefix = ci["simple_transformer_ci_cfg"], "ci_fn._global_ci_fn."
        d = c["d_model"]
        shapes |= {f"{prefix}_input_projector.W": (inputs, d), f"{prefix}_input_projector.b": (d,)}
        for n in range(c["n_blocks"]):
            shapes |= {f"{prefix}_blocks.{n}.attn.{m}_proj.weight": (d, d) for m in ("q", "k", "v", "out")}
            shapes |= mlp_shapes(f"{prefix}_blocks.{n}.mlp.", (d, *c["mlp_hidden_dim"], d))
        return shapes | {f"{prefix}_output_head.W": (d, outputs), f"{prefix}_output_head.b": (outputs,)}
    for path, (d_in, _, C) in sites.items():
        prefix, hidden = f"ci_fn._ci_fns.{path.replace('.', '-')}.layers.", ci["hidden_dims"]
        if kind == "shared_mlp":
            shapes |= mlp_shapes(prefix, (d_in, *hidden, C))
        else:
            shapes |= mlp_shapes(prefix, (1 if kind == "mlp" else d_in, *hidden, 1), (C,))
    return shapes


# ---- runs ----


@dataclass(frozen=True)
class GoldenRun:
    """``sites``: C by path, in the order of the configuration, which is not the one that counts. ``configuration``: the
    file with it. ``oldest``: tensors have the names of mid-2025. ``beside``: further files."""

    target: Callable[..., torch.Tensor]
    shapes: Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]]
    model: Mapping[str, Any]
    sites: Mapping[str, int]
    ci: Mapping[str, Any]
    configuration: tuple[str, Mapping[str, Any]]
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tied: Sequence[tuple[str, str]] = ()
    oldest: bool = False
    step: int = 300


def module_of(path: str) -> str:
    return path.removesuffix(".pre_identity")


def make_tensors(run: GoldenRun) -> Tensors:
    """The target's tensors, and those of the decomposition."""
    target = {
        name: torch.randn(shape) * 0.3 + (len(shape) == 1 and name.endswith("weight"))
        for name, shape in run.shapes(run.model).items()
    }
    w, sizes = {f"target_model.{name}": tensor for name, tensor in target.items()}, {}
    for path, C in run.sites.items():
        W = target[f"{module_of(path)}.weight"]
        if module_of(path) != path:
            W = torch.eye(W.shape[1])
        sizes[path] = (W.shape[1], W.shape[0], C)
        V, dashed = torch.randn(W.shape[1], C) * 0.5, path.replace(".", "-")
        U = torch.linalg.pinv(V) @ W.T + 0.05 * torch.randn(C, W.shape[0])
        w |= {f"_components.{dashed}.V": V, f"_components.{dashed}.U": U}
        if not run.oldest and f"{path}.bias" in target:
            w[f"_components.{dashed}.bias"] = target[f"{path}.bias"]
    for name, shape in ci_shapes(run.ci, sizes).items():
        # Importances are to be 0, 1 and between; b also has two axes where every component has its own.
        w[name] = torch.randn(shape) * (0.3 if name.endswith(".b") else 1.2 / shape[-2] ** 0.5)
    if run.ci["fn_type"] == "global_shared_transformer":
        width = (
            run.ci["simple_transformer_ci_cfg"]["d_model"]
            // run.ci["simple_transformer_ci_cfg"]["attn_config"]["n_heads"]
        )
        w["ci_fn._global_ci_fn._blocks.0.attn.rope.inv_freq"] = 10000.0 ** (-torch.arange(0, width, 2) / width)
    return w


def compute(run: GoldenRun, w: Tensors, x: torch.Tensor, masks: Tensors | None = None) -> dict[str, np.ndarray]:
    """Logits of the importances, the clean output, that masked by λ, and that by ``masks`` with δ."""
    if x.is_floating_point():
        x = x.double()
    w = {name: tensor.double() for name, tensor in w.items()}
    target = {name.removeprefix("target_model."): t for name, t in w.items() if name.startswith("target_model.")}
    factors = {path: (w[f"_components.{path.replace('.', '-')}.V"], w[f"_components.{path.replace('.', '-')}.U"])
               for path in run.sites}  # fmt: skip
    for source, copy in run.tied:  # as their loading has it
        factors[copy] = (factors[source][1].T, factors[source][0].T)
    inputs: Tensors = {}

    def forward(site: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        def linear(path: str, y: torch.Tensor) -> torch.Tensor:
            identity = f"{path}.pre_identity"
            if identity in run.sites:
                y = site(identity, y, torch.eye(y.shape[-1], dtype=y.dtype))
            W, bias = target[f"{path}.weight"], target.get(f"{path}.bias", 0)
            return (site(path, y, W) if path in run.sites else y @ W.T) + bias

        return run.target(run.model, target, linear, x)

    def record(path: str, y: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
        inputs[path] = y
        return y @ W.T

    clean = forward(record)
    logits = CI[run.ci["fn_type"]](run.ci, {**w, **{
        f"_components.{path.replace('.', '-')}.V": V for path, (V, _) in factors.items()}}, inputs)  # fmt: skip
    lower = {path: z.clamp(0, 1) for path, z in logits.items()}

    def masked(of: Tensors, delta: float) -> torch.Tensor:
        def site(path: str, y: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
            V, U = factors[path]
            return (y @ V * of[path]) @ U + delta * (y @ (W - (V @ U).T).T)

        return forward(site)

    found = {"clean": clean, "ci_masked": masked(lower, 0.0)}
    if masks is not None:
        found["masked"] = masked({path: mask.double() for path, mask in masks.items()}, DELTA)
    for path, z in logits.items():
        found |= {f"logits/{path}": z, f"lower/{path}": lower[path]}
        found[f"upper/{path}"] = torch.where(z > 1, 1 + 0.01 * (z - 1), z.clamp(0, 1))
    return {name: tensor.float().numpy() for name, tensor in found.items()}


def oldest_name(name: str) -> str:
    if name.startswith("_components."):
        _, dashed, factor = name.split(".")
        return f"target_model.{dashed.replace('-', '.')}.components.{factor}"
    name = name.replace("ci_fn._ci_fns.", "_gates.")
    if name.startswith("target_model.") and name.endswith(("mlp_in.weight", "mlp_out.weight")):
        name = name.removesuffix("weight") + "original.weight"
    return name.replace("target_model.", "patched_model.")


def write(out: Path, name: str, run: GoldenRun) -> None:
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(zlib.crc32(name.encode()))
    w = make_tensors(run)
    if "vocab_size" in run.model:
        x, leading = torch.randint(run.model["vocab_size"], (BATCH, LENGTH)), (BATCH, LENGTH)
    else:
        x, leading = torch.rand(BATCH * LENGTH, run.model["n_features"]), (BATCH * LENGTH,)
    masks = {path: torch.rand(*leading, C) for path, C in run.sites.items()}
    arrays = compute(run, w, x, masks)
    refuse_alike(run, w, x, arrays)
    arrays |= {"inputs": x.numpy()} | {f"mask/{path}": mask.numpy() for path, mask in masks.items()}
    np.savez_compressed(folder / "expected.npz", **arrays)
    torch.save({oldest_name(key) if run.oldest else key: tensor for key, tensor in w.items()},
               folder / f"model_{run.step}.pth")  # fmt: skip
    for file, content in {run.configuration[0]: run.configuration[1], **run.beside}.items():
        dumped = (
            json.dumps(content, indent=2) + "\n" if file.endswith(".json") else yaml.safe_dump(content, sort_keys=False)
        )
        (folder / file).write_text(dumped)
    share = np.mean([(z > 0).mean() for key, z in arrays.items() if key.startswith("lower/")])
    print(f"{name}: {share:.0%} of the importances above 0, outputs up to {abs(arrays['clean']).max():.2f}")
    assert 0.2 < share < 0.95


def refuse_alike(run: GoldenRun, w: Tensors, x: torch.Tensor, arrays: Mapping[str, np.ndarray]) -> None:
    """An error unless what a reader could take in another order changes the importances."""
    if not run.ci["fn_type"].startswith("global"):
        return
    by_transformer = run.ci["fn_type"] == "global_shared_transformer"
    first = "_input_projector" if by_transformer else "layers.0"
    last = "_output_head" if by_transformer else f"layers.{2 * len(run.ci['hidden_dims'])}"
    changes = {"inputs": (f"ci_fn._global_ci_fn.{first}.W", 0), "outputs": (f"ci_fn._global_ci_fn.{last}.W", 1)}
    if by_transformer:
        changes["q transposed"] = ("ci_fn._global_ci_fn._blocks.0.attn.q_proj.weight", None)
    for what, (key, axis) in changes.items():
        other = compute(run, {**w, key: w[key].T if axis is None else w[key].roll(3, axis)}, x)
        change = max(abs(other[name] - arrays[name]).max() for name in arrays if name.startswith("logits/"))
        assert change > MATTERS, f"{what}: {change:.1e}"


LM_PD = {
    "n_mask_samples": 1, "sampling": "continuous", "sigmoid_type": "leaky_hard", "use_delta_component": True,
    "components_optimizer": {"lr_schedule": {"start_val": 1e-3, "final_val_frac": 0.1, "fn_type": "cosine"}},
    "ci_fn_optimizer": {"lr_schedule": {"start_val": 1e-3, "fn_type": "constant"}},
    "steps": 300, "batch_size": 8,
    "loss_metrics": [
        {"type": "FaithfulnessLoss", "coeff": 1e5},
        {"type": "StochasticReconLoss", "coeff": 1.0},
        {"type": "StochasticAttnPatternsReconLoss", "coeff": 0.1, "n_heads": 2},
    ],
}  # fmt: skip
EVAL = {"batch_size": 8, "n_steps": 1, "every": 100, "slow_every": 100,
        "metrics": [{"type": "CI_L0", "groups": None},
                    {"type": "CEandKLLosses", "rounding_threshold": 0.0}]}  # fmt: skip
DATA = {"dataset_name": "danbraunai/pile-uncopyrighted-tok", "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "column_name": "input_ids", "max_seq_len": LENGTH, "is_tokenized": True, "streaming": True}  # fmt: skip
DEEP = SIMPLE | {"n_layer": 11, "vocab_size": 256, "n_embd": 8, "n_head": 2, "n_intermediate": 12, "rotary_dim": 4,
                 "n_key_value_heads": 1}  # fmt: skip
FLAT_LM = {
    "wandb_project": "spd", "seed": 0, "n_mask_samples": 1, "sigmoid_type": "leaky_hard", "sampling": "continuous",
    "use_delta_component": True, "output_loss_type": "kl", "steps": 300, "batch_size": 8,
    "gradient_accumulation_steps": 1,
    "faithfulness_warmup_steps": 200, "faithfulness_warmup_lr": 0.001, "faithfulness_warmup_weight_decay": 0.0,
    "loss_metric_configs": [
        {"classname": "ImportanceMinimalityLoss", "coeff": 1e-3, "pnorm": 2.0, "beta": 0.5, "eps": 1e-12},
        {"classname": "PersistentPGDReconLoss", "coeff": 0.5, "scope": {"type": "unique_per_batch_per_token"},
         "optimizer": {"type": "adam", "beta1": 0.5, "beta2": 0.99, "step_size": 0.01}, "n_warmup_steps": 1},
    ],
    "eval_metric_configs": [{"classname": "CI_L0", "groups": None}],
    "train_log_freq": 50, "eval_freq": 100, "eval_batch_size": 8, "slow_eval_freq": 100, "n_eval_steps": 1,
    "slow_eval_on_first_step": True, "save_freq": None, "ci_alive_threshold": 0.0, "autocast_bf16": False,
    "components_optimizer": {"type": "AdamW", "lr_schedule": {"start_val": 1e-3, "fn_type": "constant"}},
    "ci_fn_optimizer": {"type": "AdamW", "lr_schedule": {"start_val": 1e-3, "fn_type": "constant"}},
    "pretrained_model_path": None, "output_extract": "logits", "tokenizer_name": "bytes",
    "task_config": {"task_name": "lm", "max_seq_len": LENGTH, "buffer_size": 1000, "column_name": "input_ids",
                    "dataset_name": "danbraunai/pile-uncopyrighted-tok", "train_data_split": "train",
                    "eval_data_split": "val", "shuffle_each_epoch": True, "is_tokenized": True, "streaming": True,
                    "dataset_seed": None},
}  # fmt: skip


def listed(sites: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"module_pattern": path, "C": C} for path, C in sites.items()]


def runs() -> dict[str, GoldenRun]:
    transformer = {"mode": "global", "fn_type": "global_shared_transformer", "simple_transformer_ci_cfg": {
        "d_model": 8, "n_blocks": 2, "mlp_hidden_dim": [12],
        "attn_config": {"n_heads": 2, "max_len": 32, "rope_base": 100.0}}}  # fmt: skip
    nulls = dict.fromkeys(("hidden_dims", "reader_hidden_dims", "d_resid_ci_fn", "block_groups",
                           "extra_input_module_patterns"))  # fmt: skip
    deep = {"h.2.mlp.c_fc": 6, "h.2.mlp.down_proj": 5, "h.10.mlp.c_fc": 6, "h.10.attn.q_proj": 7}
    spec = {"kind": "pretrained", "model_class": "param_decomp_lab.pretrain.models.llama_simple_mlp.LlamaSimpleMLP",
            "run_path": "goodfire/spd/runs/t-00000000"}  # fmt: skip
    global_mlp = {"mode": "global", "fn_type": "global_shared_mlp", "hidden_dims": [9, 7]}
    with_identity = {"h.2.attn.o_proj": 5, "h.10.mlp.c_fc": 6, "h.10.mlp.c_fc.pre_identity": 4}
    shared = {"mode": "layerwise", "fn_type": "shared_mlp", "hidden_dims": [6]}
    of_llama = {"model.layers.0.mlp.gate_proj": 6, "model.layers.1.mlp.gate_proj": 6,
                "model.layers.1.self_attn.v_proj": 5, "model.layers.0.mlp.down_proj": 7}  # fmt: skip
    small = DEEP | {"n_layer": 2}
    of_tms = {"linear1": 6, "linear2": 6, "hidden_layers.0": 3}
    tms_model = {"n_features": 5, "n_hidden": 2, "n_hidden_layers": 1, "tied_weights": True}
    resid_model = {"n_features": 6, "d_embed": 8, "d_mlp": 5, "n_layers": 2, "act_fn_name": "relu", "in_bias": True,
                   "out_bias": True}  # fmt: skip
    of_resid = {f"layers.{n}.{kind}": 4 for n in range(2) for kind in ("mlp_in", "mlp_out")}
    scalar = {"mode": "layerwise", "fn_type": "mlp", "hidden_dims": [4]}
    toy_eval = {**EVAL, "metrics": [{"type": "CI_L0", "groups": None}]}
    return {
        "simple_transformer": GoldenRun(
            llama_simple_mlp, llama_simple_mlp_shapes, DEEP, deep, transformer,
            ("run_meta.yaml", {
                "reloader_class": "param_decomp_lab.experiments.lm:LMReloader",
                "pd": {**LM_PD, "decomposition_targets": listed(deep), "ci_config": transformer | nulls},
                "runtime": {"autocast_bf16": False, "device": "cuda", "dp": None},
                "cadence": {"train_log_every": 50, "save_every": 100}, "eval": EVAL, "data": DATA,
                "target": {"spec": spec, "output_extract": None},
            }),
            {"model_config.yaml": DEEP},
        ),
        "simple_global_mlp": GoldenRun(
            llama_simple_mlp, llama_simple_mlp_shapes, DEEP, with_identity, global_mlp,
            ("final_config.yaml", {
                **FLAT_LM, "ci_config": global_mlp | {"simple_transformer_ci_cfg": None},
                "module_info": listed({path: C for path, C in with_identity.items() if module_of(path) == path}),
                "identity_module_info": [{"module_pattern": "h.10.mlp.c_fc", "C": 4}],
                "pretrained_model_class": "spd.pretrain.models.llama_simple_mlp.LlamaSimpleMLP",
                "pretrained_model_name": "wandb:goodfire/spd/runs/t-00000000",
            }),
            {"model_config.yaml": DEEP},
        ),
        "llama_shared": GoldenRun(
            llama, llama_shapes, small, of_llama, shared,
            ("final_config.yaml", {
                **FLAT_LM, "ci_config": shared,
                "module_info": [
                    {"module_pattern": "model.layers.*.mlp.gate_proj", "C": 6},
                    {"module_pattern": "model.layers.1.self_attn.v_proj", "C": 5},
                    {"module_pattern": "model.layers.0.mlp.down_proj", "C": 7},
                ],
                "pretrained_model_class": "transformers.LlamaForCausalLM", "pretrained_model_name": "tiny/llama",
            }),
            {"config.json": {
                "model_type": "llama", "vocab_size": small["vocab_size"], "hidden_size": 8, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12, "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0, "max_position_embeddings": 32, "tie_word_embeddings": False,
                "hidden_act": "silu",
            }},
        ),
        "tms_mlp": GoldenRun(
            tms, tms_shapes, tms_model, of_tms, scalar,
            ("experiment_config.yaml", {
                "pd": {**LM_PD, "decomposition_targets": listed(of_tms), "ci_config": scalar,
                       "tied_weights": [["linear1", "linear2"]]},
                "runtime": {"autocast_bf16": False}, "cadence": {"train_log_every": 50}, "eval": toy_eval,
                "target": {"run_path": "goodfire/spd/runs/t-00000001"},
                "data": {"feature_probability": 0.05, "data_generation_type": "at_least_zero_active"},
            }),
            {"tms_train_config.yaml": {"tms_model_config": tms_model, "steps": 10}},
            tied=[("linear1", "linear2")],
        ),
        "resid_vector": GoldenRun(
            resid_mlp, resid_mlp_shapes, resid_model, of_resid,
            {"mode": "layerwise", "fn_type": "vector_mlp", "hidden_dims": [3]},
            ("final_config.yaml", {
                "seed": 0, "n_mask_samples": 1, "C": 4,
                "target_module_patterns": ["layers.*.mlp_in", "layers.*.mlp_out"],
                "gate_type": "vector_mlp", "gate_hidden_dims": [3], "sigmoid_type": "leaky_hard",
                "faithfulness_coeff": 1.0, "importance_minimality_coeff": 1e-3, "pnorm": 2.0, "lr": 1e-3,
                "lr_schedule": "cosine", "lr_warmup_pct": 0.0, "steps": 300, "batch_size": 8,
                "pretrained_model_class": "spd.experiments.resid_mlp.models.ResidualMLP",
                "pretrained_model_path": "wandb:spd/runs/abcdefgh",
                "task_config": {"task_name": "resid_mlp", "feature_probability": 0.01,
                                "data_generation_type": "at_least_zero_active"},
            }),
            {"resid_mlp_train_config.yaml": {"resid_mlp_model_config": resid_model}},
            oldest=True,
        ),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes tiny runs of the PyTorch project.")
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    for run_name, golden in runs().items():
        if run_name in given.names or not given.names:
            write(given.out, run_name, golden)
