"""Lists the layouts from which `pd fit --for speed` chooses."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from param_decomp_jax.sharding.memory import INTERMEDIATES, MemoryPolicy
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.memory import KEEP_ALL, PRESETS, Memory, Preset
from param_decomp_lab.config.method_schema import LanguageModelData
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe.fastest import LayoutChoice, Space
from param_decomp_lab.probe.vary import Axes, fitting_evaluation, mesh_sizes, meshes_of, sets_mesh

LINKS = frozenset({"node links", "network", "latency"})
"""Terms of the roofline that node copies reduce."""


def _usual(n_gpus: int) -> Preset:
    """Returns the preset with which the search begins: the one that spends most memory to be fast."""
    return "one_card" if n_gpus == 1 else "fast"


def spaces(
    config: RunConfig,
    n_gpus: int,
    per_node: int,
    vary: Mapping[str, Sequence[Any]],
    set_keys: Collection[str] = (),
    file_keys: Collection[str] = (),
) -> list[Space]:
    """Returns a space for each mesh and preset. ``set_keys``: keys that the user has set, which no layout changes.
    ``file_keys``: those of the memory section in the user's file.

    Raises UserError if the batch cannot be divided among the GPUs, and for keys that `--vary` cannot vary here.
    """
    for key in ("batch", "seq"):
        if key in vary:
            name = {"batch": "pd.batch_size", "seq": "data.max_seq_len"}[key]
            raise UserError(
                f"--vary {key}: the fastest step is one of a given size; set it with --set {name}=…, or ask for the "
                "largest with --for batch"
            )
    presets: Sequence[Preset] = list(vary.get("memory", ()))
    given = bool(presets) or bool({"memory", "memory.preset", "remat_recon_forwards"} & {*set_keys})
    if not given:
        presets = [_usual(n_gpus)]
    elif not presets:
        presets = [config.wrapper.memory.preset or "balanced"]
    decided = {*set_keys, *vary}
    found = []
    meshes = _meshes(config, n_gpus, per_node, vary, set_keys)
    for mesh, preset in itertools.product(meshes, presets):
        sizes = mesh_sizes(mesh, per_node)
        settings = {"mesh": sizes, "memory.preset": preset, "remat_recon_forwards": preset not in KEEP_ALL}
        choices = [
            *([] if sizes["fsdp"] == 1 else _held(sizes["nodes"], decided)),
            *([] if given else _saved(preset, config.wrapper.memory, decided)),
            *([] if given else _blocks(config, mesh, decided)),
            *([] if given else _layers(preset, decided)),
            *_varied(vary),
        ]
        make = partial(_settings, config, settings, {*set_keys}, {*vary}, {*file_keys})
        name = _words(mesh) if preset == _usual(n_gpus) else f"{_words(mesh)}, {preset}"
        begin = tuple(_begin(choice, PRESETS[preset]) for choice in choices)
        found.append(Space(name, tuple(choices), begin, config.method.pd.batch_size, make))
    return found


def _meshes(
    config: RunConfig, n_gpus: int, per_node: int, vary: Mapping[str, Sequence[Any]], set_keys: Collection[str]
) -> list[Axes]:
    """Returns the meshes that `--vary` or `--set` give. Otherwise, it returns all GPUs as one fsdp axis, and a replica
    on each node, both for the least tensor axis that divides the batch and for twice that.
    """
    if "mesh" in vary or sets_mesh(set_keys):
        return meshes_of(config, n_gpus, vary)
    batch = config.method.pd.batch_size
    tensors = [t for t in range(1, per_node + 1) if per_node % t == n_gpus % t == 0 and batch % (n_gpus // t) == 0]
    if not tensors:
        raise UserError(
            f"a batch of {batch} rows cannot be divided among {n_gpus} GPUs, nor among groups of up to {per_node} of "
            f"them; set pd.batch_size to a multiple of {n_gpus // per_node}, or take fewer GPUs"
        )
    found: list[Axes] = []
    for tensor in tensors[:2]:
        found.append((1, n_gpus // tensor, tensor))
        if n_gpus > per_node and tensor == tensors[0]:
            found.append((n_gpus // per_node, per_node // tensor, tensor))
    return found


def _words(mesh: Axes) -> str:
    return " × ".join(f"{name} {n}" for name, n in zip(("replica", "fsdp", "tensor"), mesh, strict=True) if n > 1) or (
        "one GPU"
    )


_HELD = "memory.held."
_SAVE = "memory.save."


def _held(nodes: int, decided: Collection[str]) -> list[LayoutChoice]:
    if any(key == "memory" or key.startswith("memory.held") for key in decided):
        return []
    names = {"components": "V, U", "ci": "CI", "sources": "sources", "target": "target"}
    found = []
    for group, name in names.items():
        key = _HELD + group
        levels: list[tuple[str, tuple[tuple[str, Any], ...]]] = [(f"{name} not held", ((key, None),))]
        if nodes > 1:
            levels.append((f"{name} by node", ((key, "node"),)))
        if group == "ci":
            words, assignments = levels[-1]
            levels.append((f"{words}, its heads by device", (*assignments, (f"{_HELD}heads", "device"))))
        found.append(LayoutChoice(key, (*levels, ("", ((key, "device"),))), LINKS))
    return found


def _saved(preset: Preset, own: Memory, decided: Collection[str]) -> list[LayoutChoice]:
    if {"memory.save", "memory.recompute", "memory.offload"} & {*decided}:
        return []
    found, saves = [], PRESETS[preset].save
    for name in sorted(INTERMEDIATES, key=lambda name: name not in saves):
        if name in own.offload:
            continue
        key, usual = _SAVE + name, name in saves
        without = (f"{name} recomputed" if usual else "", ((key, False),))
        found.append(LayoutChoice(key, (without, ("" if usual else f"{name} saved", ((key, True),)))))
    return found


def _blocks(config: RunConfig, mesh: Axes, decided: Collection[str]) -> list[LayoutChoice]:
    """Returns the choices of block sizes and numbers of micro-batches; tokens are counted over all GPUs."""
    found = []
    sizes: dict[str, tuple[int | None, ...]] = {
        "memory.component_block": (1 << 12, 1 << 13, None),
        "memory.token_block": (1 << 20, None),
    }
    words = {"memory.component_block": "components", "memory.token_block": "tokens"}
    data = config.method.data
    tokens = config.method.pd.batch_size * (data.max_seq_len if isinstance(data, LanguageModelData) else 1)
    for key, values in sizes.items():
        if key not in decided and not (key == "memory.token_block" and tokens <= 1 << 20):
            levels = tuple((f"{n:,} {words[key]} at once" if n else "", ((key, n),)) for n in values)
            found.append(LayoutChoice(key, levels))
    key, batch, shared = "memory.micro_batches", config.method.pd.batch_size, mesh[0] * mesh[1]
    parts = [n for n in (8, 4, 2, 1) if batch % (n * shared) == 0]
    if key not in decided and len(parts) > 1:
        found.append(LayoutChoice(key, tuple((f"{n} micro-batches" if n > 1 else "", ((key, n),)) for n in parts)))
    return found


def _layers(preset: Preset, decided: Collection[str]) -> list[LayoutChoice]:
    """Returns the choice between a loop over identical layers and unrolled layers, which need no copies out of stacks
    but compile longer.
    """
    if "memory.layers" in decided:
        return []
    usual = PRESETS[preset].layers
    words = {"scan": "layers in a loop", "unroll": "layers written out"}
    levels = tuple(("" if key == usual else words[key], (("memory.layers", key),)) for key in words)
    return [LayoutChoice("memory.layers", levels, frozenset({"memory"}), ordered=False)]


def _varied(vary: Mapping[str, Sequence[Any]]) -> list[LayoutChoice]:
    keys = {key: values for key, values in vary.items() if key not in ("mesh", "memory")}
    return [
        LayoutChoice(key, tuple((f"{key} {value}", ((key, value),)) for value in values), ordered=False)
        for key, values in keys.items()
    ]


def _begin(choice: LayoutChoice, usual: MemoryPolicy) -> int:
    """Returns the level of the preset, or the first of those that `--vary` gives."""
    if choice.name == "memory.layers":
        return ("scan", "unroll").index(usual.layers)
    if choice.name.startswith(_SAVE):
        return int(choice.name.removeprefix(_SAVE) in usual.save)
    return len(choice.levels) - 1 if choice.ordered else 0


def _settings(
    config: RunConfig,
    fixed: Mapping[str, Any],
    set_keys: set[str],
    varied: set[str],
    file_keys: set[str],
    pairs: Sequence[tuple[str, Any]],
) -> tuple[tuple[str, Any], ...]:
    """Returns ``fixed`` and the chosen levels as assignments. The memory section only has what differs from the preset
    or from the file.
    """
    chosen = dict(pairs)
    settings = dict(fixed)
    preset: Preset = fixed["memory.preset"]
    policy = PRESETS[preset]
    held = {key.removeprefix(_HELD): by for key, by in chosen.items() if key.startswith(_HELD)}
    if held:
        settings["memory.held"] = {group: by for group, by in held.items() if by}
        if settings["memory.held"] == dict(policy.held) and "held" not in file_keys:
            del settings["memory.held"]
    saves = {key.removeprefix(_SAVE): value for key, value in chosen.items() if key.startswith(_SAVE)}
    lists = {
        "save": [name for name, saved in saves.items() if saved and name not in policy.save],
        "recompute": [name for name, saved in saves.items() if not saved and name in policy.save],
    }
    for key, names in lists.items():
        if saves and (names or key in file_keys):
            settings[f"memory.{key}"] = names
    for key, value in chosen.items():
        if key.startswith((_HELD, _SAVE)):
            continue
        usual_value = getattr(policy, key.removeprefix("memory."), None)
        if key in varied or value != usual_value or key.removeprefix("memory.") in file_keys:
            settings[key] = value
    return fitting_evaluation(config, settings, {*set_keys, *varied})
