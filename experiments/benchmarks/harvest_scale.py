"""Writes a harvest of a whole model's size from made-up firings, by the functions that write real ones.

    python -m experiments.benchmarks.harvest_scale OUT  # 27 sites x 49,152 components, 2e6 positions, L0 100 a site
    python -m experiments.benchmarks.harvest_scale OUT --sites 2 --components 4096 --positions 1e5

Every component has its own density, log-uniform, and prefers some tokens. Token frequencies follow Zipf's law, as in
text. No devices take part: each block is generated as the devices would have returned it. Prints the time, the peak
resident memory of this process, and the bytes on disk. OUT then holds the harvest, which `pd browse` shows.
"""

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from param_decomp_lab.harvest.counting import BlockCounter, SiteBlock
from param_decomp_lab.harvest.device import SiteSums
from param_decomp_lab.harvest.examples import AROUND
from param_decomp_lab.harvest.files.plan import HarvestPlan, PlannedSite
from param_decomp_lab.harvest.firings import ListedFirings
from param_decomp_lab.harvest.inputs import Inputs
from param_decomp_lab.harvest.keys import keys as hashes
from param_decomp_lab.harvest.plan import examples_kept, positions_sampled
from param_decomp_lab.harvest.publish import publish
from param_decomp_lab.harvest.state import HarvestState

LENGTH, VOCABULARY, WIDTH = 512, 50_257, 64
BLOCK_ROWS = 8
KINDS = ("gate_proj", "up_proj", "down_proj")
SAVES = 4
"""How often the state is saved on the way, as a real harvest does."""


