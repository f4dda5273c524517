"""Copies the code of a run from the checkout, so that later edits do not affect the run."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.folder import COMMIT_FILE

ROOT = Path(__file__).parents[2]
PARTS = ("param_decomp_jax", "param_decomp_aot", "param_decomp_lab", "slurm", "pyproject.toml")
"""Files that are copied and must have no uncommitted changes. Configurations are saved in the run folder instead."""
NOT_COPIED = ":(exclude)param_decomp_lab/configs"
"""A link to `configs/`, which would be broken in the copy."""
CODE, PATCH = "code", "changes.patch"


@dataclass(frozen=True)
class Code:
    """A git checkout. ``changes``: lines of `git status` for its code."""

    root: Path
    commit: str
    changes: tuple[str, ...]

    @classmethod
    def from_checkout(cls, root: Path = ROOT) -> "Code":
        """Returns the checkout that contains the running code. Raises UserError if there is none."""
        try:
            top = _git(root, "rev-parse", "--show-toplevel").strip()
        except (UserError, FileNotFoundError) as error:
            raise UserError(
                f"{root} is not a git checkout; a run is launched from one, since it keeps a copy of the code. Clone "
                f"the repository, install it with `pip install --editable .` and launch from there. ({error})"
            ) from error
        if Path(top).resolve() != root.resolve():
            raise UserError(
                f"{root} is not a git checkout of its own (it lies in {top}); a run is launched from one, since it "
                "keeps a copy of the code. Clone the repository, install it with `pip install --editable .` and launch "
                "from there"
            )
        status = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *PARTS)
        return cls(root, _git(root, "rev-parse", "HEAD").strip(), tuple(status.splitlines()))

    def refuse_changes(self) -> None:
        """Raises UserError if there are uncommitted changes."""
        if not self.changes:
            return
        shown = "\n  ".join(self.changes[:10]) + (
            f"\n  … ({len(self.changes)} files)" if len(self.changes) > 10 else ""
        )
        raise UserError(
            f"{self.root} has uncommitted changes:\n  {shown}\n"
            "commit them, or include them with --with-changes: the run then keeps them as a patch beside its code"
        )

    def copy_to(self, folder: Path) -> None:
        """Copies the current code to ``folder``, including uncommitted changes, which are also saved as a patch.

        Files are made read-only; folders stay writable so that they can be removed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="param-decomp-") as scratch:
            tree, environment = self.commit, dict(os.environ)
            if self.changes:
                # A temporary index and object store leave the repository of the checkout unchanged.
                objects = _git(self.root, "rev-parse", "--git-path", "objects").strip()
                environment |= {
                    "GIT_INDEX_FILE": f"{scratch}/index",
                    "GIT_OBJECT_DIRECTORY": scratch,
                    "GIT_ALTERNATE_OBJECT_DIRECTORIES": str((self.root / objects).resolve()),
                }
                _git(self.root, "read-tree", self.commit, environment=environment)
                _git(self.root, "add", "--all", "--", *PARTS, environment=environment)
                tree = _git(self.root, "write-tree", environment=environment).strip()
                patch = f"--output={folder / PATCH}"
                _git(self.root, "diff", "--binary", patch, self.commit, tree, "--", *PARTS, environment=environment)
            archive = Path(scratch) / "code.tar"
            _git(self.root, "archive", f"--output={archive}", tree, "--", *PARTS, NOT_COPIED, environment=environment)
            shutil.unpack_archive(archive, folder, "tar")
        suffix = f", with {PATCH}" if self.changes else ""
        (folder / COMMIT_FILE).write_text(f"{self.commit}{suffix}\n")
        for file in folder.rglob("*"):
            if file.is_file() and not file.is_symlink():
                file.chmod(file.stat().st_mode & ~0o222)


def _git(root: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Returns the output of a git command. Raises a UserError with git's message if it fails."""
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], env=environment, capture_output=True, text=True,
        errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        raise UserError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout
