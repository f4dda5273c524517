"""Recovery of a toy's features (section 11): hand-made matrices, the reference, and what must not matter."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_decomp_lab.metrics.figures import tms_geometry
from param_decomp_lab.metrics.ground_truth import (
    best_versions,
    dense_ci_error,
    dense_columns,
    identity_ci_error,
    match_components,
    mmcs_and_ml2r,
)  # fmt: skip
from tests import reference as ref


@st.composite
def importances(draw: st.DrawFn) -> np.ndarray:
    """λ with many ties, many entries on the thresholds, and any number of components."""
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 7)))
    level = st.sampled_from([0.0, 0.05, 0.1, 0.15, 0.5, 0.85, 0.9, 0.95, 1.0])
    entries = draw(st.lists(level, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return np.array(entries, dtype=draw(st.sampled_from([np.float32, np.float64]))).reshape(shape)


def generic(seed: int, features: int, C: int) -> np.ndarray:
    """λ with no ties: many zeros, ones and values between."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.normal(0.2, 0.5, (features, C)), 0, 1) * rng.uniform(0.99, 1, (features, C))


def perfect(features: int, C: int) -> tuple[np.ndarray, np.ndarray]:
    """λ of a perfect identity recovery, and the component of every feature."""
    components = np.random.default_rng(features).permutation(C)[:features]
    matrix = np.full((features, C), 0.1)
    matrix[np.arange(features), components] = 0.9
    return matrix, components


# The identity pattern


@pytest.mark.parametrize(("features", "C"), [(5, 20), (40, 200), (100, 100), (102, 500), (1, 1)])
def test_perfect_identity_has_no_error(features: int, C: int) -> None:
    """At the thresholds themselves nothing is an error."""
    matrix, components = perfect(features, C)
    assert identity_ci_error(matrix, features) == 0
    matching = match_components(matrix)
    np.testing.assert_array_equal(matching.features, np.arange(features))
    np.testing.assert_array_equal(matching.components, components)
    np.testing.assert_array_equal(matching.columns[:features], components)
    np.testing.assert_array_equal(np.sort(matching.columns), np.arange(C))


def test_each_identity_error_counts_once() -> None:
    matrix, components = perfect(5, 20)
    unmatched = next(c for c in range(20) if c not in components)
    for (row, column), value in {
        (0, components[0]): 0.89,  # on the diagonal, not on
        (1, components[2]): 0.11,  # a feature that turns on the component of another
        (3, unmatched): 0.11,  # a component that no feature is matched to
    }.items():
        broken = matrix.copy()
        broken[row, column] = value
        assert identity_ci_error(broken, 5) == 1
    matrix[:, unmatched] = 0.2
    assert identity_ci_error(matrix, 5) == 5
    matrix[:, components[4]] = 0.0
    # Feature 4 takes the component that is always a little on: its own entry is now too low, four are too high.
    assert identity_ci_error(matrix, 5) == 5
    assert match_components(matrix).components[4] == unmatched


def test_hand_made_identity() -> None:
    matrix = np.array([[0.0, 1.0, 0.05], [0.95, 0.0, 0.2]])
    assert identity_ci_error(matrix, 2) == 1
    np.testing.assert_array_equal(match_components(matrix).columns, [1, 0, 2])
    # The greatest total, not the greatest entry of each row: 0.9 + 0.8 beats 1.0 + 0.
    greedy = np.array([[1.0, 0.9], [0.8, 0.0]])
    np.testing.assert_array_equal(match_components(greedy).components, [1, 0])
    assert identity_ci_error(greedy, 2) == 2


def test_a_feature_without_component_is_one_error() -> None:
    matrix, _ = perfect(5, 5)
    fewer = np.delete(matrix, 2, axis=1)
    matching = match_components(fewer)
    assert len(matching.features) == len(matching.components) == 4
    assert identity_ci_error(fewer, 5) == 1
    assert identity_ci_error(np.zeros((5, 2)), 5) == 5
    missing = next(iter(set(range(5)) - set(matching.features)))
    fewer[missing, 0] = 0.3
    assert identity_ci_error(fewer, 5) == 2, "what it turns on instead counts too"


def test_unmatched_columns_come_by_total() -> None:
    matrix = np.array([[0.0, 0.3, 1.0, 0.4, 0.1], [0.2, 0.3, 0.0, 0.0, 1.0]])
    np.testing.assert_array_equal(match_components(matrix).columns, [2, 4, 1, 3, 0])


def test_ties_go_to_fewer_errors() -> None:
    """Both matchings have total 1.5."""
    matrix = np.array([[0.75, 0.5], [1.0, 0.75]])
    assert identity_ci_error(matrix, 2) == identity_ci_error(matrix[:, ::-1], 2) == 3


