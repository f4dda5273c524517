"""A toy's decomposition with scalar MLPs as CI functions in plain PyTorch: the other side of `torch_step.py`.

Written from docs/semantics.md, whose rules the docstrings cite, in the way in which one writes it there: the target
runs as a whole in every masked forward, a masked site is F1 as it stands, components are an axis of an einsum, and
gradients are autograd's. Nothing is compiled, nothing recomputed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from param_decomp_jax.ci import LayerwiseMLP
from param_decomp_jax.decomposition.schedules import Schedule
from param_decomp_jax.decomposition.sites import PRE_IDENTITY
from param_decomp_jax.method.losses import Faithfulness, ImportanceMinimality, Lp, Term
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.optim import AdamW, Optimizer
from param_decomp_jax.method.recon import AllSites, EachSite, Reconstruction, live_sets, n_samples
from param_decomp_jax.method.routing import Everywhere
from param_decomp_jax.method.state import Decomposition
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.features import SparseFeatures
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig

LEAK = 0.01
"""α of C1 and C2."""

Linear = Callable[[str, Tensor, Tensor], Tensor]
"""Applies the matrix of this name to ``x [B, d_in]``: plainly, or masked."""


@dataclass(frozen=True)
class Sources:
    """Of one site: ``components`` [B, C], ``delta`` [B] or None without a delta component."""

    components: Tensor
    delta: Tensor | None


GivenSources = Mapping[str, Sequence[Mapping[str, Sources]]]
"""By term, for each of its forwards: sources by site. The forwards are in the order of live sets, then of samples."""


def unsupported(problem: Problem) -> Iterator[str]:
    """What of this decomposition is not written here."""
    spec, target = problem.decomposition, problem.target
    if not isinstance(spec.ci, LayerwiseMLP) or spec.ci.kind != "mlp":
        yield "a CI function other than layerwise scalar MLPs (fn_type: mlp)"
    if not isinstance(getattr(target, "architecture", None), TMSConfig | ResidMLPConfig):
        yield "a target other than TMS and ResidMLP"
    if any(site.name.endswith(PRE_IDENTITY) for site in target.sites.all):
        yield "identities as sites"
    if spec.squashing != "leaky_hard":
        yield f"sigmoid_type: {spec.squashing}"
    if spec.compute_dtype != "float32":
        yield "autocast_bf16"
    if not all(isinstance(optimizer, AdamW) for optimizer in (spec.components_optimizer, spec.ci_optimizer)):
        yield "an optimiser other than AdamW"
    yield from (term.name for term in spec.terms if not _is_supported(term))


def _is_supported(term: Term) -> bool:
    match term:
        case Faithfulness():
            return True
        case ImportanceMinimality(penalty=Lp(p), frequency=None):
            return p.start == p.final
        case Reconstruction(live=AllSites() | EachSite(), routing=Everywhere(), sources=Stochastic("continuous")):
            return term.error == "output"
        case _:
            return False


# ---- the targets: frozen, so plain tensors ----


class TMS:
    """``ReLU(x W₁ … W₂ + b)``."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        hidden = weights.get("hidden_layers", ())
        self.matrices: dict[str, Tensor] = {
            "linear1": weights["linear1"],
            **{f"hidden_layers.{n}": W for n, W in enumerate(hidden)},
            "linear2": weights["linear2"],
        }
        self.bias = weights["bias"]

    def __call__(self, x: Tensor, linear: Linear) -> Tensor:
        for name, W in self.matrices.items():
            x = linear(name, x, W)
        return F.relu(x + self.bias)


class ResidMLP:
    """``r = x W_E``, per layer ``r ← r + act(r W_in + b_in) W_out + b_out``, ``out = r W_Eᵀ``."""

    def __init__(self, config: ResidMLPConfig, weights: Mapping[str, Any]) -> None:
        layers = weights["layers"]
        self.n_layers, self.embed = config.n_layers, weights["embed"]
        self.matrices: dict[str, Tensor] = {
            f"layers.{n}.{kind}": layers[kind][n] for n in range(config.n_layers) for kind in ("mlp_in", "mlp_out")
        }
        self.in_bias, self.out_bias = (layers.get(name) for name in ("in_bias", "out_bias"))
        self.activation = F.relu if config.activation == "relu" else F.gelu

    def __call__(self, x: Tensor, linear: Linear) -> Tensor:
        r = x @ self.embed
        for n in range(self.n_layers):
            mlp_in, mlp_out = f"layers.{n}.mlp_in", f"layers.{n}.mlp_out"
            h = linear(mlp_in, r, self.matrices[mlp_in])
            h = self.activation(h if self.in_bias is None else h + self.in_bias[n])
            y = linear(mlp_out, h, self.matrices[mlp_out])
            r = r + (y if self.out_bias is None else y + self.out_bias[n])
        return r @ self.embed.T


def target_of(problem: Problem, weights: Mapping[str, Any]) -> TMS | ResidMLP:
    """``weights``: tensors, by the names of the architecture's `weight_shapes`."""
    match problem.target.architecture:
        case TMSConfig():
            return TMS(weights)
        case ResidMLPConfig() as config:
            return ResidMLP(config, weights)
    raise AssertionError("`unsupported` says so")


# ---- what is trained ----


class LowerLeaky(torch.autograd.Function):
    """λ of C1: a clip whose gradient leaks below 0, where it raises z."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        below = torch.where(g < 0, LEAK * g, 0.0)
        return torch.where(z <= 0, below, torch.where(z <= 1, g, 0.0))


def upper_leaky(z: Tensor) -> Tensor:
    """υ of C2."""
    return torch.where(z > 1, 1 + LEAK * (z - 1), z.clamp(0, 1))


class Factors(nn.Module):
    """``V`` [d_in, C] and ``U`` [C, d_out] of a site."""

    def __init__(self, d_in: int, C: int, d_out: int) -> None:
        super().__init__()
        self.V = nn.Parameter(torch.randn(d_in, C) / d_in**0.5)
        self.U = nn.Parameter(torch.randn(C, d_out) / C**0.5)


class ScalarMLPs(nn.Module):
    """C4: an MLP ``1 → hidden … → 1`` for each of the C components of a site."""

    def __init__(self, C: int, hidden: Sequence[int]) -> None:
        super().__init__()
        ins, outs = (1, *hidden), (*hidden, 1)
        gains = (*(2**0.5 for _ in hidden), 1.0)
        self.weights = nn.ParameterList(
            gain / d_in**0.5 * torch.randn(C, d_in, d_out) for gain, d_in, d_out in zip(gains, ins, outs, strict=True)
        )
        self.biases = nn.ParameterList(torch.zeros(C, d_out) for d_out in outs)

    def forward(self, acts: Tensor) -> Tensor:
        """From ``xV`` [B, C] to logits [B, C]."""
        x, last = acts[..., None], len(self.weights) - 1
        for n, (W, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.einsum("...ci,cio->...co", x, W) + b
            if n < last:
                x = F.gelu(x)
        return x[..., 0]


def key(site: str) -> str:
    """A site's name as that of a module, which has no dots."""
    return site.replace(".", "-")


