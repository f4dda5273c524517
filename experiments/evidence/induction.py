"""Does the view of heads name the induction head of a trained model?

    python -m experiments.evidence.induction OUT               # half an hour on two cores
    python -m experiments.evidence.induction OUT --steps 800   # less trained

Trains the small GPT-2 of `configs/families/gpt2_pretrain.yaml` on the standard library's text with a planted induction
pattern: between its documents are others in which a random string of letters repeats. Starts a decomposition of all
attention matrices. On held-out strings, prints the scores of each head (rule H3), and how much worse the repeated
letters are predicted without it: the rows of `o_proj` that read the head are zeroed. If OUT has the model already, it
is only measured.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jaxtyping import Float, Int

from param_decomp_jax.targets.transformer import language_logits
from param_decomp_lab import load_run
from param_decomp_lab.data.stdlib_text import stdlib_documents
from param_decomp_lab.opening import Run
from param_decomp_lab.ui.tables import markdown_table

ROOT = Path(__file__).parents[2]
T = 64
"""The number of tokens of a row."""
SHORTEST, LONGEST = 8, 24
"""The least and the largest number of letters of a string that is repeated."""
REPEATS = 400
"""The number of characters of a document of repeats."""
SITES = ("h.*.attn.c_attn.q", "h.*.attn.c_attn.k", "h.*.attn.c_attn.v", "h.*.attn.c_proj")
ROWS = 256
"""The number of held-out rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=4000, help="steps of pretraining")
    given = parser.parse_args()
    out = given.out.resolve()
    run_folder = out / "runs" / "p-00000001"
    if not any((run_folder / "ckpts").glob("*/files.json")):
        make(out, given.steps)
    print(table(load_run(run_folder, devices=1)))


def make(out: Path, steps: int) -> None:
    """Writes the text, the model, and a run of one step, whose components are the initial ones."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "data").exists():
        write_text(out / "text.jsonl")
        pd("data", "tokenize", out / "text.jsonl", "--column", "text", "--seq-len", T, "--out", out / "data")
    if not (out / "model").exists():
        recipe = yaml.safe_load((ROOT / "configs/families/gpt2_pretrain.yaml").read_text())
        recipe |= {"data": str(out / "data"), "out": str(out / "model"), "steps": steps}
        (out / "pretrain.yaml").write_text(yaml.safe_dump(recipe))
        pd("pretrain", out / "pretrain.yaml")
    changed = {
        "data.train": out / "data/train", "data.eval": out / "data/eval", "target.folder": out / "model",
        "pd.decomposition_targets": f"[{', '.join(f'{{module_pattern: {name}, C: 64}}' for name in SITES)}]",
        "pd.steps": 1, "pd.faithfulness_warmup_steps": 0, "eval": "null",
        "out_dir": out / "runs", "run_id": "p-00000001",
    }  # fmt: skip
    given = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    pd("train", ROOT / "configs/families/gpt2-sparse.yaml", *given)


def pd(*words: object) -> None:
    command = [sys.executable, "-m", "param_decomp_lab", *map(str, words)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def write_text(file: Path) -> None:
    """Writes documents of the standard library, cut to `REPEATS` characters, and as many documents of repeats."""
    rng = np.random.default_rng(0)
    with file.open("w") as lines:
        for document in stdlib_documents():
            text = str(document.content)
            for first in range(0, len(text), REPEATS):
                for part in (text[first : first + REPEATS], repeated(rng)):
                    lines.write(json.dumps({"text": part}) + "\n")


def repeated(rng: np.random.Generator) -> str:
    """Returns a random string of letters, repeated."""
    string = random_letters(rng, int(rng.integers(SHORTEST, LONGEST + 1)))
    return (bytes(string).decode() * REPEATS)[:REPEATS]


def random_letters(rng: np.random.Generator, n: int) -> Int[np.ndarray, " n"]:
    return rng.integers(ord("a"), ord("z") + 1, n).astype(np.uint8)


def held_out() -> tuple[Int[np.ndarray, "rows T"], Int[np.ndarray, "rows 1"]]:
    """Returns rows of repeated strings, and the length of each string."""
    rng = np.random.default_rng(1)
    period = rng.integers(SHORTEST, LONGEST + 1, (ROWS, 1))
    letters = np.stack([random_letters(rng, LONGEST) for _ in range(ROWS)])
    return np.take_along_axis(letters, np.arange(T)[None] % period, axis=1).astype(np.int32), period


def losses(run: Run, tokens: Int[np.ndarray, "rows T"], period: Int[np.ndarray, "rows 1"]) -> dict[str, Any]:
    """Returns the cross-entropy (nats) of the repeated letters: ``clean``, and ``without`` each head, [layers,
    heads]."""
    architecture: Any = run.target.architecture
    width = architecture.head_dim

    @jax.jit
    def loss(weights: Any) -> Float[jax.Array, ""]:
        log_p = jax.nn.log_softmax(language_logits(weights, architecture, jnp.asarray(tokens)))
        errors = -jnp.take_along_axis(log_p[:, :-1], jnp.asarray(tokens)[:, 1:, None], axis=2)[..., 0]
        again = np.arange(1, T)[None] > period
        return jnp.sum(errors * again) / again.sum()

    def without(layer: int, head: int) -> float:
        o = run.weights["layers"]["o_proj"]
        zeroed = o.at[layer, head * width : (head + 1) * width].set(0)
        return float(loss({**run.weights, "layers": {**run.weights["layers"], "o_proj": zeroed}}))

    layers, heads = architecture.n_layers, architecture.n_heads
    return {
        "clean": float(loss(run.weights)),
        "without": np.array([[without(n, h) for h in range(heads)] for n in range(layers)]),
    }


def table(run: Run) -> str:
    tokens, period = held_out()
    scores, found = run.head_scores(tokens), losses(run, tokens, period)
    worse = found["without"] - found["clean"]
    rows = [
        [f"{n}.{h}", *(f"{x[n, h]:.3f}" for x in (scores.induction, scores.previous, worse))]
        for n, h in np.ndindex(worse.shape)
    ]

    def head(x: Float[np.ndarray, "layers heads"]) -> str:
        n, h = np.unravel_index(np.argmax(x), x.shape)
        return f"{n}.{h}"

    columns = "head | induction score | previous-token score | loss without it, more by (nats)"
    lines = "\n".join(markdown_table(columns, rows))
    return (
        f"loss of letters that come again: {found['clean']:.3f} nats (of random letters {np.log(26):.3f}); "
        f"chance of induction {scores.chance['induction']:.3f}\n\n{lines}\n\n"
        f"largest induction score: {head(scores.induction)}; "
        f"worst to lose, of its layer: {worst_of_layer(scores.induction, worse)}; of all: {head(worse)}"
    )


def worst_of_layer(induction: Float[np.ndarray, "layers heads"], worse: Float[np.ndarray, "layers heads"]) -> str:
    n = int(np.argmax(induction.max(axis=1)))
    return f"{n}.{int(np.argmax(worse[n]))}"


if __name__ == "__main__":
    main()
