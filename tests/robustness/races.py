"""Random races: commands that write to one place at once, whose folder is taken away, or whose disk fills up.

    python -m tests.robustness.races                                  # 3 races of every kind, for every command
    python -m tests.robustness.races --races 50 --seed 7 --out races.jsonl
    python -m tests.robustness.races --kind disk --command tokenize --seed 7 --race 12    # this race alone
    python -m tests.robustness.races --table races.jsonl

The commands are `WRITERS`: all that make a folder or a file. Each has two variants with other results. `pd fit` and
`pd probe --json` compile for GPUs, which takes minutes: only what they write at their end is raced. `pd wandb` writes
nothing itself. Kinds:

- `two`: both variants, or one twice, into one place, one begun a random moment after the other;
- `folder`: at a random moment of a command, the folder that it writes to is renamed, removed, emptied, replaced by
  another folder or by a file, or becomes read-only (a mount: root may write where permissions forbid it);
- `disk`: the folder is on a disk of a random size, from nothing to more than is needed (a tmpfs).

Whatever comes, every command must end with status 0, 1 or 2, with one message where it is not 0, and without a
traceback. At its place lies the whole result of one of the commands that had status 0, and nothing if none had; never
parts of two. Nothing hidden stays, and no file that was there before, or that appeared meanwhile, is changed. A
run folder and copies of configurations, which grow file by file, may be there in part after a failure.

Mounting takes root: without, those races are SKIPPED, and named.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

from param_decomp_lab.ui.tables import markdown_table
from tests.robustness import forked
from tests.robustness.damage_cases import mounted, rows, small_disk
from tests.robustness.forked import BROKEN, Ended, Forked
from tests.robustness.fuzz import CONTROL, MESSAGE_BYTES
from tests.robustness.fuzz_formats import FORMATS, OLD_RUN

ROOT = Path(__file__).parents[2]
SECONDS = 180.0
"""That a command may take."""
KINDS = ("two", "folder", "disk")
RUN_ID = "p-00000001"
PAGE = 4096
MINE = "what somebody else keeps here\n"


def files(path: Path) -> Any:
    """Every file and what it holds; None if there is nothing."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if not path.exists():
        return None
    return {str(file.relative_to(path)): files(file) for file in sorted(path.rglob("*")) if file.is_file()}


def trained(path: Path) -> Any:
    """What a pretrained network is, without the clock."""
    return {file.name: files(file) for file in path.iterdir() if file.name in ("model.safetensors", "config.json")}


def decomposed(path: Path) -> Any:
    """The rows of a run without the clock, its seed, and its last checkpoint's fingerprints."""
    seed = yaml.safe_load((path / "config.yaml").read_text())["torch"]["pd"]["seed"]
    last = max(int(step.name) for step in (path / "ckpts").iterdir() if step.name.isdecimal())
    about = json.loads((path / "ckpts" / str(last) / "_CHECKPOINT_METADATA").read_text())
    return seed, rows(path), last, about["custom_metadata"]["fingerprints"]


def harvested(path: Path) -> Any:
    """The harvests of a run, and whatever else lies beside them; None if there is none."""
    finished = [folder for folder in path.glob("*/harvest.json") if not folder.parent.name.startswith(".")]
    return files(path) if finished else None


def prepared(path: Path) -> Any:
    """A run that is launched: its seed, and every file but those that say where and how it was made."""
    if not path.exists():
        return None
    seed = yaml.safe_load((path / "config.yaml").read_text())["torch"]["pd"]["seed"]
    return seed, {name: text for name, text in files(path).items() if name not in ("launch.json", "config.yaml")}


def fitted(path: Path) -> Any:
    """A wrapper and its schema file."""
    return (files(path), files(path.parent / "torch" / path.name)) if path.exists() else None


def write_answer(seed: str) -> None:
    """As `pd probe --json` at its end."""
    from param_decomp_lab.probe.command import write_json

    write_json({"verdict": "fits", "seed": seed * 9999}, Path("place/out.json"))


def write_fitted(source: str, seed: str) -> None:
    """As `pd fit` at its end."""
    from param_decomp_lab.config.write import write_config

    write_config(Path(source), (f"pd.seed={seed}", f"run_name=seed-{seed}"), Path("place/out.yaml"), (), "pd fit")


