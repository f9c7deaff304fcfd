"""Train one run, from its run.json to its result.json. Read it from top to bottom.

torchrun --standalone --nproc-per-node=W -m gpt2.train RUN_DIR --attempt N --resume none|auto|latest|best|PATH
    --micro-batch B
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gpt2.data.batches as data
from gpt2 import dist, failure, optim, prune
from gpt2.checkpoint.initial import initialize
from gpt2.checkpoint.manager import CheckpointManager
from gpt2.checkpoint.state import Stateful, TrainingState
from gpt2.data.batches import Batches
from gpt2.evaluate import Benchmarks, Validation
from gpt2.failure import Watchdog
from gpt2.log import RunLog
from gpt2.model import GPT, MODELS, autocast, configure_precision
from gpt2.norms import LayerNorms
from gpt2.steps import StepNumbers, Steps, Timings, average_gradients, clip, distributed
from gpt2.stopping import (
    BENCHMARK,
    CHECKPOINT,
    EVALUATION,
    Budget,
    EarlyStopping,
    EndReason,
    Fault,
    FaultPolicy,
    NotFiniteError,
    Policy,
    limit_of,
)
from kmatrix.errors import ConfigError, DataError, KmatrixError
from kmatrix.records.disk import SpaceWait, has_space, held_s, limit_from_environment, waiting_for_space
from kmatrix.records.files import read_json, replacing
from kmatrix.records.paths import RunDir
from kmatrix.records.run_lock import join_attempt
from kmatrix.records.train_config import TrainConfig, changes


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="gpt2.train", description="Train one run.")
    parser.add_argument("run_dir", type=Path, help="the run directory with run.json")
    parser.add_argument("--attempt", type=int, default=1, help="number of this attempt")
    parser.add_argument(
        "--resume",
        default="none",
        help="none: start; auto: newest valid checkpoint, or start; latest, best, or a path",
    )
    parser.add_argument("--micro-batch", type=int, help="replaces the run's; the global batch does not change")
    args = parser.parse_args(argv)
    dist.die_with_parent()
    rank, _, size = dist.environment()
    run_dir = RunDir(args.run_dir.absolute())
    try:
        # Before any file of the run is touched: an earlier attempt may still have ranks, or this rank may be too late.
        join_attempt(run_dir)
        run = read_json(run_dir.run_json)
    except KmatrixError as error:  # without run.json this is not a run directory: do not write a result into it
        print(f"error: {error}", file=sys.stderr)
        dist.exit_now(dist.EXIT_REFUSED)
    log = RunLog(run_dir, str(run.get("run_id")), args.attempt, main=rank == 0)
    # Signals and hangs are handled from here on, because the set-up already takes minutes (data, weights, compilation).
    stop = dist.Stop(lambda name: failure.give_up(log, rank, name))
    try:
        with (
            waiting_for_space(space_wait(log, stop)),
            Watchdog(log, rank=rank, size=size, stalled=lambda why: failure.stalled(log, rank, why)) as watchdog,
        ):
            code = train(run, log, stop, watchdog, resume=args.resume, micro_batch=args.micro_batch)
    # Broad, because result.json must have the reason of any failure: the runner retries by its kind (oom, for example).
    # The error is printed with its traceback, recorded, and ends the process.
    except Exception as error:
        with suppress(OSError):  # on a full disk there may still be space for the small result
            print(f"error: {error}" if isinstance(error, KmatrixError) else traceback.format_exc(), file=sys.stderr)
        stop.acknowledge()  # this rank responds: a signal during the next lines must not report it as hanging
        try:
            failure.record(log, rank, failure.kind_of(error), failure.describe(error, log))
        finally:
            dist.exit_now(dist.EXIT_FAILED)  # other ranks may be gone: do not wait for them
    dist.finish(code)


def space_wait(log: RunLog, stop: dist.Stop) -> SpaceWait:
    """Return how this rank writes its files on a full disk: the runner sets the limit, and a stop ends the wait."""

    limit_s = limit_from_environment()

    def full(path: Path) -> None:
        if has_space(log.dir.path):  # the checkpoints are on another disk, or one is too large
            log.event(log.step, "disk", f"{path} has no space: waiting {limit_s:g} s for it")

    def space(seconds: float) -> None:
        log.event(log.step, "disk", f"there is space again: writes were held for {seconds:.1f} s")

    return SpaceWait(limit_s, on_full=full, on_space=space, is_cancelled=lambda: stop.requested)


def train(  # noqa: PLR0912, PLR0915  (one text, top to bottom)
    run: Mapping[str, object],
    log: RunLog,
    stop: dist.Stop,
    watchdog: Watchdog,
    *,
    resume: str = "none",
    micro_batch: int | None = None,
) -> int:
    """Train, write the result and return the exit status. Failures other than a bad loss are exceptions."""
    # Configuration and process group
    values = run.get("train")
    planned = TrainConfig.from_json(values if isinstance(values, dict) else {})
    config = planned.with_micro_batch(micro_batch) if micro_batch else planned
    watchdog.begin(factor=config.stall_factor, floor_s=config.stall_floor)
    world = dist.start(config)

    # Data: before the model, because wrong data are found in a second, and a large model takes minutes
    check_data(config, log)
    batches = Batches(config, world)
    validation = Validation(config, world)
    for line in (*validation.describe(), *data.describe(batches.stream.epochs(config.max_iters * config.global_batch))):
        log.say(line)
    log.bytes_per_token = validation.bytes_per_token
    benchmarks = Benchmarks(config, world, log)

    # Model and optimizer
    log.say(configure_precision(world.device.type, config.dtype, tf32=config.tf32))
    raw = build_model(config).to(world.device)  # before the optimizers, whose state is on the device of its parameters
    optimizers = optim.build(config, raw)
    pruner = prune.build(config, raw, optimizers)
    # raw and compiled share their parameters. Checkpoints are of raw: the names do not depend on the compiler.
    compiled: nn.Module = torch.compile(raw) if config.compile else raw  # type: ignore[assignment]  # it is a module
    parameters = list(raw.parameters())
    norms = LayerNorms(raw, config.log_interval, config.max_iters - 1) if config.log_norms and world.main else None
    log.norms = norms
    log.begin(config, world, raw.params, pruner, changes(planned, config, "another micro-batch was asked for"))

    # State that a checkpoint holds besides the model, the optimizers and the random generators
    faults, early_stopping = FaultPolicy(config, log.attempt), EarlyStopping(config)
    # A GPU has two more steps in its queue when the loop sees the end of one, and they run to their end.
    budget = Budget(limit_of(config), log.attempt, ahead=2 if world.device.type == "cuda" else 0)
    stateful: dict[str, Stateful] = {"log": log, "judge": benchmarks, "guard": faults}  # version 0.1's names
    stateful |= {"early stopping": early_stopping, "budget": budget, **({"pruner": pruner} if pruner else {})}
    training = TrainingState(config=config, world=world, model=raw, optimizers=optimizers, stateful=stateful)
    checkpoints = CheckpointManager(training, log)
    resumed = checkpoints.resume(resume)  # restores all of the above, so everything that it holds exists by now
    if config.init_from and not resumed:
        initialize(raw, config)
        log.say(f"Initial weights: {config.init_from}, SHA-256 {config.init_sha256[:12]}")
    checkpoints.forecast()
    # The watchdog's file is newer than the checkpoint: it includes work that was lost, which also took time and money.
    budget.begin(spent_s=0.0 if resume == "none" else watchdog.spent_before, final_s=checkpoints.final_s)
    watchdog.spent = log.spent = lambda: budget.spent_s
    batches.seek(log.step + faults.data_ahead)
    # After the weights were restored: DDP sends those of rank 0 to the other ranks, so all certainly start equal.
    ddp = distributed(compiled, config, world) if world.size > 1 else None
    model = ddp or compiled

    # The loop
    gc.collect()
    gc.freeze()  # objects that live as long as the run: later collections skip them
    steps = Steps(world)
    between = BetweenSteps(
        training=training,
        log=log,
        stop=stop,
        watchdog=watchdog,
        batches=batches,
        validation=validation,
        benchmarks=benchmarks,
        model=raw,
        compiled=compiled,
        faults=faults,
        early_stopping=early_stopping,
        budget=budget,
        checkpoints=checkpoints,
        steps=steps,
        timings=Timings(log.dir.timings(world.rank), config.log_interval),
    )
    profile = Profile(config.profile if world.main else "", log.dir.profile)
    if ddp:
        # no annotations: register_comm_hook checks them at runtime, and refuses the strings that they are here
        ddp.register_comm_hook(None, lambda _, bucket: average_gradients(steps, bucket))
    log.end_phase("set-up", log.started_at)
    ended_by: EndReason | None = None
    try:
        while ended_by is None:
            step = log.step
            if step == config.max_iters or between.due(step):
                # A step's numbers arrive one step late: wait for them before its weights are evaluated or saved.
                ended_by = between.finish_step(steps.drain())
                if log.step == config.max_iters:
                    ended_by = EndReason.MAX_ITERS
                if ended_by or log.step != step:  # the run ends, or a rollback changed the step
                    continue
                ended_by = between.evaluate_and_save(step)
                if ended_by:
                    break

            # Forward and backward
            watchdog.work(failure.STEP, step)
            profile.at(step)
            if config.dropout:  # masks depend on seed, step and rank only: evaluations and rollbacks do not change them
                torch.manual_seed(dropout_seed(config.seed, step, world.rank))
            optimizers.set_scale(scale(config, step))
            lr = optimizers.lr
            total = torch.zeros((), device=world.device)  # stays on the device, because .item() would wait for it
            for micro in range(config.gradient_accumulation):
                if ddp:  # nanoGPT's alternative to no_sync(): average the gradients after the last micro-batch only
                    ddp.require_backward_grad_sync = micro == config.gradient_accumulation - 1
                watchdog.at(failure.DATA)
                idx, targets = batches.next()  # (B, T)
                watchdog.at(failure.FORWARD)
                with autocast(world.device.type, config.dtype):
                    _, loss = model(idx, targets)  # (), nats/token
                watchdog.at(failure.BACKWARD)
                (loss / config.gradient_accumulation).backward()  # gradients add up: the sum has to be a mean
                total += loss.detach()
            if not ddp:  # with DDP, its communication hook marks the end of the computation
                steps.computed()

            # Update, unless the step is bad and the policy is to skip it
            watchdog.at(failure.UPDATE)
            mean_loss = total / config.gradient_accumulation
            policy = None
            if faults.checks_before_update:
                norm = clip(parameters, 0.0)  # only measured: a step that is skipped or undone is not clipped
                policy = between.handle_fault(faults.check(step, *steps.average(mean_loss, norm)))
                if policy is Policy.ROLLBACK:
                    continue
            if policy is not Policy.SKIP:
                if pruner:
                    pruner.gradients()
                if norms:
                    norms.begin(step)
                norm = clip(parameters, config.grad_clip)
                optimizers.step()
            if pruner:
                pruner.weights(step + 1)
            if norms:
                norms.end(step)
            optimizers.zero_grad()
            log.step = step + 1

            # Numbers of the step before; this step's are sent
            watchdog.at(failure.NUMBERS)
            over_budget = world.main and budget.is_up(between.due(step + 1))
            numbers = steps.post(step, lr=lr, loss=mean_loss, norm=norm, stop=stop.requested, over_budget=over_budget)
            ended_by = between.finish_step(numbers)
        between.finish_step(steps.drain())  # the last step's, if the loop ended before they were read
        stop.acknowledge()  # all ranks left the loop after the same step: none waits for a rank that has stopped

        # The end
        if log.step == config.max_iters and ended_by is not EndReason.STOP:
            ended_by = EndReason.MAX_ITERS  # the budget was used up by the last step: it cut nothing off
        finished = ended_by is not EndReason.STOP and between.evaluate(log.step)
        if finished:
            between.benchmark(log.step, final=True)
    except NotFiniteError as error:  # on every rank, because all have the same numbers: a barrier is safe
        stop.acknowledge()
        log.event(log.step, "nan", str(error))
        checkpoints.wait()
        log.end("failed", "nan", str(error))
        world.barrier()
        return dist.EXIT_FAILED
    finally:
        checkpoints.wait()  # finish writing the current checkpoint, however the loop ended
        profile.end()

    watchdog.work(failure.END, log.step)
    code = between.end_finished(ended_by) if finished else between.end_stopped()
    world.barrier()  # torchrun kills the other ranks as soon as one fails: all exit after the files are written
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenSteps:
    """What one rank does between two steps and at the end: log, handle faults, evaluate, benchmark and save."""

    training: TrainingState
    log: RunLog
    stop: dist.Stop
    watchdog: Watchdog
    batches: Batches
    validation: Validation
    benchmarks: Benchmarks
    model: GPT  # for benchmarks, whose inputs vary in length: compiled code would be compiled again for each
    compiled: nn.Module  # the same weights; not DDP, whose forward pass communicates
    faults: FaultPolicy
    early_stopping: EarlyStopping
    budget: Budget
    checkpoints: CheckpointManager
    steps: Steps
    timings: Timings

    def due(self, step: int) -> list[str]:
        """Return what happens before a step, for the budget's forecast."""
        parts = {
            EVALUATION: self._evaluation_due(step),
            BENCHMARK: self.benchmarks.due(step),
            CHECKPOINT: self.checkpoints.due(step),
        }
        return [part for part, is_due in parts.items() if is_due]

    def finish_step(self, numbers: StepNumbers | None) -> EndReason | None:
        """Check and log a step whose numbers have arrived. Return why the loop must end, if it must.

        A bad step may roll the run back, which changes `log.step`.
        """
        if numbers is None:
            return None
        if not self.faults.checks_before_update:  # else it was checked already, and must not count twice
            fault = self.faults.check(numbers.step, numbers.loss, numbers.norm)
            if self.handle_fault(fault) is Policy.ROLLBACK:
                return None
        held = held_s()
        self.log.training(numbers, self.batches.epoch(numbers.step + self.faults.data_ahead))
        self.timings.add(numbers)
        if held_s() > held:
            self.steps.restart()  # the disk was full: the next step must not count that time
        self.budget.stepped(numbers.seconds)
        if numbers.stop:
            return EndReason.STOP
        return self.budget.ended_by if numbers.over_budget else None

    def handle_fault(self, fault: Fault | None) -> Policy | None:
        """Fail, roll back or log it, as the policy for a bad step says, and return the policy."""
        if fault is None:
            return None
        if fault.policy is Policy.STOP:
            raise NotFiniteError(fault.text)
        self.log.event(fault.step, fault.kind, f"{fault.text}: {fault.policy}")
        if fault.policy is Policy.ROLLBACK:
            self._roll_back(fault)
        return fault.policy

    def _roll_back(self, fault: Fault) -> None:
        """Restore the newest checkpoint and continue with the data after the bad step."""
        self.steps.drain()  # the numbers of the step that is undone: nobody may read them as those of a later step
        self.training.optimizers.zero_grad()
        if not self.checkpoints.roll_back():
            raise NotFiniteError(f"{fault.text}, and there is no checkpoint to roll back to")
        self.faults.rolled_back(fault, self.log.step)
        # The same weights on the same data would lead to the same fault, as in PaLM (arXiv:2204.02311, section 5.1).
        self.batches.seek(self.log.step + self.faults.data_ahead)
        text = f"to step {self.log.step}, continuing with the data after step {fault.step}"
        self.log.event(self.log.step, "rollback", text)
        self.steps.restart()

    def evaluate_and_save(self, step: int) -> EndReason | None:
        """Evaluate, benchmark and save, as far as it is due. Return why the loop must end, if it must."""
        ended_by = None
        if self._evaluation_due(step):
            if not self.evaluate(step):
                return EndReason.STOP
            ended_by = EndReason.EARLY_STOPPING if self.early_stopping.should_stop(self.log.last_val_loss) else None
        if self.benchmarks.due(step):
            self.benchmark(step)
        # Last, so that the checkpoint includes the losses above, and knows whether it is the best.
        with self._phase(CHECKPOINT):
            self.checkpoints.save(*self.checkpoints.reasons())
        self.steps.restart()  # none of this is part of the next step's time
        return ended_by

    def evaluate(self, step: int) -> bool:
        """Measure and log the validation loss, unless that was done. Return False if a stop interrupted it."""
        if self.log.evaluated(step):
            return True
        with self._phase(EVALUATION), self.training.optimizers.evaluation_weights():
            loss = self.validation.loss(self.compiled, lambda: self.stop.requested)
        if loss is None:
            return False
        if not np.isfinite(loss):  # no policy applies: the weights themselves are broken
            raise NotFiniteError(f"validation loss is {loss} at step {step}")
        self.log.validation(step, loss, self.validation.by_source)
        return True

    def benchmark(self, step: int, *, final: bool = False) -> None:
        """Run the benchmarks and write the sample texts that are due; all of them at the end of a run."""
        with self._phase(BENCHMARK), self.training.optimizers.evaluation_weights():
            self.benchmarks.measure(step, self.model, lambda: self.stop.requested, final=final)

    def end_stopped(self) -> int:
        """Save a checkpoint if there is time, write the result of a stopped attempt, and return the exit status."""
        log, signal = self.log, self.stop.signal
        steps = f"{log.step} of {self.training.config.max_iters} steps"
        log.event(log.step, "stop", f"stopped after {steps}: {signal or 'a peer'}")
        self.checkpoints.emergency()
        log.end("stopped", "signal", f"stopped by {signal or 'a signal to another rank'} at step {log.step}")
        return dist.EXIT_STOPPED

    def end_finished(self, ended_by: EndReason | None) -> int:
        """Save the final checkpoint, write the result of a finished run, and return the exit status."""
        # Wait: result.json comes last, and a run whose final checkpoint cannot be written is not finished.
        with self.log.phase("checkpoint"):
            self.checkpoints.save(*self.checkpoints.reasons(finished=True), wait=True)
        self.log.finish(str(ended_by))
        return dist.EXIT_FINISHED

    def _evaluation_due(self, step: int) -> bool:
        return step % self.training.config.eval_interval == 0 and not self.log.evaluated(step)

    @contextmanager
    def _phase(self, kind: str) -> Iterator[None]:
        """Record a phase without training, for the watchdog, the budget and the log."""
        self.watchdog.work(kind, self.log.step)
        with self.budget.measure(kind), self.log.phase(EVALUATION if kind == BENCHMARK else kind):
            yield


