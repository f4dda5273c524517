"""Formats numbers for people: three significant digits, no superfluous zeros."""

from math import isfinite


def number(value: float | None) -> str:
    """``0.0123``, ``12.3``, ``12,345``, ``1.23e-05``; ``–`` for None, ``NaN``, ``∞``."""
    if value is None:
        return "–"
    if not isfinite(value):
        return "NaN" if value != value else ("∞" if value > 0 else "−∞")
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e7 or size < 1e-3:
        return f"{value:.2e}".replace("e+0", "e").replace("e-0", "e-").replace("-", "−")
    if size >= 1000 or float(value).is_integer():
        return f"{value:,.0f}".replace("-", "−")
    text = f"{value:.{3 if size < 1 else 2 if size < 10 else 1}f}" if size >= 0.1 else f"{value:#.3g}"
    return text.replace("-", "−")


def signed(value: float) -> str:
    """``+0.12``, ``−1.14``, ``0.00``."""
    text = f"{value:+.2f}"
    return "0.00" if text in ("+0.00", "-0.00") else text.replace("-", "−")


def exact(value: float | None) -> str:
    """A number from a configuration, as a person would write it: ``0.003``, ``1``, ``100,000``, ``1e7``."""
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e7:
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:g}".replace("e+0", "e").replace("e-0", "e-").replace("-", "−")


def percent(share: float | None) -> str:
    """``7.4 %`` of a share in [0, 1]; more digits where it is small, to ``< 0.001 %``. The space does not break."""
    if share is None or not isfinite(share):
        return number(share)
    value = 100 * share
    if value == 0:
        return "0\u00a0%"
    size = abs(value)
    if size < 1e-3:
        return "< 0.001\u00a0%" if value > 0 else "> −0.001\u00a0%"
    text = f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 1 else f"{value:.2g}"
    return text.replace("-", "−") + "\u00a0%"


def amount(count: int) -> str:
    """A count with three digits: ``9,216``, ``12.3 M``, ``8.03 B``. The space does not break."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:#.3g}".rstrip(".") + f"\u00a0{unit}"
    return f"{count:,}"


def byte_size(n: int) -> str:
    """``512 B``, ``36.0 KiB``, ``21.5 GiB``. The space does not break."""
    size, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f}\u00a0B" if unit == "B" else f"{size:#.3g}".rstrip(".") + f"\u00a0{unit}"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 05 s``, ``7 h 12 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
