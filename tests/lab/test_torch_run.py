"""``run_path``: what a training of the PyTorch project left, on wandb or on this machine, decomposed as it is.

wandb's client is the real one (`wandb_server.py` is not wandb's). Checkpoints are safetensors, which need no torch.
"""

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console
from safetensors.numpy import save

from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_lab import load_run
from param_decomp_lab.errors import CannotFetch, UserError
from param_decomp_lab.runs.imported import read_imported
from param_decomp_lab.weights.target_folder import load_target
from param_decomp_lab.weights.torch_run import TorchRun, find_run
from param_decomp_lab.weights.wandb_run import WandbRun, parse_run_path
from tests.lab.tiny_run import ROOT, pd_here, torch_file
from tests.lab.wandb_server import ENTITY, Server, wandb_server

KEY = "0123456789" * 4
RUN = f"wandb:{ENTITY}/toys/abc123"
SETTINGS = yaml.safe_dump({"tms_model_config": {"n_features": 5, "n_hidden": 2, "device": "cpu"}, "steps": 3}).encode()
FIRST = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
CHECKPOINT = save({"linear1.weight": FIRST, "linear2.weight": FIRST.T.copy(), "linear2.bias": np.zeros(5, np.float32)})
FILES = {
    "config.yaml": b"wandb_version: {value: 1}\n", "tms_train_config.yaml": SETTINGS, "output.log": b"-",
    "tms_10.safetensors": b"old", "tms_20.safetensors": CHECKPOINT, "optimizer_20.pt": b"-", "media/a.png": b"-",
}  # fmt: skip
GOLDEN = ROOT / "tests" / "golden" / "families"
TMS = ROOT / "configs" / "toys" / "tms_5-2.yaml"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of converted weights; and nobody is logged in to wandb."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return tmp_path / "cache" / "param-decomp" / "weights"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with wandb_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        forget_wandb()
        server.add("abc123", dict(FILES))
        yield server
    forget_wandb()


def forget_wandb() -> None:
    """The client keeps the server and the key that it was told first."""
    import wandb
    from wandb.sdk.lib import wbauth

    wandb.teardown()
    wbauth.unauthenticate_session(update_settings=False)


def fetch(path: str = RUN) -> Path:
    source = find_run(path, "target.run_path")
    assert isinstance(source, TorchRun)
    return source.fetch(Console(quiet=True))


def refusal(path: str = RUN, kind: type[Exception] = UserError) -> str:
    with pytest.raises(kind) as error:
        fetch(path)
    assert KEY not in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "text",
    ["wandb:a/b/c", "wandb://a/b/c", "a/b/c", "wandb:a/b/runs/c", "wandb://a/b/runs/c", "https://wandb.ai/a/b/runs/c"],
)
def test_forms_of_a_run_path(text: str) -> None:
    assert parse_run_path(text) == WandbRun("a", "b", "c")


@pytest.mark.parametrize(
    "text", ["wandb:a/b", "a", "wandb:a/b/c/d", "wandb:a/../c", "./a/b", "/a/b/c", "wandb:a/b/c d"]
)
def test_what_is_no_run_path(text: str) -> None:
    assert parse_run_path(text) is None
    assert "is neither a folder or a checkpoint on this machine nor wandb:entity/project/id" in refusal(text)


def test_only_what_is_needed_is_fetched_once(server: Server, cache: Path) -> None:
    folder = fetch()
    assert folder == cache / "wandb" / ENTITY / "toys" / "abc123" / "target"
    assert server.fetched == ["tms_train_config.yaml", "config.yaml", "tms_20.safetensors"]
    architecture, weights = load_target(folder)
    assert architecture == TMSConfig(5, 2)
    assert np.array_equal(weights["linear1"], FIRST.T)
    server.refuse = 500, "gone"
    assert fetch(f"https://wandb.ai/{ENTITY}/toys/runs/abc123") == folder
    assert len(server.fetched) == 3


