"""Reads SAEs and transcoders from folders in SAELens' format: `cfg.json` beside `sae_weights.safetensors`.

Keys, defaults and the older form of the file (before SAELens 6: everything at the top, other names) are as in
`sae_lens/saes/` and `handle_pre_6_0_config` of SAELens 6.54. Keys that do not change what is computed are not read.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator
from safetensors import SafetensorError

from param_decomp_jax.analysis.dictionaries import Dictionary, Encoder, Normalization
from param_decomp_jax.analysis.hooks import Hook
from param_decomp_jax.targets.decoder import NORMALIZED, Decoder
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.printable import first_few, printable
from param_decomp_lab.schema.mistakes import ConfigSource, Wrong, rule_error
from param_decomp_lab.schema.strict import Strict, Width, rule, validate
from param_decomp_lab.weights.safetensors_files import open_safetensors

CONFIG_FILE, WEIGHTS_FILE = "cfg.json", "sae_weights.safetensors"
SAE = Literal["standard", "jumprelu", "topk", "gated"]
Transcoder = Literal["transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"]
RENAMED = {"hook_point": "hook_name", "hook_point_head_index": "hook_head_index", "activation_fn_str": "activation_fn"}
"""Older names of keys."""
FLOATS = ("F64", "F32", "F16", "BF16")

READ_BY_TRANSCODERS = ("hook_mlp_in", NORMALIZED, "mlp.hook_in", "hook_resid_mid")
WRITTEN_BY_TRANSCODERS = ("hook_mlp_out", "mlp.hook_out")
READ_BY_SAES = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_in", "mlp.hook_in",
                "mlp.hook_out", "hook_mlp_out")  # fmt: skip
WITHOUT_EFFECT = frozenset({"center_unembed", "fold_ln", "fold_value_biases", "refactor_factored_attn_matrices"})
"""Ways of preparing a model that leave these hooks' activations as they are."""
CENTERED = "center_writing_weights"
IN_RESIDUAL_STREAM = frozenset(READ_BY_SAES) - {"mlp.hook_in"}
"""Hooks at the residual stream, or at what is added to it."""
NOT_IN_THE_FOLDER = {
    "expected_average_only_in": "its factor is not in the folder: fold it in with fold_activation_norm_scaling_factor, "
    "and save again",
    "covariance_whitening": "its matrix is not in the folder: fold it in with fold_activation_whitening, and save "
    "again",
}


class _Metadata(Strict):
    """The hooks that it reads and writes, and the model."""

    hook_name: str
    hook_name_out: str | None = None
    hook_head_index: None = None
    hook_head_index_out: None = None
    model_name: str | None = None
    prepend_bos: bool | None = None
    seqpos_slice: tuple[None, ...] | None = None
    model_from_pretrained_kwargs: Mapping[str, Any] | None = None


def _is_in_the_folder(how: Any) -> Any:
    if isinstance(how, str) and how in NOT_IN_THE_FOLDER:
        raise rule_error(("", f"{how}: {NOT_IN_THE_FOLDER[how]}"))
    return how


class _Config(Strict):
    """The keys that are read of `cfg.json`."""

    architecture: SAE | Transcoder
    d_in: Width
    d_sae: Width
    d_out: Width | None = None
    k: int | None = None
    rescale_acts_by_decoder_norm: bool = False
    apply_b_dec_to_input: bool = True
    normalize_activations: Annotated[Normalization, BeforeValidator(_is_in_the_folder)] = "none"
    reshape_activations: Literal["none"] = "none"
    activation_fn: Literal["relu", "topk"] = "relu"
    metadata: _Metadata

    @property
    def is_transcoder(self) -> bool:
        return self.architecture.endswith("transcoder")

    @rule
    def _is_a_transcoder(self) -> Iterator[Wrong]:
        if self.is_transcoder and self.apply_b_dec_to_input:
            yield "apply_b_dec_to_input", "should be false in a transcoder"
        if self.is_transcoder and self.d_out is None:
            yield "d_out", "is missing; a transcoder has it"

    @rule
    def _where_it_writes(self) -> Iterator[Wrong]:
        out = self.metadata.hook_name_out
        if self.is_transcoder and out is None:
            yield "metadata.hook_name_out", "is missing; a transcoder has it"
        if not self.is_transcoder and out not in (None, self.metadata.hook_name):
            yield "metadata.hook_name_out", "should be missing in an SAE, which writes where it reads"

    @rule
    def _has_a_k(self) -> Iterator[Wrong]:
        if self.architecture == "topk" and not 1 <= (self.k or 0) <= self.d_sae:
            yield "k", f"should be a number from 1 to d_sae, {self.d_sae:,}, not {self.k}"

    @rule
    def _topk_is_topk(self) -> Iterator[Wrong]:
        if self.activation_fn == "topk" and self.architecture != "topk":
            yield "activation_fn", f"is topk, but the architecture is {self.architecture}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that SAELens saves, by name."""
        d_in, C, d_out = self.d_in, self.d_sae, self.d_out if self.is_transcoder and self.d_out else self.d_in
        biases = ("b_gate", "b_mag", "r_mag") if self.architecture == "gated" else ("b_enc",)
        thresholds = ("threshold",) if "jumprelu" in self.architecture else ()
        shapes: dict[str, tuple[int, ...]] = {"W_enc": (d_in, C), "W_dec": (C, d_out), "b_dec": (d_out,)}
        shapes |= dict.fromkeys((*biases, *thresholds), (C,))
        return shapes | ({"W_skip": (d_out, d_in)} if "skip" in self.architecture else {})


