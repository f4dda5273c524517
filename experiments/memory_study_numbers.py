"""Numbers and tables of the memory study's page: Markdown that a terminal shows well."""

from collections.abc import Callable, Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, its columns as wide as what is in them, numbers flush right: to be read in a terminal too."""
    cells = [list(heads), *(list(row) for row in rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        return f"| {' | '.join([first[0].ljust(first[1]), *(_aligned(text, w) for text, w in others)])} |"

    return "\n".join([line(heads), f"|{'|'.join('-' * (w + 2) for w in widths)}|", *map(line, cells[1:])])


def _aligned(text: str, width: int) -> str:
    return text.rjust(width) if text[:1].isdigit() or text[:1] in "+−" else text.ljust(width)


def or_blank(value: float | None, said: Callable[[float], str]) -> str:
    return "" if value is None else said(value)


def gib(value: float) -> str:
    """Two digits behind the point below 100."""
    return "0" if value == 0 else f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"


def digits(value: float) -> str:
    """Three of them."""
    return "0" if value == 0 else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def signed(value: float) -> str:
    """With a true minus; 0 for less than half of a hundredth."""
    if abs(value) < 0.005:
        return "0"
    return ("+" if value > 0 else "−") + gib(abs(value))


def size_of(value: float) -> str:
    """GiB, or MiB where those say more."""
    if abs(value) * 1024 < 0.5:
        return "nothing"
    sign = "" if value > 0 else "−"
    return sign + (f"{abs(value):.2f} GiB" if abs(value) >= 1 else f"{abs(value) * 1024:.0f} MiB")


def ratio(value: float, of: float) -> str:
    """A blank where there is nothing to compare, 1 where they are the same to a thousandth."""
    if not of:
        return "" if not value else "from 0"
    return "1" if abs(value / of - 1) < 1e-3 else f"{value / of:.2f}"
