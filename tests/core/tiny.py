"""A Llama small enough to compile in seconds, and the way from the core's objects to the reference's and back.

Layers 0 and 1 form one segment, layer 2 another (other kinds, and another C for `q_proj`). Sites that share an input
(`q_proj` and `v_proj` of layer 2) are among them. What goes between core and reference serves every target; the toy
models themselves are in `toys.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.ci import (
    ChunkwiseTransformer,
    CIConfig,
    ComponentReadout,
    GlobalMLP,
    GlobalTransformer,
    ImportanceReader,
    LayerwiseMLP,
    LazyLogits,
    Logits,
    Taps,
    init_ci,
    taps_of_groups,
)  # fmt: skip
from param_decomp_jax.ci.affine import GatedAffine
from param_decomp_jax.ci.chunkwise import ChunkwiseCI
from param_decomp_jax.ci.global_mlp import GlobalMLPCI
from param_decomp_jax.ci.layerwise import ScalarMLP, SharedMLP, VectorMLP
from param_decomp_jax.ci.readout import ReadoutCI
from param_decomp_jax.ci.squash import Squash, lower_leaky
from param_decomp_jax.ci.taps import TAPS
from param_decomp_jax.ci.transformer import TransformerCI
from param_decomp_jax.decomposition.draws import positions
from param_decomp_jax.decomposition.schedules import Anneal, AnySchedule, Knots, Schedule, value_at
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.adversary import (
    AdamAscent,
    Adversary,
    Ascent,
    BroadcastAcrossBatch,
    FreshAttack,
    MomentumAscent,
    PerBatch,
    PerBatchPerPosition,
    PersistentAttack,
    Pool,
    RepeatAcrossBatch,
    SGDAscent,
    SignAscent,
    SingleSource,
)  # fmt: skip
from param_decomp_jax.method.clean_pass import CleanPass
from param_decomp_jax.method.inspection import step_draws, unstack_sites
from param_decomp_jax.method.locality import NonlinearityLocality
from param_decomp_jax.method.losses import Faithfulness, ImportanceMinimality, Lp, SmoothL0, Term
from param_decomp_jax.method.masks import Bundle, Stochastic, StochasticSources
from param_decomp_jax.method.muon import Muon, MuonState, either
from param_decomp_jax.method.optim import AdamW
from param_decomp_jax.method.recon import ForwardDraws, Merged, Reconstruction, draw_forwards, live_sets, n_samples
from param_decomp_jax.method.state import Decomposition, State, init_state
from param_decomp_jax.method.step import Gradients, Problem, StepOutcome, run_clean_pass, step_outcome
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.sharding.mesh import Axes, indices, replace_fields
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.llama import LlamaConfig, module_name
from param_decomp_jax.targets.points import match_points
from param_decomp_jax.targets.resid_mlp import ResidMLP
from param_decomp_jax.targets.tms import TMS
from param_decomp_jax.targets.transformer import Transformer
from tests import reference as ref

CONFIG = LlamaConfig(vocab_size=11, d_model=8, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=2, d_mlp=6, norm_eps=1e-5)
CHOSEN = {
    module_name(0, "q_proj"): 4,
    module_name(0, "up_proj"): 6,
    module_name(1, "q_proj"): 4,
    module_name(1, "up_proj"): 6,
    module_name(2, "q_proj"): 5,
    module_name(2, "v_proj"): 3,
}
LEADING = (4, 5)
TOKENS = np.random.default_rng(7).integers(0, CONFIG.vocab_size, LEADING).astype(np.int32)

TRANSFORMER = GlobalTransformer(d_model=8, n_blocks=2, mlp_hidden=(6,), n_heads=2, max_len=8)
WITH_OPTIONS = GlobalTransformer(
    8, 2, (6, 5), n_heads=4, max_len=8, causal=True, n_kv_heads=2, mlp_type="swiglu", learned_norm_scale=True
)
"""All options of C9."""
CHUNKWISE = ChunkwiseTransformer(TRANSFORMER)
SHARED = LayerwiseMLP("shared_mlp", (5, 4))
SCALAR = LayerwiseMLP("mlp", (3,))

Tree = Any
AnyTarget = Transformer | TMS | ResidMLP


def weights(config: LlamaConfig = CONFIG, seed: int = 0) -> Tree:
    """fp32 weights at which every path of the network matters; norms away from 1."""
    rng = np.random.default_rng(seed)

    def leaf(path: tuple[Any, ...], shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.normal(size=shape)
        value = 1 + 0.2 * noise if "norm" in path[-1].key else noise / shape[-2] ** 0.5
        return np.asarray(noise if path[-1].key == "embed" else value, np.float32)

    made = jax.tree_util.tree_map_with_path(leaf, config.weight_shapes(), is_leaf=lambda x: isinstance(x, tuple))
    return jax.device_put(made)


def target(
    config: LlamaConfig = CONFIG, chosen: Mapping[str, int] = CHOSEN, memory: MemoryPolicy = PLAIN, dtype: Any = None
) -> Transformer:
    return Transformer(config, choose_sites(config.matrices(), chosen), memory, dtype or jnp.float32)


def decomposition(terms: tuple[Term, ...], **changes: Any) -> Decomposition:
    """Optimisers with clipping, decay and schedules unless told otherwise; 10 steps."""
    settings: dict[str, Any] = {
        "seed": 0,
        "steps": 10,
        "batch_size": LEADING[0],
        "squashing": "leaky_hard",
        "use_delta": True,
        "ci": SHARED,
        "terms": terms,
        "components_optimizer": AdamW(Schedule(1e-2, "cosine", 0.2, 0.1), (0.8, 0.95), 0.1, 0.05),
        "ci_optimizer": AdamW(Schedule(5e-3, "linear", 0.0, 0.5), clip_norm=0.5),
    }
    return Decomposition(**{**settings, **changes})


def problem(terms: tuple[Term, ...], of_target: AnyTarget | None = None, **changes: Any) -> Problem:
    return Problem(decomposition(terms, **changes), of_target or target())


@cache
def _state_shapes(spec: Decomposition, sites: Sites, leading: tuple[int, ...], _: bool) -> State:
    """Tracing `init_state` takes a third of a second, and most tests want the state of a problem several times. The
    last argument: whether JAX is in 64 bits."""
    return jax.eval_shape(lambda: init_state(spec, sites, leading))


def ruffled_state(problem: Problem, step: int = 3, seed: int = 1, leading: tuple[int, ...] = LEADING) -> State:
    """A state in mid-training: biases, moments and logits away from the special values that they start with.

    Filled with NumPy's numbers rather than `init_state`'s, which take longer to compile than to test.
    """
    rng = np.random.default_rng(seed)
    spec = problem.decomposition
    shapes = _state_shapes(spec, problem.target.sites, leading, jax.config.jax_enable_x64)

    def noise(x: jax.ShapeDtypeStruct, scale: float) -> np.ndarray:
        return (scale * rng.normal(size=x.shape)).astype(x.dtype)

    def squares(x: jax.ShapeDtypeStruct, scale: float) -> np.ndarray:
        return noise(x, scale) ** 2 + np.float32(scale**2 / 100)

    def factors(x: jax.ShapeDtypeStruct) -> np.ndarray:
        return noise(x, x.shape[-2] ** -0.5 if len(x.shape) > 1 else 0.3)

    def moments(state: Tree) -> Tree:
        if isinstance(state, MuonState):
            momentum = jax.tree.map(lambda x: noise(x, 0.01), state.momentum)
            return MuonState(momentum, *moments((state.others,)))
        adam, *rest = state
        adam = adam._replace(
            count=jnp.asarray(step, jnp.int32),
            mu=jax.tree.map(lambda x: noise(x, 0.01), adam.mu),
            nu=jax.tree.map(lambda x: squares(x, 0.01), adam.nu),
        )
        return (adam, *(jax.tree.map(lambda x: jnp.asarray(step, x.dtype), part) for part in rest))

    def raw(x: jax.ShapeDtypeStruct, sigmoid: bool) -> np.ndarray:
        return (rng.normal(size=x.shape) if sigmoid else rng.uniform(size=x.shape)).astype(x.dtype)

    def adversary(name: str, old: Adversary) -> Adversary:
        attack = spec.persistent[name][1]
        return Adversary(
            raw=jax.tree.map(lambda x: raw(x, attack.sigmoid), old.raw),
            mean=jax.tree.map(lambda x: noise(x, 1e-3), old.mean),
            square=jax.tree.map(lambda x: squares(x, 1e-3), old.square),
            count=jnp.asarray(5, jnp.int32),
        )

    state = State(
        components=jax.tree.map(factors, shapes.components),
        ci=jax.tree.map(lambda x: factors(x) + noise(x, 0.3), shapes.ci),
        components_moments=moments(shapes.components_moments),
        ci_moments=moments(shapes.ci_moments),
        adversaries={name: adversary(name, a) for name, a in shapes.adversaries.items()},
        step=jnp.asarray(step, jnp.int32),
        frequency_means=jax.tree.map(lambda x: jnp.asarray(squares(x, 0.3)), shapes.frequency_means),
    )
    return jax.device_put(state)  # `jnp.asarray` would compile a program for each shape


@cache
def _ci_shapes(sites: Sites, _: bool) -> Any:
    return jax.eval_shape(lambda: init_ci(SHARED, jax.random.key(0), sites))


def clean_pass(target: AnyTarget, weights: Tree, inputs: Any, outputs: bool = False) -> CleanPass:
    """A batch after its clean pass; nothing of it is made again."""
    ci = _ci_shapes(target.sites, jax.config.jax_enable_x64)
    return run_clean_pass(problem((), target), ci, weights, jnp.asarray(inputs), outputs)


def importance_reader(
    logits: Mapping[str, Any], clean_pass: CleanPass, squash: Squash = lower_leaky, lazy: bool = False
) -> ImportanceReader:
    """Reads these logits as λ, without a CI function. ``lazy``: only where they are used, as heads."""

    def head_is_logits(head: jax.Array, *_: Any) -> jax.Array:
        return head

    nothing = jnp.zeros((*clean_pass.leading, 1))
    axes = {name: Axes(("batch", *(None,) * (clean_pass.at.ndim - 1), "component_in_use")) for name in logits}
    ci_outputs = LazyLogits(nothing, dict(logits)) if lazy else Logits(dict(logits))
    n_leading, dtype = clean_pass.at.ndim, clean_pass.target.compute_dtype
    return ImportanceReader(ci_outputs, squash, {}, n_leading, axes, head_is_logits, dtype)


def to_float64(tree: Tree) -> Tree:
    """Every float leaf in float64; for use under ``jax.enable_x64``."""

    def widen(x: Any) -> Any:
        return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.device_put(jax.tree.map(widen, tree))


def in_float64(problem: Problem) -> Problem:
    spec = dataclasses.replace(problem.decomposition, compute_dtype="float64")
    return Problem(spec, dataclasses.replace(problem.target, compute_dtype=jnp.float64))


jit_step: Callable[..., StepOutcome] = jax.jit(step_outcome, static_argnums=0)


# ---- from the core's objects to the reference's ----


def array(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def ref_components(components: Tree, sites: Sites) -> Tree:
    """By site. As in the reference's state, a site that is a view of another has no entry (T4)."""
    by_site = unstack_sites(sites, jax.device_get(components))
    return {name: {"V": array(factors.V), "U": array(factors.U)} for name, factors in by_site.items()}


