"""A head in the files of a model whose config.json says that it is the embedding: read as transformers 5 reads it."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from param_decomp_jax.targets.transformer import language_logits
from param_decomp_jax.targets.transformer_config import TransformerConfig
from param_decomp_lab import load_run
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights import safetensors_files
from param_decomp_lab.weights.import_torch import checked_tensors, refuse_missing
from param_decomp_lab.weights.recorded_target import as_recorded
from param_decomp_lab.weights.safetensors_files import SafetensorsFolder
from param_decomp_lab.weights.target_folder import (
    TargetFolder,
    load_target,
    read_architecture,
    read_weights,
    save_target,
)
from tests.lab.tiny_run import LIGHT, Tiny, pd_here

FAMILIES = Path(__file__).parent.parent / "golden" / "families"
TIED = {"llama_biases": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}
"""Golden models whose head is the embedding, and its name."""
WEIGHTS, HEAD = "model.safetensors", "lm_head.weight"
named = pytest.mark.parametrize("name", TIED)


def golden(name: str) -> Any:
    return np.load(FAMILIES / name / "expected.npz")


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return load_file(FAMILIES / name / WEIGHTS)


def write(folder: Path, name: str, *parts: dict[str, np.ndarray]) -> Path:
    """The golden model's config.json, with the weights in as many files."""
    shutil.copy(FAMILIES / name / "config.json", folder)
    files = [WEIGHTS] if len(parts) == 1 else [f"model-{n}.safetensors" for n in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        save_file(part, folder / file, {"format": "pt"})
    if len(parts) > 1:
        places = {tensor: file for file, part in zip(files, parts, strict=True) for tensor in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def logits(folder: Path, tokens: Any, architecture: Any = None) -> np.ndarray:
    found = read_architecture(folder) if architecture is None else architecture
    weights = read_weights(folder, found)
    assert isinstance(found, TransformerConfig)
    with jax.default_matmul_precision("highest"):
        return np.asarray(language_logits(weights, found, jnp.asarray(tokens)))


def check(folder: Path, name: str, roll: int) -> None:
    """The logits are the golden ones, rolled by as many tokens as the head's rows are."""
    expected = np.roll(golden(name)["logits"], roll, axis=-1)
    np.testing.assert_allclose(
        logits(folder, golden(name)["tokens"]), expected, rtol=0, atol=1e-4 * abs(expected).max()
    )


@named
@pytest.mark.parametrize("shards", [False, True])
def test_another_head_is_used(name: str, shards: bool, tmp_path: Path) -> None:
    tensors = tensors_of(name)
    head = {HEAD: np.roll(tensors[TIED[name]], 1, axis=0)}
    folder = write(tmp_path, name, *((tensors, head) if shards else (tensors | head,)))
    architecture = read_architecture(folder)
    assert isinstance(architecture, TransformerConfig)
    assert not architecture.tied
    check(folder, name, roll=1)
    (note,) = TargetFolder(folder).head_notes(architecture)
    assert "the files hold another matrix, lm_head.weight, which is used" in note

    # What is written of it is read to the same model, without a note.
    save_target(folder / "again", *load_target(folder))
    assert json.loads((folder / "again" / "config.json").read_text())["tie_word_embeddings"] is False
    check(folder / "again", name, roll=1)
    assert not TargetFolder(folder / "again").head_notes(architecture)


@named
def test_the_same_head_is_the_embedding(name: str, tmp_path: Path) -> None:
    tensors = tensors_of(name)
    for stored in (tensors[TIED[name]], tensors[TIED[name]].astype(np.float64)):
        folder = write(tmp_path, name, tensors | {HEAD: stored.copy()})
        architecture, weights = load_target(folder)
        assert architecture == read_architecture(FAMILIES / name)
        assert "head" not in weights
        assert not TargetFolder(folder).head_notes(architecture)
    check(folder, name, roll=0)


@named
@pytest.mark.parametrize("prefix", [True, False])
def test_the_head_alone_is_the_embedding_too(name: str, prefix: bool, tmp_path: Path) -> None:
    tensors = tensors_of(name)
    tensors[HEAD] = tensors.pop(TIED[name])
    if not prefix:
        tensors = {key.removeprefix(f"{TIED[name].partition('.')[0]}."): x for key, x in tensors.items()}
    check(write(tmp_path, name, tensors), name, roll=0)


def test_neither_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("gpt2")
    del tensors[TIED["gpt2"]]
    with pytest.raises(UserError, match=r"no tensor transformer\.wte\.weight"):
        load_target(write(tmp_path, "gpt2", tensors))


def test_a_head_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("gpt2")
    folder = write(tmp_path, "gpt2", tensors | {HEAD: tensors[TIED["gpt2"]].astype(np.int8)})
    with pytest.raises(UserError, match=r"lm_head\.weight is stored as I8; weights must be floating-point numbers"):
        load_target(folder)


def test_a_head_under_its_newer_name(tmp_path: Path) -> None:
    """transformers 5 calls GPT-NeoX's `lm_head`; files have `embed_out`."""
    tensors = tensors_of("gpt_neox")
    tensors[HEAD] = tensors.pop("embed_out.weight")
    check(write(tmp_path, "gpt_neox", tensors), "gpt_neox", roll=0)


def test_two_tensors_are_compared_by_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "BLOCK_ELEMENTS", 8)
    a = np.random.default_rng(0).normal(size=(6, 4)).astype(ml_dtypes.bfloat16)
    late, early = a.astype(np.float32), a.astype(np.float32)
    late[5, 3] += 1
    early[0, 0] += 1
    arrays = {"a": a, "same": a.astype(np.float32), "late": late, "early": early, "wide": a.T.copy()}
    save_file(arrays, tmp_path / WEIGHTS)
    read: list[int] = []
    original = SafetensorsFolder.read

    def counted(self: SafetensorsFolder, name: str, index: tuple[slice, ...]) -> np.ndarray:
        read.append(original(self, name, index).size)
        return original(self, name, index)

    monkeypatch.setattr(SafetensorsFolder, "read", counted)
    with SafetensorsFolder(tmp_path) as files:
        blocks = {}
        for other in ("same", "late", "early", "wide"):
            read.clear()
            blocks[other] = files.same("a", other), list(read)
    assert blocks == {
        "same": (True, [8] * 6), "late": (False, [8] * 6), "early": (False, [8] * 2), "wide": (False, []),
    }  # fmt: skip


def test_a_torch_checkpoint_keeps_a_head_that_differs() -> None:
    """What is written of it is a folder as above. The embedding is not written twice."""
    architecture, tensors = read_architecture(FAMILIES / "llama_biases"), tensors_of("llama_biases")
    embed = tensors["model.embed_tokens.weight"]
    alone = {key: x for key, x in tensors.items() if x is not embed} | {HEAD: embed}
    for state, kept in ((tensors | {HEAD: embed[::-1]}, True), (tensors | {HEAD: embed}, False), (alone, True)):
        found = checked_tensors(architecture, state, "c.pt")
        assert (HEAD in found) == kept
        refuse_missing(architecture, found, "c.pt")


# ---- runs ----


def target_of(tiny: Tiny, folder: Path, head: bool) -> Path:
    """The tiny run's target, with another head beside the embedding if there is to be one."""
    folder.mkdir(exist_ok=True)
    shutil.copy(tiny.folder / "target" / "config.json", folder)
    tensors = load_file(tiny.folder / "target" / WEIGHTS)
    more = {HEAD: np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)} if head else {}
    save_file(tensors | more, folder / WEIGHTS, {"format": "pt"})
    return folder


