"""The symbols of the original project: each has a valid replacement or a reason, in the error and on the pages."""

from __future__ import annotations

import re
from itertools import groupby

import pytest

from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import read_assignments
from kmatrix.kconfig.migration import NOTHING, Former, former_symbol, former_symbols
from kmatrix.kconfig.tree import Tree
from kmatrix.records.paths import ROOT

DOCS = ROOT / "docs"
SECTIONS = {title: list(rows) for title, rows in groupby(former_symbols(), lambda row: row.section)}
ON_PRUNING_PAGE = ("Pruning", "adamwprune", "SPAM")
HEAD = ["| original | here | note |", "|---|---|---|"]


@pytest.fixture(scope="module")
def tree():
    return Tree.parse(srctree=ROOT)


def refusal(tree, tmp_path, *lines: str) -> ConfigError:
    path = tmp_path / "theirs"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_assignments(tree, path)
    return caught.value


def table_of(rows: list[Former]) -> list[str]:
    """Return the lines of a table on a page."""

    def cell(lines: tuple[str, ...]) -> str:
        return ", ".join(f"`{line}`" for line in lines)

    found = list(HEAD)
    for row in rows:
        other = "; ".join(f"{value}: {cell(lines)}" for value, lines in row.values.items())
        here = "; ".join(part for part in (cell(row.ours), other) if part)
        here = here.replace("{value}", "...").replace("{share}", ".../GPT2_MAX_ITERS")
        here = "another meaning" if row.same else here or "none"
        found.append(f"| `{row.name}` | {here} | {row.why} |")
    return found


