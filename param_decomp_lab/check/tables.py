"""Tables that `pd check` prints: sites, loss terms, training state."""

from collections.abc import Iterable
from math import prod
from typing import Any

import jax
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Sites
from param_decomp_jax.method.losses import Term
from param_decomp_jax.method.recon import AllSites, Chunks, EachSite, Reconstruction, n_attack_passes, n_forwards
from param_decomp_jax.method.state import State
from param_decomp_jax.targets.architecture import is_shape
from param_decomp_lab.config.method_schema import PDConfig
from param_decomp_lab.setup.known_target import KnownTarget
from param_decomp_lab.ui.descriptions import describe_schedule, describe_term
from param_decomp_lab.ui.numbers import amount, byte_size, exact
from param_decomp_lab.ui.tables import plain_table


def sites_table(sites: Sites, state: State) -> Table:
    """Sites in canonical order, alike ones of consecutive layers in one row, with what is trained for them."""
    columns = (("", "wrap"), ("", "right"), ("d_in × d_out", "right"), ("C", "right"))
    table = plain_table(f"Sites: {len(sites)}", *columns, ("parameters", "right"), ("", "left"))
    for stack in sites.stacks:
        trained = state.components.get(stack.name)
        notes = [f"tied to {sites.views[stack.name]}"] if trained is None else []
        notes += ["identity"] if stack.kind.endswith(PRE_IDENTITY) else []
        table.add_row(
            stack.name,
            f"{len(stack.sites)} ×" if len(stack.sites) > 1 else "",
            f"{stack.d_in} × {stack.d_out}",
            exact(stack.C),
            "–" if trained is None else amount(parameters(trained)),
            ", ".join(notes),
        )
    if len(sites.stacks) > 1:
        table.add_section()
        total = sum(site.C for site in sites.all)
        table.add_row("total", "", "", exact(total), amount(parameters(state.components)), "")
    return table


def patterns_table(pd: PDConfig) -> Table:
    """In place of the sites, where it is not known what the patterns match."""
    table = plain_table("Sites: not known without the target", ("pattern", "wrap"), ("C", "right"), ("", "left"))
    for target in pd.decomposition_targets:
        table.add_row(target.module_pattern, exact(target.C), "")
    for target in pd.identity_decomposition_targets or ():
        table.add_row(target.module_pattern, exact(target.C), "identity")
    return table


def terms_table(terms: Iterable[Term], n_sites: int | None, steps: int) -> Table:
    """Terms of the loss, and what each costs in a step. ``n_sites``: None where the target is not known."""
    columns = (("", "wrap"), ("coeff", "right"), ("forwards", "right"), ("attack passes", "right"))
    table = plain_table("Loss terms", *columns)
    forwards, ascents = 0, 0
    for term in terms:
        cells = ("–", "–")
        if isinstance(term, Reconstruction):
            cells = _costs(term, n_sites)
            if n_sites is not None:
                forwards += n_forwards(term, n_sites)
                ascents += n_attack_passes(term, n_sites)
        words, coeff = describe_term(term, n_sites, steps), "scheduled"
        if isinstance(term.coeff, float | int):
            coeff = exact(term.coeff)
        else:
            words += f"; coefficient {describe_schedule(term.coeff)}"
        table.add_row(titled(term.name, words), coeff, *cells)
    if n_sites is not None:
        table.add_section()
        words = f"{forwards + ascents:,} masked passes, each with its backward, and 1 clean forward"
        table.add_row(titled("total", words), "", f"{forwards:,}", f"{ascents:,}")
    return table


def _costs(term: Reconstruction, n_sites: int | None) -> tuple[str, str]:
    """Forwards, and passes of an attack's own; those of one live set where nobody knows how many there are."""
    unit = ""
    if n_sites is None:
        unit = {AllSites: "", EachSite: " per site", Chunks: " per chunk"}[type(term.live)]
    forwards, ascents = (count(term, n_sites or 1) for count in (n_forwards, n_attack_passes))
    return f"{forwards:,}{unit}", f"{ascents:,}{unit if ascents else ''}"


def titled(name: str, words: str) -> Group:
    """A name, and below it, set in, what it is."""
    return Group(name, Padding(Text(words, style="dim"), (0, 0, 0, 2), expand=False))


def state_table(target: KnownTarget, state: State) -> Table:
    """Parameters, and the bytes of one copy of the training state: values and what their optimisers keep (N1)."""
    columns = (("", "wrap"), ("parameters", "right"), ("values", "right"), ("moments", "right"), ("both", "right"))
    table = plain_table("Parameters and training state (fp32, without gradients)", *columns)
    parts: list[tuple[str, Any, Any]] = [
        ("components V, U", state.components, state.components_moments),
        ("CI function", state.ci, state.ci_moments),
    ]
    for name, adversary in state.adversaries.items():
        parts.append((f"sources of {name}", adversary.raw, (adversary.mean, adversary.square, adversary.count)))

    def row(name: str, values: Any, moments: Any) -> None:
        sizes = size(values), size(moments), size(values) + size(moments)
        table.add_row(name, amount(parameters(values)), *map(byte_size, sizes))

    for part in parts:
        row(*part)
    table.add_section()
    row("total", [values for _, values, _ in parts], [moments for _, _, moments in parts])
    shapes = jax.tree.leaves(target.architecture.weight_shapes(), is_leaf=is_shape)
    n = sum(prod(shape) for shape in shapes)
    stored = byte_size(n * target.dtype.itemsize)
    table.add_row("target, frozen", amount(n), stored, "", "")
    return table


def parameters(tree: Any) -> int:
    """Numbers in a tree of arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def size(tree: Any) -> int:
    """Bytes of a tree of arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
