"""Checks what involves several keys or both files: errors, unsupported combinations, and warnings."""

from collections.abc import Iterator, Sequence

from param_decomp_lab.config.loss_parts import RepeatAcrossBatchScope, bounds
from param_decomp_lab.config.loss_schema import (
    ImportanceMinimalityLoss,
    Loss,
    PersistentAdversary,
    PersistentPGDReconLoss,
    ReconLoss,
)
from param_decomp_lab.config.method_schema import (
    ChunkwiseCI,
    EvalConfig,
    GlobalCI,
    HubSpec,
    LanguageModelData,
    LanguageModelFile,
    MethodFile,
    PDConfig,
    ToyFile,
)
from param_decomp_lab.config.wrapper import Experiment, MilestonesEvery, Wrapper
from param_decomp_lab.metrics import Metric
from param_decomp_lab.schema.mistakes import REQUIRED, Mistake
from param_decomp_lab.schema.site_names import matches_module
from param_decomp_lab.schema.strict import Strict, as_far_as_read

LONGEST = "pd.ci_config.simple_transformer_ci_cfg.attn_config.max_len"
"""The key that limits the length of the rows that a CI transformer takes."""
_TOY_MODULES: dict[Experiment, tuple[str, ...]] = {
    "tms": ("linear1", "linear2", "hidden_layers.{layer}"),
    "resid_mlp": ("layers.{layer}.mlp_in", "layers.{layer}.mlp_out"),
}
"""Names of the modules of each toy."""
_TOY_LAYERS = range(100)
"""Layer numbers tried for ``{layer}``."""


_BEGINS_WITH = {
    "weighted_singular_vectors": ("weighted singular vectors", "its rank"),
    "nonlinearity_aligned": ("aligned components", "its number of neurons or of channels of heads"),
}
"""For each `init_components`: what they are called, and the least C with which they add up to their matrix."""


def infer_toy(patterns: Sequence[str]) -> Experiment | None:
    """Returns the toy whose modules match all patterns; None if neither or both qualify."""

    def all_match(templates: tuple[str, ...]) -> bool:
        modules = {template.format(layer=layer) for template in templates for layer in _TOY_LAYERS}
        return all(any(matches_module(pattern, module) for module in modules) for pattern in patterns)

    found = [toy for toy, templates in _TOY_MODULES.items() if all_match(templates)]
    return found[0] if len(found) == 1 else None


def term_names(losses: tuple[Loss, ...]) -> tuple[str, ...]:
    """Returns the names under which terms are logged: `name`, else the class, with `_2`, `_3` … after the first unnamed
    one.
    """
    unnamed: dict[str, int] = {}
    names = []
    for loss in losses:
        if loss.name is None:
            count = unnamed[loss.type] = unnamed.get(loss.type, 0) + 1
        names.append(loss.name or (loss.type if count == 1 else f"{loss.type}_{count}"))
    return tuple(names)


def wrapper_mistakes(wrapper: Wrapper, method: MethodFile) -> Iterator[Mistake]:
    """Yields mistakes in the wrapper, given the schema file. Both may lack what could not be read."""
    for check in (
        _equal_micro_batches,
        _equal_evaluation_micro_batches,
        _one_optimizer,
        _of_a_toy,
        _of_a_language_model,
        _bos_of_text,
        _revision_of_the_hub,
    ):
        yield from as_far_as_read(check, wrapper, method)


def _equal_micro_batches(wrapper: Wrapper, method: MethodFile) -> Iterator[Mistake]:
    return _unequal_micro_batches(wrapper, method.pd.batch_size, "pd.batch_size")


def _equal_evaluation_micro_batches(wrapper: Wrapper, method: MethodFile) -> Iterator[Mistake]:
    if method.eval is not None:
        yield from _unequal_micro_batches(wrapper, method.eval.batch_size, "eval.batch_size")


def _unequal_micro_batches(wrapper: Wrapper, size: int, key: str) -> Iterator[Mistake]:
    parts, devices = wrapper.memory.micro_batches, wrapper.mesh.batch_devices
    if size % devices == 0 and size // devices % parts:
        on = f"{size} rows on {devices} device{'s'[: devices > 1]}"
        yield Mistake("memory.micro_batches", f"is {parts}; {key} ({on}) cannot be cut into as many equal parts")


