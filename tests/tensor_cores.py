"""Products of matrices as NVIDIA's tensor cores and CUDA cores round them, emulated in NumPy, and how exact Δ and its
gradient are with each (N4).

    python -m tests.tensor_cores --page docs/measurements/split_delta.md
"""

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests import reference as ref
from tests.reference import Array, Var

COMPONENTS = 24_576
RATIOS = (1e-4, 1e-6, 1e-8)
"""MSE(Δ) / var(W)."""
DRAWS = 128
"""How often Δ is drawn to measure the loss."""

# ---- how a product is accumulated ----


def tensor_core(a: Array, b: Array, terms: int = 16, fraction: int | None = None) -> Array:
    """The product of a `[m, k]` and b `[k, n]` in float32, as a tensor core accumulates it.

    ``terms`` products at a time are added up with the accumulator, and the sum is rounded towards zero to float32.
    ``fraction``: every one of these terms is first rounded towards zero to so many binary places below the leading one
    of the largest; None: they are added up exactly.
    """
    columns = np.ascontiguousarray(a.T, dtype=np.float64)
    b = np.asarray(b, dtype=np.float64)
    of_columns, of_rows = _exponent(columns), _exponent(b)
    total = np.zeros((a.shape[0], b.shape[1]))
    for start in range(0, len(b), terms):
        part = slice(start, start + terms)
        if fraction is None:
            total += columns[part].T @ b[part]
        else:
            highest = (of_columns[part, :, None] + of_rows[part, None, :]).max(axis=0)
            scale = np.ldexp(1.0, fraction - np.maximum(highest, _exponent(total)))
            products = columns[part, :, None] * b[part, None, :] * scale
            total = (np.trunc(products, out=products).sum(axis=0) + np.trunc(total * scale)) / scale
        total = _cut(total)
    return total.astype(np.float32)


def _exponent(x: Array) -> Array:
    """Of the leading binary digit; far below all others for 0."""
    return np.where(x == 0, -200, np.frexp(x)[1] - 1).astype(np.int32)


def _cut(x: Array) -> Array:
    """x in float64, rounded towards zero to the 24 binary digits of float32."""
    return (x.view(np.int64) & ~np.int64(2**29 - 1)).view(np.float64)


HOPPER = partial(tensor_core, fraction=25)
"""bf16 on Hopper and Blackwell, to the bit (docs/sources.md: Xie et al. 2025)."""
AMPERE = partial(tensor_core, terms=8, fraction=24)
"""bf16 on Ampere and Ada."""


def cuda_core(a: Array, b: Array) -> Array:
    """The product of a `[m, k]` and b `[k, n]` in float32, by a fused multiply-add after the other along k."""
    total = np.zeros((a.shape[0], b.shape[1]), dtype=np.float32)
    for column, row in zip(np.ascontiguousarray(a.T, dtype=np.float64), np.asarray(b, dtype=np.float64), strict=True):
        total = (total + column[:, None] * row).astype(np.float32)
    return total


# ---- how exact Δ is ----


class Site(NamedTuple):
    """V `[d_in, C]` and U `[C, d_out]`, which are float32 numbers, and their product, all in float64.

    ``noise``: Δ apart from its size, drawn several times, `[draws, d_in, d_out]`.
    """

    V: Array
    U: Array
    exact: Array
    noise: Array

    def weights(self, ratio: float) -> Iterator[Array]:
        """A W `[d_in, d_out]` of float32 numbers in float64 for each draw of Δ, with MSE(Δ) / var(W) = ``ratio``."""
        for noise in self.noise:
            yield _stored(self.exact + np.sqrt(ratio * np.var(self.exact)) * noise)


def _stored(x: Array) -> Array:
    return x.astype(np.float32).astype(np.float64)


