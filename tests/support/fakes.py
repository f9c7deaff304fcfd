"""Fakes with the real signatures: a small trainer without torch, and an NVML driver with scripted GPUs.

As a program it is the trainer: `python tests/support/fakes.py [torchrun's options] --behave=HOW RUN_DIR --attempt N`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SLEEPER = "import time; time.sleep(300)"


def train() -> None:  # noqa: PLR0912 (one branch per way to misbehave)
    """Write the files of a trainer, or misbehave as `--behave` says."""
    parser = argparse.ArgumentParser()
    for option in ("--behave", "--attempt", "--nproc-per-node", "--resume", "--micro-batch"):
        parser.add_argument(option, default="1")
    parser.add_argument("--standalone", action="store_true")
    for option in ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-conf"):
        parser.add_argument(option)
    parser.add_argument("paths", nargs="+")
    options = parser.parse_args()
    if options.node_rank is not None:  # one rank per node
        os.environ["RANK"] = options.node_rank
    folder, behave, attempt = Path(options.paths[-1]), options.behave, int(options.attempt)
    run = json.loads((folder / "run.json").read_text())
    batch = int(options.micro_batch) if "--micro-batch" in sys.argv else run["train"].get("batch_size")
    checkpoint = folder / "checkpoints" / "step"
    step = int(checkpoint.read_text()) if options.resume in ("auto", "latest") and checkpoint.exists() else 0

    def write(name: str, value: dict[str, Any]) -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        if name.startswith("ranks/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # Atomic, because tests read the files while the trainer runs.
        (folder / f"{name}.part").write_text(json.dumps({"schema": 1, **value}))
        (folder / f"{name}.part").replace(folder / name)

    def result(status: str, **known: Any) -> None:
        write("result.json", {"run_id": run["run_id"], "attempt": attempt, "status": status, "step": step} | known)

    def save_and_exit(*_: object) -> None:
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.write_text(str(step))
        result("stopped", kind="signal", reason=f"stopped at step {step}")
        os._exit(1)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if behave == "stubborn" else save_and_exit)
    print(f"threads {os.environ['OMP_NUM_THREADS']} gpus {os.environ['CUDA_VISIBLE_DEVICES']!r}")
    write("env.json", {"pid": os.getpid(), "secret": os.environ.get("WANDB_API_KEY"), "cwd": str(Path.cwd())})
    if behave == "stubborn":
        write("ranks/0/state.json", {"rank": 0, "attempt": attempt, "pid": os.getpid()})
    if behave == "second fails" and os.environ["RANK"] == "1":
        sys.exit(1)
    if behave == "second killed" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if behave == "grandchildren":  # torchrun starts each worker in its own session
        started = [subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True).pid for _ in range(2)]
        write("grandchildren.json", {"pids": started})
    if behave == "fail":
        raise ModuleNotFoundError("No module named 'flash_attn'")
    if behave == "rank_error":
        write(
            "ranks/1/state.json",
            {"rank": 1, "attempt": attempt, "time": time.time(), "kind": "data", "reason": "shard 3 is cut short"},
        )
        sys.exit(3)
    if behave == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behave == "disk":
        result("failed", kind="disk", reason="no room for a checkpoint")
        sys.exit(1)
    if behave == "silent":
        sys.exit(0)
    if behave.startswith("oom") and batch > int(behave[3:]):
        result("failed", kind="oom", reason=f"out of memory with {batch} sequences")
        sys.exit(1)
    if behave.startswith("lost:") and behave.removeprefix("lost:") in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
        result("failed", kind="error", reason="RuntimeError: CUDA error: unspecified launch failure")
        sys.exit(1)
    if behave.startswith("nccl") and attempt <= int(behave[4:]):
        result("failed", kind="error", reason="DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2, remote error")
        sys.exit(1)
    if behave.startswith("preempted") and attempt <= int(behave[9:]):
        os.kill(os.getpid(), signal.SIGTERM)
    if behave in ("smaller", "adjusted"):
        batch = 6
    train_used = dict(run["train"]) | ({} if batch is None else {"batch_size": batch})
    why = [{"field": "batch_size", "from": 12, "to": batch, "why": "memory"}] if behave == "adjusted" else []
    write("run_used.json", {"train": train_used | {"peak_tflops": 989.4}, "adjusted": why})
    with (folder / "metrics.jsonl" if os.environ.get("RANK", "0") == "0" else Path(os.devnull)).open("a", 1) as metrics:
        while step < run["train"]["max_iters"] or behave in ("hang", "stubborn", "grandchildren", "until asked"):
            # A test writes this file, or moves the folder.
            if behave == "until asked" and ((folder / "enough").exists() or not folder.exists()):
                break
            line = {"step": step, "time": time.time(), "attempt": attempt, "train/loss": 5.5 - step / 100}
            metrics.write(json.dumps({"schema": 1, **line, "throughput/tokens_per_s": 41000.0}) + "\n")
            step += 1
            time.sleep(0.02 if behave != "quick" else 0)
            if behave == "nan" and step == 2:
                result("failed", kind="nan", reason="loss is nan at step 2")
                sys.exit(1)
    result("finished", final_val_loss=2.75)


class FakeNvml:
    """The part of pynvml that detection uses. A GPU given as an error code raises it on every call.

    init: the error code that nvmlInit raises.  mig: indices in MIG mode.
    """

    def __init__(self, gpus: list[tuple[str, str, int] | int], *, init: int | None = None, mig: tuple[int, ...] = ()):
        import pynvml

        self._gpus, self._init, self._mig, self.is_open = gpus, init, mig, False
        for name in (
            "NVMLError",
            "NVML_ERROR_LIBRARY_NOT_FOUND",
            "NVML_ERROR_DRIVER_NOT_LOADED",
            "NVML_DEVICE_MIG_ENABLE",
        ):
            setattr(self, name, getattr(pynvml, name))
        self._not_supported = pynvml.NVML_ERROR_NOT_SUPPORTED

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's names)
        if self._init is not None:
            raise self.NVMLError(self._init)  # type: ignore[attr-defined]
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self.is_open
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if isinstance(self._gpus[index], int):
            raise self.NVMLError(self._gpus[index])  # type: ignore[attr-defined]
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return self._gpus[handle][0].encode()  # type: ignore[index]

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return self._gpus[handle][1]  # type: ignore[index]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=self._gpus[handle][2] * 2**20)  # type: ignore[index]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        if not self._mig:
            raise self.NVMLError(self._not_supported)  # type: ignore[attr-defined]
        return [int(handle in self._mig), 0]


if __name__ == "__main__":
    train()