def _one_optimizer(wrapper: Wrapper, method: MethodFile) -> Iterator[Mistake]:
    chosen = wrapper.memory.optimizers
    for key, name, own in (
        ("components", chosen.components, method.pd.components_optimizer),
        ("ci_fn", chosen.ci_fn, method.pd.ci_fn_optimizer),
    ):
        if name != "adamw" and own.type != "adamw":
            instead = f"is {name}, not AdamW, but pd.{key}_optimizer is {own.type}"
            yield Mistake(f"memory.optimizers.{key}", f"{instead}; remove one of the two")


def _of_a_toy(wrapper: Wrapper, method: MethodFile) -> Iterator[Mistake]:
    if not isinstance(method, ToyFile):
        return
    if wrapper.bos:
        yield Mistake("bos", "is for language models; a toy reads no text")
    if wrapper.data is not None:
        yield Mistake("data", "is for language models; a toy's features are drawn as its schema file says")
    if wrapper.target is not None and wrapper.target.revision is not None:
        yield Mistake("target.revision", "is for a language model on the hub; a toy takes folder or pretrain")


def _of_a_language_model(wrapper: Wrapper, method: MethodFile) -> Iterator[Mistake]:
    if not isinstance(method, LanguageModelFile):
        return
    if wrapper.experiment is not None:
        yield Mistake(
            "experiment",
            f"is {wrapper.experiment}, but the schema file has target.spec and so is a language model's; remove it",
        )
    if wrapper.target is not None and wrapper.target.pretrain is not None:
        yield Mistake("target.pretrain", "is for toys only; a language model takes target: {folder: …}")


def _bos_of_text(wrapper: Wrapper, method: MethodFile) -> Iterator[Mistake]:
    if isinstance(method, LanguageModelFile) and wrapper.bos and wrapper.data is None and method.data.is_tokenized:
        yield Mistake("bos", "is for text that the run tokenizes, and data.is_tokenized is true; remove it")


def _revision_of_the_hub(wrapper: Wrapper, method: MethodFile) -> Iterator[Mistake]:
    if not isinstance(method, LanguageModelFile) or wrapper.target is None or wrapper.target.revision is None:
        return
    spec = method.target.spec
    if not isinstance(spec, HubSpec):
        yield Mistake("target.revision", f"is for target.spec.kind hf, not {spec.kind}; remove it")


def method_mistakes(wrapper: Wrapper, method: MethodFile) -> Iterator[Mistake]:
    """Yields mistakes in the schema file, given the wrapper. Both may lack what could not be read."""
    yield from as_far_as_read(_unsupported, method)
    yield from as_far_as_read(_metric_mistakes, method)
    for section in ("pd", "eval"):
        yield from as_far_as_read(_batch_mistakes, wrapper, method, section)
        yield from as_far_as_read(_source_mistakes, method, section)
    for section in ("pd", "eval"):
        yield from as_far_as_read(_name_mistakes, method, section)
    yield from as_far_as_read(_no_toy, wrapper, method)
    if isinstance(method, LanguageModelFile):
        yield from as_far_as_read(_data_mistakes, wrapper, method)
        yield from as_far_as_read(_length_mistakes, method)


TERMS = {"pd": "loss_metrics", "eval": "metrics"}
"""Keys of the lists of terms, by section."""


def _terms(method: MethodFile, section: str) -> tuple[Strict, ...]:
    part: PDConfig | EvalConfig | None = getattr(method, section)
    terms: tuple[Strict, ...] = () if part is None else getattr(part, TERMS[section])
    return terms


def losses_of(method: MethodFile) -> Iterator[tuple[str, Loss]]:
    """Yields the losses to train on and those to measure, with their keys. Parts that could not be
    read may be missing.
    """
    for section, key in TERMS.items():
        for n, term in enumerate(as_far_as_read(_terms, method, section)):
            if isinstance(term, Loss):
                yield f"{section}.{key}.{n}", term


