"""A package torch whose torchrun is a small program, for children whose PYTHONPATH names its folder."""

from __future__ import annotations

import shutil
from pathlib import Path


def install(folder: Path, program: str) -> str:
    """Make `python -m torch.distributed.run` a copy of this program, and return the folder for PYTHONPATH.

    A copy, because the nodes of a cluster see the folder and not always the checkout.
    """
    for name in ("torch", "torch/distributed"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
    shutil.copyfile(program, folder / "torch" / "distributed" / "run.py")
    return str(folder)
