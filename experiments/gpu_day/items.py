"""The items that are measured, in order."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from param_decomp_lab.config.memory import KEEP_ALL

PARTS = ("products", "plan", "step", "phases", "toys", "links", "decompose", "layers")


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something that is measured in a process of its own.

    ``parts``: the parts that show it. ``expected_s``: the time it is expected to take; with less time left it is not
    started. ``needs``: the name of the item whose result it depends on.
    """

    name: str
    parts: tuple[str, ...]
    expected_s: float
    needs: str = ""

    @property
    def asked(self) -> dict[str, Any]:
        """What the result depends on, as JSON has it: a result for other settings does not count for this item."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for name in ("name", "parts", "expected_s"):
            del found[name]
        return found


@dataclass(frozen=True, kw_only=True)
class Step(Item):
    """A configuration whose training step is measured.

    ``policy``: the memory preset, for those that are compared. ``rounds``: the number of timed dispatches, after a
    first one. ``traced``: whether the profiler traces it, without CUDA graphs, whose kernels have no names.
    ``plan_gib``: what `pd probe` says it needs; it is not started on a card with less. ``over_plan``: the GiB by which
    JAX's memory exceeds the plan of the item ``needs``, in place of 0.92 of the card.
    """

    config: str
    sets: tuple[str, ...]
    policy: str = ""
    rounds: int = 6
    traced: bool = False
    plan_gib: float = 0.0
    over_plan: float | None = None


@dataclass(frozen=True, kw_only=True)
class Products(Item):
    """V U of Δ, in every way in which it could be computed. ``shape``: d_in, C, d_out. ``checked``: the most rows and
    columns of V U that are compared with float64."""

    shape: tuple[int, int, int]
    checked: int = 512


@dataclass(frozen=True, kw_only=True)
class Links(Item):
    """Collectives between this machine's cards. ``sizes``: those of messages, in bytes. ``few``: how many of the
    smallest sizes are also measured in groups of fewer devices. ``simulated``: the number of CPU devices in place of
    cards. ``nodes``: the number of nodes over which the devices are divided."""

    sizes: tuple[int, ...]
    few: int = 3
    simulated: int = 0
    nodes: int = 1


@dataclass(frozen=True, kw_only=True)
class Decomposition(Item):
    """A run of `pd train`. ``needs``: the item that has the same step. ``most_s``: its longest time. ``steps``: a fixed
    number of steps instead of as many as fit in the time. ``seq_len``, ``tokens``: the length of the rows to train on,
    and the most tokens. ``after``: commands of `pd` for the finished run, whose folder follows the first word.
    ``after_s``: the time left for these."""

    config: str
    sets: tuple[str, ...]
    seq_len: int
    most_s: float = 1800.0
    steps: int | None = None
    tokens: int | None = None
    after: tuple[tuple[str, ...], ...] = ()
    after_s: float = 0.0


ONE_DEVICE = ("mesh={replica: 1, fsdp: 1}", "eval=null")


def _layer_18(policy: str, delta: str, batch: int, plan_gib: float, and_more: str = "", **more: Any) -> Step:
    """Returns a step of layer 18. ``delta``: `numerics.delta`. Results in docs/measurements whose names lack it come
    from an older program."""
    sets = (
        *ONE_DEVICE,
        "data.max_seq_len=512",
        f"pd.batch_size={batch}",
        f"memory={{preset: {policy}}}",
        f"remat_recon_forwards={'false' if policy in KEEP_ALL else 'true'}",
        f"numerics={{delta: {delta}}}",
    )
    name = f"layer 18, {policy}, Δ {delta}, {batch} × 512{and_more}"
    more = {"parts": ("plan", "step"), "config": "configs/llama8b_l18.yaml", "expected_s": 110.0, **more}
    return Step(name=name, sets=sets, policy=policy, plan_gib=plan_gib, **more)


def _traced(step: Step, expected_s: float = 130.0) -> Step:
    """Returns the same step, traced for its phases."""
    name = f"{step.name}, traced"
    return replace(step, name=name, parts=("phases",), expected_s=expected_s, traced=True, needs=step.name)


def _toy(name: str, at_once: int) -> Step:
    sets = ("eval=null", f"steps_per_dispatch={at_once}")
    config, name = f"configs/toys/{name}.yaml", f"{name}, {at_once:,} at once"
    return Step(name=name, parts=("toys",), expected_s=30.0, config=config, sets=sets, rounds=20)


_SMOLLM2 = (
    "pd.batch_size=64",
    "data.max_seq_len=256",
    "pd.ci_config.simple_transformer_ci_cfg.attn_config.max_len=256",
    "runtime.autocast_bf16=true",
    "memory={preset: balanced}",
)
"""Settings for 64 times the batch of SmolLM2's configuration, which was tuned for 256 tokens per step on a CPU."""
_SMOLLM2_STEP = Step(
    name="SmolLM2-135M, balanced, 64 × 256", parts=("plan", "step"), expected_s=60.0,
    config="configs/demo-smollm2-transformer.yaml", sets=("eval=null", *_SMOLLM2), rounds=20,
)  # fmt: skip


def _layers(name: str, config: str, plan_gib: float, expected_s: float) -> tuple[Step, Decomposition]:
    """Returns the items for many layers of SmolLM2, including the comparison and the harvest that follow."""
    step = Step(
        name=f"SmolLM2-135M, {name}, 16 × 256", parts=("layers",), expected_s=expected_s, config=config,
        sets=("eval=null",), rounds=20, plan_gib=plan_gib,
    )  # fmt: skip
    compared = ("eval", "--baselines", "--matched", "--batches", "2", "--batch-size", "4", "--attack", "20")
    run = Decomposition(
        name=f"SmolLM2-135M, {name}, decomposed", parts=("layers",), expected_s=420.0, needs=step.name, config=config,
        sets=(), seq_len=256, after=(compared, ("harvest", "--tokens", "1e6")), after_s=120.0,
    )  # fmt: skip
    return step, run


