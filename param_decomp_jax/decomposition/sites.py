"""Sites, their canonical order, and the homogeneous stacks in which their arrays are kept.

A *site* is one weight matrix of the target, used as ``x @ W`` with W ``[d_in, d_out]``. Sites of one kind in
consecutive layers, with one shape and one C, form a *stack*: their factors are one array with a leading layer axis, so
that a scanned target takes its slice at every layer. Everything the method keeps per site (V, U, CI head, sources,
optimiser moments) is a dictionary from stack name to such an array.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, product
from typing import Any, Literal, TypeVar

T = TypeVar("T")

PRE_IDENTITY = ".pre_identity"
"""The suffix of the name and the kind of a site whose W is the identity, inserted before a matrix of the target."""


UnitKind = Literal["neuron", "attention_head"]


@dataclass(frozen=True)
class Units:
    """The units of the nonlinearity that follows a matrix or precedes it (L7).

    The coordinates of ``side`` are ``n`` equal contiguous blocks, one for each unit. ``multiplier``: m, the number of
    query heads that each unit serves.
    """

    kind: UnitKind
    side: Literal["output", "input"]
    n: int
    multiplier: int = 1


@dataclass(frozen=True)
class Matrix:
    """A matrix of a target that can be decomposed.

    ``layer``: number of the layer it belongs to. ``kind``: its role within the layer (``up_proj``). ``reads``: name of
    the activation it multiplies; matrices of a layer that read the same activation share it. ``group``: differs between
    layers whose matrices are otherwise alike but which do not run in one scan (`targets/base.py:UniformLayers`).
    ``part_of``: for a slice of another matrix, the name of that matrix; only one of the two can be a site. ``expert``:
    for a matrix of an expert, the number of that expert; each expert of a layer has one matrix of each kind.
    ``lookup``: whether it is a table whose rows are looked up (F7); ``reads`` then names what comes out. ``faces``: the
    units of a nonlinearity that one of its sides faces, if any (L7).
    """

    name: str
    layer: int
    kind: str
    reads: str
    d_in: int
    d_out: int
    group: int = field(default=0, kw_only=True)
    part_of: str | None = field(default=None, kw_only=True)
    expert: int | None = field(default=None, kw_only=True)
    lookup: bool = field(default=False, kw_only=True)
    faces: Units | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Site(Matrix):
    """A matrix that is decomposed, into ``C`` components."""

    C: int


@dataclass(frozen=True)
class Stack:
    """Sites of one kind and shape in the layers ``first .. first + n_layers - 1``; ``sites`` are their canonical
    numbers.

    ``experts``: the number of experts for experts' matrices, None for other sites. Arrays of a stack have a leading
    axis of layers, followed by one of experts if there are any; ``sites`` are in that order. ``lookup``, ``faces``: as
    in `Matrix`.
    """

    name: str
    kind: str
    reads: str
    first: int
    d_in: int
    d_out: int
    C: int
    sites: tuple[int, ...]
    experts: int | None = None
    lookup: bool = False
    faces: Units | None = None

    @property
    def read_width(self) -> int:
        """The width of what a CI function reads of a site."""
        return self.d_out if self.lookup else self.d_in

    @property
    def n_layers(self) -> int:
        return len(self.sites) // (self.experts or 1)

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of its arrays."""
        return (self.n_layers,) if self.experts is None else (self.n_layers, self.experts)

    def rows(self) -> list[Any]:
        """The index of each site along the leading axes: a layer, or a layer and an expert."""
        return list(range(self.n_layers)) if self.experts is None else list(product(*map(range, self.lead)))

    def of_layer(self, layer: int) -> tuple[int, ...]:
        """Returns the sites of one layer. Layers are counted from the first layer of the target."""
        n = self.experts or 1
        return self.sites[(layer - self.first) * n : (layer - self.first + 1) * n]

    def lay_out(self, by_site: Any) -> Any:
        """Reshapes arrays with one leading axis, of sites, to the leading axes of the stack."""
        return by_site if self.experts is None else by_site.reshape(*self.lead, *by_site.shape[1:])

    @property
    def layers(self) -> range:
        return range(self.first, self.first + self.n_layers)


@dataclass(frozen=True)
class Segment:
    """Consecutive layers in which the same kinds are decomposed, in the same shapes. One scan runs over them."""

    first: int
    stop: int
    stacks: tuple[Stack, ...]


