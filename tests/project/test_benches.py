"""Every name that a benchmark imports exists: most benchmarks take too long to be run by a test."""

from __future__ import annotations

import ast
import importlib
import sys

import pytest

from factories import ROOT

BENCHES = sorted((ROOT / "bench").glob("*.py"))


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.name)
def test_every_name_that_a_benchmark_imports_exists(path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")  # a module of a package
        elif isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
