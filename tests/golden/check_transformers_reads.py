"""Whether transformers reads folders of ours to the logits that we compute. Needs torch, which nothing else does; in an
environment of its own:

    pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    python tests/golden/check_transformers_reads.py runs/demo-target                  # config.json, tensors, logits.npz
    python tests/golden/check_transformers_reads.py out/model --logits ours.npz       # the logits elsewhere
    python tests/golden/check_transformers_reads.py tests/golden/families/qwen*/      # golden models themselves

The logits' file has ``tokens`` int [B, T] and ``logits`` [B, T, vocab]; it is ``logits.npz`` or ``expected.npz`` in the
folder if none is named. Of LlamaSimpleMLP transformers has no class: its definition in ``torch_family_models.py`` reads
it. Exit status 1 if a logit differs by more than ``--allowed``, if a tensor is missing, for which transformers takes
random numbers, or if there is nothing to compare.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch_family_models import llama_simple_mlp

LOGITS_FILES = ("logits.npz", "expected.npz")


def read(folder: Path, tokens: torch.Tensor) -> tuple[np.ndarray, set[str], set[str]]:
    """The fp32 logits, and the tensors that are missing in the folder and those that are not used."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "llama_simple_mlp":
        files = [load_file(file) for file in folder.glob("*.safetensors")]
        weights = {name: tensor.float() for tensors in files for name, tensor in tensors.items()}
        return llama_simple_mlp(config, weights, tokens).numpy(), set(), set()
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    with torch.no_grad():
        logits = model.eval()(tokens, use_cache=False).logits.numpy()
    return logits, set(found["missing_keys"]), set(found["unexpected_keys"])


def check(folder: Path, logits_file: Path | None, allowed: float) -> bool:
    file = logits_file or next((folder / name for name in LOGITS_FILES if (folder / name).exists()), None)
    if file is None or not (folder / "config.json").exists():
        print(f"{folder}: no config.json, or none of {' and '.join(LOGITS_FILES)} and no --logits")
        return False
    stored = np.load(file)
    theirs, missing, unused = read(folder, torch.from_numpy(stored["tokens"]).long())
    difference = float(abs(stored["logits"].astype(np.float32) - theirs).max())
    print(f"{folder}: largest logit {abs(theirs).max():.3f}, largest difference {difference:.2e}")
    for names, what in ((missing, "missing"), (unused, "not used")):
        if names:
            print(f"    {what}: {', '.join(sorted(names)[:5])}{', …' if len(names) > 5 else ''} ({len(names)})")
    return difference <= allowed and not missing  # False for NaN


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--logits", type=Path, help="for one folder")
    parser.add_argument("--allowed", type=float, default=1e-4, help="1e-4 if not given")
    arguments = parser.parse_args()
    if arguments.logits and len(arguments.folders) > 1:
        parser.error("--logits is for one folder")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = [check(folder, arguments.logits, arguments.allowed) for folder in arguments.folders]
    sys.exit(not all(results))