def drawn_site(seed: int, components: int = COMPONENTS, d: int = 48, draws: int = DRAWS) -> Site:
    """As after training: sizes of components differ by factors, and V U is near a given matrix of the size that the
    product of such V and U has by chance. Δ is noise."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(0.5 * rng.normal(size=components))
    V, U = rng.normal(size=(d, components)) * sizes, rng.normal(size=(components, d)) * sizes[:, None]
    wanted = rng.normal(size=(d, d)) * np.std(V @ U)
    V = V + (wanted - V @ U) @ np.linalg.solve(U.T @ U, U.T)
    V, U = _stored(V / np.sqrt(d)), _stored(U)
    return Site(V, U, V @ U, rng.normal(size=(draws, d, d)))


def distance(found: Array, exact: Array) -> float:
    """‖found − exact‖ / ‖exact‖."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def root_mean_square(values: Iterable[float]) -> float:
    return float(np.sqrt(np.mean(np.square(list(values)))))


def loss_error(VU: Array, site: Site, ratio: float) -> float:
    """The relative error of L1 if V U is computed as VU, root of the mean square over the draws of Δ."""

    def loss(product: Array, W: Array) -> float:
        return float(ref.value(ref.squares_by(product, W, site.V, site.U)))

    return root_mean_square(loss(VU, W) / loss(site.exact, W) - 1 for W in site.weights(ratio))


def gradient_error(VU: Array, site: Site, ratio: float, narrow: Callable[[Array], Array] = np.asarray) -> float:
    """The relative error of L1's gradient by V or by U, whichever is larger, if V U is computed as VU; for the first
    draw of Δ. ``narrow``: what the gradient's own products do to the matrices that they multiply exactly."""
    W = next(site.weights(ratio))

    def gradients(product: Array, narrow: Callable[[Array], Array]) -> dict[str, Array]:
        at = {"V": Var(site.V), "U": Var(site.U)}
        loss = ref.squares_by(product, W, at["V"], at["U"], narrow)
        assert isinstance(loss, Var)
        return ref.gradients(loss, at)

    found, exact = gradients(VU, narrow), gradients(site.exact, np.asarray)
    return max(distance(found[name], exact[name]) for name in exact)


# ---- the page ----

CHUNKS = (512, 1024, 2048, 4096)
SIZES = (256, 1024, 4096, 24_576, 98_304)
"""Numbers of components."""


def ways(core: Callable[..., Array] = HOPPER) -> dict[str, ref.Product]:
    """What computes V U of V and U, by name. ``core``: how a tensor core multiplies bf16 matrices."""
    return {
        "fp32": cuda_core,
        **{f"split, chunks of {n:,}": partial(ref.split_product, chunk=n, product=core) for n in CHUNKS},
        "split, not in chunks": partial(ref.split_product, chunk=COMPONENTS, product=core),
        "TF32": lambda V, U: core(ref.significant(V, 11), ref.significant(U, 11), terms=8),
        "bf16": lambda V, U: core(ref.bfloat16(V), ref.bfloat16(U)),
    }


def percent(x: float) -> str:
    """With two significant digits, more from 100 % on."""
    return f"{100 * x:#.2g} %".replace(". ", " ") if x < 1 else f"{100 * x:,.0f} %"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def tables(seeds: int) -> Iterator[str]:
    """The three of the page, line by line; says on the way what it is at."""
    sites = [drawn_site(seed) for seed in range(seeds)]
    losses, gradients = [], []
    of_ampere = {"split, chunks of 2,048, Ampere": partial(ref.split_product, product=AMPERE)}
    for name, way in (ways() | of_ampere).items():
        print(f"{name} …", file=sys.stderr, flush=True)
        found = [(way(site.V, site.U), site) for site in sites]
        apart = root_mean_square(distance(VU, site.exact) for VU, site in found)
        short = np.mean([1 - np.vdot(VU, site.exact) / np.vdot(site.exact, site.exact) for VU, site in found])

        def cells(
            error: Callable[[Array, Site, float], float], found: list[tuple[Array, Site]] = found
        ) -> Iterator[str]:
            for ratio in RATIOS:
                yield percent(root_mean_square(error(VU, site, ratio) for VU, site in found))

        losses.append(row(name, f"{apart:.1e}", f"{short:.0e}", *cells(loss_error)))
        by_bf16 = partial(gradient_error, narrow=ref.bfloat16)
        gradients.append(row(name, *cells(gradient_error), *cells(by_bf16)))
    ratios = [f"{ratio:.0e}" for ratio in RATIOS]
    yield from (row("", "V U", "smaller by", *(f"loss, {x}" for x in ratios)), "|---|---|---|---|---|---|", *losses, "")
    yield from (
        row("", *(f"{kind}, {x}" for kind in ("gradient", "by bf16") for x in ratios)),
        "|---|---|---|---|---|---|---|",
        *gradients,
        "",
    )
    yield from (row("components", "fp32", "split, chunks of 2,048", "split, exact sums"), "|---|---|---|---|")
    for components in SIZES:
        print(f"{components:,} components …", file=sys.stderr, flush=True)
        sites = [drawn_site(seed, components, draws=1) for seed in range(seeds)]
        compared = (cuda_core, partial(ref.split_product, product=HOPPER), ref.split_product)
        found_by = [root_mean_square(distance(way(s.V, s.U), s.exact) for s in sites) for way in compared]
        yield row(f"{components:,}", *(f"{x:.1e}" for x in found_by))


