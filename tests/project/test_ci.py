"""`.ci/run` installs the programs that tests require, so that none of them is skipped there."""

from __future__ import annotations

import ast
import re

from factories import ROOT
from skips import require_program


def required(path):
    """Return the arguments of the calls of require_program in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == require_program.__name__:
            (argument,) = node.args
            assert isinstance(argument, ast.Constant), f"{path}:{node.lineno}: .ci/run reads literals only"
            yield argument.value


def test_ci_installs_every_program_that_a_test_requires():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"grep -rhoE '([^']+)'", script)
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = {match for path in files for match in re.findall(pattern, path.read_text(encoding="utf-8"))}
    programs = {program for path in files for program in required(path)}
    assert {re.sub(r'.*"(.*)".*', r"\1", call) for call in found} == programs
    assert {"chromium", "tmux"} <= programs
