"""Describes a comparison with baselines in words."""

import math

from param_decomp_lab.baselines.parts import Choice
from param_decomp_lab.baselines.result import LAMBDA, OWN, WITH_K_ON, BaselinePoint, Comparison
from param_decomp_lab.ui.numbers import number


def verdict(found: Comparison) -> str:
    """Says how the decomposition compares, in each measure, with the baseline that is best in it."""
    own, best, by_gradient = found.own, found.best, found.own_by_gradient
    what = "KL" if found.of_text else "error"

    def ratios(point: BaselinePoint) -> dict[str, str]:
        return {name: "–" if math.isnan(x) else number(x) for name, x in found.over_best(point).items()}

    def harder(point: BaselinePoint) -> str:
        over = ratios(point)
        text = f"with the parts that are off masked at random, {over['random']} times"
        if found.lengths:
            text += f", and after {found.lengths[-1]} steps of attack {over['attack']} times"
        return text

    text = (
        f"At L0 {number(own.l0)} the decomposition's {what} is {ratios(own)['error']} times that of the best "
        f"baseline ({best.parts}, {number(best.number)} parts chosen by {found.choice}); {harder(own)}."
    )
    if by_gradient is not None:
        text += (
            f" With {number(by_gradient.number)} of its components, chosen in the same way, it is "
            f"{ratios(by_gradient)['error']} times; {harder(by_gradient)}."
        )
    return text + " Below 1 the decomposition is better."


def title(point: BaselinePoint) -> str:
    """Returns the name of a point in tables."""
    if point.parts != OWN:
        return point.parts
    if point.chosen in WITH_K_ON.values():
        return f"{OWN}, {number(point.number)} {point.chosen}"
    return LAMBDA if point.chosen == LAMBDA else f"λ above {point.number:g} on"


def with_k_on(choice: Choice) -> str:
    """Says what is compared for each k, to follow the name of the error."""
    return "with the k largest on" if choice == "activation" else "with k parts on, chosen by gradient"
