"""The uncommitted changes of the checkout as a patch for `git apply`, without the hunks that hold keys."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kmatrix.redaction.forms import NAMED, SHELL, keys_of
from kmatrix.redaction.redactor import Redactor, looks_random, redactor

# Files that are never in a patch.
SECRET_FILES = (
    *(".config*", ".env*", ".netrc", "_netrc", "*.key", "*.pem", "*.p12", "id_*"),
    *("*secret*", "*credential*", "*password*"),
)
PATCH_LIMIT = 4 * 2**20  # bytes
GIT_S = 20.0
LONGEST_LINE = 10_000  # characters; the detectors take quadratic time, and no source has such lines
# A line of a private key, or any base64, also as one of the strings of a source.
ENCODED = re.compile(r"\s*[\"']?[A-Za-z0-9+/]{60,}+={0,2}(?:\\[nr]){0,2}[\"']?[,+)\\\s]*+")
BY_NAME = ("Secret Keyword", "Basic Auth Credentials")  # kinds that detect-secrets finds by the text around them
SEVERAL_LINES = ("netrc entry",)  # kinds of keys that may have their parts in several lines
HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
ALL_LEFT_OUT = "every change contains a key, or cannot be searched for keys"
BINARY = (b"GIT binary patch", b"Binary files ")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A key in the changes, whose hunk is left out of the patch."""

    file: str
    line: int  # in the new file; of a removed line, in the old one; 0: the file as a whole
    kind: str  # never the key itself

    def describe(self) -> str:
        """Return `gpt2/train.py:12: AWS Access Key`."""
        return f"{self.file}:{self.line}: {self.kind}" if self.line else f"{self.file}: {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePatch:
    """The patch of the uncommitted changes."""

    data: bytes | None = field(default=None, repr=False)  # `git apply` makes this code from the commit
    why: str = ""  # why there is no patch
    left_out: tuple[LeftOut, ...] = ()


def code_patch(root: Path) -> CodePatch:
    """Return the patch of a checkout with uncommitted changes."""
    without = [f":(exclude,glob,icase)**/{pattern}" for pattern in SECRET_FILES]
    # The user's git configuration must not change the format of the patch.
    plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--binary", "--src-prefix=a/", "--dst-prefix=b/")
    diff = git(root, "diff", "HEAD", *plain, "--", ".", *without)
    if diff is None:
        return CodePatch(why="git diff failed")
    if not diff:
        return CodePatch(why="only files that may contain secrets have changed")
    if len(diff) > PATCH_LIMIT:
        size = f"its {len(diff) / 2**20:.1f} MiB exceed the limit of {PATCH_LIMIT // 2**20} MiB"
        return CodePatch(why=size)
    plugins = _plugins()
    if plugins is None:
        return CodePatch(why="it cannot be searched for keys: detect-secrets is not installed (make setup)")
    # The results are shared and uploaded: a key in a patch would travel with them.
    data, left_out = without_keys(diff, Detectors(redactor(), plugins))
    return CodePatch(data=data or None, why="" if data else ALL_LEFT_OUT, left_out=tuple(left_out))


@dataclass(frozen=True, slots=True)
class Detectors:
    """Everything that recognizes keys."""

    known: Redactor  # of the environment and of .netrc
    plugins: Sequence[Any]  # of detect-secrets


def without_keys(diff: bytes, detectors: Detectors) -> tuple[bytes, list[LeftOut]]:
    """Return a diff without the hunks that contain keys, and what was left out."""
    kept, left_out = [], []
    for part in re.split(rb"^(?=diff --git )", diff, flags=re.MULTILINE):
        if part:
            text, found = _file_without_keys(part, detectors)
            kept.append(text)
            left_out += found
    return b"".join(kept), left_out


def _file_without_keys(part: bytes, detectors: Detectors) -> tuple[bytes, list[LeftOut]]:
    """Return the part of a diff that changes one file without keys: b"" if nothing is left."""
    head, *hunks = re.split(rb"^(?=@@ -)", part, flags=re.MULTILINE)
    name = _name(head)
    if any(line.startswith(BINARY) for line in head.splitlines()):
        # Compressed: nobody can search it.
        return b"", [LeftOut(name, 0, "binary file, not searched for keys")]
    # The names in the head may hold a key, too.
    if kinds := _kinds(name, head.decode(errors="replace").replace("\n", " "), detectors, is_head=True):
        return b"", [LeftOut("(file name)", 0, kind) for kind in kinds]
    kept, left_out, moved = [], [], 0
    for hunk in hunks:
        found = list(_keys_in_hunk(name, hunk, detectors))
        old, new = _sizes(hunk)
        if found:
            left_out += found
            moved += new - old
        else:
            kept.append(_moved(hunk, -moved))
    if left_out and not kept:
        return b"", left_out
    return head + b"".join(kept), left_out


