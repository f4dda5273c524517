"""From a configuration to what a run works with: target, weights, data, mesh; checked before anything is written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from param_decomp_jax.ci import GlobalTransformer
from param_decomp_jax.placement import MeshShape, batch_sharding, from_host, make_mesh, sharding
from param_decomp_jax.step import Problem
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.llama import Llama, make_sites, module_names, weight_shapes
from param_decomp_lab.config import RunConfig, match_sites
from param_decomp_lab.config.core_specs import decomposition
from param_decomp_lab.config.metric_schema import CI_L0
from param_decomp_lab.config.site_patterns import matches_module
from param_decomp_lab.config.torch_schema import EvalConfig, HubSpec, LanguageModelData, LanguageModelFile
from param_decomp_lab.data.batches import Batches
from param_decomp_lab.data.meta import META_FILE
from param_decomp_lab.data.row_range import RowRange, TokenRows
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.hf_config import read_config
from param_decomp_lab.weights.hf_llama import load_llama


@dataclass(frozen=True)
class Built:
    """``train``, ``eval``: the batch of a step (or of an evaluation's number) on the mesh; eval is None without one.

    ``text``: turns token ids into text, None where no tokenizer is at hand.
    """

    problem: Problem
    weights: Weights
    mesh: Mesh
    leading: tuple[int, int]
    train: Callable[[int], Array]
    eval: Callable[[int], Array] | None
    text: TokenText | None


def build(config: RunConfig) -> Built:
    """Target, weights, data and mesh of a language-model run. UserError for whatever does not fit together."""
    torch = config.torch
    assert isinstance(torch, LanguageModelFile)
    folder = target_folder(config)
    architecture = read_config(folder)
    sites = make_sites(architecture, dict(match_sites(torch.pd.decomposition_targets, module_names(architecture))))
    spec = decomposition(config)

    train, held_out = _data(config)
    longest = spec.ci.max_len if isinstance(spec.ci, GlobalTransformer) else None
    for data in {id(d): d for d in (train, held_out) if d is not None}.values():
        data.check(architecture.vocab_size, longest)
        if data.seq_len != torch.data.max_seq_len:
            raise UserError(
                f"{data.source}: rows have {data.seq_len} tokens, but data.max_seq_len is {torch.data.max_seq_len}; "
                "make the two equal (`pd data tokenize --seq-len`)"
            )

    mesh = _mesh(config)
    place = _placer(mesh)
    train_batches = Batches(train, torch.pd.batch_size, torch.pd.seed)
    eval_batches = None
    if torch.eval is not None and held_out is not None:
        eval_batches = Batches(held_out, torch.eval.batch_size, torch.pd.seed)
        wanted = torch.eval.n_steps * torch.eval.batch_size
        if wanted > len(held_out):
            raise UserError(
                f"{held_out.source} has {len(held_out)} rows, an evaluation reads {wanted} (eval.n_steps x "
                "eval.batch_size); give more held-out data or evaluate on less"
            )
        _check_groups(torch.eval, [site.name for site in sites.all])
    whole = sharding(mesh)
    shardings = jax.tree.map(lambda _: whole, weight_shapes(architecture), is_leaf=lambda x: isinstance(x, tuple))
    _, weights = load_llama(folder, torch.target.weights_dtype, shardings)
    target = Llama(architecture, sites, spec.memory, jnp.dtype(spec.compute_dtype))
    return Built(
        problem=Problem(spec, target),
        weights=weights,
        mesh=mesh,
        leading=(torch.pd.batch_size, train.seq_len),
        train=lambda step: place(train_batches[step]),
        eval=None if eval_batches is None else lambda number: place(eval_batches[number]),
        text=_text(config, folder),
    )


def _check_groups(settings: EvalConfig, sites: list[str]) -> None:
    for n, metric in enumerate(settings.metrics):
        for group, patterns in (metric.groups or {}).items() if isinstance(metric, CI_L0) else ():
            if not any(matches_module(pattern, site) for pattern in patterns for site in sites):
                where = f"eval.metrics.{n}.groups.{group}"
                raise UserError(f"{where}: {', '.join(patterns)} matches none of the sites ({', '.join(sites)})")


def target_folder(config: RunConfig) -> Path:
    """The local folder with the target's weights: the wrapper's, the schema's, or the hub's local cache."""
    assert isinstance(config.torch, LanguageModelFile)
    if config.wrapper.target is not None and config.wrapper.target.folder is not None:
        return config.wrapper.target.folder
    spec = config.torch.target.spec
    assert isinstance(spec, HubSpec)
    local = Path(spec.model_name).expanduser()
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(spec.model_name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"target.spec.model_name: '{spec.model_name}' is neither a folder nor in the local Hugging Face cache, and "
            "a run downloads nothing; fetch it first, or give target: {folder: <path>} in the wrapper"
        ) from error


def _data(config: RunConfig) -> tuple[TokenRows, TokenRows | None]:
    data = config.torch.data
    assert isinstance(data, LanguageModelData)
    settings = config.torch.eval
    if config.wrapper.data is not None:
        folders = config.wrapper.data
        if folders.train.resolve() == folders.eval.resolve():
            raise UserError(f"data.train and data.eval are the same folder ({folders.train}); evaluate on other rows")
        return TokenData(folders.train), TokenData(folders.eval) if settings is not None else None
    assert data.data_files is not None
    rows = TokenData(data.data_files)
    if settings is None:
        return rows, None
    # One set of files for both: the last rows are held out, as many as an evaluation reads.
    held = settings.batch_size * settings.n_steps
    if len(rows) - held < config.torch.pd.batch_size:
        raise UserError(f"{rows.source} has {len(rows)} rows; {held} are held out for evaluation and too few remain")
    return RowRange(rows, 0, len(rows) - held), RowRange(rows, len(rows) - held, len(rows))


def _text(config: RunConfig, target: Path) -> TokenText | None:
    """The tokenizer beside the data if that was tokenized here, else the target's own."""
    beside_data = None if config.wrapper.data is None else config.wrapper.data.train.parent
    folder = beside_data if beside_data is not None and (beside_data / META_FILE).is_file() else target
    try:
        return TokenText(folder)
    except UserError:
        return None


def _mesh(config: RunConfig) -> Mesh:
    m = config.wrapper.mesh
    shape = MeshShape(m.replica, m.fsdp, m.tensor)
    if shape.n_devices > jax.device_count():
        raise UserError(
            f"mesh: replica {m.replica} x fsdp {m.fsdp} x tensor {m.tensor} needs {shape.n_devices} devices, "
            f"this machine has {jax.device_count()} ({jax.default_backend()})"
        )
    return make_mesh(shape)


def _placer(mesh: Mesh) -> Callable[[np.ndarray], Array]:
    where = batch_sharding(mesh)
    return lambda tokens: from_host(tokens, where)
