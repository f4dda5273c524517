"""N4: how exact Δ, its loss and its gradient are by split products, as tensor cores accumulate them, beside float32."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from tests import reference as ref
from tests.reference import Array
from tests.tensor_cores import (
    AMPERE,
    HOPPER,
    RATIOS,
    Site,
    cuda_core,
    distance,
    drawn_site,
    gradient_error,
    loss_error,
    root_mean_square,
    tensor_core,
    ways,
)

SITES = 2
FP32, SPLIT, WHOLE = "fp32", "split, chunks of 2,048", "split, not in chunks"


# ---- the emulation ----


def padded(*values: float) -> Array:
    """Sixteen numbers, these first."""
    return np.array([*values, *[0.0] * (16 - len(values))])


@pytest.mark.parametrize(("core", "found"), [(tensor_core, -0.875), (HOPPER, -0.75), (AMPERE, -0.5)])
def test_small_products_are_cut_beside_large_ones(core: ref.Product, found: float) -> None:
    """Equation 10 of Xie et al. 2025 and its results on GPUs: 2²³ - 2²³ - 0.5 - 0.25 - 0.125, the first accumulated."""
    a = np.concatenate([padded(2.0**13), padded(-(2.0**13), -0.5, -0.25, -0.125)])
    b = np.concatenate([padded(2.0**10), padded(2.0**10, 1, 1, 1)])
    np.testing.assert_array_equal(core(a[None], b[:, None]), np.float32([[found]]))


@pytest.mark.parametrize("core", [tensor_core, HOPPER, AMPERE])
@pytest.mark.parametrize("sign", [1, -1])
def test_tensor_cores_round_towards_zero_and_cuda_cores_to_nearest(core: ref.Product, sign: int) -> None:
    """1 + 1.75 units of its last place."""
    a = sign * np.concatenate([padded(1), padded(1.75)])[None]
    b = np.concatenate([padded(1), padded(2.0**-23)])[:, None]
    assert core(a, b) == sign * (1 + 2.0**-23)
    assert cuda_core(a, b) == sign * (1 + 2.0**-22)


def test_cuda_cores_do_not_round_products() -> None:
    assert cuda_core(np.array([[-1, 1 + 2.0**-12]]), np.array([[1], [1 + 2.0**-12]])) == 2.0**-11 + 2.0**-24


def test_cutting_products_matters_little() -> None:
    """So the tests below take the quicker emulation, whose sums of 16 products are exact."""
    site = drawn_site(0, components=1024)
    V, U = ref.bfloat16(site.V), ref.bfloat16(site.U)
    quick, hopper = (distance(core(V, U), V @ U) for core in (tensor_core, HOPPER))
    assert 0.5 < hopper / quick < 1.2


# ---- the rule ----


class Emulated(NamedTuple):
    """Sites, and V U of each by the name of what computes it."""

    sites: list[Site]
    products: dict[str, list[Array]]

    def error(self, name: str, error: Callable[[Array, Site], float]) -> float:
        return root_mean_square(error(VU, site) for VU, site in zip(self.products[name], self.sites, strict=True))

    def apart(self, name: str) -> float:
        return self.error(name, lambda VU, site: distance(VU, site.exact))


@pytest.fixture(scope="module")
def emulated() -> Emulated:
    sites = [drawn_site(seed) for seed in range(SITES)]
    of = ways(tensor_core)
    return Emulated(sites, {name: [of[name](s.V, s.U) for s in sites] for name in (FP32, SPLIT, WHOLE, "TF32", "bf16")})


@pytest.mark.parametrize("ratio", RATIOS)
def test_split_products_lose_at_most_twice_what_float32_does(emulated: Emulated, ratio: float) -> None:
    """By MSE(Δ) / var(W). 0.3 %: a rounding to bf16 of both matrices of a product in the gradient."""
    fp32, split = (emulated.error(name, partial(gradient_error, ratio=ratio)) for name in (FP32, SPLIT))
    assert split <= 2 * fp32
    assert emulated.error(SPLIT, partial(gradient_error, ratio=ratio, narrow=ref.bfloat16)) <= 2 * fp32 + 0.003
    # An error e of Δ changes its sum of squares by 2 Δ e + e². The second part goes with the square of the error.
    off = {name: emulated.error(name, partial(loss_error, ratio=ratio)) for name in (FP32, SPLIT)}
    assert off[SPLIT] <= 2 * off[FP32] + (2 * emulated.apart(FP32)) ** 2 / ratio


def test_without_chunks_or_second_parts_it_is_far_worse(emulated: Emulated) -> None:
    assert emulated.apart(SPLIT) <= 2 * emulated.apart(FP32) < 1e-5
    assert emulated.apart(WHOLE) > 6 * emulated.apart(SPLIT)
    assert emulated.apart("TF32") > 50 * emulated.apart(SPLIT)
    assert emulated.apart("bf16") > 400 * emulated.apart(SPLIT)
    off = {name: emulated.error(name, partial(loss_error, ratio=1e-8)) for name in (SPLIT, WHOLE)}
    assert off[WHOLE] > 10 * off[SPLIT]


def test_small_sites_have_the_error_of_two_bf16_parts() -> None:
    """Which does not depend on the number of components, while that of float32 goes with its square root."""
    site = drawn_site(0, components=256)
    split, fp32 = (distance(way(site.V, site.U), site.exact) for way in (ref.split_product, cuda_core))
    assert fp32 < 4e-7
    assert 3e-6 < split < 6e-6
