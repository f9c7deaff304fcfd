"""Train one run, from its run.json to its result.json. Read it from top to bottom.

`kmatrix run RUN_DIR` starts its ranks. By hand:
torchrun --standalone --nproc-per-node=W -m gpt2.train RUN_DIR --attempt N --resume none|auto|latest|best|PATH
    --micro-batch B
On several nodes, torchrun runs on each, with --nnodes --node-rank --master-addr --master-port instead of --standalone.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from gpt2 import dist, prune
from gpt2.checkpoint import Saver, TrainingState, initialize
from gpt2.data.batches import Batches, check_data
from gpt2.evaluate import Benchmarks, Validation
from gpt2.log import RunLog
from gpt2.model.compiled import begin_pass, compile_model, keep_gradients
from gpt2.model.precision import autocast
from gpt2.model.registry import build_model, configure
from gpt2.norms import LayerNorms
from gpt2.optim.builders import build_optimizers
from gpt2.optim.sharded import shard
from gpt2.schedule import scale, step_seed
from gpt2.steps import StepNumbers, Steps, clip, distributed, profiler
from gpt2.stopping import CHECKPOINT, EVALUATION, STEP, Budget, EndReason, check_finite, stops_early
from gpt2.watchdog import END, Watchdog, one_line
from kmatrix.errors import KmatrixError
from kmatrix.output import lossy_output
from kmatrix.records.attempts import GRACE, SPENT, numbers
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir
from kmatrix.records.ranks import BACKWARD, DATA, FORWARD, NUMBERS, UPDATE
from kmatrix.records.train_config import TrainConfig
from kmatrix.rules import check


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="gpt2.train", description="Train one run.")
    parser.add_argument("run_dir", type=Path, help="the run directory with run.json")
    parser.add_argument("--attempt", type=int, help="number of this attempt (default: the newest)")
    parser.add_argument("--resume", default="none", help="none, auto (newest valid, if any), latest, best, or a path")
    parser.add_argument("--micro-batch", type=int, help="replaces the run's; the global batch does not change")
    args = parser.parse_args(argv)
    lossy_output()  # a full disk loses log lines, not the training
    rank, run_dir = dist.environment()[0], RunDir(args.run_dir.absolute())
    try:
        run = read_json(run_dir.run_json)
        if GRACE not in os.environ:  # by hand: `kmatrix run` hands its lock down
            dist.begin_by_hand(run_dir.lock)  # before any file of the run is touched
    except KmatrixError as error:  # without run.json this is not a run directory: do not write a result into it
        print(f"error: {error}", file=sys.stderr)
        dist.exit_now(dist.EXIT_REFUSED)
    log = RunLog(run_dir, str(run.get("run_id")), args.attempt or max(numbers(run_dir.path), default=1), main=rank == 0)
    # Signals and hangs are handled from here on, because the set-up already takes minutes (data, weights, compilation).
    watchdog = Watchdog(log, rank)
    stop = dist.Stop()
    try:
        code = train(run, log, stop, watchdog, resume=args.resume, micro_batch=args.micro_batch)
    # Broad, because result.json must have the reason of any failure: the runner retries by its kind (oom, for example).
    except Exception as error:
        with suppress(OSError):  # on a full disk there may still be space for the small result
            print(f"error: {error}" if isinstance(error, KmatrixError) else traceback.format_exc(), file=sys.stderr)
        watchdog.fail(error)
    watchdog.end()
    dist.finish(code)


def train(run: Mapping[str, Any], log: RunLog, stop: dist.Stop, watchdog: Watchdog, **options: Any) -> int:
    """Train, write the result and return the exit status. Failures are exceptions. options: of `set_up`."""
    with log.phase("set-up"):
        parts = set_up(run, log, watchdog, **options)
    world, saver = parts.state.world, parts.saver
    gc.collect()
    gc.freeze()  # objects that live as long as the run: later collections skip them
    try:
        ended_by = loop(parts, log, stop, watchdog)
    finally:
        with log.phase("ending"):  # its begin is the end of the training, by the clocks of each node
            saver.wait()  # finish writing the current checkpoint, however the loop ended
        if parts.recorder:
            parts.recorder.stop()

    watchdog.work(END, log.step)
    if ended_by is EndReason.STOP:
        code, reason = dist.EXIT_STOPPED, f"stopped by {stop.signal or 'a signal to another rank'} at step {log.step}"
        log.event(log.step, "stop", reason)
        saver.stop()
        log.end("stopped", kind="signal", reason=reason)
    else:
        code = dist.EXIT_FINISHED
        log.finish(str(ended_by))
    leave_together(world, log)
    return code


def loop(parts: Parts, log: RunLog, stop: dist.Stop, watchdog: Watchdog) -> EndReason:
    """Train until the last step, the end of the budget, early stopping or a stop request, and return which it was.

    All ranks do the same, because it depends on the step, or on numbers that they have exchanged.
    """
    config, optimizers, saver, steps = parts.state.config, parts.state.optimizers, parts.saver, parts.steps
    ended_by: EndReason | None = None

    def stopping() -> bool:
        watchdog.progress()  # who asks goes on: it has not stalled
        return stop.requested

    steps.restart()  # the set-up is not part of the first step
    while True:
        step = log.step
        if step == config.max_iters and ended_by is not EndReason.STOP:
            ended_by = EndReason.MAX_ITERS  # also if the budget was used up by the last step: it cut nothing off
        due = due_before(parts, log, step)
        if ended_by or due:
            # A step's numbers arrive one step late: wait for them before its weights are evaluated or saved.
            arrived = finish_step(parts, log, steps.drain())
            ended_by = ended_by or arrived
            if ended_by is not EndReason.STOP and (ended_by or EVALUATION in due):
                watchdog.work(EVALUATION, step)
                with log.phase(EVALUATION), optimizers.evaluation_weights():
                    ended_by = evaluate(parts, log, stopping, ended_by)
            if ended_by is EndReason.STOP:
                return ended_by
            is_final = ended_by is not None and config.save_checkpoint
            if is_final or saver.wanted(step):  # last: it has the losses above, and knows whether it is the best
                watchdog.work(CHECKPOINT, step)
                with log.phase(CHECKPOINT):
                    saver.save(final=is_final)
            if ended_by:
                return ended_by
            steps.restart()  # none of this is part of the next step's time

        watchdog.work(STEP, step)
        waited = parts.batches.wait(stopping, log.say)
        if waited is None:
            ended_by = EndReason.STOP
            continue
        if waited:
            steps.restart()

        mean = gradients(parts, step, watchdog)
        watchdog.at(UPDATE)
        norm = update(parts, step, log)
        log.step = step + 1
        watchdog.at(NUMBERS)
        if parts.recorder:
            parts.recorder.step()
        # Rank 0 decides by its clock. All ranks hear of it with the numbers of this step, which arrive in the next one.
        next_due = due_before(parts, log, step + 1)
        over = parts.state.world.main and parts.budget.is_up(watchdog.took, next_due, saver.final_s)
        numbers = steps.post(step, lr=optimizers.lr, loss=mean, norm=norm, stop=stop.requested, over_budget=over)
        ended_by = finish_step(parts, log, numbers)


def due_before(parts: Parts, log: RunLog, step: int) -> list[str]:
    """Return what is due before a step, and not done yet."""
    is_evaluated = step % parts.state.config.eval_interval != 0 or log.evaluated(step)
    is_due = {EVALUATION: not is_evaluated or parts.benchmarks.due(step), CHECKPOINT: parts.saver.due(step)}
    return [kind for kind, due in is_due.items() if due]


def evaluate(parts: Parts, log: RunLog, stopping: Callable[[], bool], ended_by: EndReason | None) -> EndReason | None:
    """Measure and log what is due before the next step, or at the end. Return why the loop must end, if it must."""
    step, config = log.step, parts.state.config
    if (ended_by or step % config.eval_interval == 0) and not log.evaluated(step):
        found = parts.validation.measure(parts.compiled, stopping)
        if found is None:
            return EndReason.STOP
        check_finite(step, {"validation loss": found.loss})
        log.validation(step, found.loss, found.by_source, found.bits_per_byte)
        if not ended_by and stops_early(config, [line.loss for line in log.val]):
            ended_by = EndReason.EARLY_STOPPING
    if ended_by or parts.benchmarks.due(step):
        parts.benchmarks.measure(step, parts.state.model, stopping, final=bool(ended_by))
    return ended_by


def gradients(parts: Parts, step: int, watchdog: Watchdog) -> torch.Tensor:
    """Run forward and backward of all micro-batches; return this rank's mean loss ()."""
    config, world, model = parts.state.config, parts.state.world, parts.model
    # Random numbers (dropout) depend on seed, step and rank only: no state of a generator is saved.
    torch.manual_seed(step_seed(config.seed, step, world.rank))
    total = torch.zeros((), device=world.device)  # stays on the device, because .item() would wait for it
    for micro in range(config.gradient_accumulation):
        if isinstance(model, DistributedDataParallel):
            # nanoGPT's alternative to no_sync(): average the gradients after the last micro-batch only
            model.require_backward_grad_sync = micro == config.gradient_accumulation - 1
        watchdog.at(DATA)
        idx, targets = parts.batches.next()  # (B, T)
        watchdog.at(FORWARD)
        begin_pass(config)
        with autocast(world.device.type, config.dtype):
            _, loss = model(idx, targets)  # (), nats/token
        watchdog.at(BACKWARD)
        (loss / config.gradient_accumulation).backward()  # gradients add up: the sum has to be a mean
        total += loss.detach()
    if world.size == 1:  # with DDP, its communication hook marks the end of the computation
        parts.steps.computed()
    return total / config.gradient_accumulation


