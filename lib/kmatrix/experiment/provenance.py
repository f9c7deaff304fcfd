"""The provenance of a run: code, versions, machine, and the environment variables that may change a result.

Variables are selected by a list of prefixes. Variables that look like secrets are never recorded.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kmatrix.experiment.code_patch import CodePatch, LeftOut, code_patch, git
from kmatrix.gpu.nvml.detect import Gpu, driver_state
from kmatrix.packing import usable_cores
from kmatrix.records.runs import Provenance
from kmatrix.redaction.redactor import is_key, redactor
from kmatrix.shapes import cpu_name

PACKAGES = (  # the first four may change a result, the others what is recorded or uploaded
    *("torch", "numpy", "tiktoken", "pytorch_optimizer"),
    *(
        "tokenizers",
        "pyarrow",
        "kconfiglib",
        "nvidia-ml-py",
        "msgspec",
        "matplotlib",
        "wandb",
        "trackio",
        "tensorboardX",
    ),
)

VARIABLES = (  # prefixes
    *("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "GLOO_", "OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_"),
    *("TORCH_", "TORCHINDUCTOR_", "TRITON_", "PYTORCH_", "MALLOC_", "KMATRIX_"),
)

# Names in values, also before values that are too short to be redacted in a log.
_NAMED = re.compile(r"(?:password|passwd|passphrase|secret|api_?key|token)[\"']?\s?[=:]", re.IGNORECASE)
SECRET = re.compile(r"TOKEN|KEY|PASS|SECRET|CREDENTIAL|AUTH", re.IGNORECASE)


def provenance(code: Code, command: str, gpus: Sequence[Gpu], patch: str | None = None) -> Provenance:
    """Return the provenance in matrix.json and in each run.json.

    gpus: GPUs that runs may use; run_used.json records the GPUs of each run.  patch: name of the file with the patch.
    """
    driver = driver_state(()) if gpus else None
    return {
        "created": time.time(),
        "command": command,
        "host": socket.gethostname(),
        "git_commit": code.commit,
        "git_dirty": code.dirty,
        "patch": patch,
        "no_patch": code.no_patch or None,
        "left_out": [{"file": one.file, "line": one.line, "kind": one.kind} for one in code.left_out],
        "untracked": list(code.untracked),
        "code": code.sha256,
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
    """Return the environment variables that may change a result, without those that look like secrets."""
    return {name: value for name, value in _variables(environment).items() if not _may_be_secret(value, environment)}


def secret_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that may change a result and are not recorded, because their values may be secrets."""
    return [name for name, value in _variables(environment).items() if _may_be_secret(value, environment)]


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    found = ((name, value) for name, value in sorted(environment.items()) if name.startswith(VARIABLES))
    return {name: value for name, value in found if not SECRET.search(name)}


def _may_be_secret(value: str, environment: Mapping[str, str]) -> bool:
    found = redactor(environment)
    # Left out as a whole: the rest of a redacted value would be a setting that nobody had.
    return found.redact(value) != value or bool(found.keys_in(value)) or is_key(value) or bool(_NAMED.search(value))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


SOURCES = frozenset({".c", ".h", ".py", ".sh", ".toml"})  # and Kconfig, defconfigs/
MOST_NAMES = 100  # untracked files that are recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The state of the code."""

    commit: str | None  # None outside a git repository
    dirty: bool | None  # None outside a git repository
    sha256: str  # of all sources of the trainer
    files: dict[str, str]  # source of the trainer -> first 16 digits of its SHA-256
    patch: bytes | None = field(default=None, repr=False)  # `git apply` makes this code from the commit
    no_patch: str = ""  # why there is no patch
    left_out: tuple[LeftOut, ...] = ()  # keys, whose hunks are not in the patch
    untracked: tuple[str, ...] = ()  # source files that are in neither the commit nor the patch


def code_of(root: Path) -> Code:
    """Return the state of the code in the project's directory."""
    commit = _text(root, "rev-parse", "HEAD")
    changes = _text(root, "status", "--porcelain", "--untracked-files=no")
    patch = code_patch(root) if commit and changes else CodePatch()
    files = trainer_files(root)
    return Code(
        commit=commit,
        dirty=None if changes is None else bool(changes),
        sha256=_whole(files),
        files={name: digest[:16] for name, digest in files.items()},
        patch=patch.data,
        no_patch=patch.why,
        left_out=patch.left_out,
        untracked=_untracked(root),
    )


def trainer_files(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each source of the trainer: gpt2/, and the modules of kmatrix that it imports.

    Imports are followed through kmatrix, so that an edit of the control side does not change the trainer's code.
    """
    found: dict[Path, str] = {}
    names: set[str] = set()
    pending = list((root / "gpt2").rglob("*.py"))
    while pending:
        path = pending.pop()
        if path not in found:
            # Imports are followed in the text: importing the trainer would load torch.
            source = path.read_bytes()
            found[path] = hashlib.sha256(source).hexdigest()
            new = set(_imports(source)) - names
            names |= new
            pending += [known for name in new for known in _module_files(root / "lib", name)]
    return {str(path.relative_to(root)): found[path] for path in sorted(found)}


@functools.lru_cache(maxsize=256)  # a process may make several matrices: parsing all sources takes half a second
def _imports(source: bytes) -> tuple[str, ...]:
    """Return the dotted names that a module imports from kmatrix, imports inside functions included."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # a file that does not parse imports nothing, and the trainer reports it
        return ()
    found: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("kmatrix")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kmatrix"):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def _module_files(lib: Path, name: str) -> Iterator[Path]:
    """Yield the file of a module and those of the packages around it. The last word may be a name in the module."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        place = lib.joinpath(*parts[:end])
        yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file())


def _whole(files: dict[str, str]) -> str:
    return hashlib.sha256("".join(f"{name}\0{digest}\n" for name, digest in files.items()).encode()).hexdigest()


def _untracked(root: Path) -> tuple[str, ...]:
    listed = git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", ".")
    names = (listed or b"").decode(errors="replace").split("\0")
    sources = [name for name in names if _is_source(Path(name))]
    return tuple(sorted(sources)[:MOST_NAMES])


def _is_source(path: Path) -> bool:
    return path.suffix in SOURCES or path.name.startswith("Kconfig") or path.parts[:1] == ("defconfigs",)


def _text(root: Path, *arguments: str) -> str | None:
    output = git(root, *arguments)
    return None if output is None else output.decode(errors="replace").strip()
