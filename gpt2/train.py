r"""Train one run, from its run.json to its result.json. Read it from top to bottom.

torchrun --standalone --nproc-per-node=W -m gpt2.train RUN_DIR --attempt N --resume none|auto|latest|best|PATH \
    --micro-batch B
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import nn

from gpt2 import data, dist, failure, optim, prune, schedule, watchdog
from gpt2.budget import CHECKPOINT, EVALUATION, JUDGING, Budget, EarlyStopping, limit_of
from gpt2.checkpoint import Carried, Keeper, Parts
from gpt2.config import TrainConfig, changes
from gpt2.data import Batches
from gpt2.evaluate import Validation
from gpt2.guard import Fault, Guard, NotFiniteError, Policy
from gpt2.judge import Judge
from gpt2.log import RunLog
from gpt2.model import GPT, MODELS, autocast, configure_precision
from gpt2.profile import Profile
from gpt2.replicas import average_gradients, clip, distributed
from gpt2.steps import Reading, Steps, Timings
from gpt2.watchdog import Watchdog
from kmatrix.errors import ConfigError, DataError, KmatrixError
from kmatrix.records import RunDir, read_json

STOP = "stop"  # why a loop ends that a signal asked to


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="gpt2.train", description="Train one run.")
    parser.add_argument("run_dir", type=Path, help="the folder that holds run.json")
    parser.add_argument("--attempt", type=int, default=1, help="which execution of this run this is")
    parser.add_argument(
        "--resume",
        default="none",
        help="none: from the start; auto: from the newest good checkpoint, or the start; latest, best, or a path",
    )
    parser.add_argument("--micro-batch", type=int, help="in place of the run's own; the global batch stays")
    args = parser.parse_args(argv)
    dist.die_with_parent()
    rank, _, size = dist.environment()
    run_dir = RunDir(args.run_dir.absolute())
    try:
        run = read_json(run_dir.run_json)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        dist.leave(dist.EXIT_REFUSED)
    log = RunLog(run_dir, str(run.get("run_id")), args.attempt, main=rank == 0)
    stop = dist.Stop(lambda name: failure.give_up(log, rank, name))
    try:
        with Watchdog(log, rank=rank, size=size, stalled=lambda why: failure.stalled(log, rank, why)) as watch:
            code = train(run, log, stop, watch, resume=args.resume, micro_batch=args.micro_batch)
    except Exception as error:
        with suppress(OSError):  # where the log's disk is full, the result may still find room
            print(f"error: {error}" if isinstance(error, KmatrixError) else traceback.format_exc(), file=sys.stderr)
        stop.seen()
        try:
            failure.record(log, rank, failure.kind_of(error), failure.in_words(error, log))
        finally:
            dist.leave(dist.EXIT_FAILED)  # the peers may be gone: nothing is waited for
    dist.finish(code)


def train(  # noqa: PLR0912, PLR0915  (one text, top to bottom)
    run: Mapping[str, object],
    log: RunLog,
    stop: dist.Stop,
    watch: Watchdog,
    *,
    resume: str = "none",
    micro_batch: int | None = None,
) -> int:
    """Train, write what came of it, and return the exit status. Any other end is an exception."""
    values = run.get("train")
    asked = TrainConfig.from_json(values if isinstance(values, dict) else {})
    config = asked.with_micro_batch(micro_batch) if micro_batch else asked
    watch.begin(factor=config.stall_factor, floor_s=config.stall_floor)
    world = dist.start(config)

    # Data
    check_data(config, log)
    batches = Batches(config, world)
    validation = Validation(config, world)
    if validation.samples < validation.wanted:
        log.say(f"Validation: all {validation.samples} sequences, fewer than the {validation.wanted} asked for")
    for line in data.describe(batches.stream.epochs(config.max_iters * config.global_batch)):
        log.say(line)
    log.bytes_per_token = validation.bytes_per_token
    judge = Judge(config, world, log)

    # Model and optimizer
    log.say(configure_precision(world.device.type, config.dtype, tf32=config.tf32))
    raw = build_model(config).to(world.device)
    optimizers = optim.build(config, raw)
    pruner = prune.build(config, raw, optimizers)
    compiled: nn.Module = torch.compile(raw) if config.compile else raw  # type: ignore[assignment]  # it is a module
    parameters = list(raw.parameters())
    log.begin(config, world, raw.params, pruner, changes(asked, config, "another micro-batch was asked for"))
    log.say(
        f"Training {config.model} ({raw.params:,} parameters) on {config.dataset} with {config.optimizer}: "
        f"{config.max_iters} steps of {config.tokens_per_step} tokens, {world.size} x {world.device_name}"
    )

    # What goes on over a resume besides model, optimizers and random numbers
    guard, early = Guard(config, log.attempt), EarlyStopping(config)
    budget = Budget(limit_of(config), log.attempt, ahead=2 if world.device.type == "cuda" else 0)
    carried: dict[str, Carried] = {
        "log": log,
        "judge": judge,
        "guard": guard,
        "early stopping": early,
        "budget": budget,
    }
    if pruner:
        carried["pruner"] = pruner
    keeper = Keeper(Parts(config=config, world=world, model=raw, optimizers=optimizers, carried=carried), log)
    keeper.resume(resume)
    keeper.forecast()
    budget.begin(spent_s=0.0 if resume == "none" else watch.spent_before, final_s=keeper.final_s)
    watch.spent = log.spent = lambda: budget.spent_s
    batches.seek(log.step + guard.data_ahead)
    ddp = distributed(compiled, config, world) if world.size > 1 else None
    model = ddp or compiled

    # What belongs to a step
    def settle(reading: Reading | None) -> str:
        """Log a step that is known by now, and return why the loop is to end, or "". It may go back to a checkpoint."""
        if reading is None:
            return ""
        if not guard.waits and heed(guard.judge(reading.step, reading.loss, reading.norm)) is Policy.ROLLBACK:
            return ""
        log.training(reading, batches.epoch(reading.step + guard.data_ahead))
        timings.add(reading)
        budget.stepped(reading.seconds)
        return STOP if reading.stop else budget.ended_by if reading.enough else ""

    def heed(fault: Fault | None) -> Policy | None:
        """Fail, go back, or note it, as the run's policy says of a bad step; return the policy."""
        if fault is None:
            return None
        if fault.policy is Policy.STOP:
            raise NotFiniteError(fault.text)
        log.event(fault.step, fault.kind, f"{fault.text}: {fault.policy}")
        if fault.policy is Policy.ROLLBACK:
            go_back(fault)
        return fault.policy

    def go_back(fault: Fault) -> None:
        """Put back the last checkpoint, and go on with the data behind the bad step."""
        steps.drain()
        optimizers.zero_grad()
        if not keeper.go_back():
            raise NotFiniteError(f"{fault.text}, and there is no checkpoint to go back to")
        guard.went_back(fault, log.step)
        batches.seek(log.step + guard.data_ahead)
        log.event(log.step, "rollback", f"to step {log.step}, on with the data behind those of step {fault.step}")
        steps.restart()

    def evaluation_due(step: int) -> bool:
        return step % config.eval_interval == 0 and not log.evaluated(step)

    def due(step: int) -> list[str]:
        """Return what the loop does before a step, as the budget knows it."""
        parts = {EVALUATION: evaluation_due(step), JUDGING: judge.due(step), CHECKPOINT: keeper.due(step)}
        return [part for part, is_due in parts.items() if is_due]

    @contextmanager
    def phase(kind: str) -> Iterator[None]:
        """Note a stretch in which the run does not train, for the watchdog, the budget and the log."""
        watch.work(kind, log.step)
        with budget.taking(kind), log.phase(EVALUATION if kind == JUDGING else kind):
            yield

    def evaluate(step: int) -> bool:
        """Measure and log the validation loss, if that was not done; False when a stop cut it short."""
        if log.evaluated(step):
            return True
        with phase(EVALUATION), optimizers.judged():
            loss = validation.loss(compiled, lambda: stop.asked)
        if loss is None:
            return False
        if not np.isfinite(loss):
            raise NotFiniteError(f"validation loss is {loss} at step {step}")
        log.validation(step, loss, validation.by_source)
        return True

    # The loop
    gc.collect()
    gc.freeze()  # what lives as long as the run is not looked through again
    steps = Steps(world)
    timings = Timings(log.dir.timings(world.rank), config.log_interval)
    profile = Profile(config.profile if world.main else "", log.dir.profile)
    if ddp:
        ddp.register_comm_hook(None, lambda _, bucket: average_gradients(steps, bucket))  # no annotations: DDP's wish
    log.phase_over("set-up", log.born)
    why = ""  # the loop ends: a budget's name, "early_stopping", "max_iters" or STOP
    try:
        while not why:
            step = log.step
            if step == config.max_iters or due(step):
                why = settle(steps.drain())
                if log.step == config.max_iters:
                    why = "max_iters"
                if why or log.step != step:
                    continue
                if evaluation_due(step):
                    if not evaluate(step):
                        why = STOP
                        break
                    why = "early_stopping" if early.enough(log.last_val_loss) else ""
                if judge.due(step):
                    with phase(JUDGING), optimizers.judged():
                        judge.measure(step, raw, lambda: stop.asked)
                with phase(CHECKPOINT):
                    keeper.save(*keeper.reasons())
                steps.restart()
                if why:
                    break

            watch.work(watchdog.STEP, step)
            profile.at(step)
            if config.dropout:
                torch.manual_seed(dropout_seed(config.seed, step, world.rank))
            optimizers.set_scale(schedule.scale(config, step))
            lr = optimizers.lr
            total = torch.zeros((), device=world.device)
            for micro in range(config.gradient_accumulation):
                if ddp:  # read in forward: gradients are averaged after the last micro-batch alone
                    ddp.require_backward_grad_sync = micro == config.gradient_accumulation - 1
                watch.at(watchdog.DATA)
                idx, targets = batches.next()  # (B, T)
                watch.at(watchdog.FORWARD)
                with autocast(world.device.type, config.dtype):
                    _, loss = model(idx, targets)
                watch.at(watchdog.BACKWARD)
                (loss / config.gradient_accumulation).backward()
                total += loss.detach()
            if not ddp:
                steps.computed()
            watch.at(watchdog.UPDATE)
            loss_of_step = total / config.gradient_accumulation
            policy = None
            if guard.waits:  # judged before anything has taken in its gradients
                norm = clip(parameters, 0.0)
                policy = heed(guard.judge(step, *steps.look(loss_of_step, norm)))
                if policy is Policy.ROLLBACK:
                    continue
            if policy is not Policy.SKIP:
                if pruner:
                    pruner.gradients()
                norm = clip(parameters, config.grad_clip)
                optimizers.step()
            if pruner:
                pruner.weights(step + 1)
            optimizers.zero_grad()
            log.step = step + 1
            watch.at(watchdog.NUMBERS)
            enough = world.main and budget.is_up(due(step + 1))
            why = settle(steps.post(step, lr=lr, loss=loss_of_step, norm=norm, stop=stop.asked, enough=enough))
        settle(steps.drain())
        stop.seen()

        # The end
        if log.step == config.max_iters and why != STOP:
            why = "max_iters"  # a budget that was up with the last step cut nothing off
        finished = why != STOP and evaluate(log.step)
        if finished:
            with phase(JUDGING), optimizers.judged():
                judge.measure(log.step, raw, lambda: stop.asked, final=True)
    except NotFiniteError as error:
        stop.seen()
        log.event(log.step, "nan", str(error))
        keeper.wait()
        log.end("failed", "nan", str(error))
        world.barrier()
        return dist.EXIT_FAILED
    finally:
        keeper.wait()  # a checkpoint that is being written is finished, however the loop ended
        profile.end()

    watch.work(watchdog.END, log.step)
    if not finished:
        log.event(log.step, "stop", f"stopped after {log.step} of {config.max_iters} steps: {stop.signal or 'a peer'}")
        keeper.emergency()
        log.end("stopped", "signal", f"stopped by {stop.signal or 'a signal to another rank'} at step {log.step}")
        world.barrier()
        return dist.EXIT_STOPPED

    with log.phase("checkpoint"):
        keeper.save(*keeper.reasons(finished=True), wait=True)
    best = min(log.val, key=lambda line: line["val/loss"])
    log.say(f"Final validation loss: {log.val[-1]['val/loss']:.4f} | ppl: {log.val[-1]['val/perplexity']:.2f}")
    log.say(f"Best validation loss: {best['val/loss']:.4f} (Iter {best['step']})")
    if log.step < config.max_iters:
        log.event(log.step, why, f"ended after {log.step} of {config.max_iters} steps of the learning rate schedule")
    log.end("finished", ended_by=why)
    world.barrier()  # torchrun ends the others as soon as one has ended badly: all end after the files are written
    return dist.EXIT_FINISHED


def check_data(config: TrainConfig, log: RunLog) -> None:
    """Refuse data that changed since the run was planned; say so where that cannot be known without reading them."""
    folder = Path(config.data_path)
    found = data.planned_sha256(config)
    if found is None:
        log.say(f"Data: {folder} has no dataset.json of these files; their hash is not held against the plan's")
    elif found != config.data_sha256:
        raise DataError(
            f"the data in {folder} are not those of the plan",
            why=f"their hash is {found[:12]}..., and the run was planned with {config.data_sha256[:12]}...",
            fix="put the former shards back, or start a new matrix",
        )


def build_model(config: TrainConfig) -> GPT:
    """Return the model with its initial weights, which the seed alone decides."""
    if config.arch not in MODELS:
        raise ConfigError(f"arch is {config.arch!r}", why=f"gpt2/model.py knows {', '.join(MODELS)}")
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
    """Return the seed of one step's dropout on one rank, so that it does not depend on what was drawn before."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)


if __name__ == "__main__":
    main()
