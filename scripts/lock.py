"""Write constraints.txt: the tested version of every package, with the hashes of all its files.

    python scripts/lock.py            # needs uv (https://docs.astral.sh/uv) and the package index, downloads no package

It reads the ranges of pyproject.toml, keeps the versions that constraints.txt has already, and asks the index for the
others. Delete a line of constraints.txt to get the newest version in its range.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints.txt"
# Stage -> its extras.
STAGES = {"core": (), "train": ("train",), "trackers": ("trackers",), "dev": ("dev",)}
BUILD = ("setuptools",)  # scripts/setup.sh installs kmatrix itself with it, without downloading anything
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


def main() -> int:
    """Write the file, and print its size. Return 2 if uv is missing or finds no versions that fit."""
    uv = shutil.which("uv")
    if uv is None:
        print("error: uv is not installed\n  hint: python -m pip install uv", file=sys.stderr)
        return 2
    kept = "\n".join(f"{name}=={version}" for name, version in PIN.findall(LOCK.read_text(encoding="utf-8")))
    try:
        locked = compiled(uv, kept, [extra for extras in STAGES.values() for extra in extras], "--generate-hashes")
        pins = "\n".join(f"{name}=={version}" for name, version in PIN.findall(locked))
        names = {stage: set(packages(compiled(uv, pins, extras))) for stage, extras in STAGES.items()}
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 2
    entries = packages(locked)
    LOCK.write_text(HEADER + "".join(entry(name, text, names) for name, text in entries.items()), encoding="utf-8")
    print(f"{LOCK.name}: {len(entries)} packages")
    return 0


def compiled(uv: str, pins: str, extras: list[str] | tuple[str, ...], *options: str) -> str:
    """Return the requirements of kmatrix with these extras for all platforms, as uv writes them."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, build = Path(folder, "pins.txt"), Path(folder, "build.in")
        constraints.write_text(pins, encoding="utf-8")
        build.write_text("\n".join(BUILD), encoding="utf-8")
        words = ["--universal", "--python-version", "3.11", "--no-header", "--no-annotate", "--quiet", *options]
        words += ["--constraints", str(constraints), *(word for extra in extras for word in ("--extra", extra))]
        command = [uv, "pip", "compile", "pyproject.toml", str(build), *words]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


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
    sys.exit(main())