class Made:
    """The made-up firings of one site: a pure function of (site, block)."""

    def __init__(self, site: int, C: int, mean_l0: float) -> None:
        rng = np.random.default_rng([1, site])
        weight = np.exp(rng.uniform(np.log(1e-3), 0, C))
        # Components in proportion to their shares of the firings: one draw is one lookup in this table.
        self.table = rng.choice(C, 1 << 20, p=weight / weight.sum()).astype(np.int32)
        self.site, self.C, self.mean_l0 = site, C, mean_l0

    def block(self, number: int, tokens: np.ndarray) -> SiteBlock:
        rng = np.random.default_rng([2, self.site, number])
        n = len(tokens)
        counts = rng.poisson(self.mean_l0, n)
        position = np.repeat(np.arange(n, dtype=np.int32), counts)
        # Half of the firings belong to components that follow from the token.
        drawn = rng.integers(0, 1 << 20, len(position), np.int32)
        of_token = (tokens[position] * np.int32(40_503) + (drawn & 63)) & ((1 << 20) - 1)
        component = self.table[np.where(drawn & 64, of_token, drawn)]
        order = np.argsort(position.astype(np.int64) << 20 | component, kind="stable")
        component = component[order]
        again = np.flatnonzero((np.diff(component) == 0) & (np.diff(position) == 0)) + 1
        position, component = np.delete(position, again), np.delete(component, again)
        importance = np.minimum(1, rng.random(len(position), np.float32) * 2 + 1e-3)
        activation = rng.standard_normal(len(position), np.float32)

        def gather(at: np.ndarray, components: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            values = hashes(0, (at.astype(np.uint64) << np.uint64(20)) + components[:, None].astype(np.uint64))
            values = (values >> np.uint64(40)).astype(np.float32) / (1 << 24)
            return np.where(values > 0.95, values, 0), values - 0.5

        sums = np.bincount(component, importance, self.C), np.bincount(component, np.abs(activation), self.C)
        found = ListedFirings(position, component, importance, activation, gather)
        return SiteBlock(found, SiteSums(*sums, sums[1].astype(np.float32)))


class MadeRows:
    """Rows of tokens with the frequencies of words, in place of `harvest.plan.Source`."""

    def __init__(self) -> None:
        share = 1 / np.arange(1, VOCABULARY + 1)
        self._ends = np.cumsum(share / share.sum())

    def block(self, plan: HarvestPlan, number: int) -> np.ndarray:
        drawn = np.random.default_rng([3, number]).random((plan.block_rows, plan.length))
        return np.minimum(np.searchsorted(self._ends, drawn), VOCABULARY - 1).astype(np.int32)


class MadeText:
    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [f" w{number}" for number in ids]


class MadeRun:
    """What `publish` reads of a run: V and U, with few dimensions."""

    target, n_outputs = None, VOCABULARY
    text = MadeText()

    def factors_of(self, site: str, numbers: slice) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([4, numbers.start])
        n = numbers.stop - numbers.start
        return rng.standard_normal((WIDTH, n), np.float32), rng.standard_normal((n, WIDTH), np.float32)


def make(out: Path, n_sites: int, C: int, positions: int, mean_l0: float, examples: int | None) -> None:
    examples = examples_kept(n_sites * C) if examples is None else examples
    names = [f"layers.{number // 3}.mlp.{KINDS[number % 3]}" for number in range(n_sites)]
    rows = -(-positions // LENGTH)
    n_blocks = -(-rows // BLOCK_ROWS)
    plan = HarvestPlan(
        run="p-00000000", step=0, data="made up", available=rows, rows=rows, length=LENGTH, inputs="tokens",
        n_inputs=VOCABULARY, sites=tuple(PlannedSite(name, n, C, WIDTH, WIDTH) for n, name in enumerate(names)),
        threshold=0.0, seed=0, block_rows=BLOCK_ROWS, examples=examples, around=AROUND,
        sampled=min(-(-positions_sampled(n_sites * C) // n_blocks), BLOCK_ROWS * LENGTH), outputs=16,
    )  # fmt: skip
    source, made = MadeRows(), [Made(n, C, mean_l0) for n in range(n_sites)]
    began = time.monotonic()
    making = 0.0
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as work, ThreadPoolExecutor() as pool:
        state = HarvestState(Path(work), [C] * n_sites, examples)
        counter = BlockCounter(plan, state)
        n_firings = 0
        for block in range(n_blocks):
            started = time.monotonic()
            tokens = source.block(plan, block)[: len(plan.rows_of_block(block))].ravel()
            sites = list(pool.map(partial(Made.block, number=block, tokens=tokens), made))
            outputs = np.sort(np.random.default_rng([5, block]).integers(0, VOCABULARY, (plan.sampled, 16)), axis=1)
            making += time.monotonic() - started
            n_firings += sum(len(site.found) for site in sites)
            values = np.full(outputs.shape, 1 / 32, np.float32)
            counter.add(
                block, Inputs(tokens=tokens), outputs, values, [partial(_already, site) for site in sites], pool
            )
            if (block + 1) % max(1, n_blocks // SAVES) == 0:
                state.save()
            if (block + 1) % max(1, n_blocks // 20) == 0:
                print(
                    f"{(block + 1) / n_blocks:4.0%}  {time.monotonic() - began:,.0f} s  {_resident():.2f} GiB",
                    flush=True,
                )
        state.save()
        counted = time.monotonic()
        run: Any = MadeRun()
        run.sites = {site.name: SimpleNamespace(kind="") for site in plan.sites}
        publish(run, plan, source, state, out)  # type: ignore[arg-type]
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"positions            {plan.n_positions:,}")
    print(f"components           {n_sites * C:,}")
    print(f"firings              {n_firings:,}")
    print(f"making them up       {making / 60:.1f} min")
    print(f"counting and saving  {(counted - began - making) / 60:.1f} min")
    print(f"writing the tables   {(time.monotonic() - counted) / 60:.1f} min")
    print(f"largest resident     {_resident():.2f} GiB")
    print(f"on disk              {size / 2**30:.2f} GiB, {size / (n_sites * C):,.0f} bytes a component")
    for folder in (*sorted(path for path in out.iterdir() if path.is_dir()), out):
        files = folder.iterdir() if folder == out else folder.rglob("*")
        mebibytes = sum(file.stat().st_size for file in files if file.is_file()) / 2**20
        print(f"  {folder.name if folder != out else 'other files':12} {mebibytes:,.0f} MiB")


def _already(site: SiteBlock) -> SiteBlock:
    return site


def _resident() -> float:
    """Returns the largest resident memory so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sites", type=int, default=27)
    parser.add_argument("--components", type=int, default=49_152)
    parser.add_argument("--positions", type=float, default=2e6)
    parser.add_argument("--l0", type=float, default=100.0, help="mean L0 of a site")
    parser.add_argument("--examples", type=int, help="examples of each kind, for each component")
    given = parser.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    make(given.out, given.sites, given.components, int(given.positions), given.l0, given.examples)


if __name__ == "__main__":
    main()
