"""Short descriptions of loss terms, CI functions, memory policies and paths, for printing."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

from param_decomp_jax.ci import (
    ChunkwiseTransformer,
    CIConfig,
    ComponentReadout,
    GlobalMLP,
    GlobalTransformer,
    LayerwiseMLP,
    Taps,
)
from param_decomp_jax.decomposition.schedules import Anneal, AnySchedule, Knots, Schedule
from param_decomp_jax.method.adversary import (
    AdamAscent,
    BroadcastAcrossBatch,
    FreshAttack,
    MomentumAscent,
    PerBatch,
    PerBatchPerPosition,
    PersistentAttack,
    Pool,
    RepeatAcrossBatch,
    Scope,
    SGDAscent,
    SignAscent,
    SingleSource,
)  # fmt: skip
from param_decomp_jax.method.losses import DirectTerm, ImportanceMinimality, Lp, SmoothL0, Term
from param_decomp_jax.method.masks import Constant, Stochastic
from param_decomp_jax.method.recon import (
    AllSites,
    Beside,
    Chunks,
    EachSite,
    LiveSets,
    Merged,
    Reconstruction,
    SourceSpec,
    attack_of,
    live_sets,
)
from param_decomp_jax.method.routing import Everywhere, Routing, StaticProbability, UniformKSubset
from param_decomp_jax.sharding.memory import HELD_GROUPS, INTERMEDIATES, MemoryPolicy
from param_decomp_lab.ui.numbers import exact


def describe_term(term: Term, n_sites: int | None, steps: int) -> str:
    """Describes what a term computes. ``n_sites``: None if the target is unknown."""
    match term:
        case DirectTerm():
            return term.describe()
        case ImportanceMinimality():
            return describe_importance_minimality(term)
        case Reconstruction():
            at = ["error at the sites' outputs"] if term.error == "hidden_acts" else []
            at += [] if term.beside is None else [describe_beside(term.beside, attack_of(term) is not None)]
            live = describe_live_sets(term.live, n_sites)
            return "; ".join([live, describe_routing(term.routing), describe_sources(term.sources, steps), *at])
        case _:
            assert_never(term)


def describe_beside(beside: Beside, is_persistent: bool) -> str:
    """R6. ``is_persistent``: the term's sources are kept."""
    text = f"beside the output {_listed(beside.points)}, times {describe_schedule(beside.coeff)}"
    climbed = {"output": "the output's error alone", "term": "the sum"}[beside.adversary_objective]
    return f"{text}; sources climb {climbed}" if is_persistent else text


def describe_importance_minimality(term: ImportanceMinimality) -> str:
    match term.penalty:
        case Lp(p, eps):
            text = f"(υ + {exact(eps)})^p, p {describe_schedule(p)}"
        case SmoothL0(gamma):
            text = f"υ² / (υ² + γ²), γ {describe_schedule(gamma)}"
    text += ", over its value at 1" if term.penalty.normalize_at_one else ""
    if term.frequency is None:
        return f"{text}; β {exact(term.beta)}"
    own = term.frequency
    text += f"; frequency {describe_schedule(own.coeff)} at {exact(own.reference_token_count)} positions"
    halflife = own.ema_halflife_steps
    return text if halflife is None else f"{text}, a mean over steps with a half-life of {exact(halflife)}"


def describe_live_sets(live: LiveSets, n_sites: int | None) -> str:
    match live:
        case AllSites():
            return "all sites live"
        case EachSite():
            return "one site live at a time"
        case Chunks(size):
            if n_sites is None:
                return f"chunks of {size} sites live"
            sizes = [len(chunk) for chunk in live_sets(live, n_sites)]
            last = f", the last of {sizes[-1]}" if sizes[-1] != sizes[0] else ""
            return f"{len(sizes)} chunk{'s'[: len(sizes) > 1]} of {sizes[0]} sites live{last}"
        case _:
            assert_never(live)


def describe_routing(routing: Routing) -> str:
    match routing:
        case Everywhere():
            return "everywhere"
        case UniformKSubset():
            return "routed to a uniform k-subset"
        case StaticProbability(p):
            return f"each routed with probability {exact(p)}"
        case _:
            assert_never(routing)


def describe_sources(sources: SourceSpec, steps: int) -> str:
    match sources:
        case Stochastic(sampling):
            return f"stochastic {sampling} sources"
        case Constant(value):
            meaning = {0.0: " (masks are λ)", 1.0: " (all components on)"}
            return f"constant {exact(value)}" + meaning.get(value, "")
        case FreshAttack(init, step_size, n_steps, scope):
            return f"fresh PGD, {n_steps} steps of {exact(step_size)} from {init}, {scope}"
        case PersistentAttack():
            return describe_persistent(sources, steps)
        case Merged(attack, Stochastic(sampling), adv_fraction):
            share = f"in a share of {describe_schedule(adv_fraction)} of the rows, everywhere"
            return f"{describe_persistent(attack, steps)}, {share}; stochastic {sampling} sources in the others"
        case _:
            assert_never(sources)


def describe_persistent(attack: PersistentAttack, steps: int) -> str:
    match attack.optimizer:
        case AdamAscent(schedule, beta1, beta2):
            climbs = f"Adam (β {exact(beta1)}, {exact(beta2)}) lr {describe_schedule(schedule)}"
        case SignAscent(schedule):
            climbs = f"sign lr {describe_schedule(schedule)}"
        case SGDAscent(schedule):
            climbs = f"sgd lr {describe_schedule(schedule)}"
        case MomentumAscent(schedule, momentum):
            climbs = f"momentum {exact(momentum)} lr {describe_schedule(schedule)}"
        case _:
            assert_never(attack.optimizer)
    ascents = f"{attack.n_warmup_steps} + 1 ascents per step"
    parts = [f"persistent PGD, {climbs}, {describe_scope(attack.scope)}", ascents]
    parts += ["sigmoid"] if attack.sigmoid else []
    first = attack.first_step(steps)
    parts += [f"on from step {first:,}" if first < steps else "never on"] if first else []
    return ", ".join(parts)