@dataclass(frozen=True)
class Writer:
    """``variants``: arguments of ``call``, with {base} for the folder of inputs; they write to `place/out`, or ``out``.
    ``overwrite``: has that option. ``needs``: folders of ``base`` that are copied to `place` first. ``in_parts``: may
    leave a part after a failure. ``result``: of `place/out`, the same every time; None if there is none. ``room``: the
    largest disks have so much more than the result takes."""

    name: str
    variants: tuple[tuple[str, ...], tuple[str, ...]]
    out: str = "out"
    overwrite: bool = False
    needs: tuple[str, ...] = ()
    in_parts: bool = False
    result: Callable[[Path], Any] = files
    call: Callable[..., None] = forked.pd
    room: float = 1.4


TOY = "{base}/configs/toys/tms_5-2.yaml"


def _export(run: str) -> tuple[str, ...]:
    return "export", f"{{base}}/{run}", "--out", "place/out"


def _train(seed: int) -> tuple[str, ...]:
    settings = (
        "pd.steps=6", "pd.batch_size=8", "pd.faithfulness_warmup_steps=2", "eval=null", "steps_per_dispatch=2",
        "cadence={train_log_every: 2, save_every: 3}", "target={folder: {base}/toy/target}", "out_dir=place",
        f"run_id={RUN_ID}", f"pd.seed={seed}",
        "pd.loss_metrics=[{type: ImportanceMinimalityLoss, coeff: 0.003, pnorm: 1.0, beta: 0},"
        " {type: StochasticReconLoss, coeff: 1.0}]",
    )  # fmt: skip
    return ("train", TOY, *(word for text in settings for word in ("--set", text)))


def _prepare(seed: int) -> tuple[str, ...]:
    settings = ("out_dir=place", f"run_id={RUN_ID}", f"pd.seed={seed}")
    words = (word for text in settings for word in ("--set", text))
    return ("launch", TOY, *words, "--prepare", "--with-changes")


def _tokenize(length: int) -> tuple[str, ...]:
    words = ("data", "tokenize", "{base}/text", "--out", "place/out", "--seq-len", str(length))
    return (*words, "--eval-fraction", "0.5")


def _evaluate(batches: int) -> tuple[str, ...]:
    words = ("eval", "{base}/toy/p-00000002", "--target", "{base}/toy/target", "--batches", str(batches))
    return (*words, "--out", "place/out.json")