def _unsupported(method: MethodFile) -> Iterator[Mistake]:
    name = method.pd.sigmoid_type
    falls = {"swish_hard": "dips below 0", "two_sided_leaky_hard": "falls below 0 without end"}.get(name)
    if falls is None:
        return
    for n, loss in enumerate(method.pd.loss_metrics):
        found = list(as_far_as_read(_takes_what_is_below_0, loss, f"pd.loss_metrics.{n}", name, falls))
        if found:
            yield from found
            return


def _takes_what_is_below_0(loss: Strict, where: str, name: str, falls: str) -> Iterator[Mistake]:
    if _takes_roots(loss):
        why = f"{name} {falls}, where (υ + eps)^p is not a number unless p is an integer"
        yield Mistake("pd.sigmoid_type", f"{why}; give {where} a constant integer p, or penalty: smooth_l0")
    elif name == "two_sided_leaky_hard" and _takes_log_of_odd_power(loss):
        why = f"{name} {falls}, where an odd power is negative and the logarithm of its sum is not a number"
        yield Mistake("pd.sigmoid_type", f"{why}; give {where} an even p, beta: 0, or penalty: smooth_l0")


def _metric_mistakes(method: MethodFile) -> Iterator[Mistake]:
    metrics = _terms(method, "eval")
    for n, metric in enumerate(metrics):
        yield from as_far_as_read(_listed_twice, metric, metrics[:n], f"eval.metrics.{n}.type")
        yield from as_far_as_read(_unfit_metric, metric, method, f"eval.metrics.{n}.type")


def _listed_twice(metric: Strict, before: Sequence[Strict], key: str) -> Iterator[Mistake]:
    if any(_one_output(metric, other) for other in before):
        yield Mistake(key, f"{_kind(metric)} is listed twice and would log the same keys; keep one")


def _unfit_metric(metric: Strict, method: MethodFile, key: str) -> Iterator[Mistake]:
    needs = metric.needs if isinstance(metric, Metric) else None
    if isinstance(method, LanguageModelFile) and needs == "features":
        yield Mistake(key, f"{_kind(metric)} needs a toy, where single features can be activated; remove it")
    if isinstance(method, ToyFile) and needs == "text":
        yield Mistake(key, f"{_kind(metric)} is for language models; remove it")


def _kind(metric: Strict) -> str:
    return str(getattr(metric, "type", ""))


def _takes_roots(loss: Strict) -> bool:
    """Whether the loss raises υ to a non-integer power at any step."""
    if not isinstance(loss, ImportanceMinimalityLoss) or loss.penalty != "lp":
        return False
    anneals = loss.p_anneal_final_p is not None and loss.p_anneal_start_frac < 1
    least, greatest = bounds(loss.pnorm)
    return anneals or least != greatest or least != int(least)


def _takes_log_of_odd_power(loss: Strict) -> bool:
    """Whether the loss takes the logarithm of sums of odd powers of υ, given that p is an integer."""
    if not isinstance(loss, ImportanceMinimalityLoss) or loss.penalty != "lp":
        return False
    return bounds(loss.pnorm)[0] % 2 == 1 and (loss.beta > 0 or loss.frequency is not None)


def _one_output(a: Strict, b: Strict) -> bool:
    """Whether two metrics would log the same keys; losses are distinguished by name instead."""
    return isinstance(a, Metric) and type(a) is type(b) and a.logs_the_same(b)


def _batch_mistakes(wrapper: Wrapper, method: MethodFile, section: str) -> Iterator[Mistake]:
    part, mesh = getattr(method, section), wrapper.mesh
    if part is not None and part.batch_size % mesh.batch_devices:
        split = f"mesh.replica · mesh.fsdp = {mesh.replica} · {mesh.fsdp}"
        yield Mistake(f"{section}.batch_size", f"is {part.batch_size}; it must be a multiple of {split}")


def _source_mistakes(method: MethodFile, section: str) -> Iterator[Mistake]:
    for term in _terms(method, section):
        size: int = getattr(method, section).batch_size
        yield from as_far_as_read(_unequal_sources, term, size, section)


def _unequal_sources(term: Strict, size: int, section: str) -> Iterator[Mistake]:
    scope = getattr(term, "scope", None) if isinstance(term, PersistentAdversary) else None
    if isinstance(scope, RepeatAcrossBatchScope) and size % scope.n_sources:
        sources = f"the n_sources of {_kind(term)} ({scope.n_sources})"
        yield Mistake(f"{section}.batch_size", f"is {size}; it must be a multiple of {sources}")


