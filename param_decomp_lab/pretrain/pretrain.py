"""Next-token training of a small language model, from tokenized text to a folder with its weights."""

import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.console import Console

from param_decomp_jax.targets.base import Weights
from param_decomp_lab.data.batches import Batches
from param_decomp_lab.data.meta import DataMeta
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.data.tokenizers import BYTES, load_tokenizer
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder, refuse_existing
from param_decomp_lab.pretrain.finished import SUMMARY_FILE, find_finished, identity, write_finished
from param_decomp_lab.pretrain.log import METRICS_FILE, finite, write_metrics
from param_decomp_lab.pretrain.models import LanguageModel, language_model
from param_decomp_lab.pretrain.optimizer import make_optimizer
from param_decomp_lab.pretrain.program import make_evaluation, make_step
from param_decomp_lab.pretrain.recipe import PretrainRecipe
from param_decomp_lab.ui.console import PlainConsole
from param_decomp_lab.ui.progress import StepsBar


@dataclass(frozen=True)
class Pretrained:
    """``held_out``: cross-entropy on the evaluation split; ``unigram_entropy``: that of its tokens; both in nats per
    token. ``seconds``: of training, compilation included. ``cached``: it was there already."""

    folder: Path
    held_out: float
    unigram_entropy: float
    seconds: float
    cached: bool = False


def run_pretrain(recipe: PretrainRecipe, *, overwrite: bool = False, console: Console | None = None) -> Pretrained:
    """Train the model of ``recipe`` and write it to ``recipe.out``, which appears only when it is complete.

    The folder holds ``config.json``, ``model.safetensors``, ``meta.json`` and the tokenizer of its data,
    ``metrics.jsonl`` (one object per logged step), ``recipe.yaml`` and ``summary.json``. When it is there already and
    the same recipe and data made it, nothing is done. ``console``: where progress goes.

    Raises UserError: data missing or too small, its vocabulary larger than the recipe's, ``out`` made by another recipe
    (unless ``overwrite``), not writable.
    NonFiniteLoss: the loss at a log step or an evaluation is infinite or NaN.
    """
    console = console or PlainConsole()
    folder, data_folder = Path(recipe.out), Path(recipe.data)
    meta = DataMeta.read(data_folder)
    # Wherever the data lies, the same tokens make the same model.
    made_of = identity(recipe, "data", *recipe.knobs_at_default) | {"data_sha256": meta.sha256}
    if not overwrite and (summary := find_finished(folder, made_of)):
        finished = Pretrained(folder, cached=True, **summary)
        _tell(console, finished)
        return finished
    # Before any work is done, and again when the folder is made.
    refuse_existing(folder, marker=SUMMARY_FILE, overwrite=overwrite)
    model = language_model(recipe, meta.seq_len, meta.vocab_size)
    train = Batches(TokenData(data_folder / "train"), recipe.batch_size, recipe.seed)
    held_out = _held_out(TokenData(data_folder / "eval"), recipe)
    with new_folder(folder, marker=SUMMARY_FILE, overwrite=overwrite) as partial_folder:
        start = time.perf_counter()
        with open(partial_folder / METRICS_FILE, "w") as log:
            weights, loss = _train(recipe, model, train, held_out, log, console)
        result = Pretrained(folder, loss, meta.eval.unigram_entropy, round(time.perf_counter() - start, 2))
        model.save(partial_folder, weights, meta)
        load_tokenizer(BYTES if meta.tokenizer == BYTES else data_folder).save(partial_folder)
        meta.write(partial_folder)
        summary = {key: value for key, value in asdict(result).items() if key not in ("folder", "cached")}
        write_finished(partial_folder, made_of, summary)
    _tell(console, result)
    return result


def _held_out(data: TokenData, recipe: PretrainRecipe) -> Batches:
    batches = Batches(data, recipe.batch_size, recipe.seed)
    if recipe.eval.batches * recipe.batch_size > len(data):
        raise UserError(
            f"eval.batches: {recipe.eval.batches} batches of {recipe.batch_size} rows are more than the "
            f"{len(data)} held out in {data.source}; at most {len(data) // recipe.batch_size} fit"
        )
    return batches


def _train(
    recipe: PretrainRecipe, model: LanguageModel, train: Batches, held_out: Batches, log: TextIO, console: Console
) -> tuple[Weights, float]:
    """The trained weights and the last held-out cross-entropy."""
    optimizer = make_optimizer(recipe.optimizer, recipe.steps, model.spared)
    step, loss_on = make_step(recipe, model, optimizer), make_evaluation(recipe, model)
    weights: Weights = jax.jit(model.init)(jax.random.key(recipe.seed))
    opt_state = jax.jit(optimizer.init)(weights)
    learning_rate = recipe.optimizer.learning_rate()
    tokens_per_step = recipe.batch_size * train.data.seq_len
    waiting: tuple[int, Array] | None = None
    before = time.perf_counter(), 0

    write = partial(write_metrics, log)
    of_eval = ""
    with StepsBar(console, "pretraining", recipe.steps) as bar:
        bar.show("compiling")
        for k in range(recipe.steps):
            weights, opt_state, loss = step(weights, opt_state, train[k], np.int32(k))
            bar.advance(k + 1)
            last = k + 1 == recipe.steps
            if k % recipe.log_every == 0 or last:
                # The loss of the log step before has long been computed: reading it does not hold up the device.
                if waiting is not None:
                    value = finite(waiting[0], waiting[1])
                    now = time.perf_counter(), k
                    speed = (now[1] - before[1]) * tokens_per_step / (now[0] - before[0])
                    before = now
                    lr = float(learning_rate(waiting[0], recipe.steps))
                    write({"step": waiting[0], "train/loss/total": value, "train/schedules/lr": lr,
                           "train/perf/tok_per_s": round(speed)})  # fmt: skip
                    bar.show(f"loss {value:.3f}{of_eval}  {speed:,.0f} tok/s")
                waiting = k, loss
            if (k + 1) % recipe.eval.every == 0 or last:
                losses = [loss_on(weights, held_out[n]) for n in range(recipe.eval.batches)]
                held_out_loss = finite(k, jnp.mean(jnp.stack(losses)))
                write({"step": k, "eval/ce": held_out_loss})
                of_eval = f"  held-out {held_out_loss:.3f}"
        assert waiting is not None
        write({"step": waiting[0], "train/loss/total": finite(*waiting)})
    return weights, held_out_loss


def _tell(console: Console, result: Pretrained) -> None:
    console.print(
        f"{'cached' if result.cached else 'pretrained'}: {result.folder}  ({result.seconds:.0f} s)\n"
        f"  held-out cross-entropy {result.held_out:.3f} nats per token, "
        f"{result.unigram_entropy - result.held_out:.3f} below the unigram entropy {result.unigram_entropy:.3f}",
        soft_wrap=True,
    )