def ref_ci(ci: Any, sites: Sites) -> Tree:
    def affine(layer: Any, row: Any = ...) -> Tree:
        if isinstance(layer, GatedAffine):
            return {"gate": affine(layer.gate, row), "up": affine(layer.up, row)}
        return {"w": array(layer.W[row]), "b": array(layer.b[row])}

    ci = jax.device_get(ci)  # rows of NumPy's arrays: no program for each
    rows = list(zip(sites.all, sites.stack_rows, strict=True))

    def joint(layer: Any, own: Any = rows, b: Any = ..., taps: slice = slice(None)) -> Tree:
        if TAPS in layer.rows:
            return {"w": np.concatenate(array(layer.rows[TAPS][taps])), "b": array(layer.b[b])}
        w = [array(layer.rows[stack.name][row]) for _, (stack, row) in own if stack.name in layer.rows]
        return {"w": np.concatenate(w), "b": array(layer.b[b])}

    def joint_head(own: Any = rows) -> Tree:
        heads = [affine(ci.heads[stack.name], row) for _, (stack, row) in own]
        return {k: np.concatenate([head[k] for head in heads], axis=-1) for k in "wb"}

    def blocks(of: Any, n_blocks: int) -> Tree:
        def norms(n: int) -> Tree:
            if of.norms is None:
                return {}
            return {"norms": {"attn": array(of.norms.attn[n]), "mlp": array(of.norms.mlp[n])}}

        return [
            {name: array(getattr(of, name)[n]) for name in "qkvo"} | {"mlp": [affine(x, n) for x in of.mlp]} | norms(n)
            for n in range(n_blocks)
        ]

    match ci:
        case SharedMLP() | ScalarMLP() | VectorMLP():
            return {site.name: [affine(layer, row) for layer in ci.heads[s.name]] for site, (s, row) in rows}
        case GlobalMLPCI():
            return [joint(ci.first), *map(affine, ci.middle), joint_head()]
        case TransformerCI():
            return {
                "input": joint(ci.project),
                "blocks": blocks(ci.blocks, ci.config.n_blocks),
                "head": joint_head(),
            }
        case ChunkwiseCI():
            groups = site_groups(ci.config, sites)
            of_groups = [[entry for entry in rows if entry[0].name in names] for names in groups]
            ends = np.cumsum([0, *map(len, taps_of_groups(ci.config, sites) or [()] * len(groups))])
            return [
                {
                    "input": joint(ci.project, own, n, slice(ends[n], ends[n + 1])),
                    "blocks": blocks(jax.tree.map(lambda x, n=n: x[n], ci.blocks), ci.config.transformer.n_blocks),
                    "head": joint_head(own),
                }
                for n, own in enumerate(of_groups)
            ]
        case ReadoutCI():
            inside = replace_fields(ci.function, heads={name: own.head for name, own in ci.heads.items()})
            vectors = {s.name: jax.tree.map(lambda x, r=r: array(x[r]), ci.heads[t.name].readout) for s, (t, r) in rows}
            return {
                "function": ref_ci(inside, sites),
                "readout": {name: dataclasses.asdict(own) for name, own in vectors.items()},
            }
    raise TypeError(type(ci))