def _name_mistakes(method: MethodFile, section: str) -> Iterator[Mistake]:
    key = f"{section}.{TERMS[section]}"
    numbered = [(n, term) for n, term in enumerate(_terms(method, section)) if isinstance(term, Loss)]
    taken: dict[str, int] = {}
    for (n, _), name in zip(numbered, term_names(tuple(term for _, term in numbered)), strict=True):
        if name in taken:
            yield Mistake(f"{key}.{n}.name", f"'{name}' is the name of {key}.{taken[name]} too; give each its own")
        taken.setdefault(name, n)


def _no_toy(wrapper: Wrapper, method: MethodFile) -> Iterator[Mistake]:
    if isinstance(method, ToyFile) and wrapper.target is None and method.target.run_path is None:
        yield Mistake("target.run_path", REQUIRED)


def _data_mistakes(wrapper: Wrapper, method: LanguageModelFile) -> Iterator[Mistake]:
    data = method.data
    if wrapper.data is None and data.of_files:
        if data.data_files is None:
            yield Mistake("data.data_files", f"is required with dataset_name: {data.dataset_name}, which names files")
        if data.dataset_name == "arrow" and not data.is_in_rows:
            rows = "shards of `pd data tokenize` have column_name: input_ids and is_tokenized: true"
            yield Mistake("data.dataset_name", f"is arrow; {rows}")
        if data.dataset_name == "text" and (data.is_tokenized or data.column_name != "text"):
            yield Mistake("data.dataset_name", "is text, whose only column is text; its column_name is to be text")


def _length_mistakes(method: LanguageModelFile) -> Iterator[Mistake]:
    data, ci = method.data, method.pd.ci_config
    if isinstance(ci, GlobalCI | ChunkwiseCI) and ci.simple_transformer_ci_cfg is not None:
        longest = ci.simple_transformer_ci_cfg.attn_config.max_len
        if data.max_seq_len > longest:
            yield Mistake("data.max_seq_len", f"is {data.max_seq_len}, longer than {LONGEST} ({longest})")


def warnings(wrapper: Wrapper, method: MethodFile) -> tuple[str, ...]:
    """Settings that are valid but probably unintended: one line each, starting with the key."""
    return tuple(_warnings(wrapper, method))


def _warnings(wrapper: Wrapper, method: MethodFile) -> Iterator[str]:
    dp, devices = method.runtime.dp, wrapper.mesh.devices
    if dp is not None and dp != devices:
        yield f"runtime.dp: is {dp}, but the mesh decides: it has {devices} device(s)"
    yield from _split_warnings(wrapper, method)
    yield from _held_warnings(wrapper)
    if isinstance(method, ToyFile) and wrapper.target is not None and method.target.run_path is not None:
        recipe = wrapper.target.pretrain
        ours = wrapper.target.folder or ("a recipe" if isinstance(recipe, dict) else recipe)
        yield f"target.run_path: {method.target.run_path} is replaced by the wrapper's target ({ours})"
    if wrapper.init_from is not None and method.pd.faithfulness_warmup_steps:
        yield "pd.faithfulness_warmup_steps: has no effect with init_from, whose components are warmed up"
    if wrapper.init_from is not None and wrapper.init_components != "random":
        yield "init_components: has no effect with init_from, whose components this run begins with"
    if wrapper.begins_with != "random" and method.pd.faithfulness_warmup_steps:
        which, least = _BEGINS_WITH[wrapper.begins_with]
        yield (
            f"pd.faithfulness_warmup_steps: {which} add up to their matrix already, unless C is below {least}, and a "
            "warm-up only moves them; 0 leaves them as they are"
        )
    for key, loss in losses_of(method):
        climbs_sum = isinstance(loss, PersistentAdversary) and loss.adversary_objective == "term"
        if climbs_sum and isinstance(loss, ReconLoss) and loss.hidden_acts_reconstruction is None:
            yield f"{key}.adversary_objective: term has no effect without hidden_acts_reconstruction"
    for n, metric in enumerate(method.eval.metrics if method.eval else ()):
        if isinstance(metric, PersistentAdversary) and metric.start_frac > 0:
            yield f"eval.metrics.{n}.start_frac: has no effect in a metric, whose attack is always on"
        frequency = metric.frequency if isinstance(metric, ImportanceMinimalityLoss) else None
        if frequency is not None and frequency.ema_halflife_steps is not None:
            own = "which is of the evaluation's batches alone"
            yield f"eval.metrics.{n}.frequency.ema_halflife_steps: has no effect in a metric, {own}"
    for n, loss in enumerate(method.pd.loss_metrics):
        key = f"pd.loss_metrics.{n}"
        if isinstance(loss, ImportanceMinimalityLoss):
            yield from _importance_warnings(key, loss)
        if isinstance(loss, PersistentAdversary) and loss.start_frac * method.pd.steps > method.pd.steps - 1:
            yield f"{key}.start_frac: is {loss.start_frac}, after the last of {method.pd.steps} steps: never on"
        if isinstance(loss, PersistentPGDReconLoss) and loss.n_samples > 1:
            yield f"{key}.n_samples: is {loss.n_samples}, but forwards routed everywhere are alike: one is made (R5)"
    if isinstance(method, LanguageModelFile):
        yield from _data_warnings(wrapper, method.data)
    if method.wandb is None and (wrapper.wandb_group is not None or wrapper.wandb_tags):
        yield "wandb_group, wandb_tags: have no effect, for the schema file has wandb: null"
    if not isinstance(wrapper.milestones, MilestonesEvery):
        late = [str(step) for step in wrapper.milestones if step > method.pd.steps]
        if late:
            yield f"milestones: {', '.join(late)} come after the last step ({method.pd.steps})"


