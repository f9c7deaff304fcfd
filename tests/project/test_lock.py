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
STAGES = {"core": [], "train": ["train"], "trackers": ["trackers"], "kubernetes": ["kubernetes"], "dev": ["dev"]}
ENTRY = re.compile(
    r"# (?P<stages>[a-z ]+)\n(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ \n]+)(?: ; (?P<marker>[^\\\n]+?))? \\\n"
    r"(?P<hashes>(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
)
ENTRIES = {canonicalize_name(match["name"]): match for match in ENTRY.finditer(LOCK)}


def test_every_line_belongs_to_an_entry_with_hashes():
    rest = ENTRY.sub("", LOCK)

    assert [line for line in rest.splitlines() if not line.startswith("# ")] == []
    assert len(ENTRIES) == len(ENTRY.findall(LOCK)) > 100
    for name, match in ENTRIES.items():
        assert set(match["stages"].split()) <= {*STAGES, "cuda"}, name
        if match["marker"]:
            Marker(match["marker"])


@pytest.mark.parametrize("stage", STAGES)
def test_every_requirement_is_pinned_within_its_range(stage):
    wanted = [*PROJECT["dependencies"], *(text for extra in STAGES[stage] for text in extras()[extra])]
    for requirement in map(Requirement, wanted):
        match = ENTRIES[canonicalize_name(requirement.name)]
        assert stage in match["stages"].split(), requirement.name
        assert requirement.specifier.contains(match["version"]), requirement.name


def extras() -> dict[str, list[str]]:
    return PROJECT["optional-dependencies"]


def test_each_stage_is_complete_and_has_nothing_of_the_cuda_build():
    """As pip would find: the packages of this environment require only what their own stage has."""
    for stage in STAGES:
        members = {name for name, match in ENTRIES.items() if stage in match["stages"].split()}
        assert not [name for name in members if name.startswith(("nvidia-cu", "cuda-"))]
        for name in members:
            missing = required_by(name) - members - of_the_cuda_build(name)
            assert not missing, f"{stage}: {name} needs {missing}"


def required_by(name: str) -> set[str]:
    """Return what an installed package requires here, without extras; nothing for one that is not installed."""
    try:
        lines = requires(name) or ()
    except PackageNotFoundError:
        return set()
    found = [Requirement(line) for line in lines]
    needed = [one for one in found if not one.marker or one.marker.evaluate({"extra": ""})]
    return {canonicalize_name(one.name) for one in needed}


def of_the_cuda_build(name: str) -> set[str]:
    """Return the packages of torch's CUDA build, which scripts/setup.sh installs only if torch requires them."""
    return {one for one, match in ENTRIES.items() if match["stages"] == "cuda"} if name == "torch" else set()


def test_the_packages_of_the_cuda_build_of_torch_are_pinned():
    cuda = {name for name, match in ENTRIES.items() if match["stages"] == "cuda"}

    assert {"triton", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= cuda
    assert "nvidia-ml-py" not in cuda
    assert all("linux" in (ENTRIES[name]["marker"] or "") for name in cuda)


def test_the_set_up_installs_with_hashes_and_without_the_resolver():
    script = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    calls = [line.strip() for line in script.splitlines() if "-m pip install" in line]

    assert len(calls) == 3
    assert "--no-deps --only-binary :all: --require-hashes --requirement" in "".join(calls)
    assert "--no-deps --no-build-isolation --editable ." in calls[-1]
    assert [line for line in calls if "--require-hashes" not in line and "--no-deps" not in line] == [
        '"$venv/bin/python" -m pip install $quiet --only-binary :all: --index-url "$TORCH_INDEX" "torch==$pin"'
    ]


def test_the_set_up_selects_the_entries_of_a_stage():
    script = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    program = re.search(r"awk .*?'\n(.*?)'", script, re.DOTALL)[1]

    def text_of(stage: str, torch: str = "") -> str:
        command = ["awk", "-v", f"stage={stage}", "-v", f"torch={torch}", program, str(ROOT / "constraints.txt")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def selected(stage: str, torch: str = "") -> set[str]:
        text = text_of(stage, torch)
        assert text.count("--hash=") >= len(re.findall(r"(?m)^\w", text))
        return {canonicalize_name(name) for name in re.findall(r"(?m)^([\w.-]+)==", text)}

    for stage in (*STAGES, "cuda"):
        assert selected(stage) == {name for name, match in ENTRIES.items() if stage in match["stages"].split()}
    assert selected("train") - selected("train", "none") == {"torch"}
    assert "\ntorch==2.0+cpu \\\n    --hash=" in text_of("train", "2.0+cpu")
    assert selected("train", "2.0+cpu") == selected("train")
