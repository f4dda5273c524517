"""Converts the tensors of a decomposition of the PyTorch project to our layout.

A checkpoint is the state dict of one module. It has the frozen target (``target_model.…``), V and U of every site
(``_components.<path>.V``, where the path has dashes for dots) and the CI function (``ci_fn.…``). Where sites are
concatenated, they are sorted by their paths as strings: ``h.10`` before ``h.2``. Affine maps of the CI function keep
``[d_in, d_out]``, its attention ``[d_out, d_in]``.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from param_decomp_jax.ci import CIConfig, CIFunction, GlobalMLP, GlobalTransformer, LayerwiseMLP
from param_decomp_jax.ci.affine import MLP, Affine, JointAffine
from param_decomp_jax.ci.global_mlp import GlobalMLPCI
from param_decomp_jax.ci.layerwise import ScalarMLP, SharedMLP, VectorMLP
from param_decomp_jax.ci.transformer import Block, TransformerCI
from param_decomp_jax.decomposition.components import Factors
from param_decomp_jax.decomposition.sites import Site, Sites
from param_decomp_jax.method.inspection import stack_sites
from param_decomp_jax.method.state import Learned
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.printable import first_few, printable
from param_decomp_lab.schema.mistakes import SHOWN_MISTAKES
from param_decomp_lab.schema.site_names import PREFIXES

State = Mapping[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]

TARGET = "target_model."
_COMPONENT = re.compile(r"_components\.(.+)\.([UV]|bias)")
_UNREAD = re.compile(r"_components\..+\.bias|ci_fn\._global_ci_fn\._blocks\.\d+\.attn\.rope\.inv_freq")
"""Tensors that are not read: the target's own biases, and those that follow from the configuration."""


def todays_name(name: str) -> str:
    """Returns the name that a tensor has had since the spring of 2026."""
    name = name.replace("_gates.", "_ci_fns.")
    name = re.sub(r"^patched_model\.", TARGET, name)
    name = re.sub(r"\.original\.weight$", ".weight", name)
    older = re.fullmatch(r"(?:target_model\.)?(.+)\.components\.([UV])", name)
    if older is not None:
        name = f"_components.{older[1].replace('.', '-')}.{older[2]}"
    return re.sub(r"^_ci_fns\.", "ci_fn._ci_fns.", name)


def paths_of_sites(state: State) -> dict[str, str]:
    """Returns the path of each decomposed module in the checkpoint, by our name for it."""
    paths = {found[1].replace("-", ".") for name in state if (found := _COMPONENT.fullmatch(name))}
    return {_site_name(path): path for path in sorted(paths)}


def _site_name(path: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if path.startswith(prefix)), "")
    return path.removeprefix(prefix)