def test_dense_ties_survive_another_order_of_features() -> None:
    """Both columns add up to 1.2, but in floats only in one of the two orders."""
    matrix = np.array([[0.05, 0.5], [0.5, 0.1], [0.15, 0.1], [0.5, 0.5]])
    assert dense_ci_error(matrix, 1) == dense_ci_error(matrix[[3, 0, 1, 2]], 1)


@settings(max_examples=30)
@given(importances(), st.randoms(use_true_random=False))
def test_order_does_not_matter(matrix: np.ndarray, random: object) -> None:
    """Nor does further components that are never on."""
    features, C = matrix.shape
    rng = np.random.default_rng(random.randrange(2**32))  # type: ignore[attr-defined]
    columns, rows = rng.permutation(C), rng.permutation(features)
    error = identity_ci_error(matrix, features)
    padded = np.concatenate([matrix, np.zeros((features, features), matrix.dtype)], axis=1)
    for same in (matrix[:, columns], matrix[rows], padded):
        assert identity_ci_error(same, features) == error
    for k in range(1, C + 3):
        error = dense_ci_error(matrix, k)
        for same in (matrix[:, columns], matrix[rows], padded):
            assert dense_ci_error(same, k) == error


@settings(max_examples=50)
@given(importances())
def test_matching_is_a_permutation(matrix: np.ndarray) -> None:
    features, C = matrix.shape
    matching = match_components(matrix)
    pairs = min(features, C)
    assert len(matching.features) == len(matching.components) == pairs
    assert (np.diff(matching.features) > 0).all()
    np.testing.assert_array_equal(matching.columns[:pairs], matching.components)
    for order in (matching.columns, dense_columns(matrix)):
        np.testing.assert_array_equal(np.sort(order), np.arange(C))
    totals = matrix.sum(axis=0, dtype=np.float64)
    assert (np.diff(totals[matching.columns[pairs:]]) < 1e-6).all()
    assert (np.diff(totals[dense_columns(matrix)]) < 1e-6).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("features", "C"), [(5, 20), (7, 7), (30, 60)])