@dataclass(frozen=True)
class DictionaryFolder:
    """A folder that was read. ``tensors``: `param_decomp_jax.analysis.dictionaries.Tensors` in float32, with norms of
    the decoder folded in. ``model``, ``prepends_bos``: what it says about the model and the text of its training.
    """

    folder: Path
    config: _Config
    tensors: dict[str, np.ndarray]

    @property
    def kind(self) -> str:
        return "transcoder" if self.config.is_transcoder else "SAE"

    @property
    def model(self) -> str | None:
        name = self.config.metadata.model_name
        return None if name is None else printable(name, 100)

    @property
    def prepends_bos(self) -> bool:
        return bool(self.config.metadata.prepend_bos)

    def fitted(self, target: Decoder) -> Dictionary:
        """Returns the dictionary for a target. Raises UserError if its hooks or its widths are not the target's."""
        config, meta = self.config, self.config.metadata
        may_read, may_write = (
            (READ_BY_TRANSCODERS, WRITTEN_BY_TRANSCODERS) if config.is_transcoder else (READ_BY_SAES, READ_BY_SAES)
        )
        reads = self._hook("metadata.hook_name", meta.hook_name, may_read, target)
        writes = reads
        if config.is_transcoder:
            writes = self._hook("metadata.hook_name_out", meta.hook_name_out or "", may_write, target)
            if reads.layer != writes.layer:
                raise self._error(
                    "metadata.hook_name_out", f"{writes} is in another layer than {reads}, which it reads; the MLP of "
                    "one layer can be replaced"
                )  # fmt: skip
        width = target.architecture.d_model
        for key, value in (("d_in", config.d_in), ("d_out", config.d_out if config.is_transcoder else None)):
            if value not in (None, width):
                raise self._error(key, f"is {value:,}, but the run's target has width {width:,}")
        encoder: Encoder = config.architecture if not config.is_transcoder else (  # type: ignore[assignment]
            "jumprelu" if "jumprelu" in config.architecture else "standard"
        )  # fmt: skip
        return Dictionary(
            encoder,
            reads,
            writes,
            config.normalize_activations,
            config.apply_b_dec_to_input,
            config.k if config.architecture == "topk" else None,
            self._centered(target) and reads.name in IN_RESIDUAL_STREAM,
        )

    def _hook(self, key: str, name: str, possible: tuple[str, ...], target: Decoder) -> Hook:
        found = re.fullmatch(r"blocks\.([0-9]{1,6})\.(.+)", name)
        here = [hook for hook in possible if hook in target.hooks]
        if found is None or found[2] not in here:
            raise self._error(
                key, f"{printable(name, 200)!r} is not a place that a {self.kind} can take in this target; what can be "
                f"replaced is {', '.join(f'blocks.N.{hook}' for hook in here) or 'nothing'}"
            )  # fmt: skip
        layer, n_layers = int(found[1]), target.architecture.n_layers
        if layer >= n_layers:
            raise self._error(key, f"{name}: the run's target has layers 0 to {n_layers - 1}")
        return Hook(layer, found[2])

    def _centered(self, target: Decoder) -> bool:
        """Whether it was trained on activations centered to mean 0."""
        key, given = "metadata.model_from_pretrained_kwargs", self.config.metadata.model_from_pretrained_kwargs or {}
        unknown = sorted(given.keys() - WITHOUT_EFFECT - {CENTERED})
        if unknown:
            raise self._error(f"{key}.{printable(unknown[0], 100)}", "its effect on the model is not known here")
        for name, value in given.items():
            if type(value) is not bool:
                raise self._error(f"{key}.{name}", f"should be true or false, not {value!r:.60}")
        # TransformerLens skips it for a model without LayerNorm.
        return bool(given.get(CENTERED, False)) and target.centers

    def _error(self, key: str, message: str) -> UserError:
        return UserError(f"{self.folder / CONFIG_FILE}: {key}: {message}")


