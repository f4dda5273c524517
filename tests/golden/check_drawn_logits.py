"""Whether transformers' models and ours give the same logits for `config.json` files drawn at random. Needs torch
beside our own requirements, which nothing else in the tests does; from the root of the repository:

    python -m tests.golden.check_drawn_logits --draws 20 --seeds 0
    python -m tests.golden.check_drawn_logits --families qwen3_moe --show

Each file gets a tiny model of transformers with random weights, which are saved beside it. Both then read the folder.
What `reference_configs.py` says is tried as well: where it knows no network, transformers must fail, in reading the
file or in computing. Exit status 1 if a logit differs by more than ``--allowed`` of the largest one, or where that does
not hold.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.target_folder import load_target
from tests.lab.config_classes import drawn_files
from tests.lab.drawn_configs import FAMILIES
from tests.lab.reference_configs import NoNetwork, NotDescribed, read

LENGTH = 24


def theirs(raw: dict[str, Any], folder: Path, tokens: torch.Tensor) -> np.ndarray:
    """Writes the file and random weights into ``folder``; the logits of the model that transformers reads there."""
    (folder / "config.json").write_text(json.dumps(raw))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), attn_implementation="eager", dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        is_norm_weight = name.endswith("weight") and parameter.ndim == 1
        mean = 1.0 if is_norm_weight and parameter.detach().mean() == 1.0 else 0.0
        parameter.data.normal_(mean, 0.3)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        for file in Path(saved).glob("*.safetensors*"):
            shutil.copy(file, folder)
    again, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"], found
    with torch.no_grad():
        return again.eval()(tokens, use_cache=False).logits.numpy()


def ours(folder: Path, tokens: np.ndarray) -> np.ndarray:
    architecture, weights = load_target(folder)
    target = architecture.target(Sites(()))  # type: ignore[call-arg]
    with jax.default_matmul_precision("highest"):
        return np.asarray(target.logits(weights, target.forward(weights, jnp.asarray(tokens), UNTOUCHED).output))


def check(raw: dict[str, Any], allowed: float) -> tuple[str, str]:
    """What came out, and what about it: ``same``, ``refused``, ``fails in both``, or ``WRONG``."""
    torch.manual_seed(0)
    tokens = torch.randint(48, (2, LENGTH))
    try:
        read(raw)
        known = True
    except NoNetwork:
        known = False
    except NotDescribed:
        known = True
    with tempfile.TemporaryDirectory() as folder:
        try:
            expected = theirs(raw, Path(folder), tokens)
        except Exception as error:  # whatever torch says of a null
            expected = None
            why = f"{type(error).__name__}: {error}"
        if (expected is not None) != known:
            return "WRONG", f"transformers computes: {expected is not None}, reference_configs.py says: {known}"
        try:
            found = ours(Path(folder), tokens.numpy())
        except UserError as error:
            return ("refused" if known else "fails in both"), str(error)
    if expected is None:
        return "WRONG", f"read by us, but transformers fails: {why}"
    difference = float(abs(found - expected).max() / abs(expected).max())
    return ("same" if difference <= allowed else "WRONG"), f"{difference:.1e}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, help="of each family and seed; 20 if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--allowed", type=float, default=1e-4, help="of the largest logit; 1e-4 if not given")
    parser.add_argument("--show", action="store_true", help="print what came of each file")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    heads = ("family", "same logits", "largest difference", "refused by us alone", "fails in both", "wrong")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    wrong = 0
    for family in arguments.families:
        results = []
        for drawn in (d for seed in arguments.seeds for d in drawn_files(family, seed, arguments.draws)):
            results.append(check(drawn.raw, arguments.allowed))
            if arguments.show or results[-1][0] == "WRONG":
                print(f"    {': '.join(results[-1])}\n        {json.dumps(drawn.raw)}")
        same = [float(about) for verdict, about in results if verdict == "same"]
        counts = {
            name: sum(verdict == name for verdict, _ in results) for name in ("refused", "fails in both", "WRONG")
        }
        cells = (f"`{family}`", len(same), f"{max(same, default=0):.1e}", *counts.values())
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        wrong += counts["WRONG"]
    sys.exit(wrong > 0)
