"""Which code a matrix runs: its commit, the trainer's sources, and what no commit has.

The patch is the difference of the tracked files from the last commit, as `git apply` takes it. Files that may hold
secrets are never in it, and files that git does not track are named only.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix.redaction import holds_key

SHARED = ("errors", "mix", "shapes", "stats")  # modules of kmatrix that the trainer imports, beside records
SOURCES = frozenset({".c", ".h", ".py", ".sh", ".toml"})  # and Kconfig, defconfigs/
SECRETS = (".config*", ".env*", ".netrc", "*.key", "*.pem", "*.p12", "id_*", "*secret*", "*credential*", "*password*")
PATCH_LIMIT = 4 * 2**20  # bytes
MOST_NAMES = 100  # untracked files that are named
GIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The code of one moment. commit, dirty: None outside a repository.

    sha256: of the trainer's sources together.  files: the SHA-256 of each of them, its first 16 digits.
    patch: what `git apply` makes of the commit's code this one; None where there is none, and no_patch says why.
    untracked: source files that neither the commit nor the patch has.
    """

    commit: str | None
    dirty: bool | None
    sha256: str
    files: dict[str, str]
    patch: bytes | None = field(default=None, repr=False)
    no_patch: str = ""
    untracked: tuple[str, ...] = ()


def code_of(root: Path) -> Code:
    """Return the code in the project's folder."""
    commit = _text(root, "rev-parse", "HEAD")
    changes = _text(root, "status", "--porcelain", "--untracked-files=no")
    patch, no_patch = _patch(root) if commit and changes else (None, "")
    files = trainer_files(root)
    return Code(
        commit=commit,
        dirty=None if changes is None else bool(changes),
        sha256=_whole(files),
        files={name: digest[:16] for name, digest in files.items()},
        patch=patch,
        no_patch=no_patch,
        untracked=_untracked(root),
    )


def trainer_files(root: Path) -> dict[str, str]:
    """Return the SHA-256 of everything that a trainer is made of: gpt2/ and what it takes of kmatrix."""
    ours = root / "lib" / "kmatrix"
    paths = [*(root / "gpt2").rglob("*.py"), *(ours / "records").rglob("*.py")]
    paths += [ours / f"{name}.py" for name in SHARED]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def _whole(files: dict[str, str]) -> str:
    return hashlib.sha256("".join(f"{name}\0{digest}\n" for name, digest in files.items()).encode()).hexdigest()


def _patch(root: Path) -> tuple[bytes | None, str]:
    """Return the patch, or None and why there is none."""
    without = [f":(exclude,glob,icase)**/{pattern}" for pattern in SECRETS]
    plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--binary", "--src-prefix=a/", "--dst-prefix=b/")
    patch = _git(root, "diff", "HEAD", *plain, "--", ".", *without)
    if patch is None:
        return None, "git diff failed"
    if len(patch) > PATCH_LIMIT:
        return None, f"its {len(patch) / 2**20:.1f} MiB are more than the {PATCH_LIMIT // 2**20} that are kept"
    if holds_key(patch.decode(errors="replace")):
        return None, "it holds a key: give keys in the environment only"
    return (patch, "") if patch else (None, "only files that are never kept have changed")


def _untracked(root: Path) -> tuple[str, ...]:
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", ".")
    names = (listed or b"").decode(errors="replace").split("\0")
    sources = [name for name in names if _is_source(Path(name))]
    return tuple(sorted(sources)[:MOST_NAMES])


def _is_source(path: Path) -> bool:
    return path.suffix in SOURCES or path.name.startswith("Kconfig") or path.parts[:1] == ("defconfigs",)


def _text(root: Path, *arguments: str) -> str | None:
    output = _git(root, *arguments)
    return None if output is None else output.decode(errors="replace").strip()


def _git(root: Path, *arguments: str) -> bytes | None:
    """Return what git prints; None where there is no git, no repository, or no answer."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            timeout=GIT_S,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
