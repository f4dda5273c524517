"""Our reading of a `config.json` against that of transformers' config classes, on files drawn at random.

``python -m tests.lab.config_classes --draws 200 --seeds 0 1 2`` prints how many agreed, were refused, or differed.
"""

import argparse
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import transformers

from param_decomp_jax.targets.architecture import UnsupportedConfig
from param_decomp_jax.targets.registry import read_config
from param_decomp_jax.targets.transformer import rotary_frequencies
from param_decomp_jax.targets.transformer_config import TransformerConfig
from tests.lab.drawn_configs import FAMILIES, Drawn, draw
from tests.lab.reference_configs import Network, NoNetwork, NotDescribed, read


@dataclass(frozen=True)
class Outcome:
    """``verdict``: both read the same; both refuse it; we alone refuse it, by the name of something odd; or different,
    which also a refusal is that names nothing odd. ``about``: the message of a refusal, or what differs."""

    verdict: Literal["agreed", "refused by both", "refused by us alone", "different"]
    about: str = ""


def compare(drawn: Drawn) -> Outcome:
    """What we read, and what transformers reads."""
    try:
        reference: Network | NoNetwork | NotDescribed = read(drawn.raw)
    except (NoNetwork, NotDescribed) as error:
        reference = error
    try:
        ours = read_config(drawn.raw)
    except UnsupportedConfig as error:
        named = any(key in str(error) for key in drawn.odd)
        by = "refused by both" if isinstance(reference, NoNetwork) else "refused by us alone"
        return Outcome(by if named else "different", str(error))
    if not isinstance(reference, Network):
        return Outcome("different", f"read, but transformers has no such network: {reference}")
    assert isinstance(ours, TransformerConfig)
    differences = between(computed(ours), reference) or _exported(ours)
    return Outcome("different", "; ".join(differences)) if differences else Outcome("agreed")


def between(ours: Network, theirs: Network) -> list[str]:
    """What two networks differ in."""
    found, wanted = vars(ours), vars(theirs)
    return [f"{key}: {found[key]}, not {wanted[key]}" for key in wanted if not same(found[key], wanted[key])]


def _exported(ours: TransformerConfig) -> list[str]:
    """What changes when we or transformers read the file that we write."""
    written = ours.to_config("float32", 1)
    if read_config(written) != ours:
        return [f"read again from {written}"]
    try:
        return [f"exported {difference}" for difference in between(computed(ours), read(written))]
    except (NoNetwork, NotDescribed) as error:
        return [f"transformers does not read what we export: {error}"]


def same(a: Any, b: Any) -> bool:
    """Equal, numbers to rounding."""
    if isinstance(a, float | tuple) and isinstance(b, float | tuple) and a != b:
        try:
            return bool(np.allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-6, atol=0))
        except ValueError:  # of another length
            return False
    return bool(a == b)


def computed(c: TransformerConfig) -> Network:
    """What the network of a description computes."""
    has_rope, layers = c.rope_theta is not None, range(c.n_layers)
    scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
    has_experts = tuple(not c.has_mlp(n) for n in layers)
    e = c.experts
    return Network(
        sizes={
            "vocab": c.vocab_size,
            "d_model": c.d_model,
            "layers": c.n_layers,
            "heads": c.n_heads,
            "kv_heads": c.n_kv_heads,
            "head_dim": c.head_dim,
            "positions": c.max_positions or 0,
        },
        eps=c.norm_eps,
        tied=c.tied,
        activation=c.activation,
        frequencies=tuple(rotary_frequencies(c)) if has_rope else None,
        factor=c.rope_scaling.attention_factor if c.rope_scaling is not None else 1.0,
        windows=tuple(c.window if n in c.window_layers else None for n in layers),
        scales=tuple(scale / (n + 1 if c.scale_by_layer else 1) for n in layers),
        biases=frozenset(c.biases),
        d_mlp=None if all(has_experts) else c.d_mlp,
        has_experts=has_experts,
        experts=None if e is None else (e.n, e.per_token, e.d_mlp, e.normalised),
        attention_cap=c.attention_cap,
        logit_cap=c.logit_cap,
        clip=c.clip,
        embed_scale=c.embed_scale,
        parallel=c.parallel,
    )


def drawn_files(name: str, seed: int, n: int) -> list[Drawn]:
    """The first ``n`` files of a family and a seed."""
    rng = Random(f"{name} {seed}")
    return [draw(name, rng) for _ in range(n)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200, help="of each family and seed; 200 if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--show", action="store_true", help="print what differs, and the messages of refusals")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, {arguments.draws} draws of each of the seeds {arguments.seeds}\n")
    verdicts = get_args(get_type_hints(Outcome)["verdict"])
    print(f"| family | {' | '.join(verdicts)} |\n|---|{'---|' * len(verdicts)}")
    for name in arguments.families:
        outcomes = [
            (drawn, compare(drawn)) for seed in arguments.seeds for drawn in drawn_files(name, seed, arguments.draws)
        ]
        counts = [sum(o.verdict == verdict for _, o in outcomes) for verdict in verdicts]
        print(f"| `{name}` | {' | '.join(map(str, counts))} |", flush=True)
        for drawn, outcome in outcomes:
            if arguments.show and outcome.verdict != "agreed":
                print(f"    {outcome.verdict}: {outcome.about}")
                if outcome.verdict == "different":
                    print(f"        {drawn.raw}, odd: {sorted(drawn.odd)}")