IMPORT = ("weights", "import-gguf", "{base}/model.gguf", "place/out", "--dtype")
REPORT = ("report", "place/p-00000002")
COPY = ("configs", "toys", "--out", "place/out")
HARVEST = ("harvest", "place/p-00000002", "--tokens", "20000", "--target", "{base}/toy/target", "--devices", "1")
WRITERS = {
    found.name: found
    for found in (
        Writer("tokenize", (_tokenize(8), _tokenize(16)), overwrite=True),
        Writer("import", ((*IMPORT, "float32"), (*IMPORT, "bfloat16")), overwrite=True),
        Writer("export", (_export("toy/p-00000002"), _export("llama/p-00000001")), overwrite=True),
        Writer("configs", (COPY, COPY), overwrite=True, in_parts=True),
        Writer("report", (REPORT, REPORT), out="p-00000002/report.html", needs=("toy/p-00000002",)),
        Writer("eval", (_evaluate(1), _evaluate(2)), out="out.json"),
        Writer(
            "pretrain", (("pretrain", "{base}/recipe-0.yaml"), ("pretrain", "{base}/recipe-1.yaml")),
            overwrite=True, result=trained,
        ),
        Writer(
            "harvest", (HARVEST, HARVEST), out="p-00000002/harvests", needs=("toy/p-00000002",), result=harvested,
            room=3.0,
        ),
        Writer("launch", (_prepare(0), _prepare(1)), out=RUN_ID, result=prepared),
        Writer("probe", (("0",), ("1",)), out="out.json", call=write_answer),
        Writer("fit", ((TOY, "0"), (TOY, "1")), out="out.yaml", result=fitted, call=write_fitted),
        Writer("train", (_train(0), _train(1)), out=RUN_ID, in_parts=True, result=decomposed),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """``wrong``: what is not as it must be, "" if nothing."""

    kind: str
    command: str
    seed: int
    race: int
    what: str
    statuses: tuple[int, ...]
    left: str
    wrong: str
    said: str

    @property
    def again(self) -> str:
        return (
            f"python -m tests.robustness.races --kind {self.kind} --command {self.command} --seed {self.seed} "
            f"--race {self.race}"
        )


@dataclass
class Course:
    """``base``: inputs, which nothing may change. ``results``: of every command's variants, undisturbed; ``seconds``
    and ``bytes``, on the disk, of the second of them."""

    base: Path
    results: dict[tuple[str, int], Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def make(self) -> None:
        import jax

        # Optimising a toy's programs takes longer than running them, and each is needed many times.
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        jax.config.update("jax_compilation_cache_dir", str(self.base.with_name("compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        FORMATS["tokenizer"].make(self.base)
        FORMATS["gguf"].make(self.base)
        shutil.copytree(OLD_RUN.parents[1], self.base, dirs_exist_ok=True)
        shutil.copytree(ROOT / "configs", self.base / "configs")
        recipe = yaml.safe_load((ROOT / "configs" / "toys" / "targets" / "tms_5-2.yaml").read_text())
        for seed in range(2):
            content = {**recipe, "out": "place/out", "seed": seed, "steps": 1500 + seed}
            (self.base / f"recipe-{seed}.yaml").write_text(yaml.safe_dump(content))

    def measure(self, writer: Writer) -> None:
        """Runs each variant alone, twice: RuntimeError unless it succeeds, with the same result."""
        for variant in range(2):
            found = []
            for _ in range(2):
                with tempfile.TemporaryDirectory(dir=self.base.parent) as name:
                    place = self.lay_out(writer, Path(name))
                    ended = self.start(writer, variant, Path(name), "a").wait(SECONDS)
                    if ended.status != 0:
                        raise RuntimeError(f"{writer.name}: {ended.text}")
                    found.append(writer.result(place / writer.out))
                    self.seconds[writer.name] = ended.seconds
                    sizes = (path.stat().st_size for path in place.rglob("*"))
                    self.bytes[writer.name] = sum(-(-size // PAGE) * PAGE for size in sizes)
            if found[0] != found[1]:
                raise RuntimeError(f"{writer.name}: another result the second time")
            self.results[writer.name, variant] = found[0]

    def lay_out(self, writer: Writer, folder: Path) -> Path:
        place = folder / "place"
        place.mkdir(exist_ok=True)
        (place / "mine.txt").write_text(MINE)
        for name in writer.needs:
            shutil.copytree(self.base / name, place / Path(name).name)
        return place

    def start(self, writer: Writer, variant: int, folder: Path, beside: str, *more: str) -> Forked:
        words = [word.replace("{base}", str(self.base)) for word in writer.variants[variant]]
        return forked.start(lambda: writer.call(*words, *more), folder, folder / beside)

    def race(self, kind: str, writer: Writer, seed: int, number: int, folder: Path) -> Result:
        random = Random(f"{kind} {writer.name} {seed} {number}")
        folder.mkdir()
        if writer.name not in self.seconds:
            self.measure(writer)
        match kind:
            case "two":
                what, ended, left, wrong = self._two(writer, random, folder)
            case "folder":
                what, ended, left, wrong = self._folder(writer, random, folder)
            case _:
                what, ended, left, wrong = self._disk(writer, random, folder)
        for one in ended:
            wrong += badly_ended(one)
        said = " | ".join(re.sub(r"\s+", " ", one.text[-600:]) for one in ended if one.status != 0)
        return Result(
            kind, writer.name, seed, number, what, tuple(one.status for one in ended), left, "; ".join(wrong), said
        )

    def _two(self, writer: Writer, random: Random, folder: Path) -> tuple[str, list[Ended], str, list[str]]:
        place = self.lay_out(writer, folder)
        more = ("--overwrite",) if writer.overwrite and random.random() < 0.4 else ()
        variants = (random.randrange(2), random.randrange(2))
        delay = self.seconds[writer.name] * random.choice((0.0, 0.05, random.random(), random.random()))
        first = self.start(writer, variants[0], folder, "a", *more)
        time.sleep(delay)
        second = self.start(writer, variants[1], folder, "b", *more)
        ended = [first.wait(SECONDS), second.wait(SECONDS)]
        won = [variant for variant, one in zip(variants, ended, strict=True) if one.status == 0]
        left, wrong = self.left(writer, place, won)
        if won and left == "nothing":
            wrong.append("status 0, but nothing is there")
        what = f"variants {variants[0]} and {variants[1]}{' with --overwrite' if more else ''}"
        return what, ended, left, wrong + _kept(place / "mine.txt")

    def _folder(self, writer: Writer, random: Random, folder: Path) -> tuple[str, list[Ended], str, list[str]]:
        place, moved = self.lay_out(writer, folder), folder / "moved"
        acts = ("renamed", "removed", "emptied", "replaced", "a file", *(["read-only"] if can_mount() else []))
        act, at = random.choice(acts), self.seconds[writer.name] * random.random()
        with mounted(str(place), place, "--bind") if act == "read-only" else nullcontext():
            one = self.start(writer, 0, folder, "a")
            time.sleep(at)
            done = _befall(act, place, moved)
            ended = one.wait(SECONDS)
            if act == "read-only" and done:
                subprocess.run(["mount", "-o", "remount,bind,rw", str(place)], check=True)
            won = [0] if ended.status == 0 else []
            left, wrong = self.left(writer, place, won) if place.is_dir() else ("nothing", [])
            if act == "read-only":  # nothing could be removed
                wrong = [what for what in wrong if not what.startswith("left behind")]
            if act in ("removed", "emptied"):  # it may have been the result that was being removed
                wrong = [what for what in wrong if not what.startswith("no whole result")]
            if act in ("renamed", "replaced"):
                wrong += _kept(moved / "mine.txt")
            if act in ("replaced", "read-only"):
                wrong += _kept(place / "mine.txt")
            if act == "a file":
                wrong += _kept(place)
        what = (
            f"{act}{'' if done else ' (not, for it was busy)'} after {at / self.seconds[writer.name]:.0%} of the time"
        )
        return what, [ended], left, wrong

    def _disk(self, writer: Writer, random: Random, folder: Path) -> tuple[str, list[Ended], str, list[str]]:
        size = random.randrange(0, int(writer.room * self.bytes[writer.name]) + 4 * PAGE)
        with small_disk(folder / "place", 256 << 20):
            place = self.lay_out(writer, folder)
            used = max(PAGE, shutil.disk_usage(place).used)  # a size of 0 has no limit
            subprocess.run(["mount", "-o", f"remount,size={used + size // PAGE * PAGE}", str(place)], check=True)
            ended = self.start(writer, 0, folder, "a").wait(SECONDS)
            left, wrong = self.left(writer, place, [0] if ended.status == 0 else [])
            wrong += _kept(place / "mine.txt")
            if ended.status == 0 and left == "nothing":
                wrong.append("status 0, but nothing is there")
        return f"a disk with {size // PAGE} pages free", [ended], left, wrong

    def left(self, writer: Writer, place: Path, won: Sequence[int]) -> tuple[str, list[str]]:
        """What lies at the place, in words, and what is wrong with it. ``won``: the variants that had status 0."""
        out, wrong = place / writer.out, []
        hidden = [path.name for path in place.iterdir() if path.name.startswith(".")]
        hidden += [path.name for path in out.parent.glob(".*") if out.parent != place]
        if hidden:
            wrong.append(f"left behind: {hidden[0][:60]}")
        if not out.exists():
            return "nothing", wrong
        try:
            found = writer.result(out)
        except (OSError, ValueError, KeyError, TypeError) as error:
            found = error
        if found is None:
            return "nothing", wrong
        for variant in dict.fromkeys((*won, 0, 1)):
            if found == self.results[writer.name, variant]:
                if variant not in won and not writer.in_parts:
                    wrong.append("the result of a command that failed")
                return "a whole result", wrong
        if won or not writer.in_parts:
            wrong.append(f"no whole result: {found!r:.200}")
        return "a part", wrong


def badly_ended(one: Ended) -> list[str]:
    wrong, text = [], one.text
    if one.seconds > SECONDS:
        wrong.append(f"not done after {SECONDS:.0f} s")
    elif one.status == BROKEN or "Traceback (most recent call last)" in text:
        wrong.append(f"traceback: {text.strip().splitlines()[-1]}")
    elif one.status not in (0, 1, 2):
        wrong.append(f"status {one.status}")
    elif one.status != 0 and "error:" not in text:
        wrong.append(f"status {one.status} without a message")
    if (control := CONTROL.search(text)) is not None:
        wrong.append(f"printed {control[0]!a}")
    if one.status != 0 and len(one.said) > 2 * MESSAGE_BYTES:
        wrong.append(f"said {len(one.said):,} bytes")
    return wrong


def _kept(file: Path) -> list[str]:
    try:
        return [] if file.read_text() == MINE else [f"{file.name} was changed"]
    except OSError as error:
        return [f"{file.name} is gone ({error.strerror})"]


def _befall(act: str, place: Path, moved: Path) -> bool:
    """Whether it could be done."""
    match act:
        case "renamed" | "replaced" | "a file":
            place.rename(moved)
            if act == "replaced":
                place.mkdir()
                (place / "mine.txt").write_text(MINE)
            elif act == "a file":
                place.write_text(MINE)
        case "removed" | "emptied":
            for path in place.iterdir() if act == "emptied" else [place]:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        case _:
            command = ["mount", "-o", "remount,bind,ro", str(place)]
            for _ in range(200):  # it is refused while a file is open for writing
                if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                    return True
                time.sleep(0.001)
            return False
    return True


@functools.cache
def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as name:
        try:
            with small_disk(Path(name), PAGE):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def run(kinds: Sequence[str], commands: Sequence[str], seed: int, races: Sequence[int], out: Path) -> None:
    """Appends a line of JSON for every race to ``out``."""
    forked.warm()
    if "disk" in kinds and not can_mount():
        print("SKIPPED: races of kind disk, and folders that become read-only: nothing can be mounted here")
        kinds = [kind for kind in kinds if kind != "disk"]
    with tempfile.TemporaryDirectory(prefix="param-decomp-races-") as name:
        course = Course(Path(name) / "base")
        course.base.mkdir()
        course.make()
        before = files(course.base)
        for command in commands:
            began = time.monotonic()
            for kind in kinds:
                for number in races:
                    folder = Path(name) / f"{kind}-{command}-{number}"
                    result = course.race(kind, WRITERS[command], seed, number, folder)
                    shutil.rmtree(folder, ignore_errors=True)
                    with out.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
            print(f"{command}: {len(races)} of {', '.join(kinds)}, {time.monotonic() - began:.0f} s", flush=True)
        if files(course.base) != before:
            raise SystemExit("inputs were changed")


def read(path: Path) -> list[Result]:
    return [Result(**{**(raw := json.loads(line)), "statuses": tuple(raw["statuses"])}) for line in path.open()]


def table(results: Sequence[Result]) -> str:
    """In Markdown, a row for each command and kind."""
    together = defaultdict(list)
    for result in results:
        together[result.command, result.kind].append(result)
    rows = []
    for (command, kind), found in together.items():
        statuses = sorted({status for result in found for status in result.statuses})
        left = [sum(r.left == what for r in found) for what in ("a whole result", "nothing", "a part")]
        rows.append(
            (command, kind, len(found), ", ".join(map(str, statuses)), *left, sum(bool(r.wrong) for r in found))
        )
    columns = "command | kind | races | statuses | a whole result | nothing | a part | not as it must be"
    return "\n".join(markdown_table(columns, rows)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be repeated; default: all")
    parser.add_argument("--command", action="append", choices=WRITERS, help="may be repeated; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--races", type=int, default=3, help="of each kind and command")
    parser.add_argument("--race", type=int, help="this one alone")
    parser.add_argument("--out", type=Path, help="lines of JSON, added to")
    parser.add_argument("--table", type=Path, help="print the table of these results and do nothing else")
    given = parser.parse_args()
    if given.table is not None:
        results = read(given.table)
    else:
        with tempfile.TemporaryDirectory() as name:
            out = given.out or Path(name, "results")
            before = len(read(out)) if out.exists() else 0
            numbers = range(given.races) if given.race is None else [given.race]
            run(given.kind or KINDS, given.command or list(WRITERS), given.seed, numbers, out)
            results = read(out)[before:]
    print(table(results))
    for result in results:
        if result.wrong or given.race is not None:
            print(f"{result.wrong or 'as it must be'}\n    {result.what}: {result.left}\n    {result.again}")
            print(f"    {result.said[:400]}")
    if any(result.wrong for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