def site_groups(config: ChunkwiseTransformer, sites: Sites) -> list[list[str]]:
    """C6, by the reference."""
    return ref.chunks_of_layers({site.name: site.layer for site in sites.all}, config.layers_per_chunk)


def ref_bundle(bundle: Bundle, sites: Sites, live: tuple[int, ...] | None = None) -> Tree:
    """Sources by site; of the live ones alone if ``live`` names them."""
    names = None if live is None else {sites.all[n].name for n in live}
    return {
        name: {"components": array(source.components)}
        | ({} if source.delta is None else {"delta": array(source.delta)})
        for name, source in unstack_sites(sites, jax.device_get(bundle)).items()
        if names is None or name in names
    }


def ref_moments(moments: Tree, convert: Callable[[Tree], Tree]) -> Tree:
    if isinstance(moments, MuonState):
        first = either(moments.momentum, moments.others.mu)
        second = either(jax.tree.map(jnp.zeros_like, moments.momentum), moments.others.nu)
        return {"m": convert(first), "v": convert(second), "count": int(moments.others.count)}
    adam = moments[0]
    return {"m": convert(adam.mu), "v": convert(adam.nu), "count": int(adam.count)}


def ref_adversary_moments(adversary: Adversary, sites: Sites) -> Tree:
    """Sign ascents have none; the reference leaves the zeros given here as they are. Momentum has one, which the
    reference calls v."""
    zeros = ref.zero_moments(ref_bundle(adversary.raw, sites))
    if adversary.mean is None:
        return zeros
    if adversary.square is None:
        return zeros | {"v": ref_bundle(adversary.mean, sites)}
    m, v = ref_bundle(adversary.mean, sites), ref_bundle(adversary.square, sites)
    return {"m": m, "v": v, "count": int(adversary.count)}


