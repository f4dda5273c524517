"""Whether runs fit on the GPUs that they are to be submitted to, before they wait in a queue for that answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from param_decomp_lab.display.warnings import print_warnings
from param_decomp_lab.errors import CannotTell, UserError
from param_decomp_lab.launch.layout import Layout
from param_decomp_lab.probe.subprocess import ProbeOutput, probe_in_subprocess

SKIP_PROBE = "submit without asking: --no-probe"


@dataclass(frozen=True)
class PlannedProbe:
    """A run: its wrapper with assignments, and what it is called here."""

    path: Path
    sets: tuple[str, ...]
    name: str


def all_fit(probes: Sequence[PlannedProbe], layout: Layout, gpu: str, console: Console, anyway: bool) -> bool:
    """Asks `pd probe` about every run, and says what it answers; False where one does not fit and ``anyway`` is not so.

    UserError where the question cannot be asked, CannotTell where it gets no answer (unless ``anyway``).
    """
    options = ("--gpu", gpu, "--nodes", str(layout.nodes), "--gpus-per-node", str(layout.per_node))
    all_good = True
    for planned in probes:
        name = escape(planned.name)
        console.print(f"asking whether {name} fits on {gpu.upper()}s (minutes the first time) …", highlight=False)
        output = probe_in_subprocess(planned.path, planned.sets, options)
        if output.status == 2:
            raise UserError(f"pd probe: {output.why}\n{SKIP_PROBE}")
        if output.answer is None:
            if not anyway:
                raise CannotTell(f"{planned.name}: pd probe cannot tell whether it fits: {output.why}\n{SKIP_PROBE}")
            print_warnings([f"nobody knows whether {planned.name} fits; submitted anyway"], console)
            continue
        fits = output.answer["verdict"] == "fits"
        console.print(_describe_result(planned, output), highlight=False, soft_wrap=True)
        if not fits and anyway:
            print_warnings(["submitted anyway"], console)
        all_good = all_good and (fits or anyway)
    return all_good


def _describe_result(planned: PlannedProbe, output: ProbeOutput) -> str:
    answer = output.answer
    assert answer is not None
    need = f"needs {answer['peak_gib']:.1f} of {answer['pool_gib']:.1f} GiB of each GPU ({answer['largest_part']})"
    if answer["verdict"] == "fits":
        return f"[green]fits[/]: {escape(planned.name)} {need}"
    return f"{escape(output.out.rstrip())}\n[bold red]does not fit[/]: {escape(planned.name)} {need}"
