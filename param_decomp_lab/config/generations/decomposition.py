"""Translates the choice of sites, and the CI function."""

from collections.abc import Iterator
from typing import Any

from param_decomp_lab.config.generations.reading import Section, Tree
from param_decomp_lab.config.generations.tables import MATRICES

_INITIALIZATIONS = ("random", "nonlinearity_aligned")
_SITE_INPUTS = ("all_site_inputs", "all_block_taps")
"""Taps that stand for the sites' own inputs, which a CI function reads if it has no tap."""
_LONGEST = 2048
"""The default for the longest sequence of a CI transformer."""


def sites(section: Section) -> tuple[list[Tree], Tree]:
    """Translates the section `decomposition.sites` to the current `decomposition_targets` and keys of the wrapper."""
    kind = str(section.take("kind"))
    initialization = str(section.take("initialization", "random"))
    wrapper: Tree = {}
    if initialization not in _INITIALIZATIONS:
        section.lack("initialization", f"components begin as {' or '.join(_INITIALIZATIONS)}")
    elif initialization != "random":
        wrapper["init_components"] = initialization
    origins = section.findings.origins
    origins["pd.decomposition_targets"] = section.path
    targets: list[Tree] = []
    if kind == "explicit":
        for site in section.sections("sites", "site"):
            origins[f"pd.decomposition_targets.{len(targets)}"] = site.path
            targets.append({"module_pattern": site.take("name"), "C": site.take("C")})
            site.close()
        section.close()
        return targets, wrapper
    if kind not in MATRICES:
        section.lack("kind", f"what can be decomposed is {', '.join(MATRICES)} or explicit")
        section.keep_rest()
        return targets, wrapper
    layers = section.section("layers", "layers")
    numbers = ["*"] if layers is None else list(_layers(layers))
    cs = section.section("cs", "cs")
    for layer in numbers:
        for matrix, pattern in MATRICES[kind].items():
            if cs is not None and matrix in cs:
                origins[f"pd.decomposition_targets.{len(targets)}.C"] = cs.at(matrix)
                origins[f"pd.decomposition_targets.{len(targets)}"] = cs.at(matrix)
                targets.append({"module_pattern": pattern.format(layer=layer), "C": cs.take(matrix)})
    if cs is not None:
        cs.close(*MATRICES[kind])
    section.close()
    return targets, wrapper


def _layers(section: Section) -> Iterator[str]:
    kind = section.take("kind")
    if kind == "all":
        yield "*"
    elif kind == "range":
        start, end = section.take("start"), section.take("end")
        if not (_is_natural(start) and _is_natural(end) and start < end):
            section.findings.lack(section.path, "should have start below end, both layer numbers")
        else:
            yield from map(str, range(start, min(end, start + 1000)))
    elif kind == "list":
        indices = section.take("indices", [])
        if not isinstance(indices, list) or not all(map(_is_natural, indices)):
            section.findings.lack(section.at("indices"), "should be a list of layer numbers")
        else:
            yield from map(str, indices)
    else:
        section.lack("kind", "layers are all, range or list")
    section.close()


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def ci_function(section: Section, length: int | None) -> Tree:
    """Translates the CI function, from `decomposition.ci` or `pd.ci_config`. ``length``: of rows, if known."""
    origins = section.findings.origins
    origins["pd.ci_config"] = section.path
    kind = section.take("type")
    if kind is None and "mode" in section:
        return section.keep_rest()
    if kind == "layerwise_mlp":
        out = {"mode": "layerwise", "fn_type": "shared_mlp", "hidden_dims": section.take("hidden_dims")}
    elif kind == "global_mlp":
        out = {"mode": "global", "fn_type": "global_shared_mlp", "hidden_dims": section.take("hidden_dims")}
        out |= _tap(section, None)
    elif kind in ("chunkwise_transformer", "global_transformer"):
        transformer = _transformer(section, length)
        origins["pd.ci_config.simple_transformer_ci_cfg"] = section.path
        if kind == "chunkwise_transformer":
            out = {"mode": "chunkwise", "fn_type": kind, "layers_per_chunk": section.take("blocks_per_chunk")}
            origins["pd.ci_config.layers_per_chunk"] = section.at("blocks_per_chunk")
            out |= _tap(section, "first_block_resid")
        else:
            out = {"mode": "global", "fn_type": "global_shared_transformer", **_tap(section, None)}
        out["simple_transformer_ci_cfg"] = transformer
    else:
        known = "chunkwise_transformer, global_transformer, global_mlp and layerwise_mlp"
        section.lack("type", f"there is no such CI function here; there are {known}")
        section.keep_rest()
        return {}
    section.close()
    return out


def _transformer(section: Section, length: int | None) -> Tree:
    origins, base = section.findings.origins, "pd.ci_config.simple_transformer_ci_cfg"
    out: Tree = section.keep("d_model", "n_blocks")
    attention, hidden = _attention(section), section.take("mlp_hidden")
    ffn = section.section("ffn", "ffn")
    if ffn is not None:
        hidden = ffn.take("hidden")
        origins[f"{base}.mlp_hidden_dim"] = ffn.at("hidden")
        mlp = ffn.take("kind", "gelu")
        if mlp != "gelu":
            out["mlp_type"] = mlp
            origins[f"{base}.mlp_type"] = ffn.at("kind")
        ffn.close()
    if section.take("learned_norm_scale", False):
        out["learned_norm_scale"] = True
    if isinstance(length, int) and length > _LONGEST:
        attention["max_len"] = length
    return {**out, "mlp_hidden_dim": None if hidden is None else [hidden], "attn_config": attention}


def _attention(section: Section) -> Tree:
    inner = section.section("attention", "attention")
    if inner is None:
        return {"n_heads": section.take("n_heads")}
    section.findings.origins["pd.ci_config.simple_transformer_ci_cfg.attn_config"] = inner.path
    inner.take("kind")
    out: Tree = {"n_heads": inner.take("n_heads")}
    groups = inner.take("n_kv_heads")
    if groups is not None:
        out["n_kv_heads"] = groups
    mask = inner.take("mask", "bidirectional")
    if mask not in ("bidirectional", "causal"):
        inner.lack("mask", "attention is bidirectional or causal")
    elif mask == "causal":
        out["causal"] = True
    inner.close()
    return out


def _tap(section: Section, default: str | None) -> Tree:
    """Translates what the function reads (C10). ``default``: used if the file does not say; None stands for the inputs
    of the sites.
    """
    tap = section.take("input_tap", default)
    if tap is None or tap in _SITE_INPUTS:
        if tap == "all_block_taps":
            given = "is all_block_taps; the inputs of the decomposed sites are read"
            section.findings.notes.append(f"{section.at('input_tap')}: {given}")
        return {}
    if isinstance(tap, dict) and tap.get("kind") == "residual_boundaries":
        return {"input_tap": {"residual_boundaries": tap.get("offsets")}}
    return {"input_tap": tap}