def ref_state(state: State, sites: Sites) -> Tree:
    return {
        "step": int(state.step),
        "components": ref_components(state.components, sites),
        "ci": ref_ci(state.ci, sites),
        "components_moments": ref_moments(state.components_moments, lambda t: ref_components(t, sites)),
        "ci_moments": ref_moments(state.ci_moments, lambda t: ref_ci(t, sites)),
        "sources": {name: ref_bundle(a.raw, sites) for name, a in state.adversaries.items()},
        "source_moments": {name: ref_adversary_moments(a, sites) for name, a in state.adversaries.items()},
    } | ({"frequency_means": means} if (means := ref_means(state, sites)) else {})


def ref_means(state: State, sites: Sites) -> Tree:
    """L6: by term and site."""
    by_term = jax.device_get(state.frequency_means).items()
    return {term: ref.tree_map(array, unstack_sites(sites, own)) for term, own in by_term}


def ref_gradients(gradients: Gradients, problem: Problem, step: int) -> Tree:
    """As the reference reports them: those of the sources are of their term's own error (A4)."""
    sites, spec = problem.target.sites, problem.decomposition
    coeffs = {term.name: value_at(term.coeff, step, spec.steps) for term in spec.terms}
    return {
        "components": ref_components(gradients.components, sites),
        "ci": ref_ci(gradients.ci, sites),
        "sources": {
            name: ref.tree_map(lambda g, c=coeffs[name]: g / c, ref_bundle(bundle, sites))
            for name, bundle in gradients.sources.items()
        },
    }


