"""The provenance of a run: code, versions, machine, and the environment variables that may change a result."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kmatrix.clock import clock
from kmatrix.gpu.nvml.detect import Gpu, driver_state
from kmatrix.packing import usable_cores
from kmatrix.records.paths import ROOT
from kmatrix.records.runs import Provenance
from kmatrix.redaction.redactor import redactor
from kmatrix.shapes import cpu_name
from kmatrix.sources import trainer_files, whole

PACKAGES = (  # the first four may change a result, the others what is recorded or uploaded
    *("torch", "numpy", "tiktoken", "pytorch_optimizer", "tokenizers", "pyarrow", "kconfiglib", "nvidia-ml-py"),
    *("msgspec", "matplotlib", "wandb", "trackio", "tensorboardX"),
)
VARIABLES = (  # prefixes
    *("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "GLOO_", "OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_"),
    *("TORCH_", "TORCHINDUCTOR_", "TRITON_", "PYTORCH_", "MALLOC_", "KMATRIX_"),
)
GIT_S = 60.0


def provenance(sources: Path, command: str, gpus: Sequence[Gpu]) -> Provenance:
    """Return the provenance in matrix.json and in each run.json.

    sources: folder with the sources of the trainer.  gpus: those that runs may use; result.json records those of each
    run.
    """
    changes, driver = _git("status", "--porcelain", "--untracked-files=no"), driver_state(()) if gpus else None
    return {
        "created": clock.now(),
        "command": command,
        "host": socket.gethostname(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if changes is None else bool(changes),
        "code": whole(trainer_files(sources)),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "environment": variables(os.environ),
        "driver": {"version": driver.version, "cuda": driver.cuda} if driver else None,
        "gpus": [{"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid} for gpu in gpus],
        "kernel": platform.release(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may change a result, without those that a log would have redacted."""
    redact = redactor(environment).redact
    lines = [f"{name}={environment[name]}" for name in sorted(environment) if name.startswith(VARIABLES)]
    return dict(line.split("=", 1) for line in lines if redact(line) == line)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def copy_code(sources: Path, into: Path) -> None:
    """Copy the sources of the trainer, so that what was planned is what runs."""
    for name in trainer_files(sources):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sources / name, into / name)


def keys_in_code(sources: Path) -> list[str]:
    """Return `file:line` of each line of gpt2/ that may contain a key. Modules of kmatrix name the formats of keys."""
    found, own = redactor(), [name for name in trainer_files(sources) if name.startswith("gpt2/")]
    texts = {name: (sources / name).read_text("utf-8", "replace") for name in own}
    lines = ((f"{name}:{n}", line) for name, text in texts.items() for n, line in enumerate(text.splitlines(), 1))
    return [place for place, line in lines if found.keys_in(line)]


def _git(*arguments: str) -> str | None:
    """Return what git prints about the checkout, None outside a repository or without git."""
    # By default `git status` locks the index, and a commit at the same time could fail.
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=GIT_S, check=True, env=quiet
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
