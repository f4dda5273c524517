"""What can be told of a step without the card: its plan, its arithmetic."""

from collections import Counter
from pathlib import Path
from typing import Any

from experiments.gpu_day.items import Step
from param_decomp_lab.config import load_config
from param_decomp_lab.errors import CannotTell, UserError
from param_decomp_lab.probe.cards import card
from param_decomp_lab.probe.measure import Where, measure
from param_decomp_lab.probe.subject import STEP, run_subject
from param_decomp_lab.profile.scopes import classify_scope
from param_decomp_lab.setup.resolved import ResolvedConfig

ROOT = Path(__file__).parents[2]


def plan(item: Step, card_name: str) -> dict[str, Any]:
    """What `pd probe` says of the item's step, for a card that need not be there."""
    subject = run_subject(load_config(ROOT / item.config, item.sets))
    try:
        step = measure(subject, STEP, Where(card(card_name), 1, None))
    except (UserError, CannotTell) as error:
        return {"failed": str(error)}
    return {"card": card_name, "plan": {**vars(step.memory), "peak": step.peak}, "compile_s": step.compile_s}


def count(item: Step) -> dict[str, Any]:
    """The arithmetic of the item's step (`pd probe` counts it so), as a whole and by phase."""
    config = load_config(ROOT / item.config, item.sets)
    counted = run_subject(config).flops()
    by_phase: Counter[str] = Counter()
    for scope, flops in counted.by_scope.items():
        by_phase[classify_scope(scope, ()).phase] += flops
    return {
        "total": counted.total,
        "leading": [*ResolvedConfig(config).leading],
        "by_phase": dict(by_phase),
        "counted_once": list(counted.unknown),
    }
