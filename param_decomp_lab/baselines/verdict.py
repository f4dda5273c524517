"""A comparison with baselines in words."""

from param_decomp_lab.baselines.measure import LAMBDA, LARGEST, OWN, Comparison, Point
from param_decomp_lab.display.numbers import number


def verdict(found: Comparison) -> str:
    """How the decomposition stands in each reading against the baseline that is best in it."""
    own, best = found.own, found.best
    what = "KL" if found.of_text else "error"

    def ratio(a: float, b: float) -> str:
        return number(a / b) if b > 0 else "–"

    text = (
        f"At L0 {own.l0:.1f} the decomposition's {what} is {ratio(own.error, best.error)} times that of the best "
        f"baseline ({best.parts}, {best.number:g} parts); with what is off at random "
        f"{ratio(own.random, min(p.random for p in found.matched.values()))} times"
    )
    if found.lengths:
        least = min(p.attacked[-1] for p in found.matched.values())
        text += f", after {found.lengths[-1]} steps of attack {ratio(own.attacked[-1], least)} times"
    return text + ". Below 1 the decomposition is better."


def title(point: Point) -> str:
    """What a point is called in tables."""
    if point.parts != OWN:
        return point.parts
    if point.chosen == LARGEST:
        return f"{OWN}, {point.number:g} largest"
    return LAMBDA if point.chosen == LAMBDA else f"λ above {point.number:g} on"
