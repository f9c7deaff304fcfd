"""Write the runs of a matrix as junit.xml: test cases, for the page of a CI system.

The format has no specification; the elements and attributes here are those that Jenkins, GitLab and pytest agree on.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from kmatrix.records.files import write_bytes
from kmatrix.records.runs import Status
from kmatrix.report.numbers import MatrixNumbers, RunNumbers
from kmatrix.text import printable, shortened

NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, production 2
MOST_MESSAGE = 1_000  # characters of an attribute
MOST_LINE = 2_000  # characters of a line of a log
WHY_SKIPPED = {
    Status.RUNNING: "running: it has not ended yet",
    Status.PLANNED: "planned: it has not started",
    Status.STOPPED: "stopped",
    Status.SKIPPED: "skipped",
}


def write_junit(path: Path, numbers: MatrixNumbers) -> None:
    """Write junit.xml."""
    write_bytes(path, junit(numbers))


def junit(numbers: MatrixNumbers) -> bytes:
    """Return the content of junit.xml: a suite with a test case per run."""
    failed = sum(run.status is Status.FAILED for run in numbers.runs)
    counts = {
        "tests": str(len(numbers.runs)),
        "failures": str(failed),
        "errors": "0",
        "skipped": str(sum(run.status in WHY_SKIPPED for run in numbers.runs)),
        "time": f"{sum(run.wall_s or 0.0 for run in numbers.runs):.3f}",
    }
    root = Element("testsuites", {"name": _text(numbers.name), **counts})
    suite = SubElement(root, "testsuite", {"name": _text(numbers.name), **counts})
    if numbers.created is not None:
        suite.set("timestamp", time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(numbers.created)))
    if host := numbers.provenance.get("host"):
        suite.set("hostname", _text(str(host)))
    for run in numbers.runs:
        suite.append(_case(numbers, run))
    indent(root)
    return bytes(tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _case(numbers: MatrixNumbers, run: RunNumbers) -> Element:
    case = Element("testcase", {"classname": _text(numbers.name), "name": _text(run.name)})
    case.set("time", f"{run.wall_s or 0.0:.3f}")
    if run.status is Status.FAILED:
        message = _text(run.reason or "no reason recorded")
        failure = SubElement(case, "failure", {"message": message, "type": _text(run.kind or "failed")})
        failure.text = "\n".join(_text(line, MOST_LINE) for line in run.log_tail)
    elif run.status in WHY_SKIPPED:
        SubElement(case, "skipped", {"message": _why_skipped(numbers, run)})
    return case


def _why_skipped(numbers: MatrixNumbers, run: RunNumbers) -> str:
    if run.name in numbers.reserve:
        return "reserve: the verdict does not need it"
    return _text(": ".join(filter(None, [WHY_SKIPPED[run.status], run.reason])))


def _text(text: str, most: int = MOST_MESSAGE) -> str:
    """Return text that XML may contain, without control sequences and of limited length."""
    return shortened(NOT_XML.sub("\N{REPLACEMENT CHARACTER}", printable(text)), most)