def check_data(config: TrainConfig, log: RunLog) -> None:
    """Raise DataError if the data changed since the run was planned; log a note if that is unknown."""
    folder = Path(config.data_path)
    found = data.planned_sha256(config)
    if found is None:
        log.say(f"Data: {folder} has no dataset.json for these files; their hash is not checked")
    elif found != config.data_sha256:  # a loss on other data must not be compared with the rest of the matrix
        raise DataError(
            f"the data in {folder} changed after the run was planned",
            why=f"hash {found[:12]}..., expected {config.data_sha256[:12]}...",
            hint="restore the former shards, or create a new matrix",
        )


def build_model(config: TrainConfig) -> GPT:
    """Return the model with its initial weights, which only the seed decides."""
    if config.arch not in MODELS:
        raise ConfigError(f"arch is {config.arch!r}", why=f"gpt2/model.py has {', '.join(MODELS)}")
    return MODELS[config.arch](
        config.shape,
        dropout=config.dropout,
        vocab_multiple=config.vocab_multiple,
        flash=config.flash_attention,
        seed=config.seed,
        recompute=config.recompute,
        loss_chunk=config.loss_chunk,
    )


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of one step's dropout on one rank, which does not depend on earlier random numbers."""
    # SeedSequence mixes the three, so that adjacent steps and ranks are independent. >> 1: a positive int64.
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)


