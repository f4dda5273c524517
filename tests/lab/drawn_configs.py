"""`config.json` files at random, in all the ways that people's files differ: keys that are there, missing or null, in
the words of transformers 4, of 5 or of both, which agree or do not.

Most files are in order. In the others one thing or two are odd, and a refusal is right only if it names one of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "olmo2", "olmoe", "gemma2", "gpt2", "gpt_neox", "starcoder2",
)  # fmt: skip
ODDITIES = (0, 0, 0, 0, 1, 1, 1, 2)
"""How many things are odd in a file, one of these."""
ABSENT: Any = object()


@dataclass
class Drawn:
    """``raw``: the file. ``odd``: keys of which what was drawn may be refused."""

    raw: dict[str, Any]
    odd: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Setting:
    """``keys``: its names. ``values``: one of which is drawn. ``null``: whether a null is an ordinary value.
    ``needed``: whether a file without it is odd. ``unusual``: values that may be refused. ``read``: whether it decides
    anything; if not, nothing odd is written there."""

    keys: tuple[str, ...]
    values: tuple[Any, ...]
    null: bool = False
    needed: bool = False
    unusual: tuple[Any, ...] = ()
    read: bool = True

    def draw(self, rng: Random, to: Drawn) -> None:
        """In order."""
        values = self.values + ((None,) if self.null else ())
        if not self.needed:
            values += (ABSENT,) * max(1, len(values) // 2)
        value = rng.choice(values)
        if value is not ABSENT:
            to.raw |= dict.fromkeys(rng.choice((self.keys, *((key,) for key in self.keys))), value)

    def spoil(self, rng: Random, to: Drawn) -> None:
        """Missing, null, unusual, or two names that disagree."""
        for key in self.keys:
            to.raw.pop(key, None)
        kinds = ["missing"] * self.needed + ["null"] * (not self.null)
        kinds += ["unusual"] * bool(self.unusual) + ["two"] * (2 * (len(self.keys) > 1))
        to.odd |= set(self.keys)
        match rng.choice(kinds or ["missing"]):
            case "null":
                to.raw[rng.choice(self.keys)] = None
            case "unusual":
                to.raw[rng.choice(self.keys)] = rng.choice(self.unusual)
            case "two":
                values: Sequence[Any] = rng.sample((*self.values, None), 2)
                to.raw |= dict(zip(self.keys, values, strict=True))


ACTIVATION = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "swish")
UNCOMPUTED = ("quick_gelu", "tanh", "relu2")


def _sizes(width: tuple[int, ...], heads: tuple[int, ...]) -> list[Setting]:
    return [
        Setting(("vocab_size",), (50, 61), needed=True),
        Setting(("hidden_size",), width, needed=True),
        Setting(("num_hidden_layers",), (2, 3), needed=True),
        Setting(("num_attention_heads",), heads, needed=True),
        Setting(("intermediate_size",), (24, 40), needed=True),
        Setting(("max_position_embeddings",), (64, 256)),
        Setting(("tie_word_embeddings",), (True, False)),
        Setting(("dtype", "torch_dtype"), ("float32",), null=True),
    ]


def _settings(name: str) -> list[Setting]:
    if name == "gpt2":
        return [
            Setting(("vocab_size",), (50, 61), needed=True),
            Setting(("n_embd", "hidden_size"), (48, 64), needed=True),
            Setting(("n_layer", "num_hidden_layers"), (2, 3), needed=True),
            Setting(("n_head", "num_attention_heads"), (4, 8), needed=True, unusual=(5,)),
            Setting(("n_positions", "max_position_embeddings"), (64, 96)),
            Setting(("n_inner",), (24, 40), null=True),
            Setting(("activation_function",), ACTIVATION, unusual=UNCOMPUTED),
            Setting(("layer_norm_epsilon",), (1e-5, 1e-2)),
            Setting(("scale_attn_weights",), (True, False)),
            Setting(("scale_attn_by_inverse_layer_idx",), (True, False)),
            Setting(("reorder_and_upcast_attn",), (True, False), read=False),
            Setting(("add_cross_attention",), (False,), unusual=(True,)),
            Setting(("tie_word_embeddings",), (True, False)),
            Setting(("n_ctx",), (1024,), read=False),
        ]
    if name == "gpt_neox":
        return [
            *_sizes((64, 128), (4, 8)),
            Setting(("hidden_act",), ACTIVATION, unusual=UNCOMPUTED),
            Setting(("layer_norm_eps",), (1e-5, 1e-2)),
            Setting(("use_parallel_residual",), (True, False)),
            Setting(("attention_bias",), (True, False)),
            Setting(("head_dim",), (), null=True, unusual=(6,)),
        ]
    if name == "starcoder2":
        return [
            *_sizes((64, 128), (4, 8)),
            Setting(("num_key_value_heads",), (1, 2, 4)),
            Setting(("hidden_act",), ACTIVATION, unusual=UNCOMPUTED),
            Setting(("norm_epsilon",), (1e-5, 1e-2)),
            Setting(("use_bias",), (True, False)),
            Setting(("head_dim",), (8, 16), null=True),
            Setting(("sliding_window",), (3, 5), null=True, unusual=(0,)),
        ]
    few_heads = name in ("gemma2", "olmo2", "olmoe")
    settings = [
        *_sizes((64, 128), (4, 8) if few_heads else (32,)),
        Setting(("rms_norm_eps",), (1e-6, 1e-5, 1e-2)),
        Setting(("num_key_value_heads",), (1, 2, 4), null=name in ("llama", "qwen2", "qwen3", "olmo2", "olmoe")),
    ]
    own: dict[str, list[Setting]] = {
        "llama": [
            Setting(("head_dim",), (4, 8), null=True),
            Setting(("attention_bias",), (True, False)),
            Setting(("mlp_bias",), (True, False)),
            Setting(("pretraining_tp",), (1, 2), read=False),
        ],
        "mistral": [
            Setting(("head_dim",), (4, 8), null=True),
            Setting(("sliding_window",), (3, 5), null=True, unusual=(0,)),
        ],
        "qwen2": [Setting(("head_dim",), (4, 8)), *_qwen_windows(), Setting(("max_window_layers",), (0, 1, 2, 28))],
        "qwen3": [
            Setting(("head_dim",), (4, 8)),
            Setting(("attention_bias",), (True, False)),
            *_qwen_windows(),
            Setting(("max_window_layers",), (0, 1, 2, 28)),
        ],
        "qwen3_moe": [
            Setting(("head_dim",), (4, 8)),
            Setting(("attention_bias",), (True, False)),
            *_qwen_windows(),
            Setting(("max_window_layers",), (0, 1, 2, 28), null=True),  # which its class does not read
            Setting(("num_experts", "num_local_experts"), (8, 16)),
            Setting(("num_experts_per_tok",), (2, 4)),
            Setting(("moe_intermediate_size",), (12, 20)),
            Setting(("norm_topk_prob",), (True, False)),
            Setting(("decoder_sparse_step",), (1, 2), unusual=(0,)),
            Setting(("mlp_only_layers",), ([], [1], [0, 7]), null=True),
        ],
        "olmo2": [Setting(("head_dim",), (8, 16)), Setting(("attention_bias",), (True, False))],
        "olmoe": [
            Setting(("attention_bias",), (True, False)),
            Setting(("clip_qkv",), (0.5, 2.0), null=True),
            Setting(("num_experts", "num_local_experts"), (8, 16)),
            Setting(("num_experts_per_tok",), (2, 4)),
            Setting(("norm_topk_prob",), (True, False)),
            Setting(("head_dim",), (), unusual=(6,)),
            Setting(("sliding_window",), (), null=True, unusual=(3,)),
        ],
        "gemma2": [
            Setting(("head_dim",), (8, 16)),
            Setting(("attention_bias",), (True, False)),
            Setting(("query_pre_attn_scalar",), (5, 256)),
            Setting(("attn_logit_softcapping",), (2.0, 50.0), null=True, unusual=(0.0,)),
            Setting(("final_logit_softcapping",), (3.0, 30.0), null=True, unusual=(-1.0,)),
            Setting(("sliding_window",), (3, 5)),
            Setting(("hidden_act",), ACTIVATION, null=True),  # which its class does not read
            Setting(("hidden_activation",), ACTIVATION, unusual=UNCOMPUTED),
            Setting(("use_bidirectional_attention",), (False,), null=True, unusual=(True,)),
        ],
    }
    if name != "gemma2":
        settings.append(Setting(("hidden_act",), ACTIVATION, unusual=UNCOMPUTED))
    return settings + own[name]


def _qwen_windows() -> list[Setting]:
    return [
        Setting(("use_sliding_window",), (True, True, False)),
        Setting(("sliding_window",), (3, 5), null=True),
    ]


def draw(name: str, rng: Random) -> Drawn:
    """A file of the family."""
    found = Drawn({"model_type": name})
    settings = _settings(name)
    for setting in settings:
        setting.draw(rng, found)
    if name != "gpt2":
        found.raw |= _Rope(name, rng).keys()
    _layer_types(name, rng, found)
    for _ in range(rng.choice(ODDITIES)):
        oddities: list[Callable[[Random, Drawn], None]] = [setting.spoil for setting in settings if setting.read]
        # As likely as all the rest together: most of what files say twice is the rotary embedding.
        oddities += [_spoil_rope] * (len(settings) if name != "gpt2" else 0) + [_spoil_layer_types]
        rng.choice(oddities)(rng, found)
    # Three files that transformers 5.23 cannot compute, and that can mean one thing alone: a Mistral with layer_types,
    # for which it takes another class, without a head_dim; one without a window in that class, or in Gemma 2; and yarn
    # beside a null where all other scalings take a null for no head_dim.
    if name == "mistral" and "layer_types" in found.raw:
        found.raw["head_dim"] = 8
    if name == "gemma2" or (name == "mistral" and "layer_types" in found.raw):
        found.raw |= {"sliding_window": found.raw.get("sliding_window", 5) or 5}
    if name in ("gpt_neox", "starcoder2") and found.raw.get("head_dim", 0) is None and "yarn" in str(found.raw):
        del found.raw["head_dim"]
    keys = list(found.raw)
    rng.shuffle(keys)
    return Drawn({key: found.raw[key] for key in keys}, found.odd)


# ---- kinds of layers ----

READ_LAYER_TYPES = ("mistral", "qwen2", "qwen3", "gemma2")


def _layer_types(name: str, rng: Random, to: Drawn) -> None:
    n, sliding = to.raw.get("num_hidden_layers"), to.raw.get("sliding_window", 4096) is not None
    if n is None or name not in READ_LAYER_TYPES or rng.random() < 0.5:
        return
    if name.startswith("qwen"):
        sliding = sliding and to.raw.get("use_sliding_window", False)
    kinds = ("full_attention", "sliding_attention") if sliding else ("full_attention",)
    to.raw["layer_types"] = rng.choice((None, [rng.choice(kinds) for _ in range(n)], [kinds[-1]] * n))


def _spoil_layer_types(rng: Random, to: Drawn) -> None:
    n = to.raw.get("num_hidden_layers") or 2
    kinds = ("full_attention", "sliding_attention")
    to.raw["layer_types"] = rng.choice(
        ([rng.choice(kinds) for _ in range(n)], ["sliding_attention"] * n, ["full_attention"] * (n + 1), ["conv"] * n)
    )
    if rng.random() < 0.5 and "sliding_window" in to.raw:
        to.raw["sliding_window"] = None
        to.odd.add("sliding_window")
    to.odd |= {"layer_types", "sliding_window"}


# ---- the rotary embedding ----


KEYS, NEOX_KEYS = ("rope_theta", "partial_rotary_factor"), ("rotary_emb_base", "rotary_pct")
"""Where transformers reads the base and the share of the dimensions beside the objects."""


class _Rope:
    """One embedding, and the ways to write it."""

    def __init__(self, name: str, rng: Random) -> None:
        self.rng, self.is_neox = rng, name == "gpt_neox"
        self.theta = rng.choice((ABSENT, 100.0, 500, 10000.0))
        self.share = rng.choice((ABSENT, 0.25, 0.5, 1.0)) if self.is_neox else rng.choice((ABSENT, ABSENT, 1.0))
        self.scaling = rng.choice(({}, {}, _linear(rng), _llama3(rng), _yarn(rng), _yarn(rng)))

    def keys(self) -> dict[str, Any]:
        match self.rng.choice((4, 5, "both", "both", "ours")):
            case 4:
                return self.version_4()
            case 5:
                return {"rope_parameters": self.version_5()} if self.version_5() else {}
            case "both":
                # As transformers 5 writes what it had read in the words of version 4.
                return self.version_4() | {"rope_parameters": {**self.version_5(), **self.resolved()}}
        return self.version_4() | self.resolved_beside() | {"rope_parameters": {**self.version_5(), **self.resolved()}}

    def beside(self) -> dict[str, Any]:
        theta, share = NEOX_KEYS if self.is_neox else KEYS
        return {key: v for key, v in ((theta, self.theta), (share, self.share)) if v is not ABSENT}

    def version_4(self) -> dict[str, Any]:
        """The scaling by itself, with either name of its kind, or null where there is none."""
        old = dict(self.scaling)
        if old and self.rng.random() < 0.5:
            old = {("type" if key == "rope_type" else key): value for key, value in old.items()}
        without: Any = self.rng.choice(({}, {"rope_scaling": None}))
        return self.beside() | ({"rope_scaling": old} if old else without)

    def version_5(self) -> dict[str, Any]:
        inside = {"rope_theta": self.theta, "partial_rotary_factor": self.share}
        default: dict[str, Any] = self.rng.choice(({}, {"rope_type": "default"}))
        return {k: v for k, v in inside.items() if v is not ABSENT} | (self.scaling or default)

    def resolved(self) -> dict[str, Any]:
        """What a missing key means, written out."""
        kind = self.scaling or {"rope_type": "default"}
        share = {"partial_rotary_factor": 0.25 if self.share is ABSENT else self.share} if self.is_neox else {}
        return kind | {"rope_theta": 10000.0 if self.theta is ABSENT else self.theta} | share

    def resolved_beside(self) -> dict[str, Any]:
        return {"rope_theta": 10000.0 if self.theta is ABSENT else self.theta}


def _linear(rng: Random) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": rng.choice((2.0, 4))}


def _llama3(rng: Random) -> dict[str, Any]:
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": rng.choice((3.0, 4))}
    return {"rope_type": "llama3", **factors, "original_max_position_embeddings": rng.choice((16, 32))}


def _yarn(rng: Random) -> dict[str, Any]:
    more = {
        "original_max_position_embeddings": (ABSENT, 16, 32), "attention_factor": (ABSENT, ABSENT, None, 1.5),
        "beta_fast": (ABSENT, ABSENT, None, 2.0), "beta_slow": (ABSENT, ABSENT, None, 0.5),
        "mscale": (ABSENT, ABSENT, None, 1.5), "mscale_all_dim": (ABSENT, None, 0.6), "truncate": (ABSENT, True, False),
    }  # fmt: skip
    drawn = {key: rng.choice(values) for key, values in more.items()}
    factor = rng.choice((2.0, 4))
    return {"rope_type": "yarn", "factor": factor} | {k: v for k, v in drawn.items() if v is not ABSENT}


def _spoil_rope(rng: Random, to: Drawn) -> None:
    raw, odd = to.raw, to.odd
    given = [key for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
    place = rng.choice(given or ["rope_parameters"])
    inside = dict(raw.get(place) or {})
    theta, share = NEOX_KEYS if raw["model_type"] == "gpt_neox" else KEYS
    match rng.randrange(14):
        case 0:  # as people mend a file that version 5 had written: the seen case
            raw |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_scaling": _yarn(rng)}
            odd |= {"rope_parameters", "rope_scaling"}
        case 1:
            raw |= {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}
            odd |= {"rope_parameters", "rope_scaling"}
        case 2:
            raw[theta] = rng.choice((77.0, None))
            odd.add(theta)
        case 3:
            raw[place] = inside | {"rope_theta": rng.choice((77.0, None))}
            odd.add("rope_theta")
        case 4:
            raw[place] = inside | {"rope_type": rng.choice(("dynamic", "longrope", "proportional", None, "linear"))}
            odd |= {"rope_type", "rotary scaling", "factor"}
        case 5:
            raw[place] = inside | {"type": rng.choice(("linear", "yarn", "default", "dynamic", None))}
            odd |= {"type", "rotary scaling", "factor"}
        case 6 if inside.get("factor"):
            raw[place] = {key: value for key, value in inside.items() if key != "factor"}
            odd.add("factor")
        case 6 | 7:
            kinds = ("full_attention", "sliding_attention")
            raw["rope_parameters"] = {
                kind: {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0} for kind in kinds
            }
            odd |= {"rope_parameters"}
        case 8:
            raw[share] = rng.choice((0.5, 0.75, None))
            odd.add(share)
        case 9:
            raw[place] = inside | {"partial_rotary_factor": rng.choice((0.5, 0.75))}
            odd.add("partial_rotary_factor")
        case 10:  # names of another family
            raw |= rng.choice(
                tuple({key: 77} for key in (KEYS[0], NEOX_KEYS[0]))
                + tuple({key: 0.5} for key in (KEYS[1], NEOX_KEYS[1]))
            )
            odd |= {*KEYS, *NEOX_KEYS}
        case 11:
            raw["original_max_position_embeddings"] = rng.choice((16, 8, None))
            odd.add("original_max_position_embeddings")
        case 12 if len(given) == 2:
            raw[place] = inside | {"factor": 3.0, "original_max_position_embeddings": 24, "low_freq_factor": 0.5}
            odd |= {"factor", "original_max_position_embeddings", "low_freq_factor"}
        case 12:
            raw[place] = inside | {"original_max_position_embeddings": None}
            odd.add("original_max_position_embeddings")
        case 13:
            raw["rope_local_base_freq"] = 50.0
            odd.add("rope_local_base_freq")
    if raw["model_type"] == "gpt_neox":
        odd |= {"rotary_pct"} if "partial_rotary_factor" in odd else set()