def pd_command(command: str, tiny: Tiny, tmp_path: Path) -> Any:
    settings = (
        *LIGHT,
        "pd.steps=2",
        f"target.folder={tmp_path / 'target'}",
        f"out_dir={tmp_path}",
        "run_id=p-00000001",
    )
    return pd_here(command, tiny.config, *(word for setting in settings for word in ("--set", setting)))


def test_a_run_of_a_model_with_a_head_of_its_own(tiny: Tiny, tmp_path: Path) -> None:
    target_of(tiny, tmp_path / "target", head=True)
    for command in ("check", "train"):
        done = pd_command(command, tiny, tmp_path)
        assert done.status == 0, done.err
        assert "which is used, as transformers 5 does" in " ".join((done.out + done.err).split())
    run_folder = tmp_path / "p-00000001"
    assert json.loads((run_folder / "target.json").read_text())["tied"] is False
    assert pd_here("train", "--resume", run_folder).status == 0
    tokens = np.arange(16)[None]
    np.testing.assert_allclose(load_run(run_folder).output(tokens), logits(tmp_path / "target", tokens), atol=1e-4)


def test_a_run_from_before_keeps_the_embedding(tiny: Tiny, tmp_path: Path) -> None:
    """Such a run did not look at the head: here it is put into the files after the run."""
    target_of(tiny, tmp_path / "target", head=False)
    assert pd_command("train", tiny, tmp_path).status == 0
    tokens = np.arange(16)[None]
    run_folder, before = tmp_path / "p-00000001", logits(tmp_path / "target", tokens)
    tied = read_architecture(tmp_path / "target")
    target_of(tiny, tmp_path / "target", head=True)
    found = read_architecture(tmp_path / "target")
    assert as_recorded(found, tied) == tied
    assert as_recorded(found, found) == found
    resumed = pd_here("train", "--resume", run_folder)
    assert resumed.status == 0, resumed.err
    assert "keeps the embedding" in " ".join((resumed.out + resumed.err).split())
    np.testing.assert_allclose(load_run(run_folder).output(tokens), before, atol=1e-4)

    # A config.json that describes another network, with the same tensors, is not gone on with.
    config = tmp_path / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_act": "relu"}))
    refused = pd_here("train", "--resume", run_folder)
    assert refused.status == 2
    assert "holds another target than the one the run decomposed" in refused.err
    assert "activation silu -> relu" in refused.err
