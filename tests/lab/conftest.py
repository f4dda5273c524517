"""The tiny run, the toy run and a harvest of each, made once for all tests of the laboratory."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from param_decomp_lab import load_run
from param_decomp_lab.cluster.cluster import cluster
from param_decomp_lab.cluster.request import ClusterRequest
from param_decomp_lab.harvest.files import Harvest
from param_decomp_lab.harvest.harvest import harvest
from param_decomp_lab.harvest.plan import HarvestRequest
from tests.lab import toy_run
from tests.lab.tiny_run import Tiny, pd_here, programs_kept_in


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """One folder for all processes of a test session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "tiny"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="package", autouse=True)
def _programs_shared(shared_folder: Path) -> Iterator[None]:
    """A program that any of these tests has compiled, here or in a process of its own, is compiled."""
    with programs_kept_in(shared_folder / "compiled"):
        yield


@pytest.fixture(scope="session")
def tiny(shared_folder: Path) -> Tiny:
    made = Tiny(shared_folder / "made", shared_folder / "compiled")
    with FileLock(shared_folder / "made.lock"):
        if not made.folder.exists():
            made.make()
    return made


@pytest.fixture(scope="session")
def finished(tiny: Tiny, shared_folder: Path) -> Path:
    """The folder of a run that nothing disturbed, made by `pd train`."""
    runs = shared_folder / "runs"
    with FileLock(shared_folder / "runs.lock"):
        if not runs.exists():
            process = tiny.pd(*tiny.train(runs, 1))
            assert process.returncode == 0, process.stdout + process.stderr
    return runs / "p-00000001"


@pytest.fixture(scope="session")
def toy(shared_folder: Path) -> Path:
    """A folder with a TMS, `target`, and a finished run on it, `p-00000001`: checkpoints of steps 5, 10 and 12."""
    folder = shared_folder / "toy"
    with FileLock(shared_folder / "toy.lock"):
        if not folder.exists():
            toy_run.save_toy(folder)
            outcome = pd_here("train", toy_run.CONFIG, *toy_run.settings(folder, 1))
            assert outcome.status == 0, outcome
    return folder


@pytest.fixture(scope="session")
def harvested(finished: Path, toy: Path, shared_folder: Path) -> Path:
    """A folder with copies of both runs, `p-00000001` (the tiny Llama) and `p-00000002` (the toy), each with a harvest;
    that of the Llama has groups. Nobody may change it."""
    folder = shared_folder / "harvested"
    with FileLock(shared_folder / "harvested.lock"):
        if not folder.exists():
            for number, (run, tokens) in enumerate(((finished, 640), (toy / "p-00000001", 500)), start=1):
                copy = shutil.copytree(run, folder / f"p-0000000{number}")
                made = harvest(load_run(copy, devices=1), HarvestRequest(tokens=tokens, examples=4))
                assert made is not None
                if number == 1:
                    cluster(Harvest(made), ClusterRequest(alpha=10, seeds=1))
    return folder
