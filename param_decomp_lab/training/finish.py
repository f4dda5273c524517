"""Ends a run: writes the examples and the report."""

from param_decomp_jax.method.state import State
from param_decomp_jax.targets.decoder import Decoder
from param_decomp_lab.eval.evaluation import EvaluationStopped
from param_decomp_lab.eval.examples import find_examples, write_examples
from param_decomp_lab.processes.stop_signal import LAST_PATIENCE_S
from param_decomp_lab.report import summary_table, write_report
from param_decomp_lab.runs.folder import CONFIG_FILE
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.training.job import TrainingJob

FINISHING_PATIENCE_S = 30.0
"""Time allowed for writing the report when the run is asked to stop after its last step."""


def finish(job: TrainingJob, state: State) -> None:
    """Writes the examples and the report. The last state is already saved, so resuming a run that was stopped here does
    only this.
    """
    finishing = "after the last step, which is saved; the report is not written"
    job.stop.may_leave(finishing, FINISHING_PATIENCE_S)
    job.check_folder()
    try:
        _examples(job, state)
    except EvaluationStopped:
        raise job.preempted(finishing) from None
    if job.processes.first:
        job.check_folder()
        _report(job)
        job.stop.may_leave("after the report was written; wandb may lack some of it", LAST_PATIENCE_S)


def _examples(job: TrainingJob, state: State) -> None:
    problem, weights, evaluation = job.setup.problem, job.setup.weights, job.evaluation
    if evaluation is None or job.setup.eval is None:
        return
    text, batches = job.setup.text, evaluation.batches(job.stop)
    statistics = evaluation.statistics(state, weights, job.stop)
    if text is None and isinstance(problem.target, Decoder):
        job.console.print("no tokenizer beside the data or the target: the report has no text examples")
    elif text is not None:
        examples = find_examples(problem, state, weights, batches, statistics, job.setup.mesh)
        if job.processes.first:
            job.check_folder()
            write_examples(job.folder, problem, examples, statistics, text)


def _report(job: TrainingJob) -> None:
    problem = job.setup.problem
    report = write_report(job.folder)
    sites = {site.name: site.C for site in problem.target.sites.all}
    config = read_mapping(job.folder / CONFIG_FILE, "the configuration of a run")
    job.console.print(*summary_table(read_metrics(job.folder), sites, config))
    job.console.print(f"run folder {job.folder}\nreport     {report}", soft_wrap=True)
