"""constraints.txt pins every package of every stage, with the hashes of its files."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from programs import ROOT

LOCK = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
STAGES = {"core": [], "train": ["train"], "trackers": ["trackers"], "dev": ["dev"]}
ENTRY = re.compile(
    r"# (?P<stages>[a-z ]+)\n(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ \n]+)(?: ; (?P<marker>[^\\\n]+?))? \\\n"
    r"(?P<hashes>(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
)
ENTRIES = {canonicalize_name(match["name"]): match for match in ENTRY.finditer(LOCK)}


def members(stage: str) -> set[str]:
    return {name for name, match in ENTRIES.items() if stage in match["stages"].split()}


def test_each_stage_is_complete_and_pinned_with_hashes():
    rest = ENTRY.sub("", LOCK)
    assert [line for line in rest.splitlines() if not line.startswith("# ")] == []
    assert len(ENTRIES) == len(ENTRY.findall(LOCK)) > 100
    for name, match in ENTRIES.items():
        assert set(match["stages"].split()) <= {*STAGES, "cuda"}, name
        if match["marker"]:
            Marker(match["marker"])
    for stage, extras in STAGES.items():
        wanted = [*PROJECT["dependencies"], *(line for e in extras for line in PROJECT["optional-dependencies"][e])]
        for requirement in map(Requirement, wanted):
            match = ENTRIES[canonicalize_name(requirement.name)]
            assert stage in match["stages"].split(), requirement.name
            assert requirement.specifier.contains(match["version"]), requirement.name
        # As pip would find: the packages of this environment require only what their own stage has.
        for name in members(stage):
            missing = required_by(name) - members(stage) - (members("cuda") if name == "torch" else set())
            assert not missing, f"{stage}: {name} needs {missing}"
        assert not [name for name in members(stage) if name.startswith(("nvidia-cu", "cuda-"))]
    assert {"triton", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= members("cuda")
    assert all("linux" in (ENTRIES[name]["marker"] or "") for name in members("cuda"))


def required_by(name: str) -> set[str]:
    """Return what an installed package requires here, without extras; nothing for one that is not installed."""
    try:
        lines = requires(name) or ()
    except PackageNotFoundError:
        return set()
    found = [Requirement(line) for line in lines]
    needed = [one for one in found if not one.marker or one.marker.evaluate({"extra": ""})]
    return {canonicalize_name(one.name) for one in needed}


@pytest.mark.process
def test_the_set_up_installs_the_entries_of_a_stage_with_hashes_and_without_the_resolver():
    script = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    calls = [line.strip() for line in script.splitlines() if "$pip install" in line]
    assert len(calls) == 3
    assert "--no-deps --only-binary :all: --require-hashes --requirement" in "".join(calls)
    assert [line for line in calls if "--require-hashes" not in line and "--no-deps" not in line] == [
        '$pip install $quiet --only-binary :all: --index-url "$TORCH_INDEX" "torch==$pin"'
    ]
    program = re.search(r"awk .*?'\n(.*?)'", script, re.DOTALL)[1]

    def text_of(stage: str, torch: str = "") -> str:
        command = ["awk", "-v", f"stage={stage}", "-v", f"torch={torch}", program, str(ROOT / "constraints.txt")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def selected(stage: str, torch: str = "") -> set[str]:
        return {canonicalize_name(name) for name in re.findall(r"(?m)^([\w.-]+)==", text_of(stage, torch))}

    for stage in (*STAGES, "cuda"):
        assert selected(stage) == members(stage)
    assert selected("train") - selected("train", "none") == {"torch"}
    assert "\ntorch==2.0+cpu \\\n    --hash=" in text_of("train", "2.0+cpu")
    assert selected("train", "2.0+cpu") == selected("train")