def scale(config: Any, step: int) -> float:
    """Return learning rate / peak learning rate at a 0-based step; 0 if the peak is 0.

    config: schedule, learning_rate, min_lr, warmup_steps, max_iters and, for wsd, wsd_decay_fraction.
    The rate rises as (step + 1) / (warmup_steps + 1), as in nanoGPT, peaks at step `warmup_steps`, and is min_lr from
    the last step, max_iters - 1, on.
    """
    if config.learning_rate == 0:
        return 0.0  # min_lr / learning_rate is not defined
    # One more in both: the first step has a rate above 0, and the peak comes after the warm-up, not at its last step.
    if step < config.warmup_steps:
        return float((step + 1) / (config.warmup_steps + 1))
    if config.schedule == "constant":
        return 1.0
    least = config.min_lr / config.learning_rate
    return float(least + (1.0 - least) * _height(config, step))


def _height(config: Any, step: int) -> float:
    """Return the position of the rate between minimum (0) and peak (1) after the warm-up."""
    last = config.max_iters - 1
    start = config.warmup_steps
    # Warm-up, stable, decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395): the same line as "linear", but it starts late.
    if config.schedule == "wsd":
        if not config.wsd_decay_fraction:
            return 1.0
        decay_steps = max(1, round(config.wsd_decay_fraction * config.max_iters))
        start = max(start, last - decay_steps)
    if step >= last:
        return 0.0
    progress = max(0.0, (step - start) / (last - start))
    if config.schedule == "cosine":  # one half period of Loshchilov and Hutter 2016, arXiv:1608.03983
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.schedule in ("linear", "wsd"):
        return float(1.0 - progress)
    raise ValueError(f"schedule {config.schedule!r} is not one of cosine, linear, constant, wsd")


class Profile:
    """Records a profile of steps i to j - 1 of a span "i:j"; "": none. A run resumed after i records nothing."""

    def __init__(self, span: str, path: Path) -> None:
        first, _, last = span.partition(":")
        self._first, self._last = (int(first), int(last)) if span else (-1, -1)
        self._path = path
        self._running: profile | None = None

    def at(self, step: int) -> bool:
        """Start or stop recording before a step. Return whether a trace was written."""
        if step == self._first:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._running.start()
        return step == self._last and self.end()

    def end(self) -> bool:
        """Write the recorded trace, if any, also if the run ends before the span does."""
        running, self._running = self._running, None  # first: the loop's `finally` calls this again after an error
        if running is None:
            return False
        running.stop()
        with replacing(self._path) as partial:
            running.export_chrome_trace(str(partial))
        return True


if __name__ == "__main__":
    main()