def _keys_in_hunk(name: str, hunk: bytes, detectors: Detectors) -> Iterator[LeftOut]:
    """Yield the keys in a hunk: added and removed lines, the context, and the function named in its first line."""
    first, *lines = hunk.decode(errors="replace").split("\n")
    match = HUNK.match(hunk)
    old, new = (int(match[1]), int(match[3])) if match else (0, 0)
    # Over several lines, as in .netrc. Context and changes together, as the file had them before or has them now.
    for sign in "+-":
        text = "\n".join(line[1:] for line in lines if line[:1] in (sign, " "))
        yield from (LeftOut(name, new, kind) for kind in detectors.known.keys_in(text) if kind in SEVERAL_LINES)
    yield from (LeftOut(name, new, kind) for kind in _kinds(name, first.rpartition("@@")[2], detectors))
    for line in lines:
        removed = line.startswith("-")
        for kind in _kinds(name, line[1:], detectors):
            yield LeftOut(name, old if removed else new, f"{kind} (removed line)" if removed else kind)
        old += line[:1] in ("-", " ")
        new += line[:1] in ("+", " ")


def _kinds(name: str, line: str, detectors: Detectors, *, is_head: bool = False) -> list[str]:
    """Return the kinds of the keys in a line. name: of its file, which decides how a detector reads it."""
    if len(line) > LONGEST_LINE and not is_head:
        return ["line too long to be searched for keys"]
    found = detectors.known.keys_in(line)
    if keys_of(SHELL, line) or any(looks_random(key.rstrip("\\")) for key in NAMED.keys(line)):
        found.append(NAMED.kind)
    if is_head:
        return found
    if ENCODED.fullmatch(line):
        found.append("line of base64, as in a private key")
    detected = [secret.type for detector in detectors.plugins for secret in _detected(detector, name, line)]
    if detected and not _is_allowed(name, line):
        found += detected
    return list(dict.fromkeys(found))


def _detected(detector: Any, name: str, line: str) -> Iterator[Any]:
    """Yield the findings of one detector, except those that are obviously no key."""
    from detect_secrets.filters import heuristic

    for secret in detector.analyze_line(filename=name, line=line):
        value = secret.secret_value or ""
        by_name, by_entropy = secret.type in BY_NAME, "Entropy" in secret.type
        # `password="{password}"`, `"$PASSWORD"`, `"****"`
        placeholder = heuristic.is_templated_secret(value) or heuristic.is_prefixed_with_dollar_sign(value)
        if by_name and (placeholder or heuristic.is_not_alphanumeric_string(value)):
            continue
        if by_entropy and (heuristic.is_sequential_string(value) or heuristic.is_potential_uuid(value)):
            continue
        yield secret


def _is_allowed(name: str, line: str) -> bool:
    """Return whether the author marked a line for detect-secrets, with `# pragma: allowlist secret`.

    Values of the environment, and formats that only keys have, are left out even so.
    """
    from detect_secrets.filters.allowlist import is_line_allowlisted
    from detect_secrets.util.code_snippet import get_code_snippet

    return bool(is_line_allowlisted(name, line, get_code_snippet([line], 1)))


@cache
def _plugins() -> Sequence[Any] | None:
    """Return the detectors of detect-secrets, None if it is not installed. None of them contacts a server."""
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    except ImportError:
        return None
    # Public addresses are not secret. The plugins are called directly: the package's own scan may verify a finding,
    # which sends it to the service that it belongs to.
    kinds: Mapping[str, Callable[[], Any]] = get_mapping_from_secret_type_to_class()
    return [make() for kind, make in sorted(kinds.items()) if "IP" not in kind.split()]


def _name(head: bytes) -> str:
    """Return the name of the file of a diff: the new one, or the old one of a removed file."""
    for start in (b"+++ b/", b"--- a/", b"rename to ", b"copy to "):
        for line in head.splitlines():
            if line.startswith(start):
                return line[len(start) :].decode(errors="replace").rstrip("\t")
    return head.split(b"\n", 1)[0].decode(errors="replace").rpartition(" b/")[2].rstrip('"')


def _sizes(hunk: bytes) -> tuple[int, int]:
    """Return the number of lines of the old and of the new file that a hunk covers."""
    match = HUNK.match(hunk)
    if not match:
        return 0, 0
    return int(match[2] or 1), int(match[4] or 1)


def _moved(hunk: bytes, lines: int) -> bytes:
    """Return a hunk whose place in the new file is moved, because an earlier one was left out."""
    match = HUNK.match(hunk)
    if not match or not lines:
        return hunk
    return hunk[: match.start(3)] + str(int(match[3]) + lines).encode() + hunk[match.end(3) :]


def git(root: Path, *arguments: str) -> bytes | None:
    """Return the output of git, None without git or a repository, or after a timeout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            timeout=GIT_S,
            check=False,
            # By default `git status` locks the index, and a commit at the same time could fail.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