def processor() -> str:
    """As Linux names it."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


HEAD = """\
# Δ by split products

**At 24,576 components, V U by split bf16 products has less than twice the error of float32 products; where the gradient
rounds Δ to bf16 anyway, this hardly shows unless Δ is very small.**

{command}, {date}, {cores} cores ({cpu}), NumPy {numpy}. All of
this is emulated; there was no GPU.

The tables say how exact `Δ = W − V U`, its loss and the loss's gradient are by rule N4 of
[the method](../semantics.md). d_in and d_out are 48. The {components:,} components differ in size by factors, V U is as
large as W, and Δ is noise with MSE(Δ) / var(W) of 1e-4, 1e-6 or 1e-8. Errors are relative to float64, and roots of mean
squares over {seeds} seeds; for the loss also over {draws} draws of Δ for each seed.

- *fp32*: fused multiply-adds along the components, one after the other, each rounded to nearest.
- *split*: as in N4. Products of bf16 matrices are accumulated as by Hopper's tensor cores: 16 products and the
  accumulator are cut to 25 binary places below the largest of them and added exactly, and the sum is cut to float32
  ([Xie et al. 2025](../sources.md#papers)). *Ampere*: 8 products and 24 places.
- *TF32*: float32 matrices rounded to 11 binary digits, 8 products at a time. *bf16*: V₁ U₁ alone, not in chunks.
- *V U*: ‖error‖ / ‖V U‖. *Smaller by*: the part of this error that makes V U as a whole smaller, as truncation does.
- *Gradient*: by V or U, whichever has the larger error, with `Δ Uᵀ` and `Vᵀ Δ` exact. *By bf16*: Δ, V and U are rounded
  to bf16 in these products, as in N4.

"""
TAIL = """
The last table has the error of V U by the number of components, with Hopper's sums and with exact ones. That of float32
grows with the square root of the number. That of split products stays: most of it is what two bf16 numbers leave out of
each factor, and V₂ U₂. So it is below twice that of float32 only where V U has many components.

Here Δ is independent of V U. If it is a multiple of V U, the relative error of the loss is twice *smaller by*, over the
root of MSE(Δ) / var(W): 4 % with 2e-06 and 1e-08.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--page", type=Path, help="write the page here as well")
    o = parser.parse_args()
    head = HEAD.format(
        command="`python -m tests.tensor_cores`"
        if o.seeds == parser.get_default("seeds")
        else f"`python -m tests.tensor_cores --seeds {o.seeds}`",
        date=f"{time.localtime().tm_mday} {time.strftime('%B %Y')}",
        cores=os.cpu_count(),
        cpu=processor(),
        numpy=np.__version__,
        components=COMPONENTS,
        seeds=o.seeds,
        draws=DRAWS,
    )
    page = head + "\n".join(tables(o.seeds)) + "\n" + TAIL
    print(page)
    if o.page is not None:
        o.page.write_text(page)


if __name__ == "__main__":
    main()
