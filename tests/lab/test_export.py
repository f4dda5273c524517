"""`pd export`: what is written is read with NumPy and safetensors alone, by the code in its own README."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_lab import load_run
from param_decomp_lab.errors import UserError
from param_decomp_lab.export import export_run
from param_decomp_lab.export.tensors import pieces
from param_decomp_lab.opening import Run
from tests import reference as ref
from tests.core import tiny as core
from tests.lab.several import environment_of
from tests.lab.tiny_run import EARLY, LATE, LIGHT, ROOT, SEQ_LEN, SITES, STEPS, Tiny, pd_here, saved_arrays

TOKENS = np.random.default_rng(6).integers(0, 256, SEQ_LEN)


def read_as_told(folder: Path, inputs: Mapping[str | int, np.ndarray]) -> dict[str, np.ndarray]:
    """The README's code in a process of its own that has neither JAX nor this package: λ of these site inputs."""
    blocks = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    np.savez(folder.parent / "inputs.npz", **{str(name): x for name, x in inputs.items()})
    end = f"""
given = np.load({str(folder.parent / "inputs.npz")!r})
found = logits({{int(name) if name.isdigit() else name: x.astype(np.float64) for name, x in given.items()}})
np.savez({str(folder.parent / "found.npz")!r}, **{{site: importance(z) for site, z in found.items()}})
import sys
assert not {{name.split(".")[0] for name in sys.modules}} & {{"jax", "param_decomp_lab", "param_decomp_jax", "torch"}}
"""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*blocks, end])], cwd=folder, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder.parent / "found.npz"))


def site_inputs(run: Run, inputs: np.ndarray) -> dict[str | int, np.ndarray]:
    """F5, C10, by the reference: what every site multiplies in the clean pass, and residual streams by their block."""
    target = core.ref_target(run.problem.target, run.weights, inputs)
    points = ref.clean_points(target) if run.problem.target.architecture.points() else {}  # a TMS has none
    streams = {int(name.removeprefix("resid.")): x for name, x in points.items() if name.startswith("resid.")}
    return {**ref.clean_pass(target, list(run.sites)).inputs, **streams}


def test_read_with_numpy_alone(finished: Path, tmp_path: Path) -> None:
    outcome = pd_here("export", finished, "--out", tmp_path / "out")
    assert outcome.status == 0, outcome
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "decomposition.safetensors", "description.json",
    ]  # fmt: skip
    run = load_run(finished)
    found = read_as_told(tmp_path / "out", {s: x[0] for s, x in site_inputs(run, TOKENS[None]).items()})
    want = run.causal_importances(TOKENS)
    assert list(found) == list(SITES)
    for name, values in found.items():
        np.testing.assert_allclose(values, want[name], atol=1e-4)
        assert values.std() > 0.02


CI_CONFIGS = {
    "mlp": "{mode: layerwise, fn_type: mlp, hidden_dims: [3]}",
    "vector_mlp": "{mode: layerwise, fn_type: vector_mlp, hidden_dims: [4, 3]}",
    "shared_mlp": "{mode: layerwise, fn_type: shared_mlp, hidden_dims: [8, 4]}",
    "no hidden layer": "{mode: layerwise, fn_type: shared_mlp, hidden_dims: []}",
    "global_shared_mlp": "{mode: global, fn_type: global_shared_mlp, hidden_dims: [8, 6]}",
    "readout": "{mode: global, fn_type: global_shared_mlp, hidden_dims: [8, 6], component_readout: true}",
    "with options": "{mode: global, fn_type: global_shared_transformer, simple_transformer_ci_cfg: {d_model: 8, "
    "n_blocks: 2, mlp_hidden_dim: [6, 5], mlp_type: swiglu, learned_norm_scale: true, "
    "attn_config: {n_heads: 4, n_kv_heads: 2, causal: true}}}",
    "taps": "{mode: chunkwise, fn_type: chunkwise_transformer, input_tap: {residual_boundaries: [0, 1]}, "
    "simple_transformer_ci_cfg: {d_model: 8, n_blocks: 2, mlp_hidden_dim: [6, 5], attn_config: {n_heads: 2}}}",
    "chunkwise_transformer": "{mode: chunkwise, fn_type: chunkwise_transformer, input_patterns: ['*.up_proj'], "
    "simple_transformer_ci_cfg: {d_model: 8, n_blocks: 2, mlp_hidden_dim: [6, 5], attn_config: {n_heads: 2}}}",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "squashing"),
    [
        ("mlp", "leaky_hard"),
        ("vector_mlp", "normal"),
        ("shared_mlp", "upper_leaky_hard"),
        ("no hidden layer", "swish_hard"),
        ("global_shared_mlp", "hard"),
        ("with options", "leaky_hard"),
        ("taps", "leaky_hard"),
        ("chunkwise_transformer", "leaky_hard"),
        ("readout", "two_sided_leaky_hard"),
    ],
)
def test_every_ci_function_and_squashing(tiny: Tiny, tmp_path: Path, kind: str, squashing: str) -> None:
    changes = (f"pd.ci_config={CI_CONFIGS[kind]}", f"pd.sigmoid_type={squashing}")
    outcome = pd_here(*tiny.train(tmp_path, 1, *LIGHT, *changes))
    assert outcome.status == 0, outcome
    run = load_run(tmp_path / "p-00000001")
    export_run(run.folder, tmp_path / "out")
    found = read_as_told(tmp_path / "out", {s: x[0] for s, x in site_inputs(run, TOKENS[None]).items()})
    for name, want in run.causal_importances(TOKENS).items():
        np.testing.assert_allclose(found[name], want, atol=1e-4)
        assert np.ptp(found[name]) > 0.01


