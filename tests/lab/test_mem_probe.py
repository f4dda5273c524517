"""`experiments/benchmarks/mem_probe.py`: its flags in the configuration's terms, and one measurement here."""

import json
from pathlib import Path

import pytest

from experiments.benchmarks.mem_probe import DEFAULT, assignments, parsed, probe
from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.errors import UserError
from tests.lab.tiny_run import LIGHT, ROOT, Tiny


def config_of(*flags: str) -> tuple[list[str], RunConfig]:
    options = parsed(flags)
    sets = list(assignments(options, load_config(options.config), 64))
    return sets, load_config(options.config, sets)


def test_flags() -> None:
    sets, config = config_of(
        *("--first_layer", "3", "--last_layer", "4", "--C", "8192", "--sites_per_chunk", "2", "--recon_coeff", "0.25"),
        *("--seq", "4096", "--per_gpu_batch", "2", "--no_remat", "--set", "pd.seed=3"),
    )
    assert config == load_config(DEFAULT, sets)
    pd = config.method.pd
    assert [(t.module_pattern, t.C) for t in pd.decomposition_targets] == [
        ("model.layers.3.mlp.*_proj", 8192),
        ("model.layers.4.mlp.*_proj", 8192),
    ]
    recon = next(loss for loss in pd.loss_metrics if loss.type == "ChunkwiseSubsetReconLoss")
    assert (recon.sites_per_chunk, recon.coeff) == (2, 0.25)
    assert (config.method.data.max_seq_len, pd.batch_size, pd.seed) == (4096, 128, 3)
    assert pd.ci_config.simple_transformer_ci_cfg.attn_config.max_len == 4096
    assert (config.wrapper.memory.preset, config.wrapper.mesh.fsdp, config.method.eval) == ("plain", 64, None)


def test_without_flags_it_is_the_configuration() -> None:
    _, config = config_of()
    file = load_config(DEFAULT)
    assert config.method.pd == file.method.pd
    assert config.wrapper.memory == file.wrapper.memory


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--config", str(ROOT / "configs" / "toys" / "tms_5-2.yaml")), "decomposes a toy"),
        (("--first_layer", "3"), "go together"),
        (
            ("--config", str(ROOT / "configs" / "llama8b_l18.yaml"), "--sites_per_chunk", "2"),
            "has no ChunkwiseSubsetReconLoss",
        ),
    ],
)
def test_refused(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        config_of(*flags)


@pytest.mark.slow
def test_measurement(tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sets = [word for assignment in (*LIGHT, f"out_dir={tmp_path}") for word in ("--set", assignment)]
    flags = ("--first_layer", "1", "--last_layer", "1", "--C", "16", "--seq", "8", "--per_gpu_batch", "2")
    probe(parsed(["--config", str(tiny.config), *flags, "--steps", "2", *sets]))
    text, line = capsys.readouterr().out.strip().splitlines()
    found = json.loads(line)
    assert (found["device"], found["sites"], found["batch"], found["seq"]) == ("8 x cpu", 3, 16, 8)
    assert found["planned_gib"] > 0
    assert found["live_gib"] is None
    assert "3 sites, 16 × 8 tokens on 8 x cpu: planned" in text
    assert "live –" in text
    assert not list(tmp_path.iterdir())