def ref_target(of: AnyTarget, weights: Tree, inputs: np.ndarray) -> ref.Target:
    """The reference's network with the core's weights and site names, identities put before what has such a site."""
    match of:
        case Transformer():
            plain = ref_llama(of, weights, inputs)
        case TMS():
            plain = ref.tms_target({"hidden_layers": [], **ref.tree_map(array, dict(weights))}, array(inputs))
        case ResidMLP():
            plain = ref.resid_mlp_target(
                array(weights["embed"]), by_layer(weights["layers"]), array(inputs), of.architecture.activation
            )
    return ref.with_identity_sites(plain, [site.name for site in of.sites.all])


def ref_point(name: str) -> str:
    """The reference's name of a point (R6)."""
    kind, layer = name.split(".")
    further = int(kind == "resid_post")
    return f"{kind.split('_')[0]}.{int(layer) + further}"


def ref_part(name: str) -> str:
    """The reference's name of what is logged under ``loss/``."""
    term, slash, part = name.partition("/")
    return term + slash + (ref_point(part) if part not in ("", "output") else part)


def by_layer(layers: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
    n_layers = len(next(iter(layers.values())))
    return [{name: array(w[n]) for name, w in layers.items()} for n in range(n_layers)]


def ref_llama(of: Transformer, weights: Tree, tokens: np.ndarray, **hooked: Callable[..., ref.Num]) -> ref.Target:
    """``hooked``: that argument of `ref.llama`, if it is given."""
    layers = by_layer(weights["layers"])
    for kind, has_mlp in (("dense", True), ("experts", False)):
        own = iter(by_layer(weights[kind]) if kind in weights else ())
        for n, layer in enumerate(layers):
            if of.architecture.experts is not None and of.architecture.has_mlp(n) is has_mlp:
                layer |= {name.removeprefix("experts."): w for name, w in next(own).items()}
    embed = array(weights["embed"])
    head = embed.T if of.architecture.tied else array(weights["head"])
    plain = {"embed": embed, "layers": layers, "final_norm": array(weights["norm"]), "head": head}
    config = of.architecture
    scaling = None if config.rope_scaling is None else dataclasses.asdict(config.rope_scaling)

    def project(linear: ref.Linear, layer: int, kind: str, x: ref.Num, W: np.ndarray, *expert: int) -> ref.Num:
        if kind == "embed":
            return linear(config.names["embed"].removeprefix(config.prefix), x, W)
        if not expert:
            return linear(module_name(layer, f"{kind}_proj"), x, W)
        return linear(config.names[f"experts.{kind}_proj"].format(layer, *expert).removeprefix(config.prefix), x, W)

    experts = {} if config.experts is None else {
        "experts_per_token": config.experts.per_token, "normalised": config.experts.normalised,
    }  # fmt: skip

    own = hooked.get("hooked", lambda layer, hook, x: x)

    def forward(linear: ref.Linear, choose: Any, see: Any = lambda point, x: None) -> ref.Num:
        def seen(layer: int, hook: str, x: ref.Num) -> ref.Num:
            x = own(layer, hook, x)
            if hook in ref.LLAMA_POINTS:
                see(ref_point(f"{hook.removeprefix('hook_')}.{layer}"), x)
            return x

        return ref.llama(
            plain,
            tokens,
            partial(project, linear),
            choose=lambda mixture, own: choose(mixture.removeprefix(config.prefix), own),
            **experts,
            hooked=seen,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
            rope_theta=config.rope_theta,
            rope_scaling=scaling,
        )

    return ref.MixtureTarget(forward)


def schema_schedule(schedule: float | AnySchedule) -> Any:
    match schedule:
        case Schedule(start, kind, warmup_pct, final_val_frac):
            return {"start_val": start, "fn_type": kind, "warmup_pct": warmup_pct, "final_val_frac": final_val_frac}
        case Knots():
            return dataclasses.asdict(schedule)
        case _:
            return schedule


def schema_scope(scope: Any) -> Tree:
    match scope:
        case SingleSource():
            return {"type": "single_source"}
        case BroadcastAcrossBatch():
            return {"type": "broadcast_across_batch"}
        case RepeatAcrossBatch(n):
            return {"type": "repeat_across_batch", "n_sources": n}
        case PerBatchPerPosition():
            return {"type": "per_batch_per_position"}
        case PerBatch():
            return {"type": "per_batch"}
    raise TypeError(type(scope))


def schema_ascent(ascent: Ascent) -> Tree:
    match ascent:
        case AdamAscent(_, beta1, beta2, eps):
            return {"type": "adam", "beta1": beta1, "beta2": beta2, "eps": eps}
        case SignAscent():
            return {"type": "sign"}
        case SGDAscent():
            return {"type": "sgd"}
        case MomentumAscent(_, momentum):
            return {"type": "momentum", "momentum": momentum}


def schema_attack(attack: PersistentAttack) -> Tree:
    if isinstance(attack.scope, Pool):
        shared: Tree = {"pool": {"size_per_batch_element": attack.scope.size}}
    else:
        shared = {"scope": schema_scope(attack.scope)}
    return {
        **shared,
        "optimizer": {
            **schema_ascent(attack.optimizer),
            "lr_schedule": schema_schedule(attack.optimizer.schedule),
        },
        "use_sigmoid_parameterization": attack.sigmoid,
        "n_warmup_steps": attack.n_warmup_steps,
        "start_frac": attack.start_frac,
    }


def schema_term(term: Term) -> Tree:
    """The schema's entry for a term; its name says the type (`StochasticReconLoss`, `StochasticReconLoss_2`)."""
    entry: Tree = {"type": term.name.split("_")[0], "name": term.name, "coeff": schema_schedule(term.coeff)}
    match term:
        case Faithfulness():
            entry["normalize"] = term.normalize
        case NonlinearityLocality(kinds=kinds):
            entry |= {"unit_kind_coefficients": dict(kinds), "relative_threshold": schema_schedule(term.threshold)}
            entry["normalize_at_one"] = term.normalize_at_one
        case ImportanceMinimality(penalty=penalty, frequency=frequency):
            entry |= {"beta": term.beta, "normalize_at_one": penalty.normalize_at_one}
            match penalty:
                case Lp(Anneal() as p, eps):
                    entry |= {"pnorm": p.start, "p_anneal_final_p": p.final, "eps": eps}
                    entry |= {"p_anneal_start_frac": p.start_frac, "p_anneal_end_frac": p.end_frac}
                case Lp(p, eps):
                    entry |= {"pnorm": schema_schedule(p), "eps": eps}
                case SmoothL0(gamma):
                    entry |= {"penalty": "smooth_l0", "gamma": schema_schedule(gamma)}
            if frequency is not None:
                entry["frequency"] = {**vars(frequency), "coeff": schema_schedule(frequency.coeff)}
        case Reconstruction(live=live, sources=sources):
            entry["n_samples"] = term.n_samples
            if (beside := term.beside) is not None:
                own = {"coeff": schema_schedule(beside.coeff), "points": beside.points}
                entry |= {"hidden_acts_reconstruction": own, "adversary_objective": beside.adversary_objective}
            if hasattr(live, "sites_per_chunk"):
                entry["sites_per_chunk"] = live.sites_per_chunk
            match sources:
                case FreshAttack():
                    entry |= {"mask_scope": sources.scope, "step_size": sources.step_size, "n_steps": sources.n_steps}
                case PersistentAttack():
                    entry |= schema_attack(sources)
                case Merged(attack, _, adv_fraction):
                    entry |= {**schema_attack(attack), "adv_fraction": schema_schedule(adv_fraction)}
    return entry


def with_ref_points(entry: Tree, of: AnyTarget) -> Tree:
    """An entry of the schema with its points (R6) in place of patterns, by the names that the reference has."""
    if "hidden_acts_reconstruction" in entry:
        own = entry["hidden_acts_reconstruction"]
        matched = match_points(of.architecture.points(), own["points"])
        entry["hidden_acts_reconstruction"] = own | {"points": [ref_point(point.name) for point in matched]}
    return entry


def schema_optimizer(spec: AdamW | Muon) -> Tree:
    if isinstance(spec, Muon):
        return {
            "type": "muon",
            "lr_schedule": schema_schedule(spec.schedule),
            "beta": spec.beta,
            "consistent_rms": spec.consistent_rms,
            "weight_decay": spec.weight_decay,
            "grad_clip_norm": spec.clip_norm,
            "ns_steps": spec.n_iterations,
            "ns_dtype": spec.dtype,
        }
    return {
        "lr_schedule": schema_schedule(spec.schedule),
        "betas": spec.betas,
        "weight_decay": spec.weight_decay,
        "grad_clip_norm": spec.clip_norm,
    }


def schema_ci(config: CIConfig, sites: Sites) -> Tree:
    match config:
        case ComponentReadout(function):
            return {**schema_ci(function, sites), "component_readout": True}
        case LayerwiseMLP(kind, _):
            return {"fn_type": kind}
        case GlobalMLP():
            return {"fn_type": "global_shared_mlp", "input_tap": schema_taps(config.taps)}
        case GlobalTransformer():
            attention = {"n_heads": config.n_heads, "rope_base": config.rope_base, "causal": config.causal}
            return {
                "fn_type": "global_shared_transformer",
                "simple_transformer_ci_cfg": {"attn_config": attention},
                "input_tap": schema_taps(config.taps),
            }
        case ChunkwiseTransformer(transformer, inputs=inputs):
            return {
                **schema_ci(transformer, sites),
                "fn_type": "chunkwise_transformer",
                "groups": site_groups(config, sites),
                "input_patterns": inputs and inputs.patterns,
                "input_tap": schema_taps(config.taps),
            }


def schema_taps(taps: Taps | None) -> Any:
    if taps is None or isinstance(taps.choice, str):
        return taps and taps.choice
    return {"residual_boundaries": list(taps.choice)}


def schema(problem: Problem) -> Tree:
    """The `pd` section that says the same as this problem's decomposition."""
    spec = problem.decomposition
    stochastic = [
        term.n_samples
        for term in spec.terms
        if isinstance(term, Reconstruction) and isinstance(term.sources, Stochastic) and "Chunk" not in term.name
    ]
    assert len(set(stochastic)) <= 1, "the schema has one n_mask_samples for all stochastic terms"
    return {
        "steps": spec.steps,
        "n_mask_samples": stochastic[0] if stochastic else 1,
        "sigmoid_type": spec.squashing,
        "ci_config": schema_ci(spec.ci, problem.target.sites),
        "tied_weights": problem.target.sites.tied,
        "components_optimizer": schema_optimizer(spec.components_optimizer),
        "ci_fn_optimizer": schema_optimizer(spec.ci_optimizer),
        "loss_metrics": [with_ref_points(schema_term(term), problem.target) for term in spec.terms],
        "faithfulness_warmup_steps": spec.warmup.steps,
        "faithfulness_warmup_lr": spec.warmup.lr,
        "faithfulness_warmup_weight_decay": spec.warmup.weight_decay,
    }


def drawn_at(sources: StochasticSources, site: int, leading: tuple[int, ...], C: int) -> tuple[Any, Any]:
    """Component sources and delta of one site."""
    at, number = positions(leading), jnp.asarray(site)
    return sources.components(number, at, indices(C)), sources.delta(number, at)


_jit_draw_forwards = jax.jit(draw_forwards, static_argnums=(0, 2, 3, 4))


def ref_term_draws(term: Reconstruction, key: Any, sites: Sites, leading: tuple[int, ...], use_delta: bool) -> Tree:
    """What the core draws for a term, as the reference takes it."""
    return ref_forward_draws(term, _jit_draw_forwards(term, key, sites, leading, use_delta), sites)


def ref_forward_draws(term: Reconstruction, draws: Sequence[ForwardDraws], sites: Sites) -> Tree:
    """Draws of a term as the reference takes them: by site name; samples outside, live sets inside; then ascents."""
    lives, samples = live_sets(term.live, len(sites)), n_samples(term)
    n_forwards = len(lives) * samples
    by_forward = []
    for n, draw in enumerate(draws):
        live = lives[n // samples] if n < n_forwards else tuple(range(len(sites)))
        entry: Tree = {}
        if draw.routes is not None:
            entry["routes"] = {sites.all[site].name: array(draw.routes[..., i]) for i, site in enumerate(live)}
        if draw.sources is not None:
            entry["sources"] = ref_bundle(draw.sources, sites, live)
        if draw.rows is not None:
            entry["rows"] = array(draw.rows)
        if draw.particle is not None:
            entry["particle"] = np.asarray(draw.particle)
        by_forward.append(entry)
    ordered = [by_forward[live * samples + sample] for sample in range(samples) for live in range(len(lives))]
    return ordered + by_forward[n_forwards:]


_jit_step_draws = jax.jit(step_draws, static_argnums=(0, 2))


def ref_draws(problem: Problem, step: int, leading: tuple[int, ...] = LEADING) -> Tree:
    """All draws of a training step."""
    terms = {term.name: term for term in problem.decomposition.terms}
    draws = _jit_step_draws(problem, step, leading)
    found = {name: ref_forward_draws(terms[name], own, problem.target.sites) for name, own in draws.items()}
    for name, term in terms.items():
        if isinstance(term, Reconstruction) and isinstance(term.sources, Merged):
            (own,) = found[name]
            fraction = schema_schedule(term.sources.adv_fraction)
            own["adversarial"] = ref.adversarial_rows(own.pop("rows"), fraction, int(step), problem.decomposition.steps)
    return found


def leading_axes(of: AnyTarget, inputs: Any) -> tuple[int, ...]:
    """Of an activation, for these inputs: token ids have no axis of their own, feature vectors have one."""
    return inputs.shape if isinstance(of, Transformer) else inputs.shape[:-1]


def ref_step(problem: Problem, state: Tree, weights: Tree, inputs: np.ndarray) -> ref.StepResult:
    """The reference's step from a reference state, with the draws of the core."""
    target = problem.target
    names = [site.name for site in target.sites.all]
    draws = ref_draws(problem, state["step"], leading_axes(target, inputs))
    error = ref.kl_error if isinstance(target, Transformer) else ref.mse_error
    forward = ref_target(target, weights, inputs)
    return ref.training_step(forward, error, names, schema(problem), state, draws, ref_units(target))


def ref_units(of: AnyTarget) -> Mapping[str, ref.Units]:
    """L7, by the reference."""
    config = of.architecture
    heads = (config.n_heads, config.n_kv_heads) if isinstance(of, Transformer) else (1, 1)
    return ref.faced_units({site.name: np.zeros((site.d_in, site.d_out)) for site in of.sites.all}, *heads)


# ---- comparing (D4) ----


def flat(tree: Tree, path: str = "") -> dict[str, np.ndarray]:
    if isinstance(tree, dict):
        return {k: v for key, sub in tree.items() for k, v in flat(sub, f"{path}/{key}").items()}
    if isinstance(tree, list | tuple):
        return {k: v for n, sub in enumerate(tree) for k, v in flat(sub, f"{path}/{n}").items()}
    return {path: array(tree)}


def deviation(want: Any, got: Any) -> float:
    """D4: ‖want − got‖ / ‖want‖."""
    want, got = array(want), array(got)
    assert want.shape == got.shape, (want.shape, got.shape)
    difference, norm = np.linalg.norm(want - got), np.linalg.norm(want)
    return 0.0 if difference == 0 else float(difference / norm) if norm > 0 else float("inf")


def assert_alike(want: Tree, got: Tree, tolerance: float) -> float:
    """Every array of the two trees per D4; the largest deviation."""
    want, got = flat(want), flat(got)
    assert want.keys() == got.keys(), want.keys() ^ got.keys()
    deviations = {path: deviation(want[path], got[path]) for path in want}
    worst = {path: d for path, d in deviations.items() if not d <= tolerance}
    assert not worst, dict(sorted(worst.items(), key=lambda item: -item[1])[:8])
    return max(deviations.values())


def assert_step(problem: Problem, got: StepOutcome, want: ref.StepResult, tolerance: float) -> float:
    """Total, terms, gradients, their norms and the whole new state of one step; the largest deviation."""
    metrics = {
        ref_part(name.removeprefix("loss/")): float(x) for name, x in got.metrics.items() if name.startswith("loss/")
    }
    terms = {name.replace("/frequency", "_frequency"): x for name, x in want.terms.items()}
    norms = {key: got.metrics[f"grad_norms/summary/{key}"] for key in ("components", "ci_fns")}
    wanted_norms = {
        "components": ref.global_norm(want.gradients["components"]),
        "ci_fns": ref.global_norm(want.gradients["ci"]),
    }
    return max(
        assert_alike({**terms, "total": want.total}, metrics, tolerance),
        assert_alike(wanted_norms, norms, tolerance),
        assert_alike(want.gradients, ref_gradients(got.gradients, problem, int(got.state.step) - 1), tolerance),
        assert_alike(want.state, ref_state(got.state, problem.target.sites), tolerance),
    )


def assert_step_is_the_reference(problem: Problem, weights: Tree, inputs: np.ndarray, exact: bool) -> None:
    """One step in mid-training, from a state in which everything trained gets a gradient; ``exact``: in float64."""
    state = ruffled_state(problem, seed=5, leading=leading_axes(problem.target, inputs))
    want = ref_step(problem, ref_state(state, problem.target.sites), weights, inputs)
    unmoved = {path for path, gradient in flat(want.gradients).items() if not np.any(gradient)}
    # Where a sequence has one position, attention has nothing to choose.
    assert all(path.endswith(("/q", "/k")) for path in unmoved), unmoved
    with jax.enable_x64(exact):
        if exact:
            problem, state, weights = in_float64(problem), to_float64(state), to_float64(weights)
        got = jit_step(problem, state, weights, jnp.asarray(inputs))
        print(f"{assert_step(problem, got, want, 1e-9 if exact else 1e-5):.1e}")


SLOW_IN_FP32 = pytest.mark.parametrize(
    "exact", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fp32", "float64"]
)