@dataclass(frozen=True)
class Sites:
    """All sites in canonical order (by layer, then in the order in which they are applied), and their stacks.

    ``tied`` (T4): pairs of names; the second site of a pair is trained as a view of the first one. Tied sites are
    stacks of their own.
    """

    all: tuple[Site, ...]
    tied: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        by_name = {site.name: site for site in self.all}
        assert len(by_name) == len(self.all), "a site appears twice"
        layers = [site.layer for site in self.all]
        assert layers == sorted(layers), "sites are not in canonical order"
        in_pairs = [name for pair in self.tied for name in pair]
        assert len(set(in_pairs)) == len(in_pairs), "a site is tied twice"
        for first, second in ((by_name[a], by_name[b]) for a, b in self.tied):
            shapes = (first.d_in, first.d_out, first.C), (second.d_out, second.d_in, second.C)
            assert shapes[0] == shapes[1], f"{first} and {second} cannot be tied"

    def __len__(self) -> int:
        return len(self.all)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        in_pairs = {name for pair in self.tied for name in pair}
        by_layer = [(layer, tuple(group)) for layer, group in groupby(enumerate(self.all), lambda s: s[1].layer)]

        def form(entry: tuple[int, tuple[tuple[int, Site], ...]]) -> list[tuple[Any, ...]]:
            """Returns what neighbouring layers must have in common to be in one segment."""
            # The name of a tied site makes the form of its layer unique.
            tie = (site.name if site.name in in_pairs else "" for _, site in entry[1])
            return [
                (s.kind, s.reads, s.d_in, s.d_out, s.C, s.group, s.expert, s.faces, t)
                for (_, s), t in zip(entry[1], tie, strict=True)
            ]

        segments: list[list[tuple[int, tuple[tuple[int, Site], ...]]]] = []
        for entry in by_layer:
            if segments and segments[-1][-1][0] == entry[0] - 1 and form(segments[-1][-1]) == form(entry):
                segments[-1].append(entry)
            else:
                segments.append([entry])
        return tuple(self._segment([sites for _, sites in layers]) for layers in segments)

    @staticmethod
    def _segment(layers: Sequence[Sequence[tuple[int, Site]]]) -> Segment:
        first, stop = layers[0][0][1].layer, layers[-1][0][1].layer + 1
        stacks = []
        for _, slots in groupby(range(len(layers[0])), lambda slot: layers[0][slot][1].kind):
            own = list(slots)
            site = layers[0][own[0]][1]
            name = _span(site.name, layers[-1][own[-1]][1].name)
            members = tuple(layer[slot][0] for layer in layers for slot in own)
            experts = None if site.expert is None else len(own)
            if experts is not None:
                found = [layers[0][slot][1].expert for slot in own]
                assert found == list(range(experts)), f"of {site.kind} only the experts {found} are sites"
                assert len({layers[0][slot][1].C for slot in own}) == 1, f"experts of {site.kind} differ in C"
            sizes = site.d_in, site.d_out, site.C
            stacks.append(Stack(name, site.kind, site.reads, first, *sizes, members, experts, site.lookup, site.faces))
        return Segment(first, stop, tuple(stacks))

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        return tuple(stack for segment in self.segments for stack in segment.stacks)

    @cached_property
    def stack_rows(self) -> tuple[tuple[Stack, Any], ...]:
        """The stack of each site, in canonical order, and the site's index in it (`Stack.rows`)."""
        places = {n: (stack, row) for stack in self.stacks for row, n in zip(stack.rows(), stack.sites, strict=True)}
        return tuple(places[n] for n in range(len(self.all)))

    @cached_property
    def views(self) -> dict[str, str]:
        """The stacks that are views of others (T4), each with the stack that is trained in its place."""
        return {second: first for first, second in self.tied}

    def unstack(self, arrays: Mapping[str, T]) -> dict[str, T]:
        """Splits per-stack arrays ``[layers, ...]`` (``[layers, experts, ...]`` for experts) into per-site arrays,
        keyed by site name in canonical order."""
        rows = zip(self.all, self.stack_rows, strict=True)
        return {site.name: arrays[stack.name][row] for site, (stack, row) in rows}  # type: ignore[index]


def _span(first: str, last: str) -> str:
    """Returns the name of a stack: `layers.18.mlp.up_proj` for a single site, `layers.18-26.mlp.up_proj` for layers 18
    to 26."""
    parts = zip(first.split("."), last.split("."), strict=True)
    return ".".join(a if a == b else f"{a}-{b}" for a, b in parts)