class ScalarMLPDecomposition(nn.Module):
    """Components and CI functions of a target, and the losses of a batch."""

    def __init__(self, problem: Problem, target: TMS | ResidMLP) -> None:
        super().__init__()
        self.spec, self.target = problem.decomposition, target
        assert isinstance(self.spec.ci, LayerwiseMLP)
        sites = problem.target.sites
        self.sites = [site.name for site in sites.all]
        self.first_of = {second: first for first, second in sites.tied}
        trained = [site for site in sites.all if site.name not in self.first_of]
        self.components = nn.ModuleDict({key(s.name): Factors(s.d_in, s.C, s.d_out) for s in trained})
        self.ci = nn.ModuleDict({key(s.name): ScalarMLPs(s.C, self.spec.ci.hidden) for s in sites.all})

    def factors(self, site: str) -> tuple[Tensor, Tensor]:
        """V and U; of the second of a tied pair the first one's, transposed and exchanged (T4)."""
        if site in self.first_of:
            first = self.components[key(self.first_of[site])]
            return first.U.T, first.V.T
        own = self.components[key(site)]
        return own.V, own.U

    def losses(self, features: Tensor, given: GivenSources | None = None) -> dict[str, Tensor]:
        """The terms by name, without their coefficients. ``features`` [B, n]. ``given``: in place of drawn sources."""
        inputs: dict[str, Tensor] = {}

        def recorded(name: str, x: Tensor, W: Tensor) -> Tensor:
            inputs[name] = x
            return x @ W

        with torch.no_grad():
            clean = self.target(features, recorded)
        factors = {site: self.factors(site) for site in self.sites}
        acts = {site: torch.einsum("...i,ic->...c", inputs[site], V) for site, (V, _) in factors.items()}
        logits = {site: self.ci[key(site)](acts[site]) for site in self.sites}
        lower = {site: LowerLeaky.apply(z) for site, z in logits.items()}
        deltas = {site: self.target.matrices[site] - V @ U for site, (V, U) in factors.items()}

        def drawn(site: str) -> Sources:
            delta = torch.rand(len(features)) if self.spec.use_delta else None
            return Sources(torch.rand_like(lower[site]), delta)

        def masked(sources: Mapping[str, Sources]) -> Tensor:
            """F1 at the sites that have sources; ``xW`` at the others (F3)."""

            def linear(name: str, x: Tensor, W: Tensor) -> Tensor:
                if name not in sources:
                    return x @ W
                (V, U), source = factors[name], sources[name]
                mask = lower[name] + (1 - lower[name]) * source.components
                out = torch.einsum("...c,co->...o", torch.einsum("...i,ic->...c", x, V) * mask, U)
                return out if source.delta is None else out + source.delta[..., None] * (x @ deltas[name])

            return self.target(features, linear)

        def reconstruction(term: Reconstruction) -> Tensor:
            lives = [live for live in live_sets(term.live, len(self.sites)) for _ in range(n_samples(term))]
            forwards = (
                [{self.sites[n]: drawn(self.sites[n]) for n in live} for live in lives]
                if given is None
                else given[term.name]
            )
            return torch.stack([F.mse_loss(masked(sources), clean) for sources in forwards]).mean()

        def importance_minimality(term: ImportanceMinimality, penalty: Lp) -> Tensor:
            """L2."""
            sums = [((upper_leaky(z) + penalty.eps) ** penalty.p.start).sum(0) for z in logits.values()]
            return torch.stack([(S / len(features) * (1 + term.beta * torch.log2(1 + S))).sum() for S in sums]).sum()

        def value(term: Term) -> Tensor:
            match term:
                case Reconstruction():
                    return reconstruction(term)
                case ImportanceMinimality(penalty=Lp() as penalty):
                    return importance_minimality(term, penalty)
                case Faithfulness():
                    squares = torch.stack([(delta**2).sum() for delta in deltas.values()])
                    return squares.sum() / sum(delta.numel() for delta in deltas.values())
            raise AssertionError(f"{term.name} is not supported")

        return {term.name: value(term) for term in self.spec.terms}

    def total(self, losses: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([term.coeff * losses[term.name] for term in self.spec.terms]).sum()


# ---- training ----


def scheduled(schedule: Schedule, step: int, total: int) -> float:
    """T2."""
    warmup = int(schedule.warmup_pct * total)
    if step < warmup:
        return schedule.start * step / warmup
    t, f = (step - warmup) / max(1, total - warmup - 1), schedule.final_val_frac
    match schedule.kind:
        case "constant":
            return schedule.start
        case "linear":
            return schedule.start * (f + (1 - f) * (1 - t))
        case "cosine":
            return schedule.start * (f + (1 - f) * 0.5 * (1 + math.cos(math.pi * t)))


def draw_batch(features: SparseFeatures, rows: int) -> Tensor:
    """``[rows, n_features]``, as `SparseFeatures` says."""
    n = features.n_features
    values = features.low + (1 - features.low) * torch.rand(rows, n)
    if features.generation == "exactly_one_active":
        return values * F.one_hot(torch.randint(n, (rows,)), n)
    return values * (torch.rand(rows, n) < features.probability)


def adamw(part: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """T1; its learning rate is set in every step."""
    return torch.optim.AdamW(part.parameters(), betas=settings.betas, weight_decay=settings.weight_decay)


class Training:
    """A model, its two optimisers (T1), and the number of the next step."""

    def __init__(self, model: ScalarMLPDecomposition, features: SparseFeatures) -> None:
        self.model, self.features, self.number = model, features, 0
        spec: Decomposition = model.spec
        self.groups = [
            (part, settings, adamw(part, settings))
            for part, settings in ((model.components, spec.components_optimizer), (model.ci, spec.ci_optimizer))
        ]

    def step(self) -> Tensor:
        """One training step (section 8); the total loss before it."""
        spec = self.model.spec
        for _, settings, optimizer in self.groups:
            for group in optimizer.param_groups:
                group["lr"] = scheduled(settings.schedule, self.number, spec.steps)
            optimizer.zero_grad()
        loss = self.model.total(self.model.losses(draw_batch(self.features, spec.batch_size)))
        loss.backward()
        for part, settings, optimizer in self.groups:
            if settings.clip_norm is not None:
                nn.utils.clip_grad_norm_(part.parameters(), settings.clip_norm)
            optimizer.step()
        self.number += 1
        return loss.detach()


def tensors(arrays: Any) -> Any:
    """The same tree of dictionaries (or one leaf) with tensors in place of arrays."""
    if isinstance(arrays, Mapping):
        return {name: tensors(array) for name, array in arrays.items()}
    return None if arrays is None else torch.from_numpy(np.array(arrays))
