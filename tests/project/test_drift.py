"""The Kconfig files, the trainer and the control side agree: every symbol has a reader and every field a symbol."""

from __future__ import annotations

import ast
import re
from dataclasses import fields as of

import kconfiglib as kc
from msgspec import structs

from kmatrix.engines.kubernetes import KubernetesSettings
from kmatrix.forms import FORMS
from kmatrix.kconfig.tree import NOT_AN_AXIS, Tree, check_text
from kmatrix.matrix.axes import ALIASES
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.alerts import SYMBOLS, Thresholds
from programs import ROOT

TREE = Tree.parse(srctree=ROOT)
SETTINGS = TREE.names()
OURS = [name for name in SETTINGS if not name.startswith("GPT2_")]
RESOLVED = {
    "vocab_size",
    "global_batch",
    "data_sha256",
    "data_shards",
    "init_sha256",
}  # fields derived from other fields
KCONFIGS = [ROOT / name for name in TREE.kconf.kconfig_filenames]
CONTROL = list((ROOT / "lib" / "kmatrix").rglob("*.py"))
TRAINER = list((ROOT / "gpt2").rglob("*.py"))
TRAIN_CONFIG = ROOT / "lib" / "kmatrix" / "records" / "train_config.py"


def fields():
    """Return the fields of TrainConfig with their types as text."""
    same = {"Size": "int", "Int": "int", "Amount": "float"}  # with a range
    return {one.name: " | ".join(same.get(t, t) for t in str(one.type).split(" | ")) for one in of(TrainConfig)}


def attributes(paths):
    """Return every attribute that is accessed in these files, and every string in them."""
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def has_prompt():
    return [symbol for symbol in TREE.symbols if any(node.prompt for node in symbol.nodes)]


def test_trainer_symbols_and_train_config_fields_are_the_same():
    symbols = {name.removeprefix("GPT2_").lower() for name in SETTINGS if name.startswith("GPT2_")}

    assert symbols | RESOLVED == set(fields())
    assert not symbols & RESOLVED


def test_the_type_of_a_field_matches_its_symbol():
    kinds = {kc.BOOL: "bool", kc.INT: "int"}
    for name in (name for name in SETTINGS if name.startswith("GPT2_")):
        text = "str" if name in TREE.choices else kinds.get(TREE.kconf.syms[name].orig_type, "str")
        text = "float" if name in TREE.floats or TREE.is_duration(name) else text
        assert fields()[name.removeprefix("GPT2_").lower()].split(" | ")[0] == text, name


def test_every_value_of_a_choice_is_known_to_the_trainer():
    known = attributes([*TRAINER, *CONTROL])
    choices = [name for name in TREE.choices if name.startswith("GPT2_")]
    values = {(name, member) for name in choices for member in TREE.members[name]}
    values |= {(name, text) for name, form in TREE.forms.items() if name.startswith("GPT2_") for text in form[1:]}

    assert {value for value in values if value[1] not in known} <= {
        ("GPT2_DEVICE", "auto"),
        ("GPT2_COMPILE_MODE", "max_autotune_no_cudagraphs"),  # PyTorch's name with underscores
        ("GPT2_DATA_LAYOUT", "bestfit"),
    }


def test_every_field_is_read_by_the_trainer_or_resolved_before():
    resolvers = [
        ROOT / "lib" / "kmatrix" / name for name in ("config.py", "experiment/inputs/data.py", "rules.py", "shapes.py")
    ]
    read = attributes([*TRAINER, *resolvers])
    derived = re.findall(r"(?:self|train)\.(\w+)", TRAIN_CONFIG.read_text(encoding="utf-8"))

    unread = set(fields()) - read - set(derived)

    assert unread == set()


def test_every_other_symbol_is_read_by_name_on_the_control_side():
    read = attributes(CONTROL) | {one.encode_name for one in structs.fields(KubernetesSettings)} | {*SYMBOLS.values()}

    assert [name for name in OURS if name not in read] == []