def read_dictionary(folder: Path) -> DictionaryFolder:
    """Reads a folder. Raises UserError, with the key's or the tensor's name, for what is missing, damaged, or computed
    differently from B6.
    """
    file = folder / CONFIG_FILE
    if not folder.is_dir():
        raise UserError(f"--sae {folder}: no such folder")
    raw = read_json(file, "the configuration of an SAE", dict)
    config = validate(_Config, _as_since_6(raw, file), ConfigSource(str(file)))
    tensors = _read_tensors(folder / WEIGHTS_FILE, config)
    if config.rescale_acts_by_decoder_norm and config.architecture == "topk":
        # Folded as in SAELens, with its bound.
        lengths = np.maximum(np.linalg.norm(tensors["W_dec"], axis=-1), 1e-8)
        tensors |= {
            "W_enc": tensors["W_enc"] * lengths,
            "b_enc": tensors["b_enc"] * lengths,
            "W_dec": tensors["W_dec"] / lengths[:, None],
        }
    return DictionaryFolder(folder, config, tensors)


def _as_since_6(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Converts the keys that are read to their form and place in SAELens since version 6."""
    flat = {RENAMED.get(key, key): value for key, value in raw.items()}
    metadata = flat.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise UserError(f"{file}: metadata: should be an object, not {metadata!r:.60}")
    # Null is a missing key, except where it says that something does not exist.
    known = {key: value for key, value in flat.items() if key in _Config.model_fields and value is not None}
    known["metadata"] = {key: value for key, value in (flat | metadata).items() if key in _Metadata.model_fields}
    slice_ = known["metadata"].get("seqpos_slice")
    if isinstance(slice_, list):
        known["metadata"]["seqpos_slice"] = tuple(slice_)
    known.setdefault("architecture", "standard")
    arguments = flat.get("activation_fn_kwargs")
    if known.get("activation_fn") == "topk" and isinstance(arguments, dict):
        known["architecture"] = "topk"
        if "k" in arguments:
            known["k"] = arguments["k"]
    how = known.get("normalize_activations")
    if isinstance(how, bool):
        known["normalize_activations"] = "expected_average_only_in" if how else "none"
    return known


class _Stored(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def _read_tensors(file: Path, config: _Config) -> dict[str, np.ndarray]:
    expected = config.shapes()
    if not file.is_file():  # reading a pipe would block
        raise UserError(f"{file}: no such file, or not a regular one; an SAE's tensors lie there")
    with open_safetensors(file) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
        stored = {name: _Stored(tuple(x.get_shape()), str(x.get_dtype())) for name, x in slices.items()}
        missing = [name for name in expected if name not in stored]
        if missing:
            raise UserError(
                f"{file}: no tensor {missing[0]}, which an SAE of architecture {config.architecture} has (shape "
                f"{list(expected[missing[0]])})"
            )
        for name, shape in expected.items():
            if stored[name].shape != shape:
                raise UserError(
                    f"{file}: {name} has shape {list(stored[name].shape)}, {CONFIG_FILE} implies {list(shape)}"
                )
        for name in (*expected, *("scaling_factor",) * ("scaling_factor" in stored)):
            if stored[name].dtype not in FLOATS:
                raise UserError(f"{file}: {name} is stored as {stored[name].dtype}; should be floating-point numbers")
        try:
            tensors = {name: np.asarray(handle.get_tensor(name), np.float32) for name in expected}
            # Older versions saved a factor of 1 for every latent.
            scaling = handle.get_tensor("scaling_factor") if "scaling_factor" in stored else np.ones(1)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: cannot be read ({error}): copy or download it again") from error
    if not np.allclose(np.asarray(scaling, np.float32), 1):
        raise UserError(
            f"{file}: scaling_factor: latents are scaled (finetuning_scaling_factor), which is not supported"
        )
    unknown = sorted(stored.keys() - expected.keys() - {"scaling_factor"})
    if unknown:
        raise UserError(
            f"{file}: holds {', '.join(first_few(unknown))}, which an SAE of architecture {config.architecture} does "
            "not have"
        )
    for name, x in tensors.items():
        if not np.isfinite(x).all():
            raise UserError(f"{file}: {name} has entries that are not finite")
    return tensors
