"""The layout of a run: nodes, tasks, and the devices of each task."""

from collections.abc import Iterator
from dataclasses import dataclass

from param_decomp_lab.config import RunConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe.command import gpus_per_node_of_mesh
from param_decomp_lab.setup.resolved import ResolvedConfig

NO_GPU = "none"


@dataclass(frozen=True)
class JobLayout:
    """``per_node``: tasks per node. ``simulated``: CPU devices that each task simulates; None: one GPU per task."""

    nodes: int
    per_node: int
    simulated: int | None

    @property
    def tasks(self) -> int:
        return self.nodes * self.per_node

    @property
    def on_gpus(self) -> bool:
        return self.simulated is None

    def __str__(self) -> str:
        def several(n: int, what: str) -> str:
            return f"{n} {what}{'s'[: n > 1]}"

        if self.simulated is None:
            return f"{several(self.nodes, 'node')} of {several(self.per_node, 'GPU')}, a task for each"
        of = several(self.simulated, "simulated device")
        return f"{several(self.nodes, 'node')} of {several(self.per_node, 'task')} of {of}"

    def shell_variables(self) -> Iterator[tuple[str, str]]:
        """Yields names and values of environment variables, in shell syntax; values may refer to inherited ones."""
        if self.simulated is not None:
            yield "JAX_PLATFORMS", "cpu"
            yield "XLA_FLAGS", f'"${{XLA_FLAGS:-}} {_flag(self.simulated)}"'
            yield "NPROC", f"${{NPROC:-{_threads(self.simulated)}}}"

    def variables(self, inherited: dict[str, str]) -> dict[str, str]:
        """Returns the same variables, expanded for a process."""
        if self.simulated is None:
            return {}
        flags = f"{inherited.get('XLA_FLAGS', '')} {_flag(self.simulated)}"
        return {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags.strip(),
            "NPROC": inherited.get("NPROC") or str(_threads(self.simulated)),
        }


def _flag(devices: int) -> str:
    return f"--xla_force_host_platform_device_count={devices}"  # the last occurrence counts


def _threads(devices: int) -> int:
    """Returns enough threads for all simulated devices to wait for each other; fewer would deadlock."""
    return max(16, 2 * devices)


def choose_layout(config: RunConfig, nodes: int | None, per_node: int | None, gpus: bool) -> JobLayout:
    """Returns the layout for the mesh of ``config``.

    UserError unless the mesh uses all GPUs of all nodes, or divides evenly over the CPU tasks.
    """
    mesh = ResolvedConfig(config).mesh
    if gpus:
        each = gpus_per_node_of_mesh(mesh, nodes, per_node)
        return JobLayout(mesh.n_devices // each, each, None)
    nodes, per_node = nodes or 1, per_node or 1
    share, rest = divmod(mesh.n_devices, nodes * per_node)
    if rest or not share:
        raise UserError(
            f"mesh: replica {mesh.replica} × fsdp {mesh.fsdp} × tensor {mesh.tensor} are {mesh.n_devices} devices, "
            f"which cannot be divided evenly over {nodes * per_node} tasks; set the mesh (--set mesh.fsdp=…) or the "
            "tasks (--nodes, --gpus-per-node)"
        )
    return JobLayout(nodes, per_node, share)
