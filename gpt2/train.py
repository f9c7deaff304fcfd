"""Train one run, from its run.json to its result.json. Read it from top to bottom.

torchrun --standalone --nproc-per-node=W -m gpt2.train RUN_DIR --attempt N --resume none|auto|latest|best|PATH
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import nn

from gpt2 import dist, failure, optim, prune, schedule, shards
from gpt2.checkpoint import Carried, Keeper, Parts
from gpt2.config import TrainConfig
from gpt2.data import Batches
from gpt2.evaluate import Validation
from gpt2.judge import Judge
from gpt2.log import RunLog
from gpt2.model import GPT, MODELS, autocast, configure_precision
from gpt2.replicas import average_gradients, clip, distributed
from gpt2.steps import Reading, Steps, Timings
from kmatrix.errors import ConfigError, DataError, KmatrixError
from kmatrix.records import RunDir, read_json


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="gpt2.train", description="Train one run.")
    parser.add_argument("run_dir", type=Path, help="the folder that holds run.json")
    parser.add_argument("--attempt", type=int, default=1, help="which execution of this run this is")
    parser.add_argument(
        "--resume",
        default="none",
        help="none: from the start; auto: from the newest good checkpoint, or the start; latest, best, or a path",
    )
    args = parser.parse_args(argv)
    dist.die_with_parent()
    rank, _, _ = dist.environment()
    run_dir = RunDir(args.run_dir.absolute())
    try:
        run = read_json(run_dir.run_json)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        dist.leave(dist.EXIT_REFUSED)
    log = RunLog(run_dir, str(run.get("run_id")), args.attempt, main=rank == 0)
    stop = dist.Stop(lambda name: failure.give_up(log, rank, name))
    try:
        code = train(run, log, stop, resume=args.resume)
    except Exception as error:
        print(f"error: {error}" if isinstance(error, KmatrixError) else traceback.format_exc(), file=sys.stderr)
        stop.seen()
        try:
            failure.record(log, rank, failure.kind_of(error), failure.last_line(error))
        finally:
            dist.leave(dist.EXIT_FAILED)  # the peers may be gone: nothing is waited for
    dist.finish(code)


def train(run: Mapping[str, object], log: RunLog, stop: dist.Stop, *, resume: str = "none") -> int:  # noqa: PLR0912, PLR0915  (one text, top to bottom)
    """Train, write what came of it, and return the exit status. Any other end is an exception."""
    values = run.get("train")
    config = TrainConfig.from_json(values if isinstance(values, dict) else {})
    world = dist.start(config)

    # Data
    check_data(config, log)
    batches = Batches(config, world)
    validation = Validation(config, world)
    if validation.samples < config.eval_samples:
        log.say(f"Validation: all {validation.samples} sequences, fewer than the {config.eval_samples} asked for")
    log.bytes_per_token = validation.bytes_per_token
    judge = Judge(config, world, log)

    # Model and optimizer
    log.say(configure_precision(world.device.type, config.dtype, tf32=config.tf32))
    raw = build_model(config).to(world.device)
    optimizers = optim.build(config, raw)
    pruner = prune.build(config, raw, optimizers)
    compiled: nn.Module = torch.compile(raw) if config.compile else raw  # type: ignore[assignment]  # it is a module
    parameters = list(raw.parameters())
    log.begin(config, world, raw.params, pruner)
    log.say(
        f"Training {config.model} ({raw.params:,} parameters) on {config.dataset} with {config.optimizer}: "
        f"{config.max_iters} steps of {config.tokens_per_step} tokens, {world.size} x {world.device_name}"
    )

    # What goes on over a resume besides model, optimizers and random numbers
    carried: dict[str, Carried] = {"log": log, "judge": judge}
    if pruner:
        carried["pruner"] = pruner
    keeper = Keeper(Parts(config=config, world=world, model=raw, optimizers=optimizers, carried=carried), log)
    keeper.resume(resume)
    keeper.forecast()
    batches.seek(log.step)
    ddp = distributed(compiled, config, world) if world.size > 1 else None
    model = ddp or compiled

    # The loop
    def settle(reading: Reading | None) -> bool:
        """Log a step that is known by now, and say whether some rank asked to stop in it."""
        if reading is None:
            return False
        if reading.not_finite:
            raise failure.NotFiniteError(reading.not_finite)
        log.training(reading, batches.epoch(reading.step))
        timings.add(reading)
        return reading.stop

    def evaluate(step: int) -> bool:
        """Measure and log the validation loss, if that was not done; False when a stop cut it short."""
        if log.evaluated(step):
            return True
        with log.phase("evaluation"), optimizers.judged():
            loss = validation.loss(compiled, lambda: stop.asked)
        if loss is None:
            return False
        if not np.isfinite(loss):
            raise failure.NotFiniteError(f"validation loss is {loss} at step {step}")
        log.validation(step, loss)
        return True

    gc.collect()
    gc.freeze()  # what lives as long as the run is not looked through again
    steps = Steps(world)
    timings = Timings(log.dir.timings(world.rank), config.log_interval)
    if ddp:
        ddp.register_comm_hook(None, lambda _, bucket: average_gradients(steps, bucket))  # no annotations: DDP's wish
    log.phase_over("set-up", log.born)
    try:
        while log.step < config.max_iters:
            step = log.step
            evaluation_due = step % config.eval_interval == 0 and not log.evaluated(step)
            if evaluation_due or judge.due(step) or keeper.due(step):
                if settle(steps.drain()):
                    break
                if evaluation_due and not evaluate(step):
                    break
                if judge.due(step):
                    with log.phase("evaluation"), optimizers.judged():
                        judge.measure(step, raw, lambda: stop.asked)
                with log.phase("checkpoint"):
                    keeper.save(*keeper.reasons())
                steps.restart()

            if config.dropout:
                torch.manual_seed(dropout_seed(config.seed, step, world.rank))
            optimizers.set_scale(schedule.scale(config, step))
            lr = optimizers.lr
            total = torch.zeros((), device=world.device)
            for micro in range(config.gradient_accumulation):
                if ddp:  # read in forward: gradients are averaged after the last micro-batch alone
                    ddp.require_backward_grad_sync = micro == config.gradient_accumulation - 1
                idx, targets = batches.next()  # (B, T)
                with autocast(world.device.type, config.dtype):
                    _, loss = model(idx, targets)
                (loss / config.gradient_accumulation).backward()
                total += loss.detach()
            if not ddp:
                steps.computed()
            if pruner:
                pruner.gradients()
            norm = clip(parameters, config.grad_clip)
            optimizers.step()
            if pruner:
                pruner.weights(step + 1)
            optimizers.zero_grad()
            log.step = step + 1
            loss_of_step = total / config.gradient_accumulation
            if settle(steps.post(step, lr=lr, loss=loss_of_step, norm=norm, stop=stop.asked)):
                break
        settle(steps.drain())
        stop.seen()

        # The end
        finished = log.step == config.max_iters and evaluate(config.max_iters)
        if finished:
            with optimizers.judged():
                judge.measure(log.step, raw, lambda: stop.asked, final=True)
    except failure.NotFiniteError as error:
        stop.seen()
        log.event(log.step, "nan", str(error))
        keeper.wait()
        log.end("failed", "nan", str(error))
        world.barrier()
        return dist.EXIT_FAILED
    finally:
        keeper.wait()  # a checkpoint that is being written is finished, however the loop ended

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
    log.end("finished", ended_by="max_iters")
    world.barrier()  # torchrun ends the others as soon as one has ended badly: all end after the files are written
    return dist.EXIT_FINISHED


def check_data(config: TrainConfig, log: RunLog) -> None:
    """Refuse data that changed since the run was planned; say so where that cannot be known without reading them."""
    folder = Path(config.data_path)
    found = shards.recorded_sha256(folder)
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
