"""circuit-tracer's own page, served on loopback by its own handler, and the scripts that it takes from elsewhere.

These come from the npm registry, in the versions below. A request to anywhere else fails the test that made it.
"""

import functools
import http.server
import json
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, Route

from tests.lab.readers import LOCAL_SERVER, reader_module

NPM = shutil.which("npm")
PACKAGES = ("d3-collection@1.0.7", "d3@7.9.0", "d3-jetpack@2.2.1", "dagre@0.8.5", "pako@2.1.0")
SCRIPTS = {
    # d3-jetpack still needs the older d3-collection, of whose names d3 takes back those that it has itself.
    "d3.js": ("d3-collection-1.0.7/package/dist/d3-collection.js", "d3-7.9.0/package/dist/d3.js"),
    "jetpack_2024-07-20.js": ("d3-jetpack-2.2.1/package/build/d3-jetpack.cjs",),
    "dagre.min.js": ("dagre-0.8.5/package/dist/dagre.min.js",),
    "pako.min.js": ("pako-2.1.0/package/dist/pako.min.js",),
}
"""Files of the packages, by the last part of the address at which the page asks for a script."""
IN_THEIRS = """
const plain = d3.conventions
d3.conventions = options => {
  const c = plain(options)
  c.drawAxis = svg => d3.drawAxis({...c, svg})
  return c
}"""
"""What the page's own build of d3-jetpack has besides: a method of a chart."""
NOT_NEEDED = ("hotserver-client-ws.js", "npy_v0.js")
"""These reload a page under development, and read arrays of NumPy."""
DEMANDED = "PD_TEST_PAGES"
"""Environment variable by which CI says that what these tests need must be there."""


def fetch_packages(folder: Path) -> None:
    """Unpacks the packages in ``folder``. Skips the test where there is no npm or no registry, except in CI."""
    if NPM is None:
        missing("no npm here (Debian: apt-get install npm), from whose registry the page's scripts come")
    options = ("--loglevel=error", "--prefer-offline", "--fetch-retries=1", "--fetch-timeout=30000")
    try:
        subprocess.run(
            [NPM, "pack", *options, *PACKAGES], cwd=folder, check=True, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        missing(f"npm cannot fetch the page's scripts: {error} {error.stderr}")
    for archive in folder.glob("*.tgz"):
        with tarfile.open(archive) as packed:
            packed.extractall(folder / archive.stem, filter="data")
    assert all((folder / file).is_file() for files in SCRIPTS.values() for file in files)


def missing(what: str) -> NoReturn:
    """Skips the test, or fails it in CI."""
    if os.environ.get(DEMANDED):
        pytest.fail(what)
    pytest.skip(what)


@contextmanager
def serving(data: Path) -> Iterator[str]:
    """The address of the page, with the folder ``data`` as its data folder."""
    local_server = reader_module(LOCAL_SERVER)
    handler = functools.partial(
        local_server.CircuitGraphHandler, frontend_dir=local_server.DEFAULT_FRONTEND_DIR, data_dir=str(data)
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def open_graph(page: Page, address: str, slug: str, packages: Path) -> list[str]:
    """Opens a graph and waits until it is drawn. The list gets the addresses of what was asked for elsewhere, and of
    what was not there."""
    missed: list[str] = []

    def answer(route: Route) -> None:
        url = route.request.url
        name = urlsplit(url).path.rpartition("/")[2]
        if url.startswith(f"{address}/"):
            route.continue_()
        elif name in SCRIPTS:
            script = "\n".join((packages / file).read_text() for file in SCRIPTS[name])
            script += IN_THEIRS if "jetpack" in name else ""
            route.fulfill(body=script, content_type="text/javascript")
        elif name in NOT_NEEDED:
            route.fulfill(body="", content_type="text/javascript")
        else:
            missed.append(url)
            route.abort()

    page.route("**/*", answer)
    page.on("response", lambda response: missed.append(response.url) if response.status >= 400 else None)
    page.goto(f"{address}/index.html?slug={slug}")
    page.locator(".link-graph text.node").first.wait_for(state="attached")
    page.locator(".subgraph .supernode-container").first.wait_for(state="attached")
    return missed


def drawn(page: Page) -> tuple[dict[str, str], set[tuple[str, str, float]]]:
    """Names of the nodes that the page draws, by id; and source, target and weight of each link between them."""
    found = page.evaluate(
        """() => {
            const nodes = d3.selectAll('.link-graph text.node').data();
            return JSON.stringify({
                nodes: nodes.map(d => [d.nodeId, d.ppClerp]),
                links: nodes.flatMap(d => d.sourceLinks.map(e => [e.source, e.target, e.weight])),
            });
        }"""
    )
    read = json.loads(found)
    return dict(read["nodes"]), {(source, target, weight) for source, target, weight in read["links"]}
