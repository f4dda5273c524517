"""Masks given by users, and their conversion to the sources of a masked forward pass."""

from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from param_decomp_jax.decomposition.sites import Site, Sites
from param_decomp_jax.method.masks import Bundle, Sources
from param_decomp_lab.config.site_patterns import chosen_sites
from param_decomp_lab.errors import UserError

CI: Literal["ci"] = "ci"
"""Stands for a mask equal to the lower causal importance λ."""

Mask = Any
"""``"ci"``; component numbers (integers: these are kept, the others masked out); or a mask (floats or booleans) that
broadcasts to ``[*n, C]``."""

Masks = Literal["ci"] | Mapping[str, Mask]
"""``"ci"`` for all sites, or masks by site name or pattern; sites not named use the target's own matrix (F3)."""


def by_site(sites: Sites, masks: Masks, leading: tuple[int, ...]) -> dict[str, Literal["ci"] | np.ndarray]:
    """Returns the mask of every live site, in canonical order: ``"ci"``, or floats that broadcast to ``[*leading, C]``.

    Raises UserError for an unknown site, a site matched by two patterns, a mask of the wrong shape, or a component
    number that the site does not have.
    """
    if isinstance(masks, str):
        masks = {"*": masks}
    if not isinstance(masks, Mapping):
        raise UserError(f"masks: should be '{CI}', or masks by site, not {type(masks).__name__}")
    found: dict[str, Literal["ci"] | np.ndarray] = {}
    named: dict[str, str] = {}
    by_name = {site.name: site for site in sites.all}
    for pattern, mask in masks.items():
        for name in chosen_sites(by_name, pattern, "masks: "):
            if name in named:
                raise UserError(f"masks: {name} is named twice, by '{named[name]}' and by '{pattern}'")
            named[name] = pattern
            found[name] = _mask(by_name[name], mask, leading)
    return {name: found[name] for name in by_name if name in found}


def _mask(site: Site, mask: Mask, leading: tuple[int, ...]) -> Literal["ci"] | np.ndarray:
    if isinstance(mask, str):
        if mask != CI:
            raise UserError(f"masks: {site.name}: '{mask}' is not a mask; the only text allowed is '{CI}'")
        return CI
    given = np.asarray(sorted(mask) if isinstance(mask, set | frozenset) else mask)
    if given.dtype.kind in "iu" or given.size == 0:
        given = _these_on(site, given.ravel().astype(np.int64))
    shape = (*leading, site.C)
    try:
        np.broadcast_to(given, shape)
    except ValueError:
        raise UserError(
            f"masks: {site.name}: a mask of shape {list(given.shape)} does not broadcast to {list(shape)} "
            "(leading axes of the inputs, then the site's C)"
        ) from None
    padded = given.reshape((1,) * (len(shape) - given.ndim) + given.shape).astype(np.float32)
    return np.broadcast_to(padded, (*padded.shape[:-1], site.C))


def _these_on(site: Site, numbers: np.ndarray) -> np.ndarray:
    beyond = numbers[(numbers < 0) | (numbers >= site.C)]
    if beyond.size:
        raise UserError(f"masks: {site.name} has components 0 to {site.C - 1}, and no component {beyond[0]}")
    if len(np.unique(numbers)) < len(numbers):
        raise UserError(
            f"masks: {site.name}: integers are numbers of components, and one is given twice; give a mask as floats"
        )
    mask = np.zeros(site.C, np.float32)
    mask[numbers] = 1
    return mask


Delta = float | Mapping[str, Any]
"""Weight of Δ at the masked sites: a number, or by site an array that broadcasts to the leading axes of the inputs."""


def bundle(
    sites: Sites,
    masks: Mapping[str, Float[np.ndarray, "*n C"]],
    leading: tuple[int, ...],
    delta: Delta,
    added: Mapping[str, Float[np.ndarray, "*n C"]] | None = None,
) -> tuple[tuple[int, ...], Bundle]:
    """Returns the live sites, and sources that equal these masks if λ is taken as 0. ``added``: the numbers of F8, of
    some of the masked sites.

    Raises UserError for a delta of the wrong shape, or of a site that is not masked.
    """
    weights = delta_weights(masks, leading, delta)
    added = added or {}
    names = [site.name for site in sites.all]
    made = {}
    for stack in sites.stacks:
        own = {row: masks[names[n]] for row, n in zip(stack.rows(), stack.sites, strict=True) if names[n] in masks}
        if not own:
            continue
        of_sites = zip(stack.rows(), stack.sites, strict=True)
        of_deltas = {} if weights is None else {row: weights[names[n]] for row, n in of_sites if names[n] in masks}
        of_sites = zip(stack.rows(), stack.sites, strict=True)
        of_added = {row: added[names[n]] for row, n in of_sites if names[n] in added}
        shapes = [mask.shape[:-1] for mask in (*own.values(), *of_added.values())]
        shapes += [weight.shape for weight in of_deltas.values()]
        lead = np.broadcast_shapes((1,) * len(leading), *shapes)
        components = np.zeros((*stack.lead, *lead, stack.C), np.float32)
        deltas = np.zeros((*stack.lead, *lead), np.float32)
        for row, mask in own.items():
            components[row] = mask
        for row, weight in of_deltas.items():
            deltas[row] = weight
        shifts = None
        if of_added:
            shifts = np.zeros_like(components)
            for row, numbers in of_added.items():
                shifts[row] = numbers
        made[stack.name] = Sources(
            jnp.asarray(components), jnp.asarray(deltas) if of_deltas else None,
            None if shifts is None else jnp.asarray(shifts),
        )  # fmt: skip
    live = tuple(n for n, name in enumerate(names) if name in masks)
    return live, made


def delta_weights(masks: Mapping[str, Any], leading: tuple[int, ...], delta: Delta) -> dict[str, np.ndarray] | None:
    """Returns the weight of Δ by site; None if it is 0 everywhere."""
    if not isinstance(delta, Mapping):
        return None if delta == 0 else {name: np.full((1,) * len(leading), delta, np.float32) for name in masks}
    unknown = [name for name in delta if name not in masks]
    if unknown:
        raise UserError(f"delta: {unknown[0]} is not among the masked sites")
    found = {}
    for name in masks:
        weight = np.asarray(delta.get(name, 0.0), np.float32)
        try:
            np.broadcast_to(weight, leading)
        except ValueError:
            raise UserError(
                f"delta: {name}: weights of shape {list(weight.shape)} do not broadcast to {list(leading)}"
            ) from None
        found[name] = weight.reshape((1,) * (len(leading) - weight.ndim) + weight.shape)
    return found
