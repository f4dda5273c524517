"""A run opened for reading: its target, components and CI function, and their outputs on inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32

from param_decomp_jax.ci import longest_row
from param_decomp_jax.ci.function import CIFunction
from param_decomp_jax.decomposition.sites import Site, Stack
from param_decomp_jax.method.inspection import unstack_sites
from param_decomp_jax.method.masks import Bundle
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.placement import batch_sharding, from_host
from param_decomp_jax.targets.architecture import Architecture, TokenInputs
from param_decomp_jax.targets.base import Weights
from param_decomp_lab.config.site_patterns import chosen_sites
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.token_names import unnamed
from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.data_file import read_data
from param_decomp_lab.runs.forward import activations, attacked, clean, importances, masked, masked_at
from param_decomp_lab.runs.generation import generate
from param_decomp_lab.runs.inputs import Inputs, read_inputs
from param_decomp_lab.runs.listing import read_run
from param_decomp_lab.runs.masks import CI, Delta, Masks, bundle, by_site
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.runs.target import load_weights, weights_folder
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.schema.spelling import nearest
from param_decomp_lab.setup.bos import find_tokenizer
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.ui.cards import card

Importance = Literal["lower", "upper", "logits"]
NEURONS_SHOWN = 8
ROWS_AT_ONCE = 8
"""The number of rows that run together if many are requested: a site's products take ``ROWS_AT_ONCE · T · C`` floats.
"""
STACKS_SHOWN = 24
"""Kinds of matrices that a notebook shows of a run."""


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

    def _repr_html_(self) -> str:
        def largest(x: np.ndarray) -> list[tuple[int, float]]:
            cosines = x / max(float(np.linalg.norm(x)), 1e-30)
            order = np.argsort(-np.abs(cosines), kind="stable")[:NEURONS_SHOWN]
            return [(int(i), float(cosines[i])) for i in order]

        neurons = [("read by V", largest(self.V)), ("written by U", largest(self.U))]
        return card(
            "matrix", site=self.site, n=self.number, d_in=len(self.V), d_out=len(self.U), norm=self.norm,
            neurons=neurons,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"Component({self.site}, {self.number}: V [{self.V.shape[0]}], U [{self.U.shape[0]}], norm {self.norm:.4g})"
        )


class OpenedRun:
    """A run opened by `open_run`: its components, CI function, target and metrics.

    ``resolved``: its configuration, ``config``, with what follows from it. ``step``: the step of the checkpoint that
    was read. ``sites``: the sites by name, in canonical order, each with `d_in`, `d_out` and `C`. ``problem``,
    ``learned``, ``mesh``: for calling functions of `param_decomp_jax` directly (under `jax.set_mesh`).
    """

    def __init__(
        self,
        folder: Path,
        resolved: ResolvedConfig,
        step: int,
        architecture: Architecture,
        problem: Problem,
        mesh: Mesh,
        learned: Learned,
    ) -> None:
        self.folder, self.resolved, self.config, self.step = folder, resolved, resolved.config, step
        self.architecture, self.problem, self.mesh, self.learned = architecture, problem, mesh, learned
        self.sites: dict[str, Site] = {site.name: site for site in problem.target.sites.all}

    @property
    def id(self) -> str:
        """The run id, which is also the name of the run folder."""
        return self.config.wrapper.run_id or self.folder.name

    @property
    def name(self) -> str:
        """The run's name for people (`run_name`)."""
        return self.config.wrapper.run_name

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`, each with `step`, read anew at every access."""
        return read_metrics(self.folder)

    @cached_property
    def weights(self) -> Weights:
        """The target's weights. Raises UserError if they are missing or belong to another target."""
        return load_weights(self.resolved, self.problem.target, self.mesh)

    @property
    def target(self) -> Any:
        """The target network (`param_decomp_jax.targets.base.Target`), without its weights, which are in `weights`."""
        return self.problem.target

    @property
    def ci(self) -> CIFunction:
        """The trained CI function."""
        return self.learned.ci

    @cached_property
    def text(self) -> TokenText | None:
        """The tokenizer. None if there is none next to the data or the target, and for a toy. Its prompts begin with
        BOS if the rows of the run's data do."""
        if not self.is_language_model:
            return None
        text = find_tokenizer(self.resolved.data, weights_folder(self.resolved.target))
        recorded = read_data(self.folder)
        if text is not None and recorded is not None:
            text.bos = recorded.bos
        return text

    # --- components ---

    def component(self, site: str, number: int) -> Component:
        """Component ``number`` of a site. Raises UserError if there is no such site or component."""
        where = self._site(site)
        if not 0 <= number < where.C:
            raise UserError(f"{where.name} has components 0 to {where.C - 1}, and no component {number}")
        V, U = self._factors(where)
        return Component(where.name, int(number), np.asarray(V[:, number]), np.asarray(U[number]))

    def factors(self, site: str) -> tuple[Float[np.ndarray, "d_in C"], Float[np.ndarray, "C d_out"]]:
        """V and U of a site, as NumPy arrays."""
        V, U = self._factors(self._site(site))
        return np.asarray(V), np.asarray(U)

    def factors_of(self, site: str, numbers: slice) -> tuple[Float[np.ndarray, "d_in n"], Float[np.ndarray, "n d_out"]]:
        """V and U of some consecutive components of a site, as NumPy arrays."""
        V, U = self._factors(self._site(site))
        return np.asarray(V[:, numbers]), np.asarray(U[numbers])

    def directions(self, site: str, side: Literal["U", "V"]) -> Float[np.ndarray, "C d"]:
        """The vectors V or U of a site's components, a row each, as a NumPy array."""
        V, U = self._factors(self._site(site))
        return np.asarray(U) if side == "U" else np.asarray(V).T

    def matrix(self, site: str) -> Float[np.ndarray, "d_in d_out"]:
        """The target's matrix W at a site, applied as ``x @ W``. The components leave out Δ = W - V @ U."""
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
            raise UserError(f"unknown site '{name}'; {nearest(plain, self.sites)}")
        return self.sites[plain]

    def _place(self, site: Site) -> tuple[Stack, Any]:
        return self.target.sites.stack_rows[list(self.sites).index(site.name)]

    # --- outputs on inputs ---

    def causal_importances(
        self, inputs: Inputs, sites: str | Sequence[str] | None = None, kind: Importance = "lower"
    ) -> dict[str, Float[Array, "*n C"]]:
        """Causal importances by site, in fp32: ``[B, T, C]`` for a language model, ``[B, C]`` for a toy.

        ``inputs``: token ids ``[B, T]`` or a text; for a toy, features ``[B, n]``. Without a batch axis in ``inputs``
        there is none in the result. ``sites``: names or patterns; None for all sites. ``kind``: ``lower`` is λ, from
        which masks are built (C3); ``upper`` is υ, which the importance minimality loss uses; ``logits`` are the CI
        function's outputs before either squashing. An expert's matrix has λ and υ 0, and logits −∞, at the positions
        that do not take the expert (X4).

        Raises UserError if the inputs do not fit the target, a site is unknown, or the weights are missing.
        """
        names = chosen_sites(self.sites, sites)
        if kind not in ("lower", "upper", "logits"):
            raise UserError(f"kind: '{kind}' should be lower, upper or logits")
        batch, single = self.as_batch(inputs)
        weights = self.weights
        with jax.set_mesh(self.mesh):
            found = self._importances(self.learned, weights, batch, names, kind)
        return {name: found[name][0] if single else found[name] for name in names}

    def activations(self, inputs: Inputs, sites: str | Sequence[str] | None = None) -> dict[str, Float[Array, "*n C"]]:
        """Activations ``‖U_c‖ · (x · V_c)`` of the components by site, in fp32.

        They say how much of a component's direction is in what the site reads, whether the output depends on it or
        not. Arguments, shapes and errors: as of `causal_importances`.
        """
        names = chosen_sites(self.sites, sites)
        batch, single = self.as_batch(inputs)
        weights = self.weights
        with jax.set_mesh(self.mesh):
            found = self._activations(self.learned, weights, batch, names)
        return {name: found[name][0] if single else found[name] for name in names}

    def output(
        self,
        inputs: Inputs,
        masks: Masks | None = None,
        delta: Delta = 0.0,
        added: Mapping[str, Float[np.ndarray, "*n C"]] | None = None,
    ) -> Float[Array, "*n d"]:
        """The target's output in fp32: next-token logits ``[B, T, vocabulary]``, or a toy's output.

        ``masks``: None runs the original target; ``"ci"`` masks every site by λ; a mapping from site names or patterns
        gives each of them ``"ci"``, the numbers of the components to keep, or a mask that broadcasts to ``[B, T, C]``.
        Sites not named use the target's own matrix (F3). ``delta``: weight of Δ = W - V @ U at the masked sites (F1),
        usually 0 or 1; or by site, weights that broadcast to ``[B, T]``. ``added``: by masked site, numbers that
        broadcast to ``[B, T, C]`` and are added to the components' masked activations, in the units of `activations`
        (F8): with mask 0, a component has that activation. ``inputs``: as for `causal_importances`.

        Raises UserError if the inputs, masks or numbers do not fit the target, or the weights are missing.
        """
        batch, single = self.as_batch(inputs)
        weights = self.weights
        wanted = {} if masks is None else by_site(self.target.sites, masks, self._leading(batch))
        shifts = self._over_norms({} if added is None else added, wanted, self._leading(batch))
        with jax.set_mesh(self.mesh):
            if not wanted:
                y = self._clean(weights, batch)
            else:
                pinned = all(isinstance(mask, str) for mask in wanted.values())
                live, sources = self._sources(wanted, batch, delta, pinned, shifts)
                y = self._masked(self.learned, weights, batch, sources, live, pinned)
        return y[0] if single else y

    def logits(
        self,
        tokens: Inputs,
        masks: Masks | None = None,
        delta: Delta = 0.0,
        added: Mapping[str, Float[np.ndarray, "*n C"]] | None = None,
    ) -> Float[Array, "*n vocabulary"]:
        """Next-token logits of a language model: `output` with the same arguments. Raises UserError for a toy."""
        if not self.is_language_model:
            raise UserError("a toy has no logits; use run.output(inputs, masks)")
        return self.output(tokens, masks, delta, added)

    def outputs_without(
        self, site: str, number: int, rows: Inputs, positions: Int[np.ndarray, " n"]
    ) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "n d"]]:
        """Returns the output at one position of each row, logits or a toy's outputs: of the original target, and
        without component ``number`` only at that position, with everything else (including Δ) unchanged (I5).

        ``rows``: ``[n, T]``, or a toy's features ``[n, d]``. ``positions``: one of each row; 0 for a toy. Computed
        `ROWS_AT_ONCE` rows at a time, with one compilation for a site. Raises UserError for an unknown site or
        component, and for rows or positions that do not fit.
        """
        name, rows = self.component(site, number).site, read_inputs(self, rows)
        positions = np.asarray(positions)
        length = rows.shape[1] if rows.ndim == 2 and self.is_language_model else 1
        if rows.ndim != 2 or positions.shape != rows.shape[:1] or positions.dtype.kind not in "iu":
            raise UserError(
                f"rows should be [n, T] and positions [n], not {list(rows.shape)} and {list(positions.shape)}"
            )
        if positions.min() < 0 or positions.max() >= length:
            raise UserError(f"positions go from 0 to {length - 1}, not from {positions.min()} to {positions.max()}")
        mask = np.ones(self.sites[name].C, np.float32)
        mask[number] = 0
        weights, n = self.weights, len(rows)
        found = []
        for first in range(0, n, ROWS_AT_ONCE):
            # The last rows are padded, so that there is only one program.
            these = np.minimum(np.arange(first, first + ROWS_AT_ONCE), n - 1)
            batch, _ = self.as_batch(rows[these])
            leading = self._leading(batch)
            shaped = {name: mask.reshape((1,) * len(leading) + mask.shape)}
            live, sources = bundle(self.target.sites, shaped, leading, 1.0)
            with jax.set_mesh(self.mesh):
                pair = self._masked_at(self.learned, weights, batch, positions[these].astype(np.int32), sources, live)
            found.append([np.asarray(x)[: n - first] for x in pair])
        before, after = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return before, after

    def attack_masks(
        self,
        row: np.ndarray,
        importances: dict[str, np.ndarray],
        fixed: dict[str, np.ndarray],
        value: float,
        start: tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None],
        steps: int,
        step_size: float,
        added: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None]:
        """Returns the sources, of components ``[T, C]`` and deltas ``[T]``, that an attack finds on one row of inputs
        (I3).

        ``importances``, ``fixed``: by site, at every position; masks are ``value`` where they are fixed. ``start``: the
        initial sources. ``added``: as of `output`.
        """
        batch, _ = self.as_batch(row)
        leading, sites = self._leading(batch), self.target.sites

        def laid_out(by_site: dict[str, np.ndarray], added: Mapping[str, np.ndarray] | None = None) -> Bundle:
            return bundle(sites, {n: x.reshape(*leading, -1) for n, x in by_site.items()}, leading, 0.0, added)[1]

        components, deltas = start
        shaped = None if deltas is None else {name: x.reshape(leading) for name, x in deltas.items()}
        started = bundle(
            sites,
            {n: x.reshape(*leading, -1) for n, x in components.items()},
            leading,
            0.0 if shaped is None else shaped,
        )[1]
        weights, given = self.weights, {n: x.reshape(*leading, -1) for n, x in (added or {}).items()}
        held = laid_out(fixed, self._over_norms(given, fixed, leading))
        with jax.set_mesh(self.mesh):
            found = self._attacked(
                self.learned, weights, batch, laid_out(importances), held, value, started, steps, step_size
            )
        by_site = unstack_sites(sites, jax.device_get(found))
        of_components = {name: x.components.reshape(-1, x.components.shape[-1]) for name, x in by_site.items()}
        return of_components, None if deltas is None else {name: x.delta.reshape(-1) for name, x in by_site.items()}

    def _over_norms(
        self, added: Mapping[str, np.ndarray], masked: Mapping[str, Any], leading: tuple[int, ...]
    ) -> dict[str, Float[np.ndarray, "*n C"]]:
        """Converts numbers that are added to activations ``‖U_c‖ (x · V_c)`` to those of F8, which are added to
        ``x · V_c``. Raises UserError for what is no finite number, or does not broadcast to ``[*leading, C]``; leading
        axes of 1 stay."""
        if not isinstance(added, Mapping):
            raise UserError(f"added: should be numbers by site, not {type(added).__name__}")
        found = {}
        for name, numbers in added.items():
            site = self._site(name)
            if site.name not in masked:
                raise UserError(f"added: {site.name} is not among the masked sites")
            shape = (*leading, site.C)
            own = _float32(numbers, f"added: {site.name}")
            try:
                np.broadcast_to(own, shape)
            except ValueError:
                raise UserError(f"added: {site.name}: {list(own.shape)} does not broadcast to {list(shape)}") from None
            own = own.reshape((1,) * (len(shape) - own.ndim) + own.shape)
            own = np.broadcast_to(own, (*own.shape[:-1], site.C))
            norms = np.asarray(jnp.linalg.norm(self._factors(site)[1], axis=-1))
            without = np.flatnonzero((norms == 0) & (own != 0).reshape(-1, site.C).any(axis=0))
            if without.size:
                raise UserError(f"{site.name}:{without[0]} has U = 0: it writes nothing, whatever its activation")
            with np.errstate(over="ignore"):
                over = own / np.where(norms == 0, 1, norms)
            if not np.isfinite(over).all():
                raise UserError(f"{site.name}: an activation of {np.abs(own).max():g} is too large for its components")
            found[site.name] = over
        return found

    def _sources(
        self,
        wanted: dict[str, Any],
        batch: Array,
        delta: Delta,
        pinned: bool,
        added: Mapping[str, Float[np.ndarray, "*n C"]],
    ) -> tuple[tuple[int, ...], Bundle]:
        """The live sites, and the sources of a masked forward pass.

        ``pinned``: all masks are λ, so every source is 0 (M1). Otherwise the sources are the masks and λ is taken as 0.
        """
        leading = self._leading(batch)
        if pinned:
            masks = {name: np.zeros((1,) * len(leading) + (self.sites[name].C,), np.float32) for name in wanted}
        else:
            with_ci = tuple(name for name, mask in wanted.items() if isinstance(mask, str) and mask == CI)
            found = self._importances(self.learned, self.weights, batch, with_ci, "lower") if with_ci else {}
            masks = {name: np.asarray(found[name]) if name in found else mask for name, mask in wanted.items()}
        return bundle(self.target.sites, masks, leading, delta, added)

    @cached_property
    def _importances(self) -> Any:
        return jax.jit(partial(importances, self.problem), static_argnums=(3, 4))

    @cached_property
    def _activations(self) -> Any:
        return jax.jit(partial(activations, self.problem), static_argnums=(3,))

    @cached_property
    def _masked(self) -> Any:
        return jax.jit(partial(masked, self.problem), static_argnums=(4, 5))

    @cached_property
    def _masked_at(self) -> Any:
        return jax.jit(partial(masked_at, self.problem), static_argnums=5)

    @cached_property
    def _attacked(self) -> Any:
        return jax.jit(partial(attacked, self.problem), static_argnums=(7, 8))

    @cached_property
    def _clean(self) -> Any:
        return jax.jit(partial(clean, self.problem))

    # --- inputs ---

    @property
    def n_outputs(self) -> int:
        """The number of predictions at a position: tokens of the vocabulary, or a toy's features."""
        reads = self.architecture.inputs
        return reads.vocab_size if isinstance(reads, TokenInputs) else reads.n_features

    def names(self, numbers: Sequence[int]) -> list[str]:
        """Returns the names of tokens, or of a toy's features, from their numbers. Without a tokenizer a token is
        `[300]`.
        """
        if not self.is_language_model:
            return [str(number) for number in numbers]
        return [unnamed(token) for token in numbers] if self.text is None else self.text.tokens(numbers)

    def tokens(self, text: str) -> Int32[np.ndarray, " T"]:
        """The token ids of a text as the run reads it: with BOS before them if the rows of the run's data begin with
        it. Raises UserError for a toy, without a tokenizer, for a text without tokens, and for one that is too long."""
        self._tokenizer()
        return read_inputs(self, text)

    def held_out_rows(self, n: int | None = None) -> Int32[np.ndarray, "rows T"]:
        """Token ids of the first ``n`` rows that the run keeps for its evaluation; None for all. Rows that are longer
        than `longest_row` are cut off. Raises UserError for a toy, for data that are not there, and where the run keeps
        no rows apart."""
        if not self.is_language_model:
            raise UserError("a toy has no rows of text: its inputs are drawn")
        if n is not None and n < 1:
            raise UserError(f"rows should be at least 1, not {n}")
        data = self.resolved.held_out_rows
        return data.rows(np.arange(len(data) if n is None else min(n, len(data))))[:, : self.longest_row]

    def decode(self, tokens: Sequence[int] | Int[np.ndarray, " T"]) -> str:
        """The text of these token ids as a whole, BOS included; bytes that form no character are ``\\xe6``. For their
        names one by one: `names`. Raises UserError for a toy, and without a tokenizer."""
        return self._tokenizer().decode(tokens)

    @overload
    def generate(
        self, prompt: str, n: int = ..., *, masks: Masks | None = ..., delta: Delta = ..., temperature: float = ...,
        seed: int = ...,
    ) -> str: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Any, n: int = ..., *, masks: Masks | None = ..., delta: Delta = ..., temperature: float = ...,
        seed: int = ...,
    ) -> Int32[np.ndarray, " n"]: ...  # fmt: skip

    def generate(
        self,
        prompt: Inputs,
        n: int = 20,
        *,
        masks: Masks | None = None,
        delta: Delta = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str | Int32[np.ndarray, " n"]:
        """Continues a prompt for ``n`` tokens; fewer if the target or the CI function takes no longer rows.

        ``prompt``: a text, for which it returns a text without the prompt; or token ids ``[T]``, for which it returns
        token ids. ``masks``, ``delta``: as for `output`; every token is chosen from the masked network. With ``"ci"``
        each new length compiles. ``temperature``: 0 takes the most likely token, 1 draws by the model's own
        probabilities. ``seed``: of these draws.

        Raises UserError for a toy, and if the prompt or the masks do not fit.
        """
        found = generate(self, prompt, n, masks, delta, temperature, seed)
        return self.decode(found) if isinstance(prompt, str) else found

    def _tokenizer(self) -> TokenText:
        if not self.is_language_model:
            raise UserError("a toy has no tokens: it reads features")
        if self.text is None:
            raise UserError("no tokenizer next to the data or the target: texts cannot be read, only token ids")
        return self.text

    @property
    def longest_row(self) -> int | None:
        """The most tokens that the target and the CI function take in a row; None without a limit, and for a toy."""
        reads, ci = self.architecture.inputs, self.problem.decomposition.ci
        limits = [longest_row(ci), reads.longest if isinstance(reads, TokenInputs) else None]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def is_language_model(self) -> bool:
        """Whether the target reads tokens."""
        return isinstance(self.architecture.inputs, TokenInputs)

    def _leading(self, batch: Array) -> tuple[int, ...]:
        """The leading axes of an activation: all but its last."""
        axes: tuple[int, ...] = self.target.activation_axes(batch.shape)
        return axes

    def as_batch(self, inputs: Inputs) -> tuple[Array, bool]:
        """The inputs as a batch on the mesh, and whether they were a single row.

        Raises UserError if they do not fit.
        """
        rows = read_inputs(self, inputs)
        single = rows.ndim == 1
        rows = rows[None] if single else rows
        return from_host(rows, batch_sharding(self.mesh, rows.shape)), single

    def __repr__(self) -> str:
        stacks = self.target.sites.stacks
        width = max(len(stack.name) for stack in stacks)
        lines = [
            f"Run {self.id} ({printable(self.name, 200)}), step {self.step:,} of {self.problem.decomposition.steps:,}: "
            f"{len(self.sites)} sites, {sum(site.C for site in self.sites.values()):,} components",
            f"  of {self.architecture.describe()}",
            *(f"  {stack.name:{width}}  {stack.d_in:,} × {stack.d_out:,}  C {stack.C:,}" for stack in stacks),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        stacks = self.target.sites.stacks
        return card(
            "run", id=self.id, name=self.name, step=self.step, steps=self.problem.decomposition.steps,
            n_sites=len(self.sites), C=sum(site.C for site in self.sites.values()),
            about=self.architecture.describe(), main=read_run(self.folder).headline,
            stacks=[
                {"name": stack.name, "sites": len(stack.sites), "d_in": stack.d_in, "d_out": stack.d_out, "C": stack.C}
                for stack in stacks[:STACKS_SHOWN]
            ],
            more=max(0, len(stacks) - STACKS_SHOWN),
        )  # fmt: skip


def _float32(numbers: Any, what: str) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):
            found = np.asarray(numbers, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{what}: should be numbers") from None
    if not np.isfinite(found).all():
        raise UserError(f"{what}: should be finite numbers of float32")
    return found
