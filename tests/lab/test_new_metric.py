"""docs/development.md, "A new metric", followed to the letter: a metric that is not part of the project is configured,
checked, measured, drawn and reported by the same commands as the others."""

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from matplotlib.figure import Figure

from param_decomp_lab.config import load_config
from param_decomp_lab.eval.request import EvaluationRequest, evaluation_config
from param_decomp_lab.metrics import METRICS, Metric
from param_decomp_lab.metrics.batch import Batch
from param_decomp_lab.metrics.snapshot import Snapshot
from param_decomp_lab.schema.kinds import registered
from param_decomp_lab.schema.strict import Count
from tests.lab.tiny_run import pd_here, rows
from tests.lab.toy_run import CONFIG, save_toy, settings

# --8<-- what somebody adds as `metrics/noise_error.py`, there with @registered(METRICS)


class NoiseError(Metric):
    """How far V U is from W on random inputs."""

    type: Literal["NoiseError"]
    n_inputs: Count

    usual: ClassVar = {"n_inputs": 4}
    meanings: ClassVar = {"eval/noise_error/": "mean squared error of V U on normal inputs"}
    titles: ClassVar = {"noise_error": "Error of V U on random inputs"}

    def describe(self) -> str:
        return f"error of V U on {self.n_inputs} random inputs"

    def measure(self, batch: Batch) -> dict[str, Any]:
        import jax
        import jax.numpy as jnp

        weights = batch.target.site_weights(batch.clean_pass.weights)
        errors = {}
        for name, factors in batch.components.items():
            inputs = jax.random.normal(batch.key(f"{self.type} {name}"), (self.n_inputs, factors.V.shape[-2]))
            errors[name] = jnp.mean((inputs @ (weights[name] - factors.V @ factors.U)) ** 2, axis=(-2, -1))
        return errors

    def row(self, means: Any, snapshot: Snapshot) -> dict[str, float]:
        return {f"eval/noise_error/{site}": float(x) for site, x in snapshot.sites.unstack(means).items()}

    def figures(self, means: Any, snapshot: Snapshot) -> dict[str, Figure]:
        from matplotlib.figure import Figure

        figure = Figure()
        by_site = snapshot.sites.unstack(means)
        figure.subplots().barh(list(by_site), [float(x) for x in by_site.values()])
        return {"noise_error": figure}


# --8<-- the end


@pytest.fixture(autouse=True)
def new_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers it until the end of the test."""
    monkeypatch.setitem(METRICS, "NoiseError", NoiseError)


def test_a_new_metric_goes_the_whole_way(tmp_path: Path) -> None:
    save_toy(tmp_path)
    metrics = "eval.metrics=[{type: NoiseError, n_inputs: 3}]"
    every = ("pd.steps=4", "pd.faithfulness_warmup_steps=0", "eval.every=4", "eval.slow_every=4")
    given = settings(tmp_path, 1, *every, metrics)
    said = " ".join(pd_here("check", CONFIG, *given).out.split())
    assert "NoiseError 4 error of V U on 3 random inputs" in said
    outcome = pd_here("train", CONFIG, *given)
    assert outcome.status == 0, outcome
    run, key = tmp_path / "p-00000001", "eval/noise_error/linear1"
    first, last = (row[key] for row in rows(run) if key in row)
    assert first != last
    assert (run / "figures" / "noise_error_4.png").is_file()
    page = (run / "report.html").read_text()
    for text in (key, "mean squared error of V U on normal inputs", "Error of V U on random inputs"):
        assert text in page
    out = tmp_path / "found.json"
    assert pd_here("eval", run, "--metric", "NoiseError", "--out", out).status == 0
    found = json.loads(out.read_text())
    assert found["row"][key] == last
    assert Path(found["figures"]["slow_eval/figures/noise_error"]).is_file()


def test_usual_keys() -> None:
    """They fill in a metric that the run does not configure."""
    config = evaluation_config(load_config(CONFIG), EvaluationRequest(["NoiseError"]), "here")
    assert config.method.eval is not None
    assert config.method.eval.metrics == (NoiseError(type="NoiseError", n_inputs=4),)


def test_mistakes_in_a_new_metric(tmp_path: Path) -> None:
    wrong = "eval.metrics=[{type: NoiseError, n_input: 1}, {type: NoiseEror, n_inputs: 0}]"
    outcome = pd_here("check", CONFIG, *settings(tmp_path, 1, wrong))
    assert outcome.status == 2
    for text in (
        "eval.metrics.0.n_input: unknown key 'n_input'; did you mean 'n_inputs'?",
        "eval.metrics.1: unknown 'type' 'NoiseEror'; did you mean 'NoiseError'?",
        "eval.metrics.1.n_inputs: should be greater than or equal to 1, not 0",
        "eval.metrics.1.type: NoiseError is listed twice and would log the same keys; keep one",
    ):
        assert text in outcome.err


def test_a_type_is_taken_once() -> None:
    with pytest.raises(AssertionError, match="two models have the type NoiseError"):
        registered(METRICS)(NoiseError)
