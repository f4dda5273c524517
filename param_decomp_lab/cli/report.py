"""`pd report`."""

from param_decomp_lab.cli.options import RunFolder
from param_decomp_lab.display.console import PlainConsole
from param_decomp_lab.errors import CannotWrite


def report(run: RunFolder) -> None:
    """Write `report.html` of a run again, from the files in its folder.

    Example:

        pd report runs/p-1a2b3c4d
    """
    from param_decomp_lab.report import write_report

    try:
        written = write_report(run)
    except OSError as error:
        about = "" if error.filename is None else f"{error.filename}: "
        raise CannotWrite(f"the report of {run} cannot be made: {about}{error.strerror or error}") from error
    PlainConsole().print(str(written), soft_wrap=True)