def update(parts: Parts, step: int, log: RunLog) -> torch.Tensor:
    """Update the weights; return the norm of the gradients before clipping ()."""
    config, optimizers, pruner, norms = parts.state.config, parts.state.optimizers, log.pruner, log.norms
    optimizers.set_scale(scale(config, step), step)
    if pruner:
        pruner.gradients()
    if norms:
        norms.begin(step)
    norm = clip(list(parts.state.model.parameters()), config.grad_clip)
    optimizers.step()
    if pruner:
        pruner.weights(step + 1)
    if norms:
        norms.end(step)
    optimizers.zero_grad()
    return norm


def finish_step(parts: Parts, log: RunLog, numbers: StepNumbers | None) -> EndReason | None:
    """Check and log a step whose numbers have arrived. Return why the loop must end, if it must.

    Raises NotFiniteError if its loss or gradient norm is NaN or infinite, on all ranks alike.
    """
    if numbers is None:
        return None
    check_finite(numbers.step, {"loss": numbers.loss, "gradient norm": numbers.norm})
    log.training(numbers, parts.batches.epoch(numbers.step))
    if numbers.stop:
        return EndReason.STOP
    return parts.budget.ended_by if numbers.over_budget else None


def leave_together(world: dist.World, log: RunLog) -> None:
    """Wait until rank 0 has written the result: the others are killed soon after one fails."""
    try:
        dist.gather(world, None)
    except RuntimeError as error:
        if not world.main:
            raise
        log.say(f"Note: a rank was lost after the end of the run: {one_line(error)}")  # the result is complete


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop of one rank works with."""

    state: TrainingState  # configuration, ranks, model, optimizers: what a checkpoint holds
    compiled: nn.Module  # the same weights as those of `state`, compiled as configured
    model: nn.Module  # with DDP, whose forward pass communicates
    batches: Batches
    validation: Validation
    benchmarks: Benchmarks
    budget: Budget
    saver: Saver
    steps: Steps
    recorder: profile | None


def set_up(
    run: Mapping[str, Any], log: RunLog, watchdog: Watchdog, *, resume: str = "none", micro_batch: int | None = None
) -> Parts:
    """Make all parts of the training, and restore their state from a checkpoint if `resume` says so."""
    # Configuration and process group
    planned = TrainConfig.from_json(run.get("train", {}))
    check(planned)
    config = planned.with_micro_batch(micro_batch) if micro_batch else planned
    watchdog.begin(config.stall_factor)
    world = dist.start(config)
    # Data: before the model, because wrong data are found in a second, and a large model takes minutes
    check_data(config)
    batches, validation, benchmarks = Batches(config, world), Validation(config, world), Benchmarks(config, world, log)
    for line in (*validation.describe(), *batches.describe()):
        log.say(line)

    # Model and optimizer
    configure(config, world.device)
    raw = build_model(config).to(world.device)  # before the optimizers, whose state is on the device of its parameters
    optimizers = shard(build_optimizers(config, raw), config.zero_stage, world)
    pruner = prune.build(config, raw, optimizers)
    if config.log_norms and world.main:
        log.norms = LayerNorms(raw, config.log_interval, config.max_iters - 1)
    log.optimizers, log.pruner = optimizers, pruner
    used, why = config.to_json(), "another micro-batch was asked for"
    changed = ((name, old, used[name]) for name, old in planned.to_json().items() if old != used[name])
    adjusted = [{"field": name, "from": old, "to": new, "why": why} for name, old, new in changed]
    log.begin(config, world, adjusted=adjusted)

    # Everything that a checkpoint holds
    stateful: dict[str, Any] = {"log": log, "benchmarks": benchmarks, **({"pruner": pruner} if pruner else {})}
    state = TrainingState(config=config, world=world, model=raw, optimizers=optimizers, stateful=stateful)
    saver = Saver(state, log)
    resumed = saver.resume(resume)
    if config.init_from and not resumed:
        initialize(raw, config)
        log.say(f"Initial weights: {config.init_from}, SHA-256 {config.init_sha256[:12]}")
    # The supervisor's measure includes the launch of the earlier attempts, and work after their last checkpoint.
    before_s = 0.0 if resume == "none" else max(float(os.environ.get(SPENT, "0")), log.before_s)
    budget = Budget(config, before_s)
    batches.seek(log.step)

    # raw and model share their parameters. Checkpoints are of raw: the names do not depend on the compiler. DDP comes
    # after the weights were restored: it sends those of rank 0 to the other ranks, so all certainly start equal.
    steps = Steps(world)
    compiled = compile_model(raw, config) if config.compile else raw
    model = distributed(compiled, config, steps) if world.size > 1 else compiled
    keep_gradients(raw, optimizers, config)
    recorder = profiler(config.profile if world.main else "", log.dir.profile, done=log.step)
    return Parts(state, compiled, model, batches, validation, benchmarks, budget, saver, steps, recorder)


if __name__ == "__main__":
    main()
