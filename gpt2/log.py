"""The log of a run: lines on stdout, metrics, events and the result files. Only rank 0 writes.

Of a run over several nodes, one rank of each writes the phases of its node, by the clock that the recorder there has.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gpt2.benchmarks.tasks import Scores
from gpt2.dist import World, gather
from gpt2.machine import check_alike, machine_of, software, variables
from gpt2.norms import LayerNorms
from gpt2.optim.optimizers import Optimizers
from gpt2.prune import Pruner
from gpt2.steps import StepNumbers
from kmatrix.depth_rule import describe
from kmatrix.records.files import append_jsonl, end_torn_line, write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import mfu, peak_tflops
from kmatrix.text import count, memory_size

BENCHMARKS = {  # name in result.json -> in metrics.jsonl
    "hellaswag_accuracy": "hellaswag/accuracy",
    "hellaswag_accuracy_norm": "hellaswag/accuracy_norm",
    "core_metric": "core/metric",
    "core_standard_error": "core/standard_error",
}
SHORTEST_PHASE_S = 0.005  # a checkpoint that is not due takes microseconds
WARM_UP = 10  # steps excluded from the steady speed, or half of a shorter run


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """A generated text, as in samples.jsonl."""

    prompt: str
    text: str  # without the prompt
    seed: int
    tokens: int  # generated


class RunLog:
    """The log of one attempt at a run. Ranks other than 0 keep the numbers but write nothing."""

    def __init__(self, run_dir: RunDir, run_id: str, attempt: int, *, main: bool, phases: Path | None = None) -> None:
        """Create the log. phases: the file of the phases, None for that of the run if this is rank 0."""
        self.dir, self.run_id, self.attempt, self.main = run_dir, run_id, attempt, main
        self.config: TrainConfig | None = None
        self.world: World | None = None
        self.params: int | None = None
        self.pruner: Pruner | None = None
        self.started = time.perf_counter()
        self.started_at = both_clocks()
        self.step = 0  # updates done
        self.seconds = array("d")  # duration of each step of this attempt; 8 bytes each, because there may be millions
        self.before_s = 0.0  # seconds of earlier attempts, up to the checkpoint that this one resumed from
        self.steady_before = array("d")  # their steps, without warm-up
        self.since_line = 0  # steps since the last line
        self.peak: float | None = None
        self.benchmarks: dict[str, float | None] = dict.fromkeys(BENCHMARKS)  # the newest scores
        self.norms: LayerNorms | None = None
        self.state_bytes: list[int] | None = None  # of the optimizer states on each rank, after the first update
        self.spent: Callable[[], float] = lambda: self.elapsed_s  # seconds including lost work
        self.train: list[dict[str, Any]] = []  # training lines of metrics.jsonl
        self.val: list[dict[str, Any]] = []  # validation lines of metrics.jsonl
        self._phases = run_dir.phases if main else phases
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
        machines = gather(world, machine_of(world))  # of all ranks: rank 0 knows only its own node
        check_alike(machines)
        self.peak = config.peak_tflops or peak_tflops(world.device_name, config.dtype, tf32=config.tf32)
        if not self.main:
            return
        # The configuration as used: what differs from the plan is listed with its reason
        used, adjusted = config.to_json(), list(changed)
        if self.peak != config.peak_tflops:
            used["peak_tflops"] = self.peak
            why = f"peak of {world.device_name} in kmatrix.shapes"
            adjusted.append({"field": "peak_tflops", "from": config.peak_tflops, "to": self.peak, "why": why})
        # The machines
        hosts = [machine["host"] for machine in machines]
        about = {
            "attempt": self.attempt,
            "devices": [machine["device"] for machine in machines],
            "hosts": hosts,
            "gpus": [machine["gpu"] for machine in machines if machine["gpu"]],
            "attention": dict(attention or {}),
            "environment": variables(),
            "software": software(),
        }
        write_json(self.dir.run_used, {"train": used, "adjusted": adjusted, **about})
        self.say(
            f"Training {config.model} ({params:,} parameters) on {config.dataset} with {config.optimizer}: "
            f"{config.max_iters} steps of {config.tokens_per_step} tokens, {world.size} x {world.device_name}"
            + (f" on {world.nodes} nodes: {', '.join(dict.fromkeys(hosts))}" if world.nodes > 1 else "")
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
        return self.val[-1]["val/loss"] if self.val else None

    def evaluated(self, step: int) -> bool:
        """Return whether the weights after `step` updates were evaluated, in this or an earlier attempt."""
        return bool(self.val) and bool(self.val[-1]["step"] == step)

    def is_best(self, step: int) -> bool:
        """Return whether the weights after `step` updates have the lowest validation loss so far."""
        # <= because the minimum includes this one; of equal losses the newer weights win, which saw more data
        return self.evaluated(step) and self.val[-1]["val/loss"] <= min(line["val/loss"] for line in self.val)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed attempt needs to report on the whole run."""
        return {
            "train": columns(self.train),
            "val": columns(self.val),
            "elapsed_s": self.elapsed_s,
            "steady": list(self._steady()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the history of a checkpoint."""
        self.train, self.val = rows(state["train"]), rows(state["val"])  # without those after the checkpoint
        self.before_s = state["elapsed_s"]
        self.steady_before = array("d", state["steady"])
        self.seconds, self.since_line = array("d"), 0

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
        # The monotonic time: the clock of the machine can be set back. Most steps have no phase: their lines would
        # fill the file.
        if self._phases and end[1] - begin[1] >= SHORTEST_PHASE_S:
            line = {"phase": phase, "step": self.step, "attempt": self.attempt, "begin": begin[0], "end": end[0]}
            append_jsonl(self._phases, {**line, "begin_monotonic": begin[1], "end_monotonic": end[1]})

    def training(self, numbers: StepNumbers, epoch: int) -> None:
        """Add the numbers of a step; log them every log_interval steps and at the last step."""
        assert self.config
        self.seconds.append(numbers.seconds)
        self.since_line += 1
        if numbers.step % self.config.log_interval and numbers.step != self.config.max_iters - 1:
            return
        # The mean since the last line: a single step says little on a shared machine
        seconds = statistics.fmean(self.seconds[-self.since_line :])
        self.since_line = 0
        speed, used = self._speed(seconds)
        self._metrics(  # W&B and TensorBoard group charts by the part of a key before the slash
            self.train,
            numbers.step,
            {
                "train/loss": numbers.loss,
                "train/lr": numbers.lr,
                "grad/norm": numbers.norm,
                "throughput/tokens_per_s": speed,
                "throughput/mfu": used,
                "throughput/step_ms": 1e3 * seconds,
                **({"sparsity": self.pruner.sparsity(numbers.step)} if self.pruner else {}),
            },
            self.norms.of(numbers.step) if self.norms else {},
        )
        pruned = f" | sparsity {self.pruner.sparsity(numbers.step):.1%}" if self.pruner else ""
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
            sizes = " to ".join(
                dict.fromkeys(memory_size(size) for size in (min(self.state_bytes), max(self.state_bytes)))
            )
            self.say(f"Optimizer states: sharded over {self.world.size} ranks, {sizes} on each")

    def validation(
        self, step: int, loss: float, by_source: Mapping[str, float] | None = None, bits: float | None = None
    ) -> None:
        """Log a validation loss of the weights after `step` updates.

        by_source: loss per dataset of a mix.  bits: per byte of text.
        """
        several = by_source if by_source and len(by_source) > 1 else {}  # of one dataset it would repeat the loss
        parts = {f"val/loss/{name}": value for name, value in several.items()}
        values = {"val/loss": loss, "val/perplexity": perplexity(loss), "val/bits_per_byte": bits, **parts}
        self._metrics(self.val, step, values)
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
        self.benchmarks = {key: values.get(name) for key, name in BENCHMARKS.items()}
        # Not in a history: reports read metrics.jsonl, and result.json has the newest scores only.
        self._metrics([], step, values)

    def samples(self, step: int, samples: Sequence[SampleText]) -> None:
        """Log sample texts of the weights after `step` updates, one line each."""
        for sample in samples:
            if self.main:
                line = {"time": time.time(), "step": step, "attempt": self.attempt, **asdict(sample)}
                append_jsonl(self.dir.samples, line)
            # As JSON strings: a text with line breaks stays one line of the log.
            prompt, text = (json.dumps(value, ensure_ascii=False) for value in (sample.prompt, sample.text))
            self.say(f"Iter {step} | Sample of {prompt}: {text}")

    def _sparsity(self) -> float | None:
        """Return the share of pruned weights now; None without pruning, or if the GPU has failed."""
        if threading.current_thread() is not threading.main_thread():  # the loop hangs, and the GPU may: do not wait
            return self.train[-1].get("sparsity") if self.train else None
        try:
            return self.pruner.sparsity() if self.pruner else None
        # After a CUDA error every operation fails, and the result must be written all the same: it has the reason.
        except RuntimeError:
            return None

    def _speed(self, seconds: float) -> tuple[float, float | None]:
        """Return tokens per second, and MFU if the peak is known, of steps that take `seconds`."""
        assert self.config
        assert self.world
        # FLOPs per token: Chowdhery et al., PaLM, appendix B (kmatrix.shapes)
        speed = self.config.tokens_per_step / seconds
        return speed, mfu(speed, self.config.shape.flops_per_token, self.peak, self.world.size)

    def _metrics(
        self, history: list[dict[str, Any]], step: int, values: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> None:
        """Add values to the history and to metrics.jsonl. more: for the file only, not for checkpoints."""
        assert self.config
        line = {
            "step": step,
            "time": time.time(),
            "elapsed_s": self.elapsed_s,
            "tokens": step * self.config.tokens_per_step,
            "attempt": self.attempt,
            **values,
        }
        history.append(line)
        if self.main:
            append_jsonl(self.dir.metrics, finite_items({**line, **(more or {})}))

    def _steady(self) -> array[float]:
        """Return the seconds of each step that led to the current weights, without the warm-up of each attempt."""
        return self.steady_before + self.seconds[min(WARM_UP, len(self.seconds) // 2) :]

    def result(
        self, status: str, kind: str | None = None, reason: str | None = None, *, ended_by: str | None = None
    ) -> dict[str, Any]:
        """Return what result.json says: how the attempt ended, and its numbers as far as there are any.

        ended_by: what a finished run ended by; its final validation loss is that of the step where it ended.
        """
        # Both are None if the run failed before its set-up
        config, world = self.config, self.world
        losses = [line["val/loss"] for line in self.val]
        best = min(self.val, key=lambda line: line["val/loss"], default=None)
        trained = ended_by is not None or (config is not None and self.step == config.max_iters)
        # The newest loss is the final one only if it is of the final weights. A run that was stopped has none.
        complete = trained and self.evaluated(self.step)
        steady = self._steady()
        # Speed from the mean (all tokens / all seconds), but the typical step from the median, without outliers
        speed, used = self._speed(statistics.fmean(steady)) if steady else (None, None)
        return finite_items(
            {
                "run_id": self.run_id,
                "attempt": self.attempt,
                "status": status,
                "kind": kind,
                "reason": reason,
                "ended_by": ended_by,
                "step": self.step,
                "tokens": self.step * config.tokens_per_step if config else None,
                "initial_val_loss": losses[0] if losses else None,
                "final_val_loss": losses[-1] if complete else None,
                "best_val_loss": best["val/loss"] if best else None,
                "best_val_step": best["step"] if best else None,
                "final_bits_per_byte": self.val[-1]["val/bits_per_byte"] if complete else None,
                "best_bits_per_byte": best["val/bits_per_byte"] if best else None,
                **self.benchmarks,
                "final_train_loss": self.train[-1]["train/loss"] if self.train else None,
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
                "sparsity": self._sparsity(),
                "ended": time.time(),
            }
        )

    def training_metrics(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return training_metrics.json: the original project's keys, then ours. Missing measurements are null."""
        config, world = self.config, self.world
        assert config
        assert world
        val_losses = [line["val/loss"] for line in self.val]
        train_losses = [line["train/loss"] for line in self.train]
        final, best, initial = (result[f"{which}_val_loss"] for which in ("final", "best", "initial"))
        # The history again, in the original project's format: one list per quantity
        ppl = {"final": perplexity(final), "best": perplexity(best), "initial": perplexity(initial)}
        cuda = world.device.type == "cuda"
        return finite_items(
            {
                "config": config.to_json(),
                "model_params": self.params,
                "train_losses": train_losses,
                "val_losses": val_losses,
                "train_perplexities": [perplexity(loss) for loss in train_losses],
                "val_perplexities": [perplexity(loss) for loss in val_losses],
                "learning_rates": [line["train/lr"] for line in self.train],
                "sparsities": [line.get("sparsity", 0.0) for line in self.train],  # 0: nothing is pruned
                "timestamps": [line["time"] for line in self.train],
                "iterations": [line["step"] for line in self.train],
                "final_val_loss": final,
                "best_val_loss": best,
                "final_perplexity": ppl["final"],
                "best_perplexity": ppl["best"],
                "initial_perplexity": ppl["initial"],
                "delta_ppl": ppl["final"] - ppl["initial"] if ppl["final"] and ppl["initial"] else None,
                "total_time": result["seconds"],
                # Not measured here; the keys stay for readers of the original's files.
                **{f"latency_seq{length}_{p}": None for length in (512, 1024) for p in ("p50", "p95")},
                "gpu_memory_allocated_mb": torch.cuda.max_memory_allocated(world.device) / 2**20 if cuda else None,
                "gpu_memory_reserved_mb": torch.cuda.max_memory_reserved(world.device) / 2**20 if cuda else None,
                "tokens": result["tokens"],
                "tokens_per_second": result["tokens_per_second"],
                "mfu": result["mfu"],
                "joules": None,  # the recorder measures energy, not the trainer
                "joules_per_token": None,
                "world_size": world.size,
                "global_batch": config.global_batch,
                "seed": config.seed,
                "run_id": self.run_id,
                "val_steps": [line["step"] for line in self.val],
                **{name: result[name] for name in ("final_bits_per_byte", *BENCHMARKS)},
            }
        )

    def finish(self, ended_by: str) -> None:
        """Report the final and the best validation loss, and end the run as finished."""
        assert self.config
        final, best = self.val[-1], min(self.val, key=lambda line: float(line["val/loss"]))
        self.say(f"Final validation loss: {final['val/loss']:.4f} | ppl: {final['val/perplexity']:.2f}")
        self.say(f"Best validation loss: {best['val/loss']:.4f} (Iter {best['step']})")
        if self.step < self.config.max_iters:  # its rate has not decayed: the loss is not comparable with complete runs
            text = f"ended after {self.step} of {self.config.max_iters} steps of the learning rate schedule"
            self.event(self.step, ended_by, text)
        self.end("finished", ended_by=ended_by)

    def end(
        self, status: str, kind: str | None = None, reason: str | None = None, *, ended_by: str | None = None
    ) -> None:
        """Write training_metrics.json, then result.json, whose existence means that the run has ended."""
        # A run that was moved while it trained continues at its new path: a result at the old one would be lost there.
        if not self.main or not self.dir.path.is_dir():
            return
        result = self.result(status, kind, reason, ended_by=ended_by)
        if self.config and self.world:  # else the run failed before its set-up, and there are no metrics
            with suppress(OSError) if status != "finished" else nullcontext():  # the result says why, and is small
                write_json(self.dir.training_metrics, self.training_metrics(result))
        write_json(self.dir.result, result)


def columns(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return log lines as one list per key, with None for missing values, which is compact in a checkpoint."""
    keys = dict.fromkeys(key for line in lines for key in line)
    return {key: [line.get(key) for line in lines] for key in keys}


def rows(lists: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return the log lines that `columns` was given."""
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def both_clocks() -> tuple[float, float]:
    """Return the Unix time and the monotonic time in s; the latter does not follow changes of the clock."""
    return time.time(), time.monotonic()


def perplexity(loss: float | None) -> float | None:
    """Return exp(loss), infinity if that overflows."""
    if loss is None:
        return None
    return math.exp(loss) if loss < 700 else math.inf  # exp raises OverflowError from 710 on


def peak_memory_mib(world: World) -> float:
    """Return this rank's peak memory in MiB: its GPU's tensors, or the resident set on the CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux


def finite_items(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with null for non-finite numbers."""
    # json.dumps writes NaN and Infinity, which are not JSON: strict readers would refuse the whole file.
    return {key: finite(item) for key, item in value.items()}


def finite(value: Any) -> Any:
    """Return a JSON value with null for non-finite numbers."""
    if isinstance(value, dict):
        return finite_items(value)
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
