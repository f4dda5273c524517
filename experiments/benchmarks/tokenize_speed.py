"""How fast `pd data tokenize` is beside the tokenizer's own batch call on all cores.

    python -m experiments.benchmarks.tokenize_speed --folder /tmp/speed   # 200 MB of text; some minutes on two cores
    python -m experiments.benchmarks.tokenize_speed --folder /tmp/speed --mb 20 --rounds 1

The text is the standard library's, paragraphs in a random order, as JSON lines of some 3,000 characters. The tokenizer
is a byte-level BPE of 16,384 tokens trained on it. On one side `encode_batch_fast` of the `tokenizers` library, which
uses all cores, on the same documents in memory; its results are dropped. On the other side the command, from files to
shards, with a process per core; its time includes starting Python. The sides take turns. On a machine that is not quiet
the ratio of tokens per second of CPU time says more: it does not change with what others take.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from param_decomp_lab.data.meta import DataMeta
from param_decomp_lab.data.stdlib_text import stdlib_documents

DOCUMENT_CHARS = 3000
VOCABULARY = 16_384


def make_texts(characters: int) -> list[str]:
    """Documents of the standard library's paragraphs, in a random order of its own each time they are used."""
    paragraphs = [p for document in stdlib_documents() for p in str(document.content).split("\n\n")]
    chance = random.Random(0)
    texts: list[str] = []
    pending = ""
    total = 0
    while total < characters:
        chance.shuffle(paragraphs)
        for paragraph in paragraphs:
            pending += paragraph + "\n\n"
            if len(pending) >= DOCUMENT_CHARS:
                texts.append(pending)
                total += len(pending)
                pending = ""
    return texts


def make_tokenizer(file: Path, texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[:1000], trainer)
    tokenizer.save(str(file))
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="made, and removed at the end")
    parser.add_argument("--mb", type=float, default=200.0, help="of text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--processes", type=int, help="of the command; its default otherwise")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    try:
        compare(options)
    finally:
        shutil.rmtree(options.folder)


def compare(options: argparse.Namespace) -> None:
    folder: Path = options.folder
    texts = make_texts(int(options.mb * 1e6))
    tokenizer = make_tokenizer(folder / "tokenizer.json", texts)
    for number in range(options.files):
        with open(folder / f"{number}.jsonl", "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts[number :: options.files])
    command = [sys.executable, "-m", "param_decomp_lab", "data", "tokenize"]
    command += [str(file) for file in sorted(folder.glob("*.jsonl"))]
    command += ["--tokenizer", str(folder / "tokenizer.json"), "--seq-len", "2048", "--out", str(folder / "out")]
    command += ["--processes", str(options.processes)] if options.processes else []
    print(f"{len(texts):,} documents, {sum(map(len, texts)):,} characters, {os.cpu_count()} cores")
    ratios, costs = [], []
    for _ in range(options.rounds):
        start, cpu = time.perf_counter(), time.process_time()
        n_tokens = 0
        for first in range(0, len(texts), 2000):
            encodings = tokenizer.encode_batch_fast(texts[first : first + 2000], add_special_tokens=False)
            n_tokens += sum(len(encoding) for encoding in encodings)
        alone = n_tokens / (time.perf_counter() - start)
        alone_cpu = n_tokens / (time.process_time() - cpu)
        start, cpu = time.perf_counter(), _cpu_of_children()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds, cpu = time.perf_counter() - start, _cpu_of_children() - cpu
        meta = DataMeta.read(folder / "out")
        ours = sum(split.tokens + split.dropped_tokens for split in (meta.train, meta.eval))
        shutil.rmtree(folder / "out")
        ratios.append(ours / seconds / alone)
        costs.append(ours / cpu / alone_cpu)
        sides = f"encode_batch_fast {alone:,.0f} tokens/s, pd data tokenize {ours / seconds:,.0f}"
        print(f"{sides}: {ratios[-1]:.2f}; by CPU time {costs[-1]:.2f}", flush=True)
    print(f"median of {len(ratios)}: {statistics.median(ratios):.2f}; by CPU time {statistics.median(costs):.2f}")


def _cpu_of_children() -> float:
    """Seconds of all processes that have ended and been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
