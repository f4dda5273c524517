"""Reports on a run: the page ``report.html`` and a summary for the terminal."""

from param_decomp_lab.report.summary import summary_table
from param_decomp_lab.report.write import write_report

__all__ = ["summary_table", "write_report"]
