"""Writes pictures of an answer: the memory over the course of the step, as an interactive page and as a PNG."""

from collections.abc import Mapping
from pathlib import Path

from param_decomp_aot.buffers import find_peak, ledger
from param_decomp_aot.timeline import timeline
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import is_irregular, write_whole
from param_decomp_lab.metrics.figures.save import save_figure
from param_decomp_lab.probe.answer import GIB, ProbeAnswer
from param_decomp_lab.probe.memory_page import memory_page
from param_decomp_lab.probe.show import verdict_line
from param_decomp_lab.probe.subject import STEP
from param_decomp_lab.probe.timeline_figure import timeline_figure


def write_pages(answer: ProbeAnswer, file: Path) -> tuple[Path, Path | None]:
    """Writes the page ``file``, and a PNG of the same name beside it unless it is a device or a pipe; the second path
    is then None. Raises UserError if they cannot be written.
    """
    step, pool = answer.parts[STEP], answer.pool
    kept = ledger(*step.dump)
    moments, peak = timeline(kept), find_peak(kept)
    title = f"{answer.subject.title}: the {STEP} on {answer.card.name.upper()}"
    picture = None if is_irregular(file) else file.with_suffix(".png")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        page = memory_page(
            title, moments, peak, step.groups, _summary(answer), pool=pool.usable, capacity=pool.capacity
        )
        write_whole(file, page)
        if picture is not None:
            save_figure(timeline_figure(moments, title, pool=pool.usable, capacity=pool.capacity), picture)
    except OSError as error:
        raise UserError(f"--html {file}: cannot be written ({error.strerror})") from error
    return file, picture


def _summary(answer: ProbeAnswer) -> Mapping[str, str]:
    sizes = {name: f"{part.peak / GIB:,.2f} GiB" for name, part in answer.parts.items()}
    return {**answer.subject.described, **sizes, "verdict": str(verdict_line(answer))}
