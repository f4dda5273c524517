"""Checks with `pd probe` whether runs fit on the requested GPUs before they are queued."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from param_decomp_lab.errors import CannotTell, UserError
from param_decomp_lab.launch.layout import JobLayout
from param_decomp_lab.probe.subprocess import ProbeOutput, probe_in_subprocess
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.warnings import print_warnings

SKIP_PROBE = "to submit without this check: --no-probe"


@dataclass(frozen=True)
class PlannedProbe:
    """A run to probe: its wrapper, assignments, and a name for messages."""

    path: Path
    sets: tuple[str, ...]
    name: str


def all_fit(probes: Sequence[PlannedProbe], layout: JobLayout, gpu: str, console: Console, anyway: bool) -> bool:
    """Probes every run and prints the results. Returns False if one does not fit (unless ``anyway``).

    UserError if the probe rejects its arguments, CannotTell if it fails (unless ``anyway``).
    """
    options = ("--gpu", gpu, "--nodes", str(layout.nodes), "--gpus-per-node", str(layout.per_node))
    all_good = True
    for planned in probes:
        console.print(
            f"checking whether {planned.name} fits on {Path(gpu).stem.upper()}s (minutes the first time) …",
            highlight=False,
        )
        output = probe_in_subprocess(planned.path, planned.sets, options)
        if output.status == 2:
            raise UserError(f"pd probe: {output.why}\n{SKIP_PROBE}")
        if output.answer is None:
            if not anyway:
                raise CannotTell(f"{planned.name}: pd probe could not tell if it fits: {output.why}\n{SKIP_PROBE}")
            print_warnings([f"it is unknown whether {planned.name} fits; submitted anyway"], console)
            continue
        fits = output.answer["verdict"] == "fits"
        console.print(_describe_result(planned, output), highlight=False, soft_wrap=True)
        if not fits and anyway:
            print_warnings(["submitted anyway"], console)
        all_good = all_good and (fits or anyway)
    return all_good


def _describe_result(planned: PlannedProbe, output: ProbeOutput) -> Text:
    answer = output.answer
    assert answer is not None
    need = f"needs {answer['peak_gib']:.1f} of {answer['pool_gib']:.1f} GiB of each GPU ({answer['largest_part']})"
    if answer["verdict"] == "fits":
        return Text.assemble(("fits", "green"), f": {planned.name} {need}")
    return Text.assemble(
        f"{printable(output.out.rstrip())}\n", ("does not fit", "bold red"), f": {planned.name} {need}"
    )
