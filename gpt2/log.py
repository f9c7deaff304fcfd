"""The log of a run: lines on stdout, metrics, events, phases and the result. Only rank 0 writes.

Of a run over several nodes, one rank of each writes the phases of its node, by the clock that the recorder there has.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpt2.benchmarks.tasks import Scores
from gpt2.dist import World, environment, gather, node_environment
from gpt2.machine import about_machines, machine_of, peak_memory_mib
from gpt2.norms import LayerNorms
from gpt2.optim.optimizers import Optimizers
from gpt2.prune import Pruner
from gpt2.steps import StepNumbers
from kmatrix.depth_rule import describe
from kmatrix.records.files import append_jsonl, end_torn_line, write_json
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import mfu, peak_tflops
from kmatrix.text import count, memory_size

# Names in metrics.jsonl; in result.json with _ instead of /.
BENCHMARKS = ("hellaswag/accuracy", "hellaswag/accuracy_norm", "core/metric", "core/standard_error")
SHORTEST_PHASE_S = 0.005  # most steps have no phase: their lines would fill the file
WARM_UP = 10  # steps excluded from the steady speed, or half of a shorter run


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """A generated text, as in samples.jsonl."""

    prompt: str
    text: str  # without the prompt
    seed: int
    tokens: int  # generated


class Evaluation(NamedTuple):
    """The validation loss of the weights after `step` updates."""

    step: int
    loss: float  # nats/token
    bits: float | None  # per byte of text


class RunLog:
    """The log of one attempt at a run. Ranks other than 0 keep the numbers but write nothing."""

    def __init__(self, run_dir: RunDir, run_id: str, attempt: int, *, main: bool) -> None:
        self.dir, self.run_id, self.attempt, self.main = run_dir, run_id, attempt, main
        self.config: TrainConfig | None = None
        self.world: World | None = None
        self.params: int | None = None
        self.pruner: Pruner | None = None
        self.norms: LayerNorms | None = None
        self.peak: float | None = None  # TFLOP/s
        self.started, self.started_at = time.perf_counter(), both_clocks()
        self.spent: Callable[[], float] = lambda: self.elapsed_s  # seconds including lost work
        # The history: a resumed attempt reports on the whole run
        self.step = 0  # updates done
        self.val: list[Evaluation] = []
        self.train_loss: float | None = None  # of the newest line
        self.sparsity: float | None = None
        self.before_s = 0.0  # seconds of earlier attempts, up to the checkpoint that this one resumed from
        self.seconds = array("d")  # of each step of this attempt; 8 bytes each, because there may be millions
        self.steady_before = array("d")  # of the steps of earlier attempts, without warm-up
        self.since_line, self.compute_s = 0, 0.0  # steps since the last line, and the compute time of this rank in them
        self.state_bytes: list[int] | None = None  # of the optimizer states on each rank, after the first update
        self.benchmarks: dict[str, float | None] = newest({})  # the newest scores
        self._phases = phases_of_node(run_dir)
        written = (run_dir.metrics, run_dir.events, run_dir.samples, run_dir.core) if main else ()
        for path in (*written, *([self._phases] if self._phases else [])):
            end_torn_line(path)  # an earlier attempt may have been killed while it wrote a line

    def begin(
        self,
        config: TrainConfig,
        world: World,
        params: int,
        pruner: Pruner | None = None,
        changed: Sequence[Mapping[str, Any]] = (),
        *,
        attention: Mapping[str, str] | None = None,
    ) -> None:
        """Write run_used.json: the effective fields, and how they differ from run.json.

        changed: fields that differ from the plan, each with field, from, to and why.  attention: kernel by kind.
        """
        self.config, self.world, self.params, self.pruner = config, world, params, pruner
        self.dir.rank(world.rank).mkdir(parents=True, exist_ok=True)
        end_torn_line(self.dir.timings(world.rank))
        machines = gather(world, machine_of(world))  # of all ranks: rank 0 knows only its own node
        self.peak = config.peak_tflops or peak_tflops(world.device_name, config.dtype, tf32=config.tf32)
        used, adjusted = config.to_json(), list(changed)
        if self.peak != config.peak_tflops:
            used["peak_tflops"] = self.peak
            why = f"peak of {world.device_name} in kmatrix.shapes"
            adjusted.append({"field": "peak_tflops", "from": config.peak_tflops, "to": self.peak, "why": why})
        about = {"attempt": self.attempt, "attention": dict(attention or {}), **about_machines(machines)}
        if self.main:
            write_json(self.dir.run_used, {"train": used, "adjusted": adjusted, **about})
        hosts = f" on {world.nodes} nodes: {', '.join(dict.fromkeys(about['hosts']))}" if world.nodes > 1 else ""
        self.say(
            f"Training {config.model} ({params:,} parameters) on {config.dataset} with {config.optimizer}: "
            f"{config.max_iters} steps of {config.tokens_per_step} tokens, {world.size} x {world.device_name}{hosts}"
        )
        if attention:
            self.say("Attention: " + ", ".join(f"{kind} {kernel}" for kind, kernel in attention.items()))
        for line in describe(config):
            self.say(f"Depth rule: {line}")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run started, over all attempts that led to the current weights."""
        return self.before_s + time.perf_counter() - self.started

    @property
    def last_val_loss(self) -> float | None:
        """The newest validation loss."""
        return self.val[-1].loss if self.val else None

    def evaluated(self, step: int) -> bool:
        """Return whether the weights after `step` updates were evaluated, in this or an earlier attempt."""
        return bool(self.val) and self.val[-1].step == step

    def is_best(self, step: int) -> bool:
        """Return whether the weights after `step` updates have the lowest validation loss so far."""
        # <= because the minimum includes this one; of equal losses the newer weights win, which saw more data
        return self.evaluated(step) and self.val[-1].loss <= min(line.loss for line in self.val)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed attempt needs to report on the whole run."""
        history = {"val": [list(line) for line in self.val], "train_loss": self.train_loss, "sparsity": self.sparsity}
        return {**history, "elapsed_s": self.elapsed_s, "steady": list(self._steady())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the history of a checkpoint."""
        self.val = [Evaluation(*line) for line in state["val"]]  # without those after the checkpoint
        self.train_loss, self.sparsity = state["train_loss"], state["sparsity"]
        self.before_s, self.steady_before = state["elapsed_s"], array("d", state["steady"])

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
        begin = both_clocks()
        try:
            yield
        finally:
            self.end_phase(phase, begin)

    def end_phase(self, phase: str, begin: tuple[float, float]) -> None:
        """Write a phase from `begin` (of `both_clocks`) until now to its file, unless it was negligible."""
        end = both_clocks()
        # The monotonic time: the clock of the machine can be set back.
        if self._phases and end[1] - begin[1] >= SHORTEST_PHASE_S:
            line = {"phase": phase, "step": self.step, "attempt": self.attempt, "begin": begin[0], "end": end[0]}
            append_jsonl(self._phases, {**line, "begin_monotonic": begin[1], "end_monotonic": end[1]})

    def training(self, numbers: StepNumbers, epoch: int) -> None:
        """Add the numbers of a step; log them every log_interval steps and at the last step."""
        assert self.config
        self.seconds.append(numbers.seconds)
        self.since_line, self.compute_s = self.since_line + 1, self.compute_s + numbers.compute_s
        if numbers.step % self.config.log_interval and numbers.step != self.config.max_iters - 1:
            return
        # The mean since the last line: a single step says little on a shared machine
        seconds = statistics.fmean(self.seconds[-self.since_line :])
        self._timings(numbers.step, seconds)
        self.since_line, self.compute_s, self.train_loss = 0, 0.0, numbers.loss
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
            self.sparsity = values["sparsity"] = self.pruner.sparsity(numbers.step)
            pruned = f" | sparsity {self.sparsity:.1%}"
        self._metrics(numbers.step, values | (self.norms.of(numbers.step) if self.norms else {}))
        self.say(
            f"Iter {numbers.step} | epoch {epoch} | loss {numbers.loss:.4f} | lr {numbers.lr:.2e} | "
            f"norm {numbers.norm:.2f} | dt {1e3 * seconds:.1f}ms | tok/s {speed:.0f} | "
            f"mfu {'n/a' if used is None else f'{used:.1%}'}{pruned}"
        )

    def states(self, optimizers: Optimizers) -> None:
        """Log the size of the optimizer states of each rank, once in an attempt: the first update makes them."""
        if self.state_bytes is not None or self.world is None:
            return
        self.state_bytes = gather(self.world, optimizers.state_bytes)
        if optimizers.sharded:
            sizes = dict.fromkeys(memory_size(size) for size in (min(self.state_bytes), max(self.state_bytes)))
            self.say(f"Optimizer states: sharded over {self.world.size} ranks, {' to '.join(sizes)} on each")

    def validation(
        self, step: int, loss: float, by_source: Mapping[str, float] | None = None, bits: float | None = None
    ) -> None:
        """Log a validation loss of the weights after `step` updates.

        by_source: loss per dataset of a mix.  bits: per byte of text.
        """
        self.val.append(Evaluation(step, loss, bits))
        several = by_source if by_source and len(by_source) > 1 else {}  # of one dataset it would repeat the loss
        parts = {f"val/loss/{name}": value for name, value in several.items()}
        self._metrics(step, {"val/loss": loss, "val/perplexity": perplexity(loss), "val/bits_per_byte": bits, **parts})
        more = "" if bits is None else f" | bpb {bits:.4f}"
        more += "".join(f" | {name} {value:.4f}" for name, value in several.items())
        self.say(f"Iter {step} | Validation loss {loss:.4f} | ppl {perplexity(loss):.2f}{more}")

    def scores(self, step: int, scores: Scores) -> None:
        """Log HellaSwag and CORE of the weights after `step` updates."""
        values: dict[str, Any] = {}
        if found := scores.hellaswag:
            values |= {"hellaswag/accuracy": found.accuracy, "hellaswag/accuracy_norm": found.accuracy_norm}
            self.say(f"Iter {step} | HellaSwag {found.accuracy:.4f} | normalised {found.accuracy_norm:.4f}")
        if core := scores.core:
            values |= {"core/metric": core.core, "core/standard_error": core.standard_error}
            values |= {f"core/{task.label}": task.accuracy for task in core.tasks}
            if self.main:
                line = {"time": time.time(), "step": step, "attempt": self.attempt, **asdict(core)}
                append_jsonl(self.dir.core, line | {"tasks": {task.pop("label"): task for task in line["tasks"]}})
            more = f"standard error {core.standard_error:.4f}, {count(core.examples)} examples"
            more += f", {count(core.truncated)} truncated" if core.truncated else ""
            self.say(f"Iter {step} | CORE {core.core:z.4f} ({more})")
        self.benchmarks = newest(values)
        self._metrics(step, values)

    def samples(self, step: int, samples: Sequence[SampleText]) -> None:
        """Log sample texts of the weights after `step` updates, one line each."""
        for sample in samples:
            if self.main:
                line = {"time": time.time(), "step": step, "attempt": self.attempt, **asdict(sample)}
                append_jsonl(self.dir.samples, line)
            # As JSON strings: a text with line breaks stays one line of the log.
            prompt, text = (json.dumps(value, ensure_ascii=False) for value in (sample.prompt, sample.text))
            self.say(f"Iter {step} | Sample of {prompt}: {text}")

    def _speed(self, seconds: float) -> tuple[float, float | None]:
        """Return tokens per second, and MFU if the peak is known, of steps that take `seconds`."""
        assert self.config
        assert self.world
        # FLOPs per token: Chowdhery et al., PaLM, appendix B (kmatrix.shapes)
        speed = self.config.tokens_per_step / seconds
        return speed, mfu(speed, self.config.shape.flops_per_token, self.peak, self.world.size)

    def _timings(self, step: int, seconds: float) -> None:
        """Add a line to the timings of this rank, but not of the first step, which includes warm-up."""
        assert self.world
        if step:
            line = {"step": step, "steps": self.since_line, "compute_ms": 1e3 * self.compute_s / self.since_line}
            append_jsonl(self.dir.timings(self.world.rank), line | {"step_ms": 1e3 * seconds})

    def _metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        assert self.config
        line = {"step": step, "time": time.time(), "elapsed_s": self.elapsed_s}
        line |= {"tokens": step * self.config.tokens_per_step, "attempt": self.attempt}
        if self.main:
            append_jsonl(self.dir.metrics, finite({**line, **values}))

    def _steady(self) -> array[float]:
        """Return the seconds of each step that led to the current weights, without the warm-up of each attempt."""
        return self.steady_before + self.seconds[min(WARM_UP, len(self.seconds) // 2) :]

    def result(
        self, status: str, kind: str | None = None, reason: str | None = None, *, ended_by: str | None = None
    ) -> dict[str, Any]:
        """Return what result.json says: how the attempt ended, and its numbers as far as there are any.

        ended_by: what a finished run ended by; its final validation loss is that of the step where it ended.
        """
        config, world = self.config, self.world  # None if the run failed before its set-up
        best = min(self.val, key=lambda line: line.loss, default=None)
        trained = ended_by is not None or (config is not None and self.step == config.max_iters)
        # The newest loss is the final one only if it is of the final weights. A run that was stopped has none.
        final = self.val[-1] if trained and self.evaluated(self.step) else None
        steady = self._steady()
        # Speed from the mean (all tokens / all seconds), but the typical step from the median, without outliers
        speed, used = self._speed(statistics.fmean(steady)) if steady else (None, None)
        return {
            "run_id": self.run_id,
            "attempt": self.attempt,
            "status": status,
            "kind": kind,
            "reason": reason,
            "ended_by": ended_by,
            "step": self.step,
            "tokens": self.step * config.tokens_per_step if config else None,
            "initial_val_loss": self.val[0].loss if self.val else None,
            "final_val_loss": final.loss if final else None,
            "best_val_loss": best.loss if best else None,
            "best_val_step": best.step if best else None,
            "final_bits_per_byte": final.bits if final else None,
            "best_bits_per_byte": best.bits if best else None,
            **self.benchmarks,
            "final_train_loss": self.train_loss,
            "tokens_per_second": speed,
            "mfu": used,
            "step_ms": 1e3 * statistics.median(steady) if steady else None,
            "seconds": self.elapsed_s,
            "spent_s": self.spent(),
            "schedule_share": self.step / config.max_iters if config else None,
            "attempt_seconds": time.perf_counter() - self.started,
            "peak_memory_mib": peak_memory_mib(world) if world else None,
            "optimizer_state_mib": [size / 2**20 for size in self.state_bytes] if self.state_bytes else None,
            "world_size": world.size if world else None,
            "device": world.device.type if world else None,
            "device_name": world.device_name if world else None,
            "params": self.params,
            "sparsity": self.sparsity,
            "ended": time.time(),
        }

    def finish(self, ended_by: str) -> None:
        """Report the final and the best validation loss, and end the run as finished."""
        assert self.config
        if self.pruner:
            self.sparsity = self.pruner.sparsity(self.step)
        final, best = self.val[-1], min(self.val, key=lambda line: line.loss)
        self.say(f"Final validation loss: {final.loss:.4f} | ppl: {perplexity(final.loss):.2f}")
        self.say(f"Best validation loss: {best.loss:.4f} (Iter {best.step})")
        if self.step < self.config.max_iters:  # its rate has not decayed: the loss is not comparable with complete runs
            text = f"ended after {self.step} of {self.config.max_iters} steps of the learning rate schedule"
            self.event(self.step, ended_by, text)
        self.end("finished", ended_by=ended_by)

    def end(
        self, status: str, kind: str | None = None, reason: str | None = None, *, ended_by: str | None = None
    ) -> None:
        """Write result.json, whose existence means that the run has ended."""
        # A run that was moved while it trained continues at its new path: a result at the old one would be lost there.
        if self.main and self.dir.path.is_dir():
            write_json(self.dir.result, finite(self.result(status, kind, reason, ended_by=ended_by)))


def phases_of_node(run_dir: RunDir) -> Path | None:
    """Return the file of the phases of this node, for its first rank; None for others, and if nothing watches it."""
    node = NodeDir(run_dir, node_environment()[0])
    _, local_rank, _ = environment()
    # Without its folder, torchrun was started by hand on this node: there is no recording to divide.
    return node.recording.phases if local_rank == 0 and node.recording.path.is_dir() else None


def newest(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return the scores of benchmarks as result.json names them; None for those that are not among `values`."""
    return {name.replace("/", "_"): values.get(name) for name in BENCHMARKS}


def both_clocks() -> tuple[float, float]:
    """Return the Unix time and the monotonic time in s; the latter does not follow changes of the clock."""
    return time.time(), time.monotonic()


def perplexity(loss: float) -> float:
    """Return exp(loss), infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf  # exp raises OverflowError from 710 on


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with None for numbers that are not finite: NaN and Infinity are not JSON."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
