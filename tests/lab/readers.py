"""Modules of tools that read what `pd share` writes, without what these tools need themselves.

circuit-tracer and sae-dashboard are installed without their dependencies (`make` does so), torch among them, which the
`__init__` of each imports. Their modules of formats need none of them: a package is put in place without being run.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

DISTRIBUTIONS = {"circuit_tracer": "circuit-tracer", "sae_dashboard": "sae-dashboard"}
GRAPH_MODELS = "circuit_tracer.frontend.graph_models"
FEATURE_MODELS = "circuit_tracer.frontend.feature_models"
LOCAL_SERVER = "circuit_tracer.frontend.local_server"
DASHBOARD = "sae_dashboard.neuronpedia.neuronpedia_dashboard"


def installed(package: str) -> Path:
    """The folder of the package, which is looked into and not imported."""
    name = DISTRIBUTIONS[package]
    try:
        return Path(str(distribution(name).locate_file(package)))
    except PackageNotFoundError as error:
        raise RuntimeError(f"install it with `pip install --no-deps {name}`, as make does") from error


def reader_module(name: str) -> ModuleType:
    """The module of this name, loaded anew; nothing of its package stays in `sys.modules`."""
    with _not_run(name.partition(".")[0]):
        return import_module(name)


@contextmanager
def _not_run(package: str) -> Iterator[None]:
    def those() -> list[str]:
        return [name for name in sys.modules if name == package or name.startswith(f"{package}.")]

    before = {name: sys.modules.pop(name) for name in those()}
    folder = installed(package)
    spec = spec_from_file_location(package, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    sys.modules[package] = module_from_spec(spec)
    try:
        yield
    finally:
        for name in those():
            del sys.modules[name]
        sys.modules.update(before)
