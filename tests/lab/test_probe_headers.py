"""What `pd probe` says in the headers of shipped configurations, and its being written anew."""

from itertools import takewhile
from pathlib import Path

import pytest

from experiments.benchmarks.probe_headers import ROOT, header_command, with_answer
from param_decomp_lab.config import load_config
from param_decomp_lab.config.method_schema import LanguageModelFile

PROBED = [path for path in sorted(ROOT.glob("configs/llama8b*.yaml")) if "pd probe" in path.read_text()]


@pytest.mark.parametrize("path", PROBED, ids=lambda path: path.stem)
def test_headers_answer_for_their_configuration(path: Path) -> None:
    """On as many GPUs as its mesh has; the verdict comes last, and is that it fits."""
    text = path.read_text()
    command = header_command(text)
    assert command is not None
    assert ROOT / command[1] == path
    nodes, per_node = (int(command[command.index(flag) + 1]) for flag in ("--nodes", "--gpus-per-node"))
    config = load_config(ROOT / command[1], [])
    assert config.wrapper.mesh.devices == nodes * per_node
    header = list(takewhile(lambda line: line.startswith("#"), text.splitlines()))
    assert header[-1].startswith("# fits: ")
    assert isinstance(config.method, LanguageModelFile)
    assert f"# batch   {config.method.pd.batch_size:,} × {config.method.data.max_seq_len:,}" in header


def test_only_the_answer_is_replaced() -> None:
    words = "# Two lines\n# of words.\n#\n#   pd probe a.yaml --gpu b200\n#\n"
    text = f"{words}# old\n#\n# fits: no\nkey: 1\n# a comment\nother: 2\n"
    new = with_answer(text, "\nrun  x\n\nfits: yes\n")
    assert new == text.replace("# old\n#\n# fits: no", "# run  x\n#\n# fits: yes")
    assert with_answer(new, "run  x\n\nfits: yes") == new
    assert header_command(text) == ["probe", "a.yaml", "--gpu", "b200"]
    assert header_command("# without\nkey: 1\n") is None
