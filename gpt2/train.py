"""Train one run, from its run.json to its result.json. Read it from top to bottom.

torchrun --standalone --nproc-per-node=W -m gpt2.train RUN_DIR --attempt N
"""

from __future__ import annotations

import argparse
import gc
import inspect
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gpt2 import checkpoint, dist, failure, optim, schedule, shards
from gpt2.config import TrainConfig
from gpt2.data import Batches
from gpt2.evaluate import Validation
from gpt2.log import RunLog
from gpt2.model import GPT, MODELS, autocast, configure_precision
from gpt2.steps import Reading, Steps, Timings
from kmatrix.errors import ConfigError, DataError, KmatrixError, RecordError
from kmatrix.records import RunDir, read_json

# The model's buffers are constants, and need not be sent at each forward pass; newer PyTorch has another name for it.
NEW_NAME = "forward_sync_buffers"
KNOWN = inspect.signature(DistributedDataParallel).parameters
NO_BUFFERS: dict[str, Any] = {NEW_NAME if NEW_NAME in KNOWN else "broadcast_buffers": False}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="gpt2.train", description="Train one run.")
    parser.add_argument("run_dir", type=Path, help="the folder that holds run.json")
    parser.add_argument("--attempt", type=int, default=1, help="which execution of this run this is")
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
        code = train(run, log, stop)
    except Exception as error:
        print(f"error: {error}" if isinstance(error, KmatrixError) else traceback.format_exc(), file=sys.stderr)
        stop.seen()
        try:
            failure.record(log, rank, failure.kind_of(error), failure.last_line(error))
        finally:
            dist.leave(dist.EXIT_FAILED)  # the peers may be gone: nothing is waited for
    dist.finish(code)


def train(run: Mapping[str, object], log: RunLog, stop: dist.Stop) -> int:  # noqa: PLR0912, PLR0915  (one text, top to bottom)
    """Train, write what came of it, and return the exit status. Any other end is an exception."""
    values = run.get("train")
    config = TrainConfig.from_json(values if isinstance(values, dict) else {})
    world = dist.start(config)
    checkpoints = Path(config.checkpoint_dir)

    # Data
    check_data(config, log)
    batches = Batches(config, world)
    validation = Validation(config, world)
    if validation.samples < config.eval_samples:
        log.say(f"Validation: all {validation.samples} sequences, fewer than the {config.eval_samples} asked for")

    # Model and optimizer
    log.say(configure_precision(world.device.type, config.dtype, tf32=config.tf32))
    raw = build_model(config).to(world.device)
    optimizers = optim.build(config, raw)
    compiled: nn.Module = torch.compile(raw) if config.compile else raw  # type: ignore[assignment]  # it is a module
    ddp = distributed(compiled, config, world) if world.size > 1 else None
    model = ddp or compiled
    parameters = list(raw.parameters())
    log.begin(config, world, raw.params)
    log.say(
        f"Training {config.model} ({raw.params:,} parameters) on {config.dataset} with {config.optimizer}: "
        f"{config.max_iters} steps of {config.tokens_per_step} tokens, {world.size} x {world.device_name}"
    )

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
        """Measure and log the validation loss; False when a stop cut it short."""
        with optimizers.judged():
            loss = validation.loss(compiled, lambda: stop.asked)
        if loss is None:
            return False
        if not np.isfinite(loss):
            raise failure.NotFiniteError(f"validation loss is {loss} at step {step}")
        log.validation(step, loss)
        return True

    def save(name: str) -> None:
        """Write a checkpoint of the weights after log.step updates; a periodic one may fail, and training goes on."""
        if not world.main:
            return
        try:
            state = checkpoint.state(config, raw, optimizers, step=log.step, run_id=log.run_id)
            checkpoint.save(checkpoints / name, state)
            log.event(log.step, "checkpoint", str(checkpoints / name))
        except RecordError as error:
            if name != checkpoint.LAST:
                raise
            log.event(log.step, "checkpoint failed", failure.last_line(error))

    gc.collect()
    gc.freeze()  # what lives as long as the run is not looked through again
    steps = Steps(world)
    timings = Timings(log.dir.timings(world.rank), config.log_interval)
    if ddp:
        ddp.register_comm_hook(None, lambda _, bucket: average_gradients(steps, bucket))  # no annotations: DDP's wish
    try:
        for step in range(config.max_iters):
            evaluation_due = step % config.eval_interval == 0
            checkpoint_due = bool(step and config.checkpoint_interval) and step % config.checkpoint_interval == 0
            if evaluation_due or checkpoint_due:
                if settle(steps.drain()):
                    break
                if evaluation_due:
                    evaluate(step)
                if checkpoint_due:
                    save(checkpoint.LAST)
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
            norm = clip(parameters, config.grad_clip)
            optimizers.step()
            optimizers.zero_grad()
            log.step = step + 1
            loss_of_step = total / config.gradient_accumulation
            if settle(steps.post(step, lr=lr, loss=loss_of_step, norm=norm, stop=stop.asked)):
                break
        settle(steps.drain())
        stop.seen()

        # The end
        finished = log.step == config.max_iters and evaluate(config.max_iters)
    except failure.NotFiniteError as error:
        stop.seen()
        log.event(log.step, "nan", str(error))
        log.end("failed", "nan", str(error))
        world.barrier()
        return dist.EXIT_FAILED

    if not finished:
        log.event(log.step, "stop", f"stopped after {log.step} of {config.max_iters} steps: {stop.signal or 'a peer'}")
        save(checkpoint.STOP)
        log.end("stopped", "signal", f"stopped by {stop.signal or 'a signal to another rank'} at step {log.step}")
        world.barrier()
        return dist.EXIT_STOPPED

    if config.save_checkpoint:
        save(checkpoint.FINAL)
        if world.main:
            checkpoint.discard(checkpoints, checkpoint.LAST, checkpoint.STOP)
    best = min(log.val, key=lambda line: line["val/loss"])
    log.say(f"Final validation loss: {log.val[-1]['val/loss']:.4f} | ppl: {log.val[-1]['val/perplexity']:.2f}")
    log.say(f"Best validation loss: {best['val/loss']:.4f} (Iter {best['step']})")
    log.end("finished")
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


def distributed(model: nn.Module, config: TrainConfig, world: dist.World) -> DistributedDataParallel:
    """Return the model with its gradients averaged over the ranks after each step's last micro-batch."""
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **NO_BUFFERS,
        find_unused_parameters=bool(config.ddp_find_unused_params),
    )


def average_gradients(steps: Steps, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket of gradients over the ranks, as DDP does by itself; with the last, this rank has computed."""
    if bucket.is_last():
        steps.computed()
    return allreduce_hook(torch.distributed.group.WORLD, bucket)  # type: ignore[arg-type]  # None means the world


def clip(parameters: list[nn.Parameter], most: float) -> torch.Tensor:
    """Scale the gradients down to a norm of `most` (0: leave them), and return the norm they had."""
    if most:
        return nn.utils.clip_grad_norm_(parameters, most)
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of one step's dropout on one rank, so that it does not depend on what was drawn before."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)


if __name__ == "__main__":
    main()
