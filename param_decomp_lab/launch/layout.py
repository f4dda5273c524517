"""Where a run is to be made: nodes, tasks, and what devices each task has."""

from collections.abc import Iterator
from dataclasses import dataclass

from param_decomp_jax.mesh import MeshShape
from param_decomp_lab.config import RunConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe.command import gpus_per_node_of_mesh
from param_decomp_lab.probe.outline import mesh_shape

NO_GPU = "none"


@dataclass(frozen=True)
class Layout:
    """``per_node``: tasks of a node. ``simulated``: devices that each of them simulates on the CPU; None: one GPU."""

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
        """Names and values, for a shell; the values may name what is inherited."""
        if self.simulated is not None:
            yield "JAX_PLATFORMS", "cpu"
            yield "XLA_FLAGS", f'"${{XLA_FLAGS:-}} {_flag(self.simulated)}"'
            yield "NPROC", f"${{NPROC:-{_threads(self.simulated)}}}"

    def variables(self, inherited: dict[str, str]) -> dict[str, str]:
        """The same, for a process."""
        if self.simulated is None:
            return {}
        flags = f"{inherited.get('XLA_FLAGS', '')} {_flag(self.simulated)}"
        return {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags.strip(),
            "NPROC": inherited.get("NPROC") or str(_threads(self.simulated)),
        }


def _flag(devices: int) -> str:
    return f"--xla_force_host_platform_device_count={devices}"  # the last one counts


def _threads(devices: int) -> int:
    """Enough for all simulated devices to wait for each other; with fewer they hang."""
    return max(16, 2 * devices)


def choose_layout(config: RunConfig, nodes: int | None, per_node: int | None, gpus: bool) -> Layout:
    """UserError unless the mesh takes all GPUs of all nodes, or can be spread evenly over the tasks of CPUs."""
    mesh: MeshShape = mesh_shape(config)
    if gpus:
        each = gpus_per_node_of_mesh(mesh, nodes, per_node)
        return Layout(mesh.n_devices // each, each, None)
    nodes, per_node = nodes or 1, per_node or 1
    share, rest = divmod(mesh.n_devices, nodes * per_node)
    if rest or not share:
        raise UserError(
            f"mesh: replica {mesh.replica} × fsdp {mesh.fsdp} × tensor {mesh.tensor} are {mesh.n_devices} devices, "
            f"which do not spread evenly over {nodes * per_node} tasks; set the mesh (--set mesh.fsdp=…) or the tasks "
            "(--nodes, --gpus-per-node)"
        )
    return Layout(nodes, per_node, share)