@pytest.mark.slow
def test_a_toy_with_tied_sites(toy: Path, tmp_path: Path) -> None:
    """T4: both sites have tensors of their own."""
    run = load_run(toy / "p-00000001")
    export_run(run.folder, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "decomposition.safetensors")
    for name in run.sites:
        for factor, want in zip("VU", run.factors(name), strict=True):
            np.testing.assert_array_equal(tensors[f"components.{name}.{factor}"], want)
    described = json.loads((tmp_path / "out" / "description.json").read_text())
    assert [site["tied_to"] for site in described["sites"]] == [None, None, "linear1"]
    features = np.random.default_rng(5).uniform(size=(4, 5)).astype(np.float32)
    found = read_as_told(tmp_path / "out", site_inputs(run, features))
    for name, want in run.causal_importances(features).items():
        np.testing.assert_allclose(found[name], want, atol=1e-4)


def assert_all_there(folder: Path, run: Path, step: int) -> None:
    """Every array of the item `learned`, in full, under the names and shapes that the description gives."""
    described = json.loads((folder / "description.json").read_text())
    tensors = {}
    for file in {entry["file"] for entry in described["tensors"].values()}:
        tensors |= load_file(folder / file)
    assert {name: list(x.shape) for name, x in tensors.items()} == {
        name: entry["shape"] for name, entry in described["tensors"].items()
    }
    saved = {n.removeprefix("learned/"): x for n, x in saved_arrays(run, step).items() if n.startswith("learned/")}
    assert sum(x.size for x in tensors.values()) == sum(x.size for x in saved.values())
    for kind in ("up_proj", "down_proj"):
        stack = f"layers.0-1.mlp.{kind}"
        for row in range(2):
            site = f"layers.{row}.mlp.{kind}"
            for tensor, name in {
                f"components.{site}.V": f"components/{stack}/V",
                f"components.{site}.U": f"components/{stack}/U",
                f"ci.project.{site}.W": f"ci/project/rows/{stack}",
                f"ci.heads.{site}.W": f"ci/heads/{stack}/W",
                f"ci.heads.{site}.b": f"ci/heads/{stack}/b",
            }.items():
                np.testing.assert_array_equal(tensors[tensor], saved[name][row])
    for name in "qkvo":
        np.testing.assert_array_equal(tensors[f"ci.blocks.0.{name}"], saved[f"ci/blocks/{name}"][0])
    np.testing.assert_array_equal(tensors["ci.blocks.0.mlp.1.W"], saved["ci/blocks/mlp/1/W"][0])
    np.testing.assert_array_equal(tensors["ci.project.b"], saved["ci/project/b"])


def test_description(finished: Path, tmp_path: Path) -> None:
    export_run(finished, tmp_path / "out", LATE)
    assert_all_there(tmp_path / "out", finished, LATE)
    said = json.loads((tmp_path / "out" / "description.json").read_text())
    assert said["run"] == {"id": finished.name, "name": "tiny", "step": LATE, "steps": STEPS}
    assert {site["name"]: site["C"] for site in said["sites"]} == SITES
    assert said["sites"][1] == {
        "name": "layers.0.mlp.down_proj", "layer": 0, "kind": "down_proj", "d_in": 24, "d_out": 16, "C": 12,
        "lookup": False,
        "V": "components.layers.0.mlp.down_proj.V", "U": "components.layers.0.mlp.down_proj.U", "tied_to": None,
    }  # fmt: skip
    assert said["ci"]["fn_type"] == "global_shared_transformer"
    assert said["ci"]["n_heads"] == 2
    assert said["ci"]["component_readout"] is False
    assert said["target"]["d_model"] == 16
    assert said["configuration"]["torch"]["pd"]["steps"] == STEPS
    assert {"param-decomp", "jax", "safetensors", "python"} <= said["versions"].keys()


