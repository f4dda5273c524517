"""How processes are told of each other: options, Slurm's variables, and what is wrong with either."""

import socket
from pathlib import Path

import pytest

from param_decomp_lab.errors import UserError
from param_decomp_lab.processes.group import ALONE
from param_decomp_lab.processes.joining import ByAddress, BySlurm, find_place
from tests.lab.several import CHILD, run, slurm_task
from tests.lab.tiny_run import pd_here

TASK = slurm_task(number=3, count=8, job=5) | {"SLURM_LOCALID": "3"}


def test_explicit() -> None:
    assert find_place("node01:29400", 4, 3, {}) == ByAddress("node01:29400", 4, 3)
    assert find_place("[::1]:29400", 4, 0, TASK) == ByAddress("[::1]:29400", 4, 0)  # Slurm or not
    assert find_place(None, None, None, {}) is None
    assert find_place(None, 1, None, TASK) is None
    assert find_place("node01:29400", 1, 0, {}) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("node01:1", None, 0), "--processes missing"),
        ((None, 2, None), "--coordinator, --process-id missing"),
        ((None, None, 1), "--coordinator, --processes missing"),
        (("node01", 2, 0), "node01 is not HOST:PORT"),
        (("node01:x", 2, 0), "node01:x is not HOST:PORT"),
        (("node01:99999", 2, 0), "node01:99999 is not HOST:PORT"),
        (("node01:1", 2, 2), "--process-id: is 2, but with --processes 2 it goes from 0 to 1"),
        ((None, 1, 1), "--coordinator missing"),
    ],
)
def test_what_does_not_make_sense(given: tuple[str | None, int | None, int | None], says: str) -> None:
    with pytest.raises(UserError, match=says):
        find_place(*given, TASK)


@pytest.mark.parametrize(
    ("shown", "tasks", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "SLURM_GPUS_ON_NODE": "8"}, "8", (3,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "SLURM_GPUS_ON_NODE": "8"}, "4(x2)", (6, 7)),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "8"}, "8", (0,)),  # --gpus-per-task
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "SLURM_GPUS_ON_NODE": "16"}, "8", (0, 1)),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "8", (0,)),
        ({"SLURM_GPUS_ON_NODE": "8"}, "8", (3,)),
        ({}, "8", None),  # no GPUs
        ({"SLURM_GPUS_ON_NODE": "8"}, "8,4", None),  # nodes that differ: as JAX does
    ],
)
def test_gpus_of_a_task(shown: dict[str, str], tasks: str, devices: tuple[int, ...] | None) -> None:
    task = TASK | shown | {"SLURM_STEP_TASKS_PER_NODE": tasks}
    assert find_place(None, None, None, task) == BySlurm(devices)


def test_one_task_with_a_node_to_itself_takes_all_its_gpus() -> None:
    task = TASK | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0", "SLURM_GPUS_ON_NODE": "4"}
    assert find_place(None, None, None, task) == BySlurm((0, 1, 2, 3))


@pytest.mark.parametrize(
    "change", [{"SLURM_NTASKS": "1"}, {"SLURM_STEP_NODELIST": None}, {"SLURM_PROCID": None}], ids=str
)
def test_slurm_without_several_tasks(change: dict[str, str | None]) -> None:
    """A step of one task; the shell that `sbatch` or `salloc` starts."""
    task = {name: value for name, value in (TASK | change).items() if value is not None}
    assert find_place(None, None, None, task) is None


def test_alone_everything_is_trivial() -> None:
    assert ALONE.first
    assert ALONE.gather("x") == ["x"]
    assert ALONE.from_first("x") == "x"
    assert ALONE.in_turn(lambda: 7) == 7
    with pytest.raises(UserError, match="as it was"), ALONE.sharing_errors():
        raise UserError("as it was")


def test_messages_of_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("param_decomp_lab.processes.joining.TIMEOUT_S", 0)
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        nobody = pd_here(
            "train", "x.yaml", "--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id", "1"
        )
        taken.listen()
        same = pd_here("train", "x.yaml", "--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id", "0")
    assert (nobody.status, same.status) == (2, 2)
    assert f"nobody has answered at 127.0.0.1:{port}" in nobody.err
    assert f"127.0.0.1:{port}: cannot listen at port {port} (Address already in use)" in same.err
    no_host = pd_here("train", "x.yaml", "--coordinator", "no.such.host.:1", "--processes", "2", "--process-id", "1")
    assert no_host.status == 2
    assert "--coordinator: no host no.such.host." in no_host.err


@pytest.mark.slow
def test_joined_by_slurm(tmp_path: Path) -> None:
    found = run([*CHILD, "agree", "", ""], 2, 1, {"CHILD_FOLDER": str(tmp_path)}, slurm=True)
    assert [process.status for process in found] == [0, 0], found
    assert all("gathered ['from 0', 'from 1'] 0\n" in process.text for process in found)