_ONE_CARD = _layer_18("one_card", "split", 8, 78.1, expected_s=130.0)
_BALANCED = _layer_18("balanced", "split", 8, 60.4)

# Plans come from `pd probe`. Those of `one_card` and `balanced` with 8 rows and Δ split are of 28 November 2026, JAX
# 0.10.2; the others are older. 0.92 of a card of 80 GB are 73.3 GiB; the target and the state of layer 18 take 44. The
# first seven items should fit in a quarter of an hour.
ITEMS: tuple[Item, ...] = (
    Products(name="V U in Δ", parts=("products",), expected_s=60.0, shape=(4096, 24576, 14336)),
    _ONE_CARD,
    _BALANCED,
    _layer_18("plain", "fp32", 8, 109.7),
    _traced(_ONE_CARD, 140.0),
    _layer_18(
        "balanced", "split", 8, 60.4, ", 0.5 GiB over its plan", parts=("plan",), rounds=2, over_plan=0.5,
        needs=_BALANCED.name,
    ),
    _traced(_BALANCED),
    _layer_18("balanced", "fp32", 8, 61.1),
    _layer_18("plain", "split", 8, 109.7),
    _layer_18("one_card", "split", 5, 69.6, expected_s=130.0),
    _toy("tms_5-2", 100),
    _toy("resid_mlp1", 50),
    _SMOLLM2_STEP,
    Links(name="links", parts=("links",), expected_s=200.0, sizes=tuple(4**n << 16 for n in range(7))),
    Decomposition(
        name="SmolLM2-135M decomposed", parts=("decompose",), expected_s=300.0, needs=_SMOLLM2_STEP.name,
        config=_SMOLLM2_STEP.config, sets=_SMOLLM2, seq_len=256,
    ),
    _layer_18("lean", "split", 8, 65.9),
    _layer_18("fast", "split", 8, 65.5),
    _layer_18("balanced", "split", 32, 106.6),
    *_layers("layers 22 to 29", "configs/smollm2_l22-29.yaml", 12.2, 150.0),
    *_layers("MLPs of all layers", "configs/smollm2_all_mlp.yaml", 10.5, 200.0),
)  # fmt: skip


_TINY_TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 64,
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
_TINY = (
    "pd.decomposition_targets=[{module_pattern: model.layers.1.mlp.*_proj, C: 8}]",
    "pd.ci_config={mode: layerwise, fn_type: shared_mlp, hidden_dims: [8]}",
)


def toy_items(work: Path) -> tuple[Item, ...]:
    """Returns a small item of every kind, for a CPU. ``work``: a folder for the description of a small target."""
    target = work / "tiny-target"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(_TINY_TARGET))
    tiny = (
        *_TINY,
        f"target={{folder: {target}}}",
        "runtime.autocast_bf16=false",
        "pd.faithfulness_warmup_steps=0",
        "pd.loss_metrics=[{type: FaithfulnessLoss, coeff: 100}, {type: CIMaskedReconLoss, coeff: 1}]",
        "data.max_seq_len=8",
    )
    asked = (("one_card", "split"), ("balanced", "split"), ("balanced", "fp32"), ("lean", "split"))
    steps = [_layer_18(*one, 2, 0.0, expected_s=0, rounds=2) for one in asked]
    steps = [replace(s, name=s.name.replace("layer 18", "tiny"), sets=(*s.sets, *tiny)) for s in steps]
    toy = replace(_toy("tms_5-2", 2), expected_s=0, rounds=2)
    demo = ("pd.batch_size=4", "data.max_seq_len=32", "pd.faithfulness_warmup_steps=2", "eval.batch_size=4")
    return (
        Products(name="V U in Δ", parts=("products",), expected_s=0, shape=(64, 4096, 48)),
        *steps,
        _traced(steps[0], expected_s=0),
        replace(toy, sets=(*toy.sets, "pd.batch_size=8")),
        Links(
            name="links", parts=("links",), expected_s=0, sizes=(1 << 16, 1 << 18, 1 << 20), few=1, simulated=8, nodes=2
        ),
        Decomposition(
            name="the demo's target decomposed", parts=("decompose",), expected_s=0,
            config="configs/demo/transformer.yaml", seq_len=32, tokens=20_000, steps=600,
            sets=(*_TINY, *demo, "eval.n_steps=1", "eval.metrics.1.groups=null"),
            after=(
                ("eval", "--baselines", "--matched", "--batches", "1", "--batch-size", "4", "--attack", "2"),
                ("harvest", "--tokens", "2000"),
            ),
        ),
    )  # fmt: skip


def named(items: Sequence[Item], name: str) -> Item:
    return next(item for item in items if item.name == name)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command was asked for. ``decompose_s``: the length of the decomposition; None: as long as time is left,
    within the item's own limit. ``smollm2``: a folder with its weights. ``text``: what to train on in place of the
    standard library. ``beside``: the number of processes that compile without the card, after the measurements."""

    parts: Sequence[str]
    json: Path
    page: Path
    work: Path
    seconds: float
    decompose_s: float | None
    smollm2: Path | None
    text: Path | None
    beside: int
    toy: bool

    @cached_property
    def every(self) -> Sequence[Item]:
        return toy_items(self.work) if self.toy else ITEMS

    @cached_property
    def items(self) -> Sequence[Item]:
        """The items of the parts asked for, and those that they need, in order."""
        every = self.every
        wanted = {item.name for item in every if {*item.parts} & {*self.parts}}
        wanted |= {item.needs for item in every if item.name in wanted}
        return [item for item in every if item.name in wanted]
