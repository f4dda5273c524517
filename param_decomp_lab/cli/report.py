"""`pd report`."""

from param_decomp_lab.cli.options import RunFolder
from param_decomp_lab.ui.console import PlainConsole


def report(run: RunFolder) -> None:
    """Write the `report.html` of a run again, from the files in its folder.

    Example:

        pd report runs/p-1a2b3c4d
    """
    from param_decomp_lab.report import write_report

    PlainConsole().print(str(write_report(run)), soft_wrap=True)