@dataclass(frozen=True)
class CheckpointLayout:
    """The places of a decomposition's arrays in a checkpoint. ``paths``: those of `paths_of_sites`,
    for all ``sites``.
    """

    sites: Sites
    config: CIConfig
    paths: Mapping[str, str]

    @property
    def in_their_order(self) -> list[Site]:
        return sorted(self.sites.all, key=lambda site: self.paths[site.name])

    def shapes(self) -> Shapes:
        """Returns the shape of every tensor that is read, by name."""
        found: Shapes = {}
        for site in self.sites.all:
            found[self.component(site, "V")], found[self.component(site, "U")] = (
                (site.d_in, site.C),
                (site.C, site.d_out),
            )
        for prefix, (lead, widths) in self._mlps().items():
            for n, (d_in, d_out) in enumerate(pairwise(widths)):
                found |= {f"{prefix}{2 * n}.W": (*lead, d_in, d_out), f"{prefix}{2 * n}.b": (*lead, d_out)}
        if isinstance(self.config, GlobalTransformer):
            d = self.config.d_model
            inputs, outputs = (sum(widths) for widths in self._widths())
            found |= {f"{_GLOBAL}_input_projector.W": (inputs, d), f"{_GLOBAL}_input_projector.b": (d,)}
            found |= {f"{_GLOBAL}_output_head.W": (d, outputs), f"{_GLOBAL}_output_head.b": (outputs,)}
            for n in range(self.config.n_blocks):
                found |= {f"{_GLOBAL}_blocks.{n}.attn.{m}_proj.weight": (d, d) for m in ("q", "k", "v", "out")}
        return found

    def component(self, site: Site, factor: str) -> str:
        return f"_components.{self._dashed(site)}.{factor}"

    def _dashed(self, site: Site) -> str:
        return self.paths[site.name].replace(".", "-")

    def _widths(self) -> tuple[list[int], list[int]]:
        """Returns the input widths of the sites, and their numbers of components, in the order of the checkpoint."""
        sites = self.in_their_order
        return [site.d_in for site in sites], [site.C for site in sites]

    def mlp(self, site: Site) -> str:
        """Returns the prefix of the names of a site's own MLP."""
        return f"ci_fn._ci_fns.{self._dashed(site)}.layers."

    def _mlps(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns the leading axes and widths of every MLP, by the prefix of its names."""
        match self.config:
            case LayerwiseMLP("shared_mlp", hidden):
                return {self.mlp(site): ((), (site.d_in, *hidden, site.C)) for site in self.sites.all}
            case LayerwiseMLP(kind, hidden):
                read = {site.name: 1 if kind == "mlp" else site.d_in for site in self.sites.all}
                return {self.mlp(site): ((site.C,), (read[site.name], *hidden, 1)) for site in self.sites.all}
            case GlobalMLP(hidden):
                inputs, outputs = (sum(widths) for widths in self._widths())
                return {f"{_GLOBAL}layers.": ((), (inputs, *hidden, outputs))}
            case GlobalTransformer(d, n, hidden):
                return {f"{_GLOBAL}_blocks.{i}.mlp.": ((), (d, *hidden, d)) for i in range(n)}
            case _:
                raise AssertionError(f"a CI function that the PyTorch project did not have: {self.config}")

    def check(self, state: State, where: str) -> None:
        """Raises a UserError that lists all differences, unless the checkpoint has exactly these tensors and the
        target's.
        """
        wanted = self.shapes()
        lines = [f"{name}: is missing (shape {list(shape)})" for name, shape in wanted.items() if name not in state]
        for name, array in state.items():
            if name in wanted and array.shape != wanted[name]:
                lines.append(f"{name}: has shape {list(array.shape)}, the configuration implies {list(wanted[name])}")
            elif name in wanted and array.dtype.kind not in "fV":  # V: bfloat16
                lines.append(f"{name}: holds {array.dtype}, and not floating-point numbers")
            elif name not in wanted and not name.startswith(TARGET) and not _UNREAD.fullmatch(name):
                lines.append(f"{printable(name, 200)}: has no place in the decomposition of the configuration")
        if lines:
            told = "\n  ".join(first_few(lines, SHOWN_MISTAKES))
            raise UserError(f"{where}: the checkpoint and its configuration do not belong together:\n  {told}")

    def read(self, state: State) -> Learned:
        """Returns V, U and the CI function in our layout, in fp32. ``state``: as in `check`."""

        def array(name: str) -> jax.Array:
            return jnp.asarray(np.asarray(state[name], np.float32))

        trained = [site for site, (stack, _) in zip(self.sites.all, self.sites.stack_rows, strict=True)
                   if stack.name not in self.sites.views]  # fmt: skip
        factors = {s.name: Factors(array(self.component(s, "V")), array(self.component(s, "U"))) for s in trained}
        return Learned(stack_sites(self.sites, factors), self._ci(array))

    def _ci(self, array: Callable[[str], jax.Array]) -> CIFunction:
        def affine(prefix: str) -> Affine:
            return Affine(array(f"{prefix}.W"), array(f"{prefix}.b"))

        def mlp(prefix: str) -> MLP:
            return tuple(affine(f"{prefix}{2 * n}") for n in range(len(self._mlps()[prefix][1]) - 1))

        match self.config:
            case LayerwiseMLP(kind):
                heads = stack_sites(self.sites, {site.name: mlp(self.mlp(site)) for site in self.sites.all})
                return {"shared_mlp": SharedMLP, "mlp": ScalarMLP, "vector_mlp": VectorMLP}[kind](heads)
            case GlobalMLP():
                first, *middle, last = mlp(f"{_GLOBAL}layers.")
                return GlobalMLPCI(self._joint(first), tuple(middle), self._heads(last))
            case GlobalTransformer(n_blocks=n) as config:
                blocks = [
                    Block(
                        *(array(f"{prefix}attn.{m}_proj.weight").T for m in ("q", "k", "v", "out")),
                        mlp(f"{prefix}mlp."),
                    )
                    for prefix in (f"{_GLOBAL}_blocks.{i}." for i in range(n))
                ]
                stacked: Block = jax.tree.map(lambda *own: jnp.stack(own), *blocks)
                project, head = affine(f"{_GLOBAL}_input_projector"), affine(f"{_GLOBAL}_output_head")
                return TransformerCI(self._joint(project), stacked, self._heads(head), config)
            case _:
                raise AssertionError(f"a CI function that the PyTorch project did not have: {self.config}")

    def _joint(self, affine: Affine) -> JointAffine:
        """Returns an affine map of the concatenated inputs of the sites."""
        parts = zip(self.in_their_order, _parts(self._widths()[0]), strict=True)
        return JointAffine(stack_sites(self.sites, {site.name: affine.W[part] for site, part in parts}), affine.b)

    def _heads(self, affine: Affine) -> dict[str, Any]:
        """Returns an affine map to the concatenated logits of the sites, split into heads."""
        parts = zip(self.in_their_order, _parts(self._widths()[1]), strict=True)
        heads = {site.name: Affine(affine.W[:, part], affine.b[part]) for site, part in parts}
        return stack_sites(self.sites, heads)


_GLOBAL = "ci_fn._global_ci_fn."


def _parts(widths: Sequence[int]) -> Iterator[slice]:
    return (slice(start, stop) for start, stop in pairwise(accumulate(widths, initial=0)))
