"""Builds the documentation's gallery: pages of the two demos, which visitors can read before they install anything.

    pd demo && pd demo --smollm2
    pd harvest runs/p-5e6f7a8b --tokens 50e3                            # SmolLM2's; the demo has one
    pd graph RUN "def __init__(self, name):" && pd label RUN …          # graphs and labels, in either run
    python -m experiments.evidence.gallery --demo runs/p-1a2b3c4d --smollm2 runs/p-5e6f7a8b

Writes `docs/gallery.zip`, which `make docs` unpacks into the site. For each run it has the pages that `pd share site`
makes of at most ``--most`` labelled components and of all graphs. Refuses to write more than 3 MB.
"""

import argparse
import html
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from param_decomp_lab.errors import UserError
from param_decomp_lab.share.shared_run import SharedRun, open_shared
from param_decomp_lab.share.site import share_site

ROOT = Path(__file__).parents[2]
LARGEST = 3_000_000
"""The most bytes that all pages may have together."""
EXAMPLES, CONTEXT = 3, 20
"""The number of examples in a list, and of tokens in each."""
RUNS: Mapping[str, tuple[str, str]] = {
    "demo": (
        "A small Llama, trained on Python’s documentation",
        "The demo of pd: six MLP matrices of a network of four layers, 64 components each.",
    ),
    "smollm2": (
        "SmolLM2-135M, the MLP of layer 28",
        "A pretrained language model: three matrices of one of its thirty layers, 576 components each.",
    ),
}
"""The title and the description of each run, by its folder in the gallery."""

INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>param-decomp: a gallery</title>
<meta http-equiv="content-security-policy" content="default-src 'none'; style-src 'self'">
<link rel="stylesheet" href="demo/static/browse.css"></head>
<body><main><h1>Components to look at</h1>
<p>What <code>pd browse</code> shows of two decompositions: for each component where it fires, on which tokens, and what
the network predicts there; and how components lead to a prediction. These are copies without a server behind them, so
search, texts of your own and interventions are not there.</p>
{rows}
</main></body></html>
"""


def main() -> None:
    """Writes the gallery. A run without labels is an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in RUNS:
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="RUN")
    parser.add_argument("--most", type=int, default=37, help="components of each run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gallery.zip")
    given = parser.parse_args()
    try:
        pages, size = write_gallery({name: getattr(given, name) for name in RUNS}, given.out, given.most)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{given.out}: {pages} pages, {size / 1e6:.2f} MB; zipped {given.out.stat().st_size / 1e6:.2f} MB")


def write_gallery(runs: Mapping[str, Path], out: Path, most: int) -> tuple[int, int]:
    """Writes the gallery, and returns the number and the bytes of its files. Raises UserError for a run without labels,
    and for more than `LARGEST` bytes."""
    with tempfile.TemporaryDirectory() as work:
        folder, rows = Path(work), []
        for name, path in runs.items():
            run = open_shared(path, None)
            numbers = labelled(run, most)
            made = share_site(run, folder / name, numbers, examples=EXAMPLES, context=CONTEXT)
            title, what = (html.escape(text) for text in RUNS[name])
            rows.append(
                f'<h2><a href="{name}/index.html">{title}</a></h2>\n<p>{what} Here are {made.components} of them, '
                f"labelled, and {made.graphs} graph{'s'[: made.graphs != 1]}.</p>"
            )
        (folder / "index.html").write_text(INDEX.format(rows="\n".join(rows)), "utf-8")
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        size = sum(file.stat().st_size for file in files)
        if size > LARGEST:
            raise UserError(f"the pages have {size / 1e6:.2f} MB, more than {LARGEST / 1e6:g}; take fewer: --most")
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file in files:
                # The date is fixed, so that the same pages give the same file.
                entry = zipfile.ZipInfo(file.relative_to(folder).as_posix())
                archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    return len(files), size


def labelled(run: SharedRun, most: int) -> list[str]:
    """Returns the labelled components for `share_site`: one of each site in turn, in the order of their numbers."""
    queues = {site: sorted(run.labels.of_site(site)) for site in run.harvest.sites}
    chosen: dict[str, list[int]] = {site: [] for site in queues}
    while sum(map(len, chosen.values())) < most and any(queues.values()):
        for site, queue in queues.items():
            if queue and sum(map(len, chosen.values())) < most:
                chosen[site].append(queue.pop(0))
    if not any(chosen.values()):
        raise UserError(f"{run.folder}: has no labels; see docs/labelling.md")
    return [f"{site}:{','.join(map(str, numbers))}" for site, numbers in chosen.items() if numbers]


if __name__ == "__main__":
    main()
