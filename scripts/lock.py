"""Write constraints.txt: the tested version of every package, with the hashes of all its files.

Needs uv (https://docs.astral.sh/uv) and the package index. It reads the ranges of pyproject.toml, keeps the versions
that constraints.txt has already, and asks for the others. Delete a line of it to get the newest version in its range.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints.txt"
# Stage -> its extras.
STAGES = {"core": (), "train": ("train",), "trackers": ("trackers",), "dev": ("dev",)}
BUILD = "setuptools"  # scripts/setup.sh installs kmatrix itself with it, without downloading anything
# Needed by the CUDA build of torch only; scripts/setup.sh installs them if the installed torch requires them.
CUDA = re.compile(r"nvidia-(?!ml-py$)|cuda-|triton$")
# The CPU build of torch is not on the default index: torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl.
TORCH_CPU = ("2.13.0", "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b")
PIN = re.compile(r"(?m)^([A-Za-z0-9._-]+)==(\S+)")
HEADER = """\
# The versions that kmatrix is tested with, and the hashes of their files: scripts/lock.py writes this file, and
# scripts/setup.sh installs exactly these files (pip --require-hashes). The comment above a package names the stages of
# .venv that have it; cuda: only if the installed torch is a CUDA build.
"""


def main() -> None:
    """Write the file, and print its size."""
    locked = compiled([extra for extras in STAGES.values() for extra in extras], "--generate-hashes")
    entries = packages(locked)
    LOCK.write_text(locked, encoding="utf-8")
    names = {stage: set(packages(compiled(extras))) for stage, extras in STAGES.items()}
    LOCK.write_text(HEADER + "".join(entry(name, text, names) for name, text in entries.items()), encoding="utf-8")
    print(f"{LOCK.name}: {len(entries)} packages")


def compiled(extras: Sequence[str], *options: str) -> str:
    """Return the requirements of kmatrix with these extras for all platforms, as uv writes them."""
    words = ["--universal", "--python-version", "3.11", "--no-header", "--no-annotate", "--quiet", *options]
    words += ["--constraints", str(LOCK), *(word for extra in extras for word in ("--extra", extra))]
    command = ["uv", "pip", "compile", "pyproject.toml", "-", *words]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, input=BUILD).stdout


def packages(text: str) -> dict[str, str]:
    """Return the entries of a requirements file by name."""
    found = re.split(r"(?m)^(?=[A-Za-z0-9])", text)
    return {match[1]: part.rstrip() + "\n" for part in found if (match := PIN.match(part))}


def entry(name: str, text: str, names: dict[str, set[str]]) -> str:
    """Return the entry of a package for constraints.txt, with its stages."""
    stages = ["cuda"] if CUDA.match(name) else [stage for stage, members in names.items() if name in members]
    version, digest = TORCH_CPU
    if name == "torch" and text.startswith(f"torch=={version} "):
        text = text.rstrip() + f" \\\n    --hash=sha256:{digest}\n"
    return f"# {' '.join(stages)}\n{text}"


if __name__ == "__main__":
    main()
