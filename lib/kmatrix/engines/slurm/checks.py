"""Check a Slurm cluster and suggest fixes: partitions, how it ends jobs, and the storage that its nodes share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kmatrix.doctor import Check, Level, broken, ok, warning
from kmatrix.engines.base import GRACE_S, Capacity, NodeKind, Partition
from kmatrix.engines.slurm.capacity import capacity
from kmatrix.engines.slurm.commands import environment, is_installed
from kmatrix.engines.slurm.scheduler import no_partition
from kmatrix.engines.slurm.script import JobPlace
from kmatrix.engines.slurm.settings import SlurmSettings, read_settings
from kmatrix.errors import KmatrixError
from kmatrix.records.paths import program_path
from kmatrix.text import duration, memory_size, plural

QUEUE_S, PROBE_S = 120, 300  # wait for two nodes, and for the whole probe
MOST_APART_S = 5.0  # between the clocks of two nodes: logs are hard to compare beyond that
SLOW_LAG_S = 2.0


def slurm_checks(symbols: Mapping[str, str], *, selected: bool) -> Iterator[Check]:
    """Check the cluster. symbols: of the configuration.  selected: whether it has ENGINE=slurm.

    Nothing is wrong with a cluster that the configuration does not use: it may be installed, and never set up.
    """
    for check in _cluster(symbols) if is_installed() else _not_installed(selected=selected):
        if selected or check.level is Level.OK:
            yield check
        else:
            yield replace(check, level=Level.OK, message=f"{check.message} (matters for ENGINE=slurm)", hint="")


def _not_installed(*, selected: bool) -> Iterator[Check]:
    if selected:
        yield broken("Slurm", "sbatch not found, but .config has ENGINE=slurm", "run this on a login node")


def _cluster(symbols: Mapping[str, str]) -> Iterator[Check]:
    try:
        settings = read_settings(symbols, os.environ)
        known = capacity(settings.gpu_type)
    except KmatrixError as error:
        message = ": ".join(part for part in (error.what, error.why) if part)
        hint = error.hint or "try `sinfo`; ask the administrators of the cluster"
        yield broken("Slurm", message, hint)
        return
    yield from cluster_checks(known, settings)


def cluster_checks(known: Capacity, settings: SlurmSettings) -> Iterator[Check]:
    """Yield the checks of what a cluster has and how it ends jobs."""
    if not known.partitions:
        yield warning("Slurm", "its nodes are not shown to users", "set GPUS_PER_NODE= and SLURM_TIME= yourself")
    elif known.partition(settings.partition) is None:
        yield broken("Slurm", no_partition(known, settings.partition), "set SLURM_PARTITION")
    for partition in known.partitions:
        yield _partition(partition)
    if known.kill_s is not None:
        left = min(GRACE_S, known.kill_s - 5)
        message = f"{known.kill_s:g} s: a cancelled run has {max(0.0, left):g} s to save a checkpoint"
        if known.kill_s < GRACE_S + 5:
            yield warning("KillWait", message, "set CHECKPOINT_INTERVAL if a checkpoint takes longer (make status)")
        else:
            yield ok("KillWait", message)
    yield ok("accounting", "on" if known.has_accounting else "off: Slurm forgets a job some minutes after its end")
    if settings.setup is not None and not settings.setup.is_file():
        yield broken("SLURM_SETUP", f"{settings.setup}: no such file", "set SLURM_SETUP= to a file on shared storage")


def _partition(partition: Partition) -> Check:
    down = sum(kind.down for kind in partition.kinds)
    nodes = "; ".join(", ".join(_words(kind)) for kind in partition.kinds)
    limit = f"at most {duration(partition.seconds)}" if partition.seconds is not None else "no time limit"
    words = [nodes or "no nodes", limit, *(["jobs may be preempted"] if partition.preempts else [])]
    name = f"partition {partition.name}" + (" (default)" if partition.is_default else "")
    message = "; ".join(words)
    if not partition.is_up:
        return warning(name, f"{message}; not up", "jobs wait until it is: choose another one with SLURM_PARTITION=")
    if down:
        return warning(name, f"{message}; {plural(down, 'node')} down", "`sinfo -R` lists the reasons")
    return ok(name, message)


def _words(kind: NodeKind) -> Iterator[str]:
    yield plural(kind.count, "node")
    if kind.gpus:
        yield f"{kind.gpus} x {kind.gpu_type or 'GPU'}"
    if kind.cpus:
        yield plural(kind.cpus, "CPU")
    if kind.memory_mib:
        yield memory_size(kind.memory_mib * 2**20)


def storage_checks(symbols: Mapping[str, str], folder: Path, place: JobPlace) -> Iterator[Check]:
    """Run the probe on two nodes, and check what it finds. folder: of the results."""
    settings = read_settings(symbols, os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    probe = Path(tempfile.mkdtemp(prefix=".kmatrix_probe_", dir=folder))
    try:
        done = subprocess.run(
            _probe_command(settings, probe, place),
            env={**environment(), "PYTHONPATH": program_path(place.root)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_S,
            cwd=place.root,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield warning("storage", f"not probed: {error}", "run it again when two nodes are idle")
        return
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    found = [_read(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(found) < 2:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        yield broken("storage", f"the probe on two nodes failed: {why}", f"{folder} and the checkout must be shared")
        return
    yield from probe_checks(found, folder)


def _probe_command(settings: SlurmSettings, probe: Path, place: JobPlace) -> list[str]:
    known = {"partition": settings.partition, "account": settings.account, "qos": settings.qos}
    flags = [f"--{name}={value}" for name, value in known.items() if value]
    shape = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--time=5", "--job-name=kmatrix"]
    program = [str(place.python), "-m", "kmatrix.engines.slurm.probe", str(probe)]
    return ["srun", *flags, *shape, f"--immediate={QUEUE_S}", *program]


def _read(line: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {"error": "a line of the probe is damaged"}
    return found if isinstance(found, dict) else {}


def probe_checks(found: list[Mapping[str, Any]], folder: Path) -> Iterator[Check]:
    """Yield the checks of what two nodes have found on the storage of a folder."""
    hosts = " and ".join(str(one.get("host", "?")) for one in found[:2])
    errors = [str(one["error"]) for one in found if "error" in one]
    if errors:
        yield broken("storage", f"{hosts}: {errors[0]}", f"{folder} must be on storage that all nodes share")
        return
    looked = next((one for one in found if "lag_s" in one), {})
    lag, excluded = float(looked.get("lag_s", 0.0)), bool(looked.get("excluded"))
    kept = f"a new file is visible on {hosts} after {lag:g} s"
    if lag > SLOW_LAG_S:
        yield ok("storage", f"{kept}: status may be late by as much; nothing depends on it")
    else:
        yield ok("storage", kept)
    yield ok("locks", "exclude other nodes" if excluded else "do not exclude other nodes; kmatrix does not rely on it")
    clocks = [float(one.get("clock", 0.0)) for one in found]
    apart = max(clocks) - min(clocks)
    if apart > MOST_APART_S:
        yield warning("clocks", f"{hosts} are {apart:.1f} s apart", "times in logs differ; results do not depend on it")
    else:
        yield ok("clocks", f"{hosts} are {apart:.1f} s apart")