def describe_scope(scope: Scope) -> str:
    match scope:
        case SingleSource():
            return "single_source"
        case BroadcastAcrossBatch():
            return "broadcast_across_batch"
        case RepeatAcrossBatch(n):
            return f"repeat_across_batch of {n}"
        case PerBatchPerPosition():
            return "per_batch_per_position"
        case PerBatch():
            return "per_batch"
        case Pool(size):
            return f"pool of {size} a row"
        case _:
            assert_never(scope)


def describe_schedule(schedule: float | AnySchedule | Anneal) -> str:
    match schedule:
        case Schedule(start, kind, warmup_pct, final_val_frac):
            warmup = f" after {exact(100 * warmup_pct)} % warm-up" if warmup_pct else ""
            final = "" if kind == "constant" else f" {kind} to {exact(start * final_val_frac)}"
            return f"{exact(start)}{final}{warmup}"
        case Anneal(start, end):
            return exact(start) + (f" → {exact(end)}" if schedule.moves else "")
        case Knots(peak, points):
            first, last = (exact(peak * point.frac) for point in (points[0], points[-1]))
            return f"{first} to {last} by {len(points)} knots, {exact(peak)} at most"
        case _:
            return exact(schedule)


def describe_ci(ci: CIConfig) -> str:
    match ci:
        case LayerwiseMLP(kind, hidden):
            return f"layerwise {kind}, hidden {list(hidden)}"
        case GlobalMLP(hidden):
            return f"global_shared_mlp, hidden {list(hidden)}{describe_taps(ci.taps)}"
        case GlobalTransformer():
            return f"global_shared_transformer, {describe_transformer(ci)}{describe_taps(ci.taps)}"
        case ChunkwiseTransformer(transformer, n, inputs):
            layers = "a layer" if n == 1 else f"{n} layers"
            reads = "" if inputs is None else f", reads the inputs of {_listed(inputs.patterns)}"
            taps = describe_taps(ci.taps)
            return f"chunkwise_transformer, one to {layers}: {describe_transformer(transformer)}{reads}{taps}"
        case ComponentReadout(function):
            return f"{describe_ci(function)}, with a component readout"
        case _:
            assert_never(ci)


def describe_taps(taps: Taps | None) -> str:
    match taps:
        case None:
            return ""
        case Taps("first_block_resid"):
            return ", reads the residual stream that enters its first block"
        case Taps("all_block_resids"):
            return ", reads the residual streams that enter its blocks"
        case Taps(offsets):
            return f", reads the residual streams at {_listed([f'+{n}' for n in offsets])} from its first block"


def describe_transformer(ci: GlobalTransformer) -> str:
    blocks = f"{ci.n_blocks} block{'s'[: ci.n_blocks > 1]} of width {ci.d_model:,}"
    heads = f"{ci.n_heads}{' causal' if ci.causal else ''} heads"
    if ci.n_kv_heads is not None:
        heads += f" ({ci.n_kv_heads} of keys and values)"
    mlp = f"{'SwiGLU' if ci.mlp_type == 'swiglu' else 'MLP'} {list(ci.mlp_hidden)}"
    return f"{blocks}, {heads}, {mlp}{', weights of norms' if ci.learned_norm_scale else ''}"


def shown_path(path: Path) -> str:
    """The path, relative to the current folder if that is shorter."""
    relative = os.path.relpath(path)
    return min(str(path), relative, key=len)


def describe_memory(preset: str, policy: MemoryPolicy) -> str:
    """Describes what a policy keeps and what it computes in blocks; settings at their defaults are left out."""
    kept = [name for name in INTERMEDIATES if name in policy.save]
    summary = [f"{preset}: everything kept" if len(kept) == len(INTERMEDIATES) else f"{preset}: keeps {_listed(kept)}"]
    offloaded = [*(name for name in INTERMEDIATES if name in policy.offload), *sorted(policy.offload_state)]
    if offloaded:
        summary.append(f"{_listed(offloaded)} in host memory")
    blocks = {
        "sites by {:,} components": policy.component_block,
        "sites by {:,} tokens": policy.token_block,
        "KL by {:,} tokens": policy.vocabulary_block if policy.recomputes("vocabulary") else None,
    }
    summary += [words.format(size) for words, size in blocks.items() if size is not None]
    if policy.layers == "unroll":
        summary.append("layers unrolled")
    if policy.layer_group is not None:
        summary.append(f"one input kept in {policy.layer_group} layers")
    if policy.micro_batches > 1:
        summary.append(f"{policy.micro_batches} micro-batches")
    if not policy.donate:
        summary.append("nothing donated")
    for by in ("device", "node"):
        if groups := [group for group in HELD_GROUPS if dict(policy.held).get(group) == by]:
            summary.append(f"each {by} holds {_listed(groups)}")
    if policy.collective_mib is not None:
        summary.append(f"collectives of up to {policy.collective_mib:,} MiB")
    summary += [f"{part} in {dtype}" for part, dtype in policy.state_dtypes]
    return "; ".join(summary)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "nothing"
