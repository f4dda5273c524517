"""An opened run: what it decomposed, what it learned, and what both say of inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from param_decomp_jax.ci import GlobalTransformer
from param_decomp_jax.ci.function import CIFunction
from param_decomp_jax.masks import Bundle
from param_decomp_jax.placement import batch_sharding, from_host
from param_decomp_jax.sites import Site, Stack
from param_decomp_jax.step import Problem
from param_decomp_jax.targets.architecture import Architecture, FeatureInputs, TokenInputs
from param_decomp_jax.targets.base import Weights
from param_decomp_lab.checkpoints.store import Learned
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.strict import nearest
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.errors import UserError
from param_decomp_lab.metrics.sinks import read_metrics
from param_decomp_lab.opening.forward import clean, importances, masked
from param_decomp_lab.opening.masks import CI, Masks, bundle, by_site, chosen_sites
from param_decomp_lab.opening.target import load_weights, weights_folder
from param_decomp_lab.setup.language_model import find_tokenizer

Inputs = Any
"""Token ids ``[B, T]``, or ``[T]``, or a text, for a language model; features ``[B, n]``, or ``[n]``, for a toy."""

Importance = Literal["lower", "upper", "logits"]


@dataclass(frozen=True)
class Component:
    """Component ``number`` of a site: the rank-one matrix ``V ⊗ U``."""

    site: str
    number: int
    V: Float[np.ndarray, " d_in"]
    U: Float[np.ndarray, " d_out"]

    @property
    def norm(self) -> float:
        """Frobenius norm of the rank-one matrix, ``‖V‖ · ‖U‖``."""
        return float(np.linalg.norm(self.V) * np.linalg.norm(self.U))

    @property
    def matrix(self) -> Float[np.ndarray, "d_in d_out"]:
        return np.outer(self.V, self.U)

    def __repr__(self) -> str:
        return (
            f"Component({self.site}, {self.number}: V [{self.V.shape[0]}], U [{self.U.shape[0]}], norm {self.norm:.4g})"
        )


class Run:
    """A run opened by `load_run`.

    ``step``: of the checkpoint that was read. ``sites``: by name, in canonical order, each with `d_in`, `d_out`, `C`.
    ``problem``, ``learned``, ``mesh``: for code that goes on with the core's own functions (under `jax.set_mesh`).
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        step: int,
        architecture: Architecture,
        problem: Problem,
        mesh: Mesh,
        learned: Learned,
    ) -> None:
        self.folder, self.config, self.step = folder, config, step
        self.architecture, self.problem, self.mesh, self.learned = architecture, problem, mesh, learned
        self.sites: dict[str, Site] = {site.name: site for site in problem.target.sites.all}

    @property
    def id(self) -> str:
        return self.config.wrapper.run_id or self.folder.name

    @property
    def name(self) -> str:
        return self.config.wrapper.run_name

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`, each with `step`, as they are now."""
        return read_metrics(self.folder)

    @cached_property
    def weights(self) -> Weights:
        """The target's weights. UserError where they are not, or are another target's."""
        return load_weights(self.config, self.architecture, self.mesh)

    @property
    def target(self) -> Any:
        """The target's forward pass (`param_decomp_jax.targets.base.Target`); its weights are `weights`."""
        return self.problem.target

    @property
    def ci(self) -> CIFunction:
        """The trained CI function."""
        return self.learned.ci

    @cached_property
    def text(self) -> TokenText | None:
        """Text to token ids and back; None where no tokenizer is beside the data or the target."""
        if not self._is_language_model:
            return None
        return find_tokenizer(self.config, weights_folder(self.config))

    # --- components ---

    def component(self, site: str, number: int) -> Component:
        """One component. UserError: no such site, no such component."""
        where = self._site(site)
        if not 0 <= number < where.C:
            raise UserError(f"{where.name} has components 0 to {where.C - 1}; there is no {number}")
        V, U = self._factors(where)
        return Component(where.name, int(number), np.asarray(V[:, number]), np.asarray(U[number]))

    def factors(self, site: str) -> tuple[Float[np.ndarray, "d_in C"], Float[np.ndarray, "C d_out"]]:
        """V and U of a site, on the host."""
        V, U = self._factors(self._site(site))
        return np.asarray(V), np.asarray(U)

    def matrix(self, site: str) -> Float[np.ndarray, "d_in d_out"]:
        """W of a site, used as ``x @ W``; ``run.matrix(s) - V @ U`` is what its components leave unexplained."""
        stack, row = self._place(self._site(site))
        with jax.set_mesh(self.mesh):
            return np.asarray(self.target.site_weights(self.weights)[stack.name][row])

    def _factors(self, site: Site) -> tuple[Float[Array, "d_in C"], Float[Array, "C d_out"]]:
        stack, row = self._place(site)
        first = self.target.sites.views.get(stack.name)
        trained = self.learned.components[first or stack.name]
        if first is None:
            return trained.V[row], trained.U[row]
        return trained.U[row].T, trained.V[row].T  # T4

    def _site(self, name: str) -> Site:
        plain = name.removeprefix("model.").removesuffix(".weight")
        if plain not in self.sites:
            raise UserError(f"'{name}' is no site; {nearest(plain, self.sites)}")
        return self.sites[plain]

    def _place(self, site: Site) -> tuple[Stack, int]:
        return self.target.sites.stack_rows[list(self.sites).index(site.name)]

    # --- what it says of inputs ---

    def causal_importances(
        self, inputs: Inputs, sites: str | Sequence[str] | None = None, kind: Importance = "lower"
    ) -> dict[str, Float[Array, "*n C"]]:
        """Causal importances ``[B, T, C]`` by site (``[B, C]`` of a toy), in fp32.

        ``inputs``: token ids ``[B, T]`` or a text; of a toy features ``[B, n]``. A single row has no batch axis, and
        neither has the result. ``sites``: names or patterns; nothing is made of the others. ``kind``: ``lower`` is λ,
        which masks are made of (C3); ``upper`` is υ, which importance minimality counts; ``logits`` is what both
        squash. Raises UserError: inputs that are none of the target's, an unknown site, no weights.
        """
        names = chosen_sites(self.target.sites, sites)
        if kind not in ("lower", "upper", "logits"):
            raise UserError(f"kind: '{kind}' should be lower, upper or logits")
        batch, single = self._batch(inputs)
        weights = self.weights
        with jax.set_mesh(self.mesh):
            found = self._importances(*self.learned, weights, batch, names, kind)
        return {name: found[name][0] if single else found[name] for name in names}

    def output(self, inputs: Inputs, masks: Masks | None = None, delta: float = 0.0) -> Float[Array, "*n d"]:
        """What the target gives in fp32: next-token logits ``[B, T, vocabulary]``, or the output of a toy.

        ``masks`` None: the target as it is. ``"ci"``: every site masked by λ. Or by site name or pattern: ``"ci"``;
        component numbers (those on, the others off); a mask that broadcasts to ``[B, T, C]``. Sites that are not named
        are left as the target has them (F3). ``delta``: how much of what the components leave unexplained is added at
        the masked sites (F1), 0 or 1 as a rule. ``inputs`` as in `causal_importances`.
        """
        batch, single = self._batch(inputs)
        weights = self.weights
        wanted = {} if masks is None else by_site(self.target.sites, masks, self._leading(batch))
        with jax.set_mesh(self.mesh):
            if not wanted:
                y = self._clean(weights, batch)
            else:
                pinned = all(isinstance(mask, str) for mask in wanted.values())
                live, sources = self._sources(wanted, batch, delta, pinned)
                y = self._masked(*self.learned, weights, batch, sources, live, pinned)
        return y[0] if single else y

    def logits(self, tokens: Inputs, masks: Masks | None = None, delta: float = 0.0) -> Float[Array, "*n vocabulary"]:
        """`output` of a language model."""
        if not self._is_language_model:
            raise UserError("a toy has no logits; ask for run.output(inputs, masks)")
        return self.output(tokens, masks, delta)

    def _sources(
        self, wanted: dict[str, Any], batch: Array, delta: float, pinned: bool
    ) -> tuple[tuple[int, ...], Bundle]:
        """``pinned``: all masks are λ, so every source is 0 (M1); else the sources are the masks, and λ counts as 0."""
        leading = self._leading(batch)
        if pinned:
            masks = {name: np.zeros((1,) * len(leading) + (self.sites[name].C,), np.float32) for name in wanted}
        else:
            with_ci = tuple(name for name, mask in wanted.items() if isinstance(mask, str) and mask == CI)
            found = self._importances(*self.learned, self.weights, batch, with_ci, "lower") if with_ci else {}
            masks = {name: np.asarray(found[name]) if name in found else mask for name, mask in wanted.items()}
        return bundle(self.target.sites, masks, len(leading), delta)

    @cached_property
    def _importances(self) -> Any:
        return jax.jit(partial(importances, self.problem), static_argnums=(4, 5))

    @cached_property
    def _masked(self) -> Any:
        return jax.jit(partial(masked, self.problem), static_argnums=(5, 6))

    @cached_property
    def _clean(self) -> Any:
        return jax.jit(partial(clean, self.problem))

    # --- inputs ---

    @property
    def _is_language_model(self) -> bool:
        return isinstance(self.architecture.inputs, TokenInputs)

    def _leading(self, batch: Array) -> tuple[int, ...]:
        """Axes of an activation before its last one."""
        axes: tuple[int, ...] = self.target.activation_axes(batch.shape)
        return axes

    def _batch(self, inputs: Inputs) -> tuple[Array, bool]:
        """A batch on the mesh, and whether it was given as one row."""
        rows = self._tokens(inputs) if self._is_language_model else self._features(inputs)
        single = rows.ndim == 1
        rows = rows[None] if single else rows
        return from_host(rows, batch_sharding(self.mesh, rows.shape)), single

    def _tokens(self, inputs: Inputs) -> Int[np.ndarray, "*B T"]:
        reads = self.architecture.inputs
        assert isinstance(reads, TokenInputs)
        if isinstance(inputs, str):
            if self.text is None:
                raise UserError("no tokenizer is beside the data or the target: give token ids instead of a text")
            inputs = np.asarray(self.text.ids(inputs), np.int32)
        rows, vocabulary = np.asarray(inputs), reads.vocab_size
        if rows.dtype.kind not in "iu" or rows.ndim not in (1, 2) or rows.size == 0:
            raise UserError(f"inputs should be token ids [B, T] or [T], not {rows.dtype} {list(rows.shape)}")
        if rows.min() < 0 or rows.max() >= vocabulary:
            raise UserError(f"token ids go from 0 to {vocabulary - 1}; the inputs', from {rows.min()} to {rows.max()}")
        if reads.longest is not None and rows.shape[-1] > reads.longest:
            raise UserError(f"the target takes up to {reads.longest} tokens; the inputs have {rows.shape[-1]}")
        ci = self.problem.decomposition.ci
        if isinstance(ci, GlobalTransformer) and rows.shape[-1] > ci.max_len:
            raise UserError(f"the CI function takes up to {ci.max_len} tokens; the inputs have {rows.shape[-1]}")
        return rows.astype(np.int32)

    def _features(self, inputs: Inputs) -> Float[np.ndarray, "*B n"]:
        assert isinstance(self.architecture.inputs, FeatureInputs)
        n, rows = self.architecture.inputs.n_features, np.asarray(inputs)
        if rows.dtype.kind not in "fiub" or rows.ndim not in (1, 2) or rows.shape[-1] != n or rows.size == 0:
            raise UserError(f"inputs should be features [B, {n}] or [{n}], not {rows.dtype} {list(rows.shape)}")
        return rows.astype(np.float32)

    def __repr__(self) -> str:
        stacks = self.target.sites.stacks
        width = max(len(stack.name) for stack in stacks)
        lines = [
            f"Run {self.id} ({self.name}), step {self.step:,} of {self.problem.decomposition.steps:,}: "
            f"{len(self.sites)} sites, {sum(site.C for site in self.sites.values()):,} components",
            f"  of {self.architecture.describe()}",
            *(f"  {stack.name:{width}}  {stack.d_in:,} × {stack.d_out:,}  C {stack.C:,}" for stack in stacks),
        ]
        return "\n".join(lines)
