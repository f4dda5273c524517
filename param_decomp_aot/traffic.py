"""Bytes that a compiled program moves, counted from its text: in a device's memory, and between devices.

A loop's body counts as often as it runs, a conditional as the branch that moves the most, and an asynchronous operation
(start and done) once. For what an operation moves in memory see `fused_bytes.py`; a collective operation reads its
operands there and writes its results.

Between devices, a collective goes round the ring of its group of n devices, ordered by node. With S bytes per device
(the result of an all-gather, else the operand), each device sends (n−1)/n · S, twice that for an all-reduce, and S for
a permutation. If a group spans nodes, with k of its devices in a node, these k share the ring's one way out of the
node: each of them sends 1/k of that over the network (with one network card per GPU). A device that is alone in its
node sends nothing over the node's own links.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from param_decomp_aot.fused_bytes import bytes_moved, multiplies
from param_decomp_aot.hlo import Computation, Instruction, Module, module
from param_decomp_aot.instructions import Instructions
from param_decomp_aot.loops import trips
from param_decomp_aot.replica_groups import Groups, replica_groups, source_target_pairs

_BRANCHES = ("branch_computations", "true_computation", "false_computation")
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """One collective operation. ``payload``: S above, in bytes. ``group``: n. ``in_node``: k, for the group with the
    fewest devices in a node. ``shape``: that of the operands' local parts."""

    kind: str
    payload: int
    group: int
    in_node: int
    shape: str
    scope: str
    source: str

    @property
    def crosses(self) -> bool:
        """Whether it needs the network between nodes."""
        return self.in_node < self.group

    @property
    def ring(self) -> int:
        """The bytes that each device sends to the next."""
        if self.group < 2:
            return 0
        if self.kind == "collective-permute":
            return self.payload
        return (2 if self.kind == "all-reduce" else 1) * self.payload * (self.group - 1) // self.group

    @property
    def hops(self) -> int:
        """The number of devices that a message passes in sequence."""
        if self.group < 2 or self.kind == "collective-permute":
            return min(self.group - 1, 1)
        return (2 if self.kind == "all-reduce" else 1) * (self.group - 1)

    @property
    def network_hops(self) -> int:
        """The number of these hops that lead to another node."""
        if not self.crosses:
            return 0
        nodes = -(-self.group // self.in_node)
        return -(-self.hops * (nodes - 1) // (self.group - 1))

    @property
    def within(self) -> int:
        """The bytes that each device sends over the links of its node."""
        return self.ring if self.in_node > 1 else 0

    @property
    def across(self) -> int:
        """The bytes that each device sends over the network between nodes."""
        return self.ring // self.in_node if self.crosses else 0


@dataclass(frozen=True)
class Sum:
    """The sum of several collective operations. ``count``: the number of runs. ``payload``, ``within``, ``across``:
    bytes per device. ``node_hops``, ``network_hops``: see `Collective.hops`."""

    count: int = 0
    payload: int = 0
    within: int = 0
    across: int = 0
    node_hops: int = 0
    network_hops: int = 0


@dataclass(frozen=True)
class Traffic:
    """What one run of a program moves, per device, in bytes.

    ``memory``: read and written in the device's memory, by scope (`Instructions.origin`). ``products``: the part of
    that for kernels of matrix products, in total. ``host``: read and written in the host's memory. ``collectives``:
    each with the number of its runs. ``unknown``: operations that could not be resolved, counted as if they ran once,
    or among all devices.
    """

    memory: Mapping[str, int]
    products: int
    host: int
    collectives: Mapping[Collective, int]
    unknown: tuple[str, ...]

    @property
    def hbm(self) -> int:
        """The bytes read and written in the device's memory."""
        return sum(self.memory.values())

    @property
    def within(self) -> int:
        """The bytes sent over the links of a node."""
        return sum(n * c.within for c, n in self.collectives.items())

    @property
    def across(self) -> int:
        """The bytes sent over the network between nodes."""
        return sum(n * c.across for c, n in self.collectives.items())

    def by_kind(self) -> Mapping[tuple[str, bool], Sum]:
        """The collectives by kind and by whether they need the network, those that send the most first."""
        sums: dict[tuple[str, bool], Sum] = {}
        for c, n in self.collectives.items():
            old = sums.get((c.kind, c.crosses), Sum())
            sums[c.kind, c.crosses] = Sum(
                old.count + n,
                old.payload + n * c.payload,
                old.within + n * c.within,
                old.across + n * c.across,
                old.node_hops + n * (c.hops - c.network_hops),
                old.network_hops + n * c.network_hops,
            )
        return dict(sorted(sums.items(), key=lambda item: -max(item[1].within, item[1].across)))


@dataclass
class _Count:
    memory: Counter[str] = field(default_factory=Counter)
    products: int = 0
    host: int = 0
    collectives: Counter[Collective] = field(default_factory=Counter)
    unknown: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.memory.total() + self.host + sum(n * c.ring for c, n in self.collectives.items())

    def add(self, other: "_Count", times: int = 1) -> None:
        for scope, n in other.memory.items():
            self.memory[scope] += times * n
        for collective, n in other.collectives.items():
            self.collectives[collective] += times * n
        self.products += times * other.products
        self.host += times * other.host
        self.unknown.extend(u for u in other.unknown if u not in self.unknown)


def traffic(program: str, gpus_per_node: int = 8) -> Traffic:
    """Returns what each device moves in one run of ``program``, HLO from `jax.stages.Compiled.as_text` or from a dump.

    A loop whose trip count the program does not give counts once and is reported, with one exception: an outermost loop
    that moves more than half of everything is the loop over the steps of a dispatch. It counts once, so the result is
    that of one step. Raises ValueError if the text is not a program.
    """
    counting = _Counting(module(program), Instructions(program), gpus_per_node)
    count, loops = counting.count_computation(counting.module.entry, outermost=True)
    steps = max(loops, key=lambda loop: loop[1], default=("", 0))
    unknown = count.unknown + [name for name, total in loops if name != steps[0] or 2 * total <= count.total]
    memory, collectives = dict(count.memory.most_common()), dict(count.collectives.most_common())
    return Traffic(memory, count.products, count.host, collectives, tuple(unknown))


class _Counting:
    def __init__(self, module: Module, instructions: Instructions, gpus_per_node: int) -> None:
        self.module, self.instructions, self.gpus_per_node = module, instructions, gpus_per_node

    def count_computation(
        self, name: str, started_by: str = "", outermost: bool = False
    ) -> tuple[_Count, list[tuple[str, int]]]:
        """Counts one run of a computation. For the outermost one it also returns the loops of unknown length directly
        in it, with their bytes per iteration. ``started_by``: the instruction from which it takes its origin."""
        computation, count = self.module.computations[name], _Count()
        loops: list[tuple[str, int]] = []
        for i in computation.instructions.values():
            if i.opcode == "while":
                one = _Count()
                for part in (*i.called("body"), *i.called("condition")):
                    one.add(self.count_computation(part)[0])
                n = trips(self.module, computation, i)
                count.add(one, 1 if n is None else n)
                if n is None:
                    loops.append(
                        (f"{i.name} in {self.instructions.origin(i.name)[0]}: counted as one round", one.total)
                    )
            elif i.opcode == "conditional":
                branches = [self.count_computation(name)[0] for key in _BRANCHES for name in i.called(key)]
                count.add(max(branches, key=lambda branch: branch.total))
            elif i.opcode == "call":
                called, more = self.count_computation(i.called("to_apply")[0], outermost=outermost)
                count.add(called)
                loops += more
            elif i.opcode == "async-start":
                count.add(self.count_computation(i.called("calls")[0], i.name)[0])
            elif (kind := i.opcode.removesuffix("-start")) in KINDS:
                self._collective(kind, computation, i, started_by or i.name, count)
            elif moved := bytes_moved(self.module, computation, i):
                count.memory[self.instructions.origin(started_by or i.name)[0]] += moved.device
                count.host += moved.host
                if multiplies(self.module, i):
                    count.products += moved.device
        if outermost:
            return count, loops
        count.unknown += [loop for loop, _ in loops]
        return count, []

    def _collective(self, kind: str, inside: Computation, i: Instruction, named: str, count: _Count) -> None:
        operands = [inside.instructions[name] for name in i.operands]
        given = sum(o.n_bytes for o in operands)
        groups = self._groups(kind, i, count)
        size = max(map(len, groups), default=1)
        in_node = min((self._in_node(group) for group in groups), default=1)
        taken = {"all-gather": given * size, "reduce-scatter": given // size}.get(kind, given)
        scope, source = self.instructions.origin(named)
        shape = " + ".join(o.shape.partition("{")[0] for o in operands)
        count.collectives[Collective(kind, max(given, taken), size, in_node, shape, scope, source)] += 1
        count.memory[scope] += given + taken

    def _groups(self, kind: str, i: Instruction, count: _Count) -> Groups:
        if kind == "collective-permute":
            return source_target_pairs(i.attributes)
        try:
            return replica_groups(i.attributes, self.module.n_devices)
        except ValueError as error:
            count.unknown.append(f"{i.name}: {error}; counted as among all devices")
            return (tuple(range(self.module.n_devices)),)

    def _in_node(self, group: tuple[int, ...]) -> int:
        """Returns the smallest number of a group's devices in one node."""
        return min(Counter(device // self.gpus_per_node for device in group).values())
