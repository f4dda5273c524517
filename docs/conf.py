"""The documentation site, built by `make docs`: the pages of this folder, and the API reference from docstrings."""

import os
import shutil
import sys
import typing
import zipfile
from pathlib import Path
from typing import Any

from myst_nb.core import render

# The notebooks call `pd` as a shell finds it.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

# jaxtyping then prints `Float[Array, "n d"]` in signatures, without the modules in which JAX keeps its classes.
typing.GENERATING_DOCUMENTATION = "param_decomp"  # type: ignore[attr-defined]

project = "param-decomp"
html_title = project
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
exclude_patterns = ["templates"]
templates_path = ["templates"]

# Anchors of headings as the forges make them: a link to a section works there and here.
myst_heading_anchors = 4

# The notebooks are kept without outputs, and executed here; in later builds, those that changed. A cell that fails is
# an error of the build.
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parents[1] / "build" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True


def _join_streams(outputs: list[Any]) -> list[Any]:
    """Pieces of a stream that follow each other, as one. A `%%bash` cell gives pieces of a hundred bytes, and myst-nb's
    own function would begin a line with each."""
    joined: list[Any] = []
    for output in outputs:
        if output["output_type"] == "stream" and joined and joined[-1].get("name") == output["name"]:
            joined[-1]["text"] += output["text"]
        else:
            joined.append(output)
    return joined


render.coalesce_streams = _join_streams

# In docstrings ``literal`` is code; `name` links to what its module or class calls so, and is code otherwise.
default_role = "py:obj"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
add_module_names = False
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 100

# No fonts, scripts or images from other hosts; all is served from the site's own folder, or opened as files.
html_theme = "furo"
html_copy_source = False
html_show_copyright = False


def _unpack_gallery() -> list[str]:
    """The pages of the gallery (`experiments/evidence/gallery.py`), which go into the site as they are."""
    folder = Path(__file__).parents[1] / "build" / "gallery"
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(Path(__file__).with_name("gallery.zip")) as archive:
        archive.extractall(folder / "gallery")
    return [str(folder)]


html_extra_path = _unpack_gallery()

_IN_THE_ROOT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the repository's root that pages of this folder include: links to the former are to lead to the latter."""


def _link_pages_of_the_root(prefix: str, own: str, content: list[str]) -> None:
    for name, page in _IN_THE_ROOT.items():
        content[0] = content[0].replace(f"]({prefix}{name})", f"]({own}{page})")


def setup(app: Any) -> None:
    app.connect("source-read", lambda app, page, content: _link_pages_of_the_root("../", "", content))
    app.connect("include-read", lambda app, file, page, content: _link_pages_of_the_root("", "docs/", content))
