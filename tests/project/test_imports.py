"""The import graph: layers, cycles, libraries with a single importing package, and imports inside functions.

The rules are in pyproject.toml, [tool.kmatrix.imports]; docs/developing.md explains them.
Imports inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kmatrix.sources import SHARED

ROOT = Path(__file__).resolve().parents[2]
RULES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["kmatrix"]["imports"]
OURS = ("kmatrix", "gpt2", "scripts")


class Arrow(NamedTuple):
    """The target of one import statement as a dotted module name. inside: within a function."""

    module: str
    target: str
    line: int
    inside: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part not in ("lib", "__init__"))


@cache
def modules() -> dict[str, ast.Module]:
    paths = [path for folder in ("lib/kmatrix", "gpt2", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {dotted(path): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in paths}


def imported_modules(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Yield the modules that a module imports: `a.b` if `from a import b` names a module, otherwise `a`."""
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, inside = todo.pop()
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        todo += [(child, inside) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, inside
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import in line {node.lineno}"
            base = node.module or ""
            for alias in node.names:
                module_name = f"{base}.{alias.name}"
                yield module_name if module_name in modules() else base, node.lineno, inside


@cache
def arrows() -> tuple[Arrow, ...]:
    return tuple(Arrow(module, *found) for module, tree in modules().items() for found in imported_modules(tree))


def own_imports() -> list[Arrow]:
    return [arrow for arrow in arrows() if arrow.target.partition(".")[0] in OURS]


def package(module: str) -> str:
    """Return the name of the layer of a module: kmatrix.report.gpu.text -> report, gpt2.train -> gpt2."""
    parts = module.split(".")
    return parts[1] if parts[0] == "kmatrix" and len(parts) > 1 else parts[0]


def below(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


@cache
def targets_of() -> dict[str, set[str]]:
    direct: dict[str, set[str]] = {}
    for arrow in arrows():
        direct.setdefault(arrow.module, set()).add(arrow.target)
    return direct


def reachable_modules(start: str) -> dict[str, list[str]]:
    """Return every module reachable by imports from `start`, with the import path."""
    direct = targets_of()
    found, todo = {start: [start]}, [start]
    while todo:
        for target in direct.get(here := todo.pop(), ()):
            if target not in found:
                found[target] = [*found[here], target]
                todo.append(target)
    return found


def test_each_package_has_one_layer():
    floors = [name for floor in RULES["floors"] for name in floor]
    assert len(floors) == len(set(floors))
    assert {package(module) for module in modules()} - {"kmatrix", "__main__"} == set(floors)


def test_imports_point_to_lower_layers():
    floor = {name: level for level, names in enumerate(RULES["floors"]) for name in names}
    uphill = [
        str(arrow)
        for arrow in own_imports()
        if (source_package := package(arrow.module)) not in ("kmatrix", "__main__")
        and (target_package := package(arrow.target)) not in ("kmatrix", source_package)
        and floor[source_package] >= floor[target_package]
    ]
    assert not uphill, "\n".join(uphill)


def test_the_copy_of_the_trainer_in_a_matrix_has_exactly_what_it_imports():
    ways = [reachable_modules(start) for start in modules() if below(start, "gpt2")]
    found = {package(module) for way in ways for module in way if module.startswith("kmatrix.")}
    assert found == {name.removesuffix(".py") for name in SHARED} - {"__init__"}


def test_modules_have_no_import_cycle():
    direct: dict[str, set[str]] = {module: set() for module in modules()}
    for arrow in own_imports():
        if arrow.target in direct and arrow.target != arrow.module:
            direct[arrow.module].add(arrow.target)
    while free := [module for module, targets in direct.items() if not targets]:
        for module in free:
            del direct[module]
        for targets in direct.values():
            targets.difference_update(free)
    assert not direct, "\n".join(f"{module} -> {', '.join(sorted(targets))}" for module, targets in direct.items())


def test_forbidden_modules_are_not_reachable():
    for rule in RULES["never"]:
        for module in (name for name in modules() if below(name, rule["from"])):
            for target, way in reachable_modules(module).items():
                hit = next((name for name in rule["to"] if below(target, name)), None)
                assert hit is None, " -> ".join(way)


def test_a_library_is_imported_in_one_place():
    strays = [
        str(arrow)
        for library, doors in RULES["doors"].items()
        for arrow in arrows()
        if below(arrow.target, library) and not any(below(arrow.module, door) for door in doors)
    ]
    assert not strays, "\n".join(strays)


def test_only_heavy_packages_are_imported_inside_functions():
    heavy = tuple(RULES["heavy"])
    strays = [str(arrow) for arrow in arrows() if arrow.inside and not arrow.target.startswith(heavy)]
    assert not strays, "\n".join(strays)


def test_each_heavy_package_is_imported_inside_a_function():
    for name in RULES["heavy"]:
        assert any(arrow.inside and below(arrow.target, name) for arrow in arrows()), f"{name}: no longer needed"


def test_no_folder_has_more_than_fourteen_modules():
    folders: dict[Path, int] = {}
    for path in [*(ROOT / "lib").rglob("*.py"), *(ROOT / "gpt2").rglob("*.py")]:
        folders[path.parent] = folders.get(path.parent, 0) + (path.name not in ("__init__.py", "__main__.py"))
    assert {str(folder): count for folder, count in folders.items() if count > RULES["most_modules"]} == {}
