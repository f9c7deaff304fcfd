"""The log of a run: lines on stdout, metrics, events, phases and the result. Only rank 0 writes.

Of a run over several nodes, one rank of each writes the phases of its node, by the clock that the recorder there has.
"""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from gpt2.dist import EXIT_FAILED, World, environment, exit_now
from gpt2.machine import machines, peak_memory_mib
from gpt2.norms import LayerNorms
from gpt2.optim.optimizers import Optimizers
from gpt2.prune import Pruner
from gpt2.steps import StepNumbers
from kmatrix.records.attempts import numbers
from kmatrix.records.files import append_jsonl, end_torn_line, write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import mfu, peak_tflops

WARM_UP = 10  # steps excluded from the steady speed, or half of a shorter run


class Evaluation(NamedTuple):
    """The validation loss of the weights after `step` updates."""

    step: int
    loss: float  # nats/token
    bits: float | None  # per byte of text


class RunLog:
    """The log of one attempt at a run. Ranks other than 0 keep the numbers but write nothing."""

    config: TrainConfig  # since `begin`
    world: World

    def __init__(self, run_dir: RunDir, run_id: str, attempt: int, *, main: bool) -> None:
        self.dir, self.run_id, self.attempt, self.main = run_dir, run_id, attempt, main
        self.optimizers: Optimizers | None = None
        self.pruner: Pruner | None = None
        self.norms: LayerNorms | None = None
        self.peak: float | None = None  # TFLOP/s
        self.started = time.perf_counter()
        # The history: a resumed attempt reports on the whole run
        self.step = 0  # updates done
        self.val: list[Evaluation] = []
        self.train_loss: float | None = None  # of the newest line
        self.before_s = 0.0  # seconds of earlier attempts, up to the checkpoint that this one resumed from
        self.seconds = array("d")  # of each step of this attempt; 8 bytes each, because there may be millions
        self._recent: list[StepNumbers] = []  # steps since the last line
        _, local_rank, _, node, _ = environment()
        recording = RunDir(run_dir.path / "nodes" / str(node)) if node else run_dir
        # Without its folder, torchrun was started by hand on this node: there is no recording to divide.
        self._phases = recording.phases if local_rank == 0 and recording.path.is_dir() else None
        self._about: dict[str, Any] = {}  # of result.json: the effective fields, and the machines of all ranks
        for path in (*((run_dir.metrics, run_dir.events) if main else ()), self._phases):
            if path:
                end_torn_line(path)  # an earlier attempt may have been killed while it wrote a line

    def begin(self, config: TrainConfig, world: World, **about: Any) -> None:
        """Keep for result.json the effective fields, the machines of all ranks, and what `about` says."""
        self.config, self.world = config, world
        self.dir.rank(world.rank).mkdir(parents=True, exist_ok=True)
        end_torn_line(self.dir.timings(world.rank))
        self.peak = config.peak_tflops or peak_tflops(world.device_name, config.dtype)
        used = config.to_json() | {"peak_tflops": self.peak}
        self._about = {"used": used, **about, **machines(world)}  # of all ranks: rank 0 knows only its own node
        what = f"{config.model} ({config.shape.params:,} parameters) on {config.dataset} with {config.optimizer}"
        length = f"{config.max_iters} steps of {config.tokens_per_step} tokens"
        self.say(f"Training {what}: {length}, {world.size} x {world.device_name}")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run started, over all attempts that led to the current weights."""
        return self.before_s + time.perf_counter() - self.started

    def evaluated(self, step: int) -> bool:
        """Return whether the weights after `step` updates were evaluated, in this or an earlier attempt."""
        return bool(self.val) and self.val[-1].step == step

    def is_best(self, step: int) -> bool:
        """Return whether the weights after `step` updates have the lowest validation loss so far."""
        # <= because the minimum includes this one; of equal losses the newer weights win, which saw more data
        return self.evaluated(step) and self.val[-1].loss <= min(line.loss for line in self.val)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed attempt needs to report on the whole run."""
        return {"val": [list(line) for line in self.val], "elapsed_s": self.elapsed_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the history of a checkpoint."""
        self.val = [Evaluation(*line) for line in state["val"]]  # without those after the checkpoint
        self.before_s = state["elapsed_s"]

    def resumed(self, step: int) -> None:
        """Mark in metrics.jsonl that training continues from a step, which voids the lines of later steps."""
        # The log is only appended to: rewriting it would lose lines if the process were killed meanwhile.
        if self.main and self.dir.metrics.exists():
            line = {"step": step, "time": time.time(), "attempt": self.attempt, "resumed": True}
            append_jsonl(self.dir.metrics, line)

    def say(self, text: str) -> None:
        """Print one line and flush."""
        if self.main:  # one write, because the checkpoint thread prints too
            print(f"{text}\n", end="", flush=True)

    def event(self, step: int, event: str, text: str) -> None:
        """Record and print an event."""
        if self.main:
            append_jsonl(self.dir.events, {"time": time.time(), "step": step, "event": event, "text": text})
            self.say(f"{event}: {text}")

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Record a phase without training, also if it fails."""
        begin = time.time(), time.monotonic()  # by both clocks: that of the machine can be set back
        try:
            yield
        finally:
            if self._phases:
                line = {"phase": phase, "step": self.step, "attempt": self.attempt, "begin": begin[0]}
                line |= {"end": time.time(), "begin_monotonic": begin[1], "end_monotonic": time.monotonic()}
                append_jsonl(self._phases, line)

    def training(self, numbers: StepNumbers, epoch: int) -> None:
        """Add the numbers of a step; log them every log_interval steps and at the last step."""
        step = numbers.step
        self.seconds.append(numbers.seconds)
        self._recent.append(numbers)
        if step % self.config.log_interval and step != self.config.max_iters - 1:
            return
        # The mean since the last line: a single step says little on a shared machine
        recent, self._recent, self.train_loss = self._recent, [], numbers.loss
        seconds = statistics.fmean(each.seconds for each in recent)
        if step:  # the first one includes warm-up
            compute = statistics.fmean(each.compute_s for each in recent)
            line = {"step": step, "steps": len(recent), "compute_ms": 1e3 * compute, "step_ms": 1e3 * seconds}
            append_jsonl(self.dir.timings(self.world.rank), line)
        speed, used = self._speed(seconds)
        values = {  # W&B and TensorBoard group charts by the part of a key before the slash
            "train/loss": numbers.loss,
            "train/lr": numbers.lr,
            "grad/norm": numbers.norm,
            "throughput/tokens_per_s": speed,
            "throughput/mfu": used,
            "throughput/step_ms": 1e3 * seconds,
        }
        pruned = ""
        if self.pruner:
            values["sparsity"] = self.pruner.sparsity(step)
            pruned = f" | sparsity {values['sparsity']:.1%}"
        self._metrics(step, values | (self.norms.of(step) if self.norms else {}))
        self.say(
            f"Iter {step} | epoch {epoch} | loss {numbers.loss:.4f} | lr {numbers.lr:.2e} | "
            f"norm {numbers.norm:.2f} | dt {1e3 * seconds:.1f}ms | tok/s {speed:.0f} | "
            f"mfu {'n/a' if used is None else f'{used:.1%}'}{pruned}"
        )

    def validation(self, step: int, loss: float, by_source: Mapping[str, float], bits: float | None) -> None:
        """Log a validation loss of the weights after `step` updates.

        by_source: loss per dataset of a mix.  bits: per byte of text.
        """
        self.val.append(Evaluation(step, loss, bits))
        several = by_source if len(by_source) > 1 else {}  # of one dataset it would repeat the loss
        parts = {f"val/loss/{name}": value for name, value in several.items()}
        self._metrics(step, {"val/loss": loss, "val/bits_per_byte": bits, **parts})
        self.say(f"Iter {step} | Validation loss {loss:.4f}" + ("" if bits is None else f" | bpb {bits:.4f}"))

    def scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Log the scores of benchmarks, by their names in the metrics, of the weights after `step` updates."""
        self.say(f"Iter {step} | " + " | ".join(f"{name} {value:z.4f}" for name, value in scores.items()))
        self._metrics(step, scores)

    def _speed(self, seconds: float) -> tuple[float, float | None]:
        """Return tokens per second, and MFU if the peak is known, of steps that take `seconds`."""
        # FLOPs per token: Chowdhery et al., PaLM, appendix B (kmatrix.shapes)
        speed = self.config.tokens_per_step / seconds
        return speed, mfu(speed, self.config.shape.flops_per_token, self.peak, self.world.size)

    def _metrics(self, step: int, values: Mapping[str, Any]) -> None:
        if self.main:
            head = {"step": step, "time": time.time(), "attempt": self.attempt, "elapsed_s": self.elapsed_s}
            append_jsonl(self.dir.metrics, finite({**head, "tokens": step * self.config.tokens_per_step, **values}))

    def result(self, status: str, **end: str | None) -> dict[str, Any]:
        """Return what result.json says: how the attempt ended, and its numbers if its set-up was complete.

        end: kind and reason; of a finished run ended_by: its final validation loss is that of the step where it ended.
        """
        head = {"run_id": self.run_id, "attempt": self.attempt, "status": status, "kind": None, "reason": None}
        head |= {"ended_by": None, **end, "step": self.step, "ended": time.time()}
        if not self._about:
            return head
        config, world = self.config, self.world
        best = min(self.val, key=lambda line: line.loss, default=None)
        # The newest loss is the final one only if it is of the final weights. A run that was stopped has none.
        trained = end.get("ended_by") is not None or self.step == config.max_iters
        final = self.val[-1] if trained and self.evaluated(self.step) else None
        steady = self.seconds[min(WARM_UP, len(self.seconds) // 2) :]
        # Speed from the mean (all tokens / all seconds), but the typical step from the median, without outliers
        speed, used = self._speed(statistics.fmean(steady)) if steady else (None, None)
        return head | {
            "tokens": self.step * config.tokens_per_step,
            "initial_val_loss": self.val[0].loss if self.val else None,
            "final_val_loss": final.loss if final else None,
            "best_val_loss": best.loss if best else None,
            "best_val_step": best.step if best else None,
            "final_bits_per_byte": final.bits if final else None,
            "best_bits_per_byte": best.bits if best else None,
            "final_train_loss": self.train_loss,
            "tokens_per_second": speed,
            "mfu": used,
            "step_ms": 1e3 * statistics.median(steady) if steady else None,
            "seconds": self.elapsed_s,
            "peak_memory_mib": peak_memory_mib(world),
            "optimizer_state_mib": self.optimizers.state_bytes / 2**20 if self.optimizers else None,
            "world_size": world.size,
            "device": world.device.type,
            "device_name": world.device_name,
            "params": config.shape.params,
            "sparsity": self.pruner.sparsity(self.step) if self.pruner and status != "failed" else None,
            **self._about,
        }

    def finish(self, ended_by: str) -> None:
        """Report the final and the best validation loss, and end the run as finished."""
        final, best = self.val[-1], min(self.val, key=lambda line: line.loss)
        self.say(f"Final validation loss: {final.loss:.4f}")
        self.say(f"Best validation loss: {best.loss:.4f} (Iter {best.step})")
        if self.step < self.config.max_iters:  # its rate has not decayed: the loss is not comparable with complete runs
            text = f"ended after {self.step} of {self.config.max_iters} steps of the learning rate schedule"
            self.event(self.step, ended_by, text)
        self.end("finished", ended_by=ended_by)

    def end(self, status: str, **end: str | None) -> None:
        """Write result.json, whose existence means that the run has ended. end: as of `result`."""
        # A run that was moved while it trained continues at its new path: a result at the old one would be lost there.
        if self.main and self.dir.path.is_dir():
            self.leave_if_replaced()
            write_json(self.dir.result, finite(self.result(status, **end)))

    def leave_if_replaced(self) -> None:
        """Exit if a newer attempt has the run: only its checkpoints and its result count."""
        if numbers(self.dir.path)[-1:] > [self.attempt]:
            self.say(f"attempt {self.attempt} ends: another attempt has the run now")
            exit_now(EXIT_FAILED)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with None for numbers that are not finite: NaN and Infinity are not JSON."""
    unknown = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    return {**values, **dict.fromkeys(unknown)}