def _data_warnings(wrapper: Wrapper, data: LanguageModelData) -> Iterator[str]:
    """Warns of a data set that is not read, and of keys that apply only to a data set where files are named."""
    if wrapper.data is not None and wrapper.bos:
        yield "bos: has no effect with data, whose rows are there already"
    if wrapper.data is not None and not data.of_files:
        yield f"data.dataset_name: {data.dataset_name} is replaced by the folders of the wrapper's data"
    elif data.of_files:
        for key in ("revision", "train_split", "eval_split"):
            if key in data.model_fields_set and getattr(data, key) is not None:
                yield f"data.{key}: has no effect with dataset_name: {data.dataset_name}, which names files"


def _split_warnings(wrapper: Wrapper, method: MethodFile) -> Iterator[str]:
    """Warns where V, U and their moments cannot be sharded: they are sharded over components or not at all."""
    parts = wrapper.mesh.fsdp * wrapper.mesh.tensor
    for name in ("decomposition_targets", "identity_decomposition_targets"):
        for n, target in enumerate(getattr(method.pd, name) or ()):
            if target.C % parts:
                near = target.C + -target.C % parts
                yield (
                    f"pd.{name}.{n}.C: is {target.C}, not a multiple of fsdp x tensor ({parts}): V, U and their "
                    f"moments are not split over all of these devices; {near} would be"
                )


def _held_warnings(wrapper: Wrapper) -> Iterator[str]:
    """Warns of node copies that have no effect because there is only one node."""
    memory = wrapper.memory
    by_node = [group for group, by in memory.held.items() if by == "node"]
    if by_node and wrapper.mesh.nodes == 1:
        yield f"memory.held: node has no effect on {', '.join(by_node)}, for mesh.nodes is 1"


def _importance_warnings(key: str, loss: ImportanceMinimalityLoss) -> Iterator[str]:
    final = loss.p_anneal_final_p
    if loss.penalty == "smooth_l0":
        if final is not None:
            yield f"{key}.p_anneal_final_p: has no effect with penalty: smooth_l0"
        if not isinstance(loss.pnorm, float):
            yield f"{key}.pnorm: is a schedule, which has no effect with penalty: smooth_l0"
    elif final is not None and loss.p_anneal_start_frac == 1:
        yield f"{key}.p_anneal_final_p: has no effect, for p_anneal_start_frac is 1 (its default)"
    elif loss.least_p < 1 and loss.eps < 1e-6:
        remedy = "eps 1e-6 makes that rarer, and penalty: smooth_l0 has not done it"
        yield f"{key}.eps: with {loss.eps} and p below 1 long runs have collapsed late; {remedy}"
