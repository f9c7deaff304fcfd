"""axe-core, which finds problems of accessibility in a page: from the npm registry, this version only."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tarfile
from typing import Any

from browsing import SCREENSHOTS, Browser
from skips import require_program

PACKAGE = "axe-core-4.14.1"
SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="  # of its archive
CHECK = """const done = arguments[0];
axe.run(document).then((found) => done(found.violations.map((one) => ({
  impact: one.impact, rule: one.id, help: one.help, places: one.nodes.map((node) => node.target.join(" ")).slice(0, 5),
}))), (error) => done([{impact: "critical", rule: String(error), help: "", places: []}]));"""


def serious_violations(window: Browser) -> list[dict[str, Any]]:
    """Return what axe-core calls serious or critical in the page as it is now."""
    window.execute_cdp_cmd("Runtime.evaluate", {"expression": axe_source()})  # its policy does not concern this
    window.set_script_timeout(300)
    return [one for one in window.execute_async_script(CHECK) if one["impact"] in ("serious", "critical")]


def axe_source() -> str:
    """Return the program, which is kept in test-artifacts/. Skips the test if npm is missing."""
    archive = SCREENSHOTS / f"{PACKAGE}.tgz"
    if not archive.is_file():
        SCREENSHOTS.mkdir(exist_ok=True)
        name = "@".join(PACKAGE.rsplit("-", 1))
        subprocess.run([require_program("npm"), "pack", "--silent", name], cwd=SCREENSHOTS, check=True, timeout=300)
    assert base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() == SHA512, archive
    with tarfile.open(archive) as files:
        return files.extractfile("package/axe.min.js").read().decode()