def test_errors_agree_with_the_reference(seed: int, features: int, C: int) -> None:
    matrix = generic(seed, features, C)
    assert identity_ci_error(matrix, features) == ref.identity_ci_error(matrix, match_components(matrix).components)
    for k in (1, C // 2, C):
        assert dense_ci_error(matrix, k) == ref.dense_ci_error(matrix, k)


def test_matching_beats_every_other() -> None:
    matrix = generic(0, 4, 6)
    matching = match_components(matrix)
    best = matrix[matching.features, matching.components].sum()
    rng = np.random.default_rng(1)
    assert all(matrix[np.arange(4), rng.permutation(6)[:4]].sum() <= best for _ in range(2000))


# The dense pattern


def test_hand_made_dense() -> None:
    matrix = np.array([[0.5, 0.0, 0.9, 0.0], [0.9, 0.1, 0.8, 0.0], [0.2, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(dense_columns(matrix), [2, 0, 1, 3])
    assert dense_ci_error(matrix, 2) == 0
    assert dense_ci_error(matrix, 1) == 3, "entries of the second in the rest"
    assert dense_ci_error(matrix, 3) == 1, "the third has no entry of 0.9"
    assert dense_ci_error(matrix, 4) == 2
    assert dense_ci_error(matrix, 7) == 5, "three do not exist"


def test_each_dense_error_counts_once() -> None:
    matrix = np.full((100, 100), 0.1)
    matrix[:, ::2] = 0.9
    assert dense_ci_error(matrix, 50) == 0
    matrix[3, 1] = 0.11
    assert dense_ci_error(matrix, 50) == 1
    matrix[:, 0] = 0.89
    assert dense_ci_error(matrix, 50) == 2


def test_dense_ties_go_to_fewer_errors() -> None:
    """Two components of total 1: the one that is really used is the one that counts as used."""
    used, spread = np.array([1.0, 0.0, 0.0, 0.0]), np.full(4, 0.25)
    for pair in ((used, spread), (spread, used)):
        # In front `spread` would be one error, in the rest it is four.
        assert dense_ci_error(np.stack(pair, axis=1), 1) == 2


# Misuse is our bug


def test_misuse_is_asserted() -> None:
    with pytest.raises(AssertionError, match="3 features were probed, the pattern has 5"):
        identity_ci_error(np.eye(3), 5)
    broken = np.eye(3)
    broken[0, 1] = np.nan
    for error in (identity_ci_error, dense_ci_error):
        with pytest.raises(AssertionError, match="N3"):
            error(broken, 3)
    with pytest.raises(AssertionError, match="every row of W is zero"):
        mmcs_and_ml2r(np.zeros((3, 2)), np.ones((3, 4)), np.ones((4, 2)))


# The vectors of a TMS


def tms(seed: int, n: int, h: int, C: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, h)), rng.normal(size=(n, C)), rng.normal(size=(C, h))


@pytest.mark.parametrize(("n", "h", "C"), [(5, 2, 20), (40, 10, 200), (3, 4, 1)])
def test_mmcs_agrees_with_the_reference(n: int, h: int, C: int) -> None:
    W, V, U = tms(0, n, h, C)
    V[0] = 0
    U[0] = 0
    np.testing.assert_allclose(mmcs_and_ml2r(W, V, U), ref.mmcs_and_ml2r(W, V, U), rtol=1e-12)


def test_perfect_vectors() -> None:
    W, _, _ = tms(1, 5, 2, 5)
    order = np.array([2, 0, 3, 1, 4])
    V, U = np.eye(5)[:, order], W[order]
    np.testing.assert_allclose(mmcs_and_ml2r(W, V, U), (1, 1))
    np.testing.assert_allclose(mmcs_and_ml2r(W, -3 * V, -U), (1, 3))
    np.testing.assert_array_equal(order[best_versions(W, V, U).component], np.arange(5))


def test_a_version_of_zero_is_left_out() -> None:
    W = np.array([[1.0, 0.0], [0.0, 1.0]])
    V, U = np.array([[-1.0, 0.0], [0.0, 2.0]]), W
    best = best_versions(W, V, U)
    # Feature 0: its only version points the other way, and is better than one that is zero all the same.
    np.testing.assert_array_equal(best.component, [0, 1])
    np.testing.assert_array_equal(best.cosine, [-1, 1])
    np.testing.assert_array_equal(best.norm_ratio, [1, 2])
    assert mmcs_and_ml2r(W, V, U) == (0.0, 1.5)


@pytest.mark.parametrize(("length", "component"), [(4e-6, 0), (0.0099, 0), (0.0101, 2)])
def test_a_dead_component_does_not_win(length: float, component: int) -> None:
    """Component 2 points exactly along feature 0, which component 0 has learned but for a small angle."""
    W = 3 * np.eye(2)
    V, U = np.eye(2)[:, [0, 1, 0]], 3 * np.array([[1.0, 0.01], [0.0, 1.0], [length, 0.0]])
    best = best_versions(W, V, U)
    np.testing.assert_array_equal(best.component, [component, 1])
    np.testing.assert_allclose(best.norm_ratio, [length if component else np.sqrt(1.0001), 1])
    np.testing.assert_allclose(mmcs_and_ml2r(W, V, U), ref.mmcs_and_ml2r(W, V, U), rtol=1e-12)


def test_a_feature_with_dead_components_alone_counts_as_nothing() -> None:
    W, V, U = 3 * np.eye(2), np.eye(2), np.array([[0.02, 0.0], [0.0, 3.0]])
    best = best_versions(W, V, U)
    np.testing.assert_array_equal(best.component, [-1, 1])
    assert mmcs_and_ml2r(W, V, U) == ref.mmcs_and_ml2r(W, V, U) == (0.5, 0.5)
    shown = {text.get_text() for axes in tms_geometry(W, V, U).axes for text in axes.texts}
    assert {"no c", "c 1"} <= shown


def test_features_without_vector_are_left_out() -> None:
    W, V, U = tms(2, 6, 3, 9)
    without = np.concatenate([W[:2], np.zeros((1, 3)), W[2:]])
    further = np.concatenate([V[:2], np.ones((1, 9)), V[2:]])
    best = best_versions(without, further, U)
    assert np.isnan(best.cosine[2])
    assert np.isnan(best.norm_ratio[2])
    np.testing.assert_allclose(mmcs_and_ml2r(without, further, U), mmcs_and_ml2r(W, V, U), rtol=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_order_sign_and_split_do_not_matter(seed: int) -> None:
    """V, U and their components in any order, with any split of a component's size and sign between the two."""
    W, V, U = tms(seed, 4, 3, 6)
    rng = np.random.default_rng(seed)
    order = rng.permutation(6)
    scale = rng.uniform(0.1, 10, 6) * rng.choice([-1, 1], 6)
    again = mmcs_and_ml2r(W, (V * scale)[:, order], (U / scale[:, None])[order])
    np.testing.assert_allclose(again, mmcs_and_ml2r(W, V, U), rtol=1e-9)