def test_every_symbol_and_choice_of_a_user_has_a_prompt_a_help_a_default_and_a_range():
    for symbol in has_prompt():
        node = symbol.nodes[0]
        axis = symbol.name.startswith("MATRIX_") and node.prompt[0].startswith("sweep ")
        said = node.help or symbol.choice or axis or "(" in node.prompt[0] or ":" in node.prompt[0]
        assert node.prompt[0], symbol.name
        assert said, symbol.name
        assert len(symbol.nodes) == 1, symbol.name
        assert symbol.defaults or symbol.choice or symbol.orig_type in (kc.BOOL, kc.STRING), symbol.name
        for default in (entry[0] for entry in symbol.defaults if symbol.orig_type != kc.BOOL and not entry[0].nodes):
            check_text(TREE, symbol, default.name, "default")
        if symbol.orig_type == kc.INT:
            last = symbol.ranges[-1][2]
            assert last is TREE.kconf.y or symbol.direct_dep is not TREE.kconf.y, symbol.name
            assert any(entry[1] is TREE.kconf.y for entry in symbol.orig_defaults), symbol.name
    for name, choice in TREE.choices.items():
        assert choice.nodes[0].prompt, name
        assert choice.nodes[0].help, name
        assert choice.defaults, name
        assert name, [member.name for member in choice.syms]
    assert len(TREE.choices) == len(TREE.kconf.unique_choices)


def test_a_forbid_symbol_has_a_reason():
    forbidding = [symbol for symbol in TREE.symbols if symbol.name.startswith("FORBID_")]

    assert forbidding
    assert all(symbol.nodes[0].help and not symbol.nodes[0].prompt for symbol in forbidding)


def test_every_axis_symbol_sweeps_a_setting_and_all_optimizers_can_be_swept():
    names = {symbol.name for symbol in TREE.symbols}
    swept = {name.removeprefix("MATRIX_") for name in names - set(NOT_AN_AXIS) if name.startswith("MATRIX_")}

    assert swept <= names
    for name in swept:
        wanted = kc.BOOL if TREE.kconf.syms[name].choice else kc.STRING
        assert TREE.kconf.syms[f"MATRIX_{name}"].orig_type == wanted, name
    for axis in {TREE.axis_of(name) for name in swept} & set(TREE.choices):
        assert {member.name for member in TREE.members[axis].values()} <= swept, axis
    assert set(NOT_AN_AXIS) <= names


def test_labels_are_unique_and_valid_in_file_names():
    labels = list(TREE.labels.values())

    assert len(set(labels)) == len(labels)
    assert all(re.fullmatch(r"[a-z][a-z0-9]*", label) for label in labels)


def test_an_alert_has_the_same_default_in_menuconfig_and_in_the_code():
    values = {name: TREE.kconf.syms[name].str_value for name in SYMBOLS.values()}

    assert Thresholds.of(values) == Thresholds()
    assert {name for name in SETTINGS if name.startswith("ALERT_")} == set(SYMBOLS.values())


def test_aliases_refer_to_symbols_and_hide_none():
    for name, target in ALIASES.items():
        assert target in SETTINGS
        assert name not in SETTINGS
        assert f"GPT2_{name}" not in SETTINGS


def test_the_kconfig_files_parse_without_a_warning_and_have_only_known_markers(monkeypatch):
    monkeypatch.setattr(TREE.kconf, "warn", True)
    for symbol in TREE.symbols:
        assert symbol.str_value is not None  # evaluation finds more: defaults outside their range, forced selects
    assert TREE.kconf.warnings == []
    marker = r"\t\$\((float(,[^,]+){2}(,empty)?|form,(oneof(,\w+)+|\w+)|label,\w+)\)"
    for path in KCONFIGS:
        block = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            block = line if re.match(r"\w", line) else block
            if "$(" in line and not line.startswith("#"):
                assert re.fullmatch(marker, line), (path, line)
                assert block.startswith(("config ", "menuconfig ")), (path, line)
    assert all(low <= high for low, high, _ in TREE.floats.values())
    assert {form[0] for form in TREE.forms.values()} == {*FORMS, "oneof"}


def test_kconfig_files_never_compare_text_by_size_and_use_no_unusual_keywords():
    for path in KCONFIGS:
        text = path.read_text(encoding="utf-8")
        for keyword in ("select", "imply", "visible if", "osource", "rsource", "tristate", "option"):
            assert not re.search(rf"^\s*{keyword}\b", text, re.MULTILINE), (path, keyword)
        for line in re.findall(r"^\s*(?:depends on|default|def_bool|range).*[<>].*$", text, re.MULTILINE):
            assert '"' not in line, line
        assert text.endswith("\n")