@pytest.mark.parametrize(
    ("page", "title"),
    [*(("migration.md", title) for title in SECTIONS), *(("pruning.md", title) for title in ON_PRUNING_PAGE)],
)
def test_the_tables_of_the_pages_are_those_of_the_data(page, title, request):
    path = DOCS / page
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(\n### {re.escape(title)}\n\n)((?:\|.*\n)*)")
    assert pattern.search(text), f"{page} has no section {title}"
    table = "\n".join(table_of(SECTIONS[title])) + "\n"
    if request.config.getoption("--update-golden"):
        path.write_text(pattern.sub(lambda match: match[1] + table, text), encoding="utf-8")
        return
    assert pattern.search(text)[2] == table, f"{page} differs: pytest --update-golden, then read the diff"


def test_a_symbol_has_a_replacement_or_a_reason():
    assert [row.name for row in former_symbols() if not (row.ours or row.values or row.why)] == []
    names = [row.name for row in former_symbols()]
    assert len(names) == len(set(names)) > 150


def test_only_symbols_with_another_meaning_are_known_here(tree):
    known = [row.name for row in former_symbols() if (s := tree.kconf.syms.get(row.name)) and s.nodes]
    assert known == [row.name for row in former_symbols() if row.same]


def test_every_replacement_is_a_valid_line_here(tree, tmp_path):
    """With a default of the symbol here as the value, each line is read without an error."""
    path = tmp_path / "ours"
    for row in former_symbols():
        for line in (*row.ours, *(line for lines in row.values.values() for line in lines)):
            symbol = tree.kconf.syms.get(line.partition("=")[0])
            assert symbol is not None, line
            value = symbol.defaults[0][0].name if symbol.defaults else "y"
            path.write_text("CONFIG_" + line.format(value=value, share="0.5") + "\n", encoding="utf-8")
            (read,) = read_assignments(tree, path)
            assert read.name == symbol.name


def test_a_line_of_the_original_is_refused_with_its_replacement(tree, tmp_path):
    error = refusal(tree, tmp_path, 'CONFIG_LEARNING_RATE="6e-4"')

    assert error.what.splitlines() == [
        f"{tmp_path}/theirs has 1 symbol of the original project (mcgrof/AdamWPrune):",
        f"  line{' ' * (len(str(tmp_path)) + 34)}here",
        f'  {tmp_path}/theirs:1: CONFIG_LEARNING_RATE=6e-4  CONFIG_GPT2_LEARNING_RATE="6e-4"',
    ]
    assert "docs/migration.md" in error.hint


@pytest.mark.parametrize(
    ("lines", "replacement"),
    [
        (["CONFIG_OPTIMIZER_ENABLE_SGD=n"], NOTHING),
        (["# CONFIG_OPTIMIZER_ENABLE_SGD is not set"], NOTHING),
        (["CONFIG_OPTIMIZER_ENABLE_SGD=y"], "CONFIG_MATRIX_GPT2_OPTIMIZER_SGD=y"),
        (["CONFIG_COMPILE_MODEL=n"], "CONFIG_GPT2_COMPILE=n"),
        (["CONFIG_SPAM_ENABLE_CLIP=n"], "CONFIG_GPT2_SPAM_RULE_NORM=y"),
        (["CONFIG_SPAM_ENABLE_CLIP=y"], "CONFIG_GPT2_SPAM_RULE_BOTH=y"),
        (['CONFIG_GPT2_AMP_DTYPE="bfloat16"'], "CONFIG_GPT2_DTYPE_BF16=y"),
        (['CONFIG_GPT2_AMP_DTYPE="float16"'], "none: float16 has no equivalent"),
        (["CONFIG_TEST_SPARSITY_50=y"], "none: computed from SPARSITY_ENABLE_... there"),
        (["CONFIG_TIERING_ANYTHING=y"], "none: optimizer states stay on the GPU"),
        (["CONFIG_BATCH_SIZE=12   # per GPU"], "CONFIG_GPT2_BATCH_SIZE=12"),
        (["CONFIG_PRUNING_WARMUP=1000"], 'CONFIG_GPT2_PRUNING_WARMUP="1000 / GPT2_MAX_ITERS"'),
        (["CONFIG_GPT2_MAX_ITERS=50000", "CONFIG_PRUNING_WARMUP=1000"], 'CONFIG_GPT2_PRUNING_WARMUP="0.02"'),
    ],
)
def test_the_replacement_depends_on_the_value(tree, tmp_path, lines, replacement):
    error = refusal(tree, tmp_path, *lines)

    assert error.what.splitlines()[-1].partition("  ")[2].strip().partition("  ")[2].strip().startswith(replacement)


def test_a_symbol_with_another_meaning_is_listed_in_a_file_of_the_original_only(tree, tmp_path):
    error = refusal(tree, tmp_path, "CONFIG_BATCH_SIZE=12", "CONFIG_PARALLEL_BATCH_SIZE=256")
    assert "PARALLEL_BATCH_SIZE=256" in error.what.splitlines()[-1]
    assert "another meaning: the global batch of a step here" in error.what.splitlines()[-1]

    path = tmp_path / "ours"
    path.write_text("CONFIG_PARALLEL_BATCH_SIZE=256\n", encoding="utf-8")
    assert [item.value for item in read_assignments(tree, path)] == ["256"]


def test_other_mistakes_of_the_file_are_in_the_same_error(tree, tmp_path):
    error = refusal(tree, tmp_path, "CONFIG_BATCH_SIZE=12", "CONFIG_GPT2_SEED=one", "CONFIG_NOBODYS=y")

    assert error.what.splitlines()[3] == "  other lines that have no effect:"
    assert [line.split(": ")[1] for line in error.what.splitlines()[4:]] == ["CONFIG_GPT2_SEED=one", "CONFIG_NOBODYS"]


def test_an_exact_name_is_preferred_to_a_family():
    assert former_symbol("GPT2_ADAMWPRUNE_VARIANT_BITTER0").ours == ("GPT2_PRUNING_STATE=y",)
    assert former_symbol("GPT2_ADAMWPRUNE_VARIANT_BITTER7").name == "GPT2_ADAMWPRUNE_VARIANT_*"
    assert former_symbol("GPT2_SEED") is None