def test_several_files(finished: Path, tmp_path: Path) -> None:
    """With an index as Hugging Face's; a file is larger than allowed only if one tensor is."""
    export_run(finished, tmp_path / "out", largest=4000)
    files = sorted(path for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert [path.name for path in files] == [
        f"decomposition-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    index = json.loads((tmp_path / "out" / "decomposition.safetensors.index.json").read_text())
    here = {}
    for path in files:
        with safe_open(path, framework="numpy") as tensors:
            names = list(tensors.keys())
            here |= dict.fromkeys(names, path.name)
            bytes_ = sum(tensors.get_tensor(name).nbytes for name in names)
            assert bytes_ <= 4000 or len(names) == 1
    assert index["weight_map"] == here
    assert index["metadata"]["total_size"] == sum(path.stat().st_size for path in files) - sum(map(header_bytes, files))
    assert_all_there(tmp_path / "out", finished, STEPS)
    run = load_run(finished)
    found = read_as_told(tmp_path / "out", {s: x[0] for s, x in site_inputs(run, TOKENS[None]).items()})
    for name, want in run.causal_importances(TOKENS).items():
        np.testing.assert_allclose(found[name], want, atol=1e-4)


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_needs_no_target(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / finished.name
    shutil.copytree(finished, run)
    config = run / "config.yaml"
    config.write_text(re.sub(r"folder: .*", "folder: /nowhere/at/all", config.read_text()))
    shutil.rmtree(run / "ckpts" / str(STEPS) / "training")
    export_run(run, tmp_path / "out")
    assert_all_there(tmp_path / "out", finished, STEPS)


# ---- all or nothing ----


def truncate(checkpoint: Path) -> None:
    for path in (checkpoint / "learned" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:-50])


def replace_by_another_step(checkpoint: Path) -> None:
    """Whole arrays, readable and of the right shapes."""
    shutil.rmtree(checkpoint / "learned")
    shutil.copytree(checkpoint.parent / str(LATE) / "learned", checkpoint / "learned")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves an event loop behind
@pytest.mark.parametrize(
    ("damage", "listed", "says"),
    [
        (truncate, True, "were saved"),
        (truncate, False, "learned cannot be read"),
        (replace_by_another_step, False, "does not hold what was saved"),
    ],
)
def test_nothing_is_left_of_a_failure(
    finished: Path, tmp_path: Path, damage: Callable[[Path], None], listed: bool, says: str
) -> None:
    run = tmp_path / finished.name
    shutil.copytree(finished, run)
    checkpoint = run / "ckpts" / str(STEPS)
    damage(checkpoint)
    if not listed:
        (checkpoint / "files.json").unlink()
    outcome = pd_here("export", run, "--out", tmp_path / "out")
    assert outcome.status == 2, outcome
    assert str(checkpoint) in outcome.err
    assert says in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [finished.name]


def test_what_is_refused(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for more in ((), ("--overwrite",)):
        outcome = pd_here("export", finished, "--out", tmp_path / "mine", *more)
        assert outcome.status == 2, outcome
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    export_run(finished, tmp_path / "out", EARLY)
    with pytest.raises(UserError, match="exists and is not empty"):
        export_run(finished, tmp_path / "out", LATE)
    export_run(finished, tmp_path / "out", LATE, overwrite=True)
    assert json.loads((tmp_path / "out" / "description.json").read_text())["run"]["step"] == LATE
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        export_run(finished, tmp_path / "file" / "out")


CHILD = """
import sys
from pathlib import Path
from tests.lab.child import peak_memory
from param_decomp_lab.export import export_run

run, out = map(Path, sys.argv[1:])
export_run(run, out / "first")  # the compiler's own memory is not the arrays'
memory = {}
with peak_memory(memory):
    export_run(run, out / "second")
print(memory["peak"] - memory["base"])
"""


@pytest.mark.slow
def test_memory_of_one_chunk(tiny: Tiny, tmp_path: Path) -> None:
    """200 MB that eight devices saved go through the host in chunks of 6 MB."""
    wide = "pd.decomposition_targets=[{module_pattern: 'layers.*.mlp.*_proj', C: 200000}]"
    ci = "pd.ci_config={mode: layerwise, fn_type: shared_mlp, hidden_dims: [2]}"
    changes = (*LIGHT, wide, ci, "pd.steps=1", "mesh={fsdp: 8}", "data.max_seq_len=16")
    trained = tiny.pd(*tiny.train(tmp_path, 1, *changes), timeout=1200)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    run = tmp_path / "p-00000001"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(run), str(tmp_path)],
        env={**environment_of(1, {}), "CHILD_NUMBER": "0", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    taken, written = int(done.stdout.split()[-1]), (tmp_path / "second" / "decomposition.safetensors").stat().st_size
    print(f"{written / 1e6:.1f} MB written, {taken / 1e6:.1f} MB of anonymous memory taken")
    assert written > 150e6
    assert taken < 0.5 * written  # 5 to 56 MB were seen: what the allocator keeps differs from run to run


def test_names() -> None:
    sites = Sites(())
    assert pieces(sites, {"ci/middle/0/W": (3, 4)})["ci/middle/0/W"][0].name == "ci.middle.0.W"
