"""Measures how fast `pd browse` answers a given harvest, how large its pages are, and how much memory it takes.

    python -m experiments.benchmarks.browse_load FOLDER                 # 500 random requests to the first harvest there
    python -m experiments.benchmarks.browse_load FOLDER --requests 100 --seed 3

Requests are drawn at random. Half are pages of components; the others are lists of one site's components or of all, in
all orders, filters and searches, components within a list, and the page of all sites. Prints the times of whole
answers, over the machine's own network, and their compressed sizes, by kind of request.
"""

import argparse
import gzip
import http.client
import random
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from html import unescape
from pathlib import Path
from urllib.parse import quote

ORDERS = ("importance", "density", "largest", "activation", "largest_activation", "unlabelled", "number")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    began = time.perf_counter()
    command = [sys.executable, "-m", "param_decomp_lab", "browse", str(given.folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = re.match(r"http://([^/]+)/", process.stdout.readline())
    assert address is not None, "pd browse did not start"

    def get(path: str) -> tuple[float, int, str]:
        connection = http.client.HTTPConnection(address[1])
        asked = time.perf_counter()
        connection.request("GET", path, headers={"accept-encoding": "gzip"})
        answer = connection.getresponse()
        body = answer.read()
        took = time.perf_counter() - asked
        page = (gzip.decompress(body) if answer.headers["content-encoding"] == "gzip" else body).decode()
        assert answer.status == 200, (path, page)
        return took, len(body), page

    try:
        _, _, page = get("/")
        start = time.perf_counter() - began
        found = re.search(r'<li><a href="([^"]+)"', page)
        assert found is not None, f"no harvest in {given.folder}"
        harvest = unescape(found[1])
        sites: dict[str, int] = {}
        number = 1
        while True:
            _, _, page = get(f"{harvest}?page={number}")
            rows = re.findall(r'<th scope="row"><a href="([^"]+)">.*?</a></th><td class="num">([\d,]+)</td>', page)
            sites |= {unescape(link): int(C.replace(",", "")) for link, C in rows}
            number += 1
            if 'rel="next"' not in page:
                break
        shown = re.findall(r'<span class="token">([^<]+)</span>', get(next(iter(sites)))[2])
        words = [quote(unescape(token).strip()) for token in shown if token.strip()] or ["the"]
        answers: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for _ in range(given.requests):
            site = draw.choice(list(sites))
            component = draw.randrange(sites[site])
            asked = f"sort={draw.choice(ORDERS)}&order={draw.choice(('', 'up'))}"
            everywhere = f"{harvest}/components?{asked}&page={draw.randrange(1, 1000)}"
            of_all = [("all components", everywhere)] * 2
            of_all += [("all components, filtered", f"{everywhere}&min_density=1e-5&max_density={draw.random():.4f}")]
            of_all += [("all components, searched", f"{harvest}/components?search={draw.choice(words)}&{asked}")]
            kind, path = draw.choice(
                [("component", f"{site}/{component}")] * 7
                + [("list", f"{site}?sort={draw.choice(ORDERS)}&page={draw.randrange(1, 20)}")] * 2
                + [("search", f"{site}?search={draw.choice(words)}")]
                + [("component of a list", f"{site}/{component}?sort=density")]
                + [("all sites", harvest)]
                + of_all
            )
            answers[kind].append(get(path)[:2])
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = {key: int(re.search(rf"{key}:\s+(\d+)", status)[1]) / 1024 for key in ("VmRSS", "VmHWM")}  # type: ignore[index]
    finally:
        process.terminate()
        process.wait()
    print(f"sites, components    {len(sites)}, {sum(sites.values()):,}")
    print(f"start                {start:.2f} s until the first page is there")
    print(f"resident             {resident['VmRSS']:.0f} MiB at the end, {resident['VmHWM']:.0f} MiB at most")
    answers["all"] = [answer for of_kind in answers.values() for answer in of_kind]
    print(f"{'':25} {'number':>7} {'median':>8} {'95 %':>8} {'longest':>8}   largest page")
    for kind, of_kind in answers.items():
        times = sorted(1e3 * took for took, _ in of_kind)
        last = times[min(len(times) - 1, int(0.95 * len(times)))]
        sizes = max(size for _, size in of_kind) / 1000
        row = f"{len(times):7} {statistics.median(times):5.0f} ms {last:5.0f} ms {times[-1]:5.0f} ms   {sizes:.1f} kB"
        print(f"{kind:25} {row}")


if __name__ == "__main__":
    main()