def test_a_checkpoint_in_a_folder_of_its_own(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With progress."""
    monkeypatch.setattr("param_decomp_lab.weights.wandb_run.LARGE_BYTES", 100)
    server.add("deep", {"tms_train_config.yaml": SETTINGS, "checkpoints/tms_20.safetensors": CHECKPOINT})
    console = Console(record=True, width=200, file=io.StringIO())
    source = find_run("wandb:somebody/toys/deep", "target.run_path")
    assert isinstance(source, TorchRun)
    assert load_target(source.fetch(console))[0] == TMSConfig(5, 2)
    assert "downloading checkpoints/tms_20.safetensors: done in " in console.export_text()


def test_what_was_interrupted_is_gone_on_with(server: Server) -> None:
    """Files that arrived are not fetched again; one that was cut short is."""
    server.runs["abc123"].files["tms_20.safetensors"] = CHECKPOINT[:100]
    whole, sizes = CHECKPOINT, server.sizes
    sizes["tms_20.safetensors"] = len(whole)
    assert "tms_20.safetensors arrived with 100 bytes" in refusal(kind=CannotFetch)
    server.runs["abc123"].files["tms_20.safetensors"] = whole
    assert load_target(fetch())[0] == TMSConfig(5, 2)
    assert server.fetched.count("tms_train_config.yaml") == 1
    assert server.fetched.count("tms_20.safetensors") == 2


def test_refusals(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "target.run_path: there is no wandb:somebody/toys/other, or the account" in refusal(
        "wandb:somebody/toys/other"
    )
    server.add("empty", {"config.yaml": b"a: 1"})
    assert "target.run_path: wandb:somebody/toys/empty: has no checkpoint" in refusal("wandb:somebody/toys/empty")
    server.add("bare", {"a.pt": b""})
    assert "has none of model_config.yaml, final_config.yaml" in refusal("wandb:somebody/toys/bare")
    server.add("outside", {"tms_train_config.yaml": SETTINGS, "../x.pt": b"-"})
    assert "lies outside of" in refusal("wandb:somebody/toys/outside")
    server.keys = {"other"}
    forget_wandb()
    assert "wandb does not know the API key that was sent: run `wandb login`" in refusal()
    monkeypatch.delenv("WANDB_API_KEY")
    forget_wandb()
    assert "needs an API key of wandb: run `wandb login`, or set WANDB_API_KEY" in refusal()


@pytest.mark.usefixtures("server")
def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("param_decomp_lab.weights.wandb_run.TIMEOUT_S", 1)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    forget_wandb()
    said = refusal(kind=CannotFetch)
    assert re.search(
        r"wandb:somebody/toys/abc123 could not be fetched from wandb \(.*\); start again where there", said
    )


def settings(*assignments: str) -> list[str]:
    losses = "pd.loss_metrics=[{type: FaithfulnessLoss, coeff: 1}]"
    small = ("target=null", "pd.steps=2", "eval=null", "pd.batch_size=8", "pd.faithfulness_warmup_steps=0", losses)
    return [word for assignment in (*small, *assignments) for word in ("--set", assignment)]


@pytest.mark.slow
def test_a_run_on_wandb_is_decomposed(server: Server, tmp_path: Path) -> None:
    path = f"target.run_path={RUN}"
    checked = pd_here("check", TMS, *settings(path))
    assert checked.status == 0, checked
    said = " ".join(checked.out.split())
    assert f"not on this machine: the target, so its sites are not checked: target.run_path: {RUN}: not fetched" in said
    assert not server.fetched
    trained = pd_here("train", TMS, *settings(path, f"out_dir={tmp_path}", "run_id=p-00000001"))
    assert trained.status == 0, trained
    kept = b"".join(file.read_bytes() for file in (tmp_path / "p-00000001").rglob("*") if file.is_file())
    assert KEY.encode() not in kept
    assert KEY not in trained.out + trained.err
    assert np.array_equal(load_run(tmp_path / "p-00000001").weights["linear1"], FIRST.T)
    checked = pd_here("check", TMS, *settings(path))
    assert "TMS, 5 features in 2" in checked.out
    assert "not on this machine" not in checked.out


def test_a_local_run(tmp_path: Path, cache: Path) -> None:
    """A folder with a checkpoint, the checkpoint, and a folder in our own layout."""
    folder = tmp_path / "left"
    folder.mkdir()
    for name in ("tms_train_config.yaml", "tms_10.safetensors", "tms_20.safetensors"):
        (folder / name).write_bytes(FILES[name])
    checked = pd_here("check", TMS, *settings(f"target.run_path={folder}"))
    assert checked.status == 0, checked
    assert "TMS, 5 features in 2" in checked.out
    assert "the target's weights" in checked.out
    assert not cache.exists()
    for path in (folder, folder / "tms_20.safetensors"):
        assert load_target(fetch(str(path)))[0] == TMSConfig(5, 2)
    made = fetch(str(folder))
    assert find_run(str(made), "target.run_path") == made


def language_model(tmp_path: Path, model_class: str, run_path: str, *patterns: str) -> Path:
    """A wrapper of a schema file that names what a training of the PyTorch project left."""
    method = torch_file()
    method["target"] = {
        "spec": {"kind": "pretrained", "model_class": model_class, "run_path": run_path}, "output_extract": 0
    }  # fmt: skip
    method["pd"]["decomposition_targets"] = [{"module_pattern": pattern, "C": 8} for pattern in patterns]
    method["eval"] = None
    (tmp_path / "torch.yaml").write_text(yaml.safe_dump(method))
    wrapper = {"torch_config": "torch.yaml", "run_name": "x", "data": {"train": "train", "eval": "eval"}}
    (tmp_path / "wrapper.yaml").write_text(yaml.safe_dump(wrapper))
    return tmp_path / "wrapper.yaml"


LANGUAGE_MODELS = {
    "llama_simple_mlp_torch": ("models.LlamaSimpleMLP", "h.*.mlp.c_fc", "h.*.attn.q_proj"),
    "torch_gpt2": ("models.GPT2", "h.*.attn.c_attn", "h.*.mlp.c_fc"),
}


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_language_model_is_checked_without_torch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    model_class, *patterns = LANGUAGE_MODELS[name]
    checked = pd_here("check", language_model(tmp_path, model_class, str(GOLDEN / name), *patterns))
    assert checked.status == 0, checked
    said = " ".join(checked.out.split())
    assert "Sites: 6" in said
    assert "not converted yet; `pd train` does it, or `pd weights fetch`" in said
    other = language_model(tmp_path, "transformers.LlamaForCausalLM", str(GOLDEN / name), *patterns)
    assert "target.spec.model_class: is transformers.LlamaForCausalLM, but" in pd_here("check", other).err


@pytest.mark.slow
def test_a_language_model_on_wandb(server: Server, tmp_path: Path) -> None:
    content = (GOLDEN / "llama_simple_mlp_adjacent" / "model.safetensors").read_bytes()
    settings = (GOLDEN / "llama_simple_mlp_torch" / "model_config.yaml").read_bytes()
    files = {"config.yaml": b"a: {value: 1}", "model_config.yaml": settings, "model_step_9.safetensors": content}
    server.add("lm", {**files, "tokenizer.json": b"{}"})
    config = language_model(tmp_path, "models.LlamaSimpleMLP", "wandb:somebody/lms/runs/lm", "h.*.mlp.*")
    checked = pd_here("check", config)
    assert checked.status == 0, checked
    said = " ".join(checked.out.split())
    assert "its sites are not checked: target.spec.run_path: wandb:somebody/lms/lm: not fetched yet" in said
    unknown = language_model(tmp_path, "models.LlamaSimple", "wandb:somebody/lms/lm", "h.*.mlp.*")
    refused = pd_here("check", unknown)
    assert refused.status == 2
    assert "target.spec.model_class: is models.LlamaSimple; did you mean 'LlamaSimpleMLP'?" in refused.err
    assert not server.fetched
    config = language_model(tmp_path, "models.LlamaSimpleMLP", "wandb:somebody/lms/runs/lm", "h.*.mlp.*")
    fetched = pd_here("weights", "fetch", config)
    assert fetched.status == 0, fetched
    assert (Path(fetched.out.splitlines()[-1]) / "tokenizer.json").is_file()
    assert "Sites: 6" in pd_here("check", config).out


def test_a_decomposition_on_wandb(server: Server, tmp_path: Path) -> None:
    """`pd import` fetches the configuration, the model's settings and one checkpoint, once."""
    golden = ROOT / "tests" / "golden" / "decompositions" / "tms_mlp"
    names = ("experiment_config.yaml", "tms_train_config.yaml", "model_300.pth")
    files = {name: (golden / name).read_bytes() for name in names}
    server.add("def456", {**files, "model_200.pth": b"-", "training_300.pth": b"-", "figures/a.png": b"-"})
    for out in ("first", "second"):
        made = pd_here("import", f"wandb:{ENTITY}/toys/def456", "--out", tmp_path / out)
        assert made.status == 0, made
    assert sorted(server.fetched) == sorted(names)
    found = read_imported(tmp_path / "second")
    assert found is not None
    assert found.source == f"wandb:{ENTITY}/toys/def456"
