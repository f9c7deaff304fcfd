"""What a run says of itself: lines on stdout, metrics, events, and the files at its end. Rank 0 alone writes."""

from __future__ import annotations

import json
import math
import resource
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from gpt2.config import TrainConfig
from gpt2.dist import World
from gpt2.hellaswag import Score
from gpt2.machine import gpus, software
from gpt2.prune import Pruner
from gpt2.steps import Reading
from kmatrix.records import RunDir, append_jsonl, end_torn_line, write_json
from kmatrix.shapes import mfu, peak_tflops
from kmatrix.stats import bits_per_byte

HELLASWAG = ("hellaswag_accuracy", "hellaswag_accuracy_norm")
MOMENT_S = 0.005  # a shorter phase is none: a checkpoint that is not due takes microseconds
WARMING_UP = 10  # steps that the steady speed leaves out, or half of a shorter run


class RunLog:
    """The record of one attempt at a run. On ranks other than 0 it keeps the numbers and writes nothing."""

    def __init__(self, run_dir: RunDir, run_id: str, attempt: int, *, main: bool) -> None:
        self.dir, self.run_id, self.attempt, self.main = run_dir, run_id, attempt, main
        self.config: TrainConfig | None = None
        self.world: World | None = None
        self.params: int | None = None
        self.pruner: Pruner | None = None
        self.started = time.perf_counter()
        self.born = time.time()  # Unix seconds
        self.step = 0  # updates done
        self.seconds = array("d")  # of each step of this attempt
        self.before_s = 0.0  # seconds of the attempts that this one goes on from, up to their checkpoint
        self.steady_before = array("d")  # their steps, without those that warmed up
        self.since_line = 0  # steps since the last line
        self.peak: float | None = None
        self.bytes_per_token: float | None = None  # of the validation targets
        self.hellaswag_score: Score | None = None  # the newest
        self.spent: Callable[[], float] = lambda: self.elapsed_s  # seconds that were paid for, lost work included
        self.train: list[dict[str, Any]] = []  # what was written of training and of validation
        self.val: list[dict[str, Any]] = []
        if main:
            for path in (run_dir.metrics, run_dir.events):
                end_torn_line(path)

    def begin(
        self,
        config: TrainConfig,
        world: World,
        params: int,
        pruner: Pruner | None = None,
        changed: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Say what is used, in run_used.json: the fields of run.json, and what differs from them.

        changed: fields that are not as asked, each with field, from, to, why.
        """
        self.config, self.world, self.params, self.pruner = config, world, params, pruner
        self.peak = config.peak_tflops or peak_tflops(world.device_name, config.dtype, tf32=config.tf32)
        if not self.main:
            return
        used, adjusted = config.to_json(), list(changed)
        if self.peak != config.peak_tflops:
            used["peak_tflops"] = self.peak
            why = f"the table's peak of {world.device_name}"
            adjusted.append({"field": "peak_tflops", "from": config.peak_tflops, "to": self.peak, "why": why})
        devices = [world.device_name] * world.size
        if world.device.type == "cuda":
            devices = [torch.cuda.get_device_name(index) for index in range(world.size)]
        about = {"devices": devices, "gpus": gpus(world), "software": software()}
        write_json(self.dir.run_used, {"train": used, "adjusted": adjusted, **about})

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, over all attempts that are behind its weights."""
        return self.before_s + time.perf_counter() - self.started

    @property
    def last_val_loss(self) -> float | None:
        """The validation loss that was measured last."""
        return self.val[-1]["val/loss"] if self.val else None

    def evaluated(self, step: int) -> bool:
        """Whether the weights after `step` updates were judged already, by this attempt or the one before."""
        return bool(self.val) and bool(self.val[-1]["step"] == step)

    def is_best(self, step: int) -> bool:
        """Whether the weights after `step` updates have the lowest validation loss so far."""
        return self.evaluated(step) and self.val[-1]["val/loss"] <= min(line["val/loss"] for line in self.val)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed attempt needs to tell of the whole run."""
        return {
            "train": columns(self.train),
            "val": columns(self.val),
            "attempt": self.attempt,
            "elapsed_s": self.elapsed_s,
            "steady": list(self._steady()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what an earlier attempt knew at its checkpoint, or back to what this one knew.

        Time does not go back: what this attempt took it took.
        """
        self.train, self.val = rows(state["train"]), rows(state["val"])
        if state["attempt"] != self.attempt:
            self.before_s = state["elapsed_s"]
        self.steady_before = array("d", state["steady"])
        self.seconds, self.since_line = array("d"), 0

    def resumed(self, step: int) -> None:
        """Say in metrics.jsonl that training goes on from a step: what was written of later ones is void."""
        if self.main and self.dir.metrics.exists():
            line = {"step": step, "time": time.time(), "attempt": self.attempt, "resumed": True}
            append_jsonl(self.dir.metrics, line)

    def say(self, text: str) -> None:
        """Print one line at once."""
        if self.main:
            print(f"{text}\n", end="", flush=True)  # one write: a checkpoint that is done may be told meanwhile

    def event(self, step: int, event: str, text: str) -> None:
        """Record something that happened once, and print it."""
        if self.main:
            append_jsonl(self.dir.events, {"time": time.time(), "step": step, "event": event, "text": text})
            self.say(f"{event}: {text}")

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Note a stretch in which the run did not train, also one that fails."""
        begin = time.time()
        try:
            yield
        finally:
            self.phase_over(phase, begin)

    def phase_over(self, phase: str, begin: float) -> None:
        """Write to phases.jsonl what was done from `begin`, in Unix seconds, until now, unless it was but a moment."""
        end = time.time()
        if self.main and end - begin >= MOMENT_S:
            line = {"phase": phase, "step": self.step, "attempt": self.attempt, "begin": begin, "end": end}
            append_jsonl(self.dir.phases, line)

    def training(self, reading: Reading, epoch: int) -> None:
        """Take the numbers of a step; write them at every log_interval steps and at the last one."""
        assert self.config
        self.seconds.append(reading.seconds)
        self.since_line += 1
        if reading.step % self.config.log_interval and reading.step != self.config.max_iters - 1:
            return
        seconds = statistics.fmean(self.seconds[-self.since_line :])
        self.since_line = 0
        speed, used = self._speed(seconds)
        self._metrics(
            self.train,
            reading.step,
            {
                "train/loss": reading.loss,
                "train/lr": reading.lr,
                "grad/norm": reading.norm,
                "throughput/tokens_per_s": speed,
                "throughput/mfu": used,
                "throughput/step_ms": 1e3 * seconds,
                **({"sparsity": self.pruner.sparsity(reading.step)} if self.pruner else {}),
            },
        )
        pruned = f" | sparsity {self.pruner.sparsity(reading.step):.1%}" if self.pruner else ""
        self.say(
            f"Iter {reading.step} | epoch {epoch} | loss {reading.loss:.4f} | lr {reading.lr:.2e} | "
            f"norm {reading.norm:.2f} | dt {1e3 * seconds:.1f}ms | tok/s {speed:.0f} | "
            f"mfu {'n/a' if used is None else f'{used:.1%}'}{pruned}"
        )

    def validation(self, step: int, loss: float, by_source: Mapping[str, float] | None = None) -> None:
        """Write a validation loss, measured on the weights after `step` updates.

        by_source: the loss of each dataset of a mix.
        """
        bits = bits_per_byte(loss, self.bytes_per_token)
        several = by_source if by_source and len(by_source) > 1 else {}
        parts = {f"val/loss/{name}": value for name, value in several.items()}
        values = {"val/loss": loss, "val/perplexity": perplexity(loss), "val/bits_per_byte": bits, **parts}
        self._metrics(self.val, step, values)
        more = "" if bits is None else f" | bpb {bits:.4f}"
        more += "".join(f" | {name} {value:.4f}" for name, value in several.items())
        self.say(f"Iter {step} | Validation loss {loss:.4f} | ppl {perplexity(loss):.2f}{more}")

    def hellaswag(self, step: int, score: Score) -> None:
        """Write a HellaSwag score of the weights after `step` updates."""
        self.hellaswag_score = score
        self._metrics([], step, {"hellaswag/accuracy": score.accuracy, "hellaswag/accuracy_norm": score.accuracy_norm})
        self.say(f"Iter {step} | HellaSwag {score.accuracy:.4f} | normalised {score.accuracy_norm:.4f}")

    def samples(self, step: int, texts: Sequence[Mapping[str, Any]]) -> None:
        """Write sample texts of the weights after `step` updates, each on one line of the log."""
        for text in texts:
            if self.main:
                append_jsonl(self.dir.samples, {"time": time.time(), "step": step, "attempt": self.attempt, **text})
            prompt, answer = (json.dumps(text[name], ensure_ascii=False) for name in ("prompt", "text"))
            self.say(f"Iter {step} | Sample of {prompt}: {answer}")

    def _dollars(self) -> float | None:
        """Return what the run has cost so far, None where no price is known."""
        if self.config is None or self.config.gpu_hour_price is None:
            return None
        return self.config.gpu_hour_price * self.config.num_gpus * self.spent() / 3600

    def _speed(self, seconds: float) -> tuple[float, float | None]:
        """Return tokens per second, and MFU where the peak is known, of steps that take `seconds`."""
        assert self.config
        assert self.world
        speed = self.config.tokens_per_step / seconds
        return speed, mfu(speed, self.config.shape.flops_per_token, self.peak, self.world.size)

    def _metrics(self, history: list[dict[str, Any]], step: int, values: Mapping[str, Any]) -> None:
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
            append_jsonl(self.dir.metrics, finite_items(line))

    def _steady(self) -> array[float]:
        """Return the seconds of each step behind the weights, without those in which an attempt warmed up."""
        return self.steady_before + self.seconds[min(WARMING_UP, len(self.seconds) // 2) :]

    def result(
        self, status: str, kind: str | None = None, reason: str | None = None, *, ended_by: str | None = None
    ) -> dict[str, Any]:
        """Return what result.json says: how the attempt ended, and its numbers as far as there are any.

        ended_by: what a finished run ended by; its final validation loss is that of the step where it ended.
        """
        config, world = self.config, self.world
        losses = [line["val/loss"] for line in self.val]
        best = min(self.val, key=lambda line: line["val/loss"], default=None)
        trained = ended_by is not None or (config is not None and self.step == config.max_iters)
        complete = trained and self.evaluated(self.step)
        steady = self._steady()
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
                "bytes_per_token": self.bytes_per_token,
                "final_bits_per_byte": bits_per_byte(losses[-1] if complete else None, self.bytes_per_token),
                "hellaswag_accuracy": self.hellaswag_score.accuracy if self.hellaswag_score else None,
                "hellaswag_accuracy_norm": self.hellaswag_score.accuracy_norm if self.hellaswag_score else None,
                "final_train_loss": self.train[-1]["train/loss"] if self.train else None,
                "tokens_per_second": speed,
                "mfu": used,
                "step_ms": 1e3 * statistics.median(steady) if steady else None,
                "seconds": self.elapsed_s,
                "spent_s": self.spent(),
                "dollars": self._dollars(),
                "schedule_share": self.step / config.max_iters if config else None,
                "attempt_seconds": time.perf_counter() - self.started,
                "peak_memory_mib": peak_memory_mib(world) if world else None,
                "world_size": world.size if world else None,
                "device": world.device.type if world else None,
                "device_name": world.device_name if world else None,
                "params": self.params,
                "sparsity": self.pruner.sparsity() if self.pruner else None,
                "ended": time.time(),
            }
        )

    def training_metrics(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return training_metrics.json: the original project's keys, then ours. Not measured is null."""
        config, world = self.config, self.world
        assert config
        assert world
        val_losses = [line["val/loss"] for line in self.val]
        train_losses = [line["train/loss"] for line in self.train]
        final, best, initial = (result[f"{which}_val_loss"] for which in ("final", "best", "initial"))
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
                **{name: result[name] for name in ("final_bits_per_byte", *HELLASWAG)},
            }
        )

    def end(
        self, status: str, kind: str | None = None, reason: str | None = None, *, ended_by: str | None = None
    ) -> None:
        """Write training_metrics.json, and result.json last: the run ended when that one is there."""
        if not self.main:
            return
        result = self.result(status, kind, reason, ended_by=ended_by)
        if self.config and self.world:
            with suppress(OSError) if status != "finished" else nullcontext():  # the result says why, and is small
                write_json(self.dir.training_metrics, self.training_metrics(result))
        write_json(self.dir.result, result)


def columns(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return lines of the log as one list for each key, None where a line lacks it: small in a checkpoint."""
    keys = dict.fromkeys(key for line in lines for key in line)
    return {key: [line.get(key) for line in lines] for key in keys}


def rows(lists: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return what `columns` made into lists as lines again."""
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def perplexity(loss: float | None) -> float | None:
    """Return e to the loss; infinity where that is too large for a float."""
    if loss is None:
        return None
    return math.exp(loss) if loss < 700 else math.inf


def peak_memory_mib(world: World) -> float:
    """Return the most memory that this rank used, in MiB: of its GPU's tensors, or of the process on the CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux


def finite_items(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with null in the place of each number that is not finite."""
    return {key: finite(item) for key, item in value.items()}


def finite(value: Any) -> Any:
    """Return a JSON value with null in the place of each number that is not finite."""
    if isinstance(value, dict):
        return finite_items(value)
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
