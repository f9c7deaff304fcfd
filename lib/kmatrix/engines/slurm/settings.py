"""The settings of a matrix on Slurm: the symbols SLURM_* as values, for the submitter and for the runner in a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kmatrix.errors import ConfigError
from kmatrix.records.jobs.forms import job_seconds, memory_mib, split_flags
from kmatrix.records.paths import below_root

# Symbol -> variable with which sites set a default for sbatch.
VARIABLES = {"SLURM_PARTITION": "SBATCH_PARTITION", "SLURM_ACCOUNT": "SBATCH_ACCOUNT", "SLURM_QOS": "SBATCH_QOS"}
# Flags that the script sets -> how to change them instead.
OURS = {
    "--partition": "SLURM_PARTITION=",
    "--account": "SLURM_ACCOUNT=",
    "--qos": "SLURM_QOS=",
    "--time": "SLURM_TIME=",
    "--mem": "SLURM_MEMORY=",
    "--mem-per-cpu": "SLURM_MEMORY=",
    "--mem-per-gpu": "SLURM_MEMORY=",
    "--exclusive": "SLURM_EXCLUSIVE=y",
    "--gres": "SLURM_GPU_TYPE= and NUM_GPUS=",
    "--gpus": "NUM_GPUS=",
    "--gpus-per-node": "SLURM_GPU_FLAG=gpus-per-node",
    "--gpus-per-task": "SLURM_GPU_FLAG=gpus-per-task",
    "--nodes": "NUM_NODES=",
    "--ntasks": "NUM_NODES=",
    "--ntasks-per-node": "NUM_NODES=",
    "--cpus-per-task": "SLURM_CPUS_PER_GPU=",
    "--cpus-per-gpu": "SLURM_CPUS_PER_GPU=",
    "--signal": "SLURM_NOTICE=",
    "--requeue": "SLURM_RESTARTS=",
    "--no-requeue": "SLURM_RESTARTS=0",
    **dict.fromkeys(
        (
            *("--array", "--clusters", "--comment", "--dependency", "--job-name", "--output", "--error"),
            *("--open-mode", "--chdir"),
            *("--export", "--export-file", "--parsable", "--test-only", "--wait", "--wrap", "--input", "--help"),
            *("--version", "--usage", "--quiet", "--verbose"),
        ),
        "",
    ),
}
SHORT = {
    **{"-p": "--partition", "-A": "--account", "-q": "--qos", "-t": "--time", "-G": "--gpus"},
    **{"-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-a": "--array", "-d": "--dependency"},
    **{"-J": "--job-name", "-o": "--output", "-e": "--error", "-D": "--chdir", "-W": "--wait", "-i": "--input"},
    **{"-h": "--help", "-V": "--version", "-Q": "--quiet", "-v": "--verbose", "-M": "--clusters"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """How the jobs of a matrix are submitted, and how they behave."""

    partition: str = ""  # "": the default one
    account: str = ""
    qos: str = ""
    gpu_type: str = ""  # "": any
    gpu_flag: str = "gres"  # gres, gpus-per-node or gpus-per-task
    memory_mib: int | None = None  # per node; None: the cluster's default, 0: all
    cpus_per_gpu: int = 0  # 0: the GPU's share of its node
    exclusive: bool = False
    seconds: int | None = None  # time limit of a job; None: from the estimate
    time_factor: float = 1.5
    notice_s: int = 120
    restarts: int = 50  # of a job, at most
    setup: Path | None = None  # file that a job sources first
    extra_flags: tuple[tuple[str, ...], ...] = ()  # each with its value
    stage_dir: Path | None = None  # on each node, for a copy of the data
    pack_nodes: bool = False
    parallel_jobs: int = 0  # tasks of an array that run at the same time; 0: any number
    gpus_per_node: int = 0  # as configured; 0: ask the cluster


def read_settings(symbols: Mapping[str, str], environment: Mapping[str, str] | None = None) -> SlurmSettings:
    """Return the settings of these symbols, those of engine.json or of a configuration. Missing ones have defaults.

    environment: variables that give defaults, None for none.  Raises ConfigError for an invalid value.
    """
    defaults = {name: (environment or {}).get(variable, "") for name, variable in VARIABLES.items()}

    def text(name: str) -> str:
        return symbols.get(name) or defaults.get(name, "")

    time, memory, setup, stage = (text(name) for name in ("SLURM_TIME", "SLURM_MEMORY", "SLURM_SETUP", "STAGE_DIR"))
    return SlurmSettings(
        partition=text("SLURM_PARTITION"),
        account=text("SLURM_ACCOUNT"),
        qos=text("SLURM_QOS"),
        gpu_type=text("SLURM_GPU_TYPE"),
        gpu_flag=text("SLURM_GPU_FLAG") or "gres",
        memory_mib=_need("SLURM_MEMORY", memory, memory_mib(memory)) if memory else None,
        cpus_per_gpu=_number(symbols, "SLURM_CPUS_PER_GPU", 0),
        exclusive=text("SLURM_EXCLUSIVE") == "y",
        seconds=_whole_minutes(_need("SLURM_TIME", time, job_seconds(time))) if time else None,
        time_factor=_factor(text("SLURM_TIME_FACTOR")),
        notice_s=_number(symbols, "SLURM_NOTICE", 120),
        restarts=_number(symbols, "SLURM_RESTARTS", 50),
        setup=below_root(setup) if setup else None,
        extra_flags=_extra_flags(text("SLURM_EXTRA_FLAGS")),
        stage_dir=Path(stage).expanduser() if stage else None,
        pack_nodes=text("PACK_NODES") == "y",
        parallel_jobs=_number(symbols, "PARALLEL_JOBS", 0),
        gpus_per_node=_number(symbols, "GPUS_PER_NODE", 0),
    )


def _need(name: str, text: str, value: int | None) -> int:
    if value is None:
        raise ConfigError(f"{name}={text} cannot be read", hint=f"see the help of {name} in make menuconfig")
    return value


def _whole_minutes(seconds: int) -> int:
    """Return a time limit (s) as Slurm counts it: in minutes, rounded up."""
    return -(-seconds // 60) * 60


def _number(symbols: Mapping[str, str], name: str, default: int) -> int:
    text = symbols.get(name) or str(default)
    return _need(name, text, int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None)


def _factor(text: str) -> float:
    try:
        factor = float(text or 1.5)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= 100:
        raise ConfigError(f"SLURM_TIME_FACTOR={text} is not a number from 1 to 100", hint="pass SLURM_TIME_FACTOR=1.5")
    return factor


def _extra_flags(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the flags of SLURM_EXTRA_FLAGS. Raises ConfigError for those that the script sets."""
    try:
        flags = split_flags(text)
    except ValueError as error:
        raise ConfigError(f"SLURM_EXTRA_FLAGS={text} cannot be read", why=str(error)) from None
    for name in (flag[0].partition("=")[0] for flag in flags):
        # getopt_long(3) takes abbreviations, and short flags with a value right after them.
        short = SHORT.get(name[:2]) if not name.startswith("--") else None
        ours = short or next((one for one in OURS if name.startswith("--") and one.startswith(name)), None)
        if ours is not None:
            raise ConfigError(
                f"SLURM_EXTRA_FLAGS has {name}, which kmatrix sets itself",
                hint=f"pass {OURS[ours]} instead" if OURS[ours] else f"remove {name}",
            )
    if any(not word.isprintable() for flag in flags for word in flag):
        raise ConfigError("SLURM_EXTRA_FLAGS has control characters", hint="remove them")
    return tuple(tuple(flag) for flag in flags)
