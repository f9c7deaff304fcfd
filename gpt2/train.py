"""Train one run, from its run.json to its result.json. Read it from top to bottom.

torchrun --standalone --nproc-per-node=W -m gpt2.train RUN_DIR --attempt N --resume none|auto|latest|best|PATH
    --micro-batch B
On several nodes, torchrun runs on each, with --nnodes --node-rank --master-addr --master-port instead of --standalone.
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gpt2.data.batches as data
from gpt2 import dist, prune
from gpt2.checkpoint.initial import initialize
from gpt2.checkpoint.saver import Saver
from gpt2.checkpoint.shared import check_shared
from gpt2.checkpoint.state import Stateful, TrainingState
from gpt2.data.batches import Batches
from gpt2.evaluate import Benchmarks, Validation
from gpt2.log import RunLog
from gpt2.loop.between import BetweenSteps
from gpt2.loop.profiling import Profile
from gpt2.loop.schedule import dropout_seed, scale
from gpt2.model.attention_kernel import choose_kernel, kernels_of
from gpt2.model.base import LanguageModel
from gpt2.model.compiled import begin_pass, compile_model, keeps_gradients
from gpt2.model.fp8 import check_device
from gpt2.model.precision import autocast, configure_determinism, configure_precision
from gpt2.model.registry import MODELS
from gpt2.norms import LayerNorms
from gpt2.optim.builders import build_optimizers
from gpt2.optim.sharded import shard
from gpt2.prune import Pruner
from gpt2.steps import StepNumbers, Steps, Timings, average_gradients, clip, distributed
from gpt2.stopping import (
    Budget,
    EarlyStopping,
    EndReason,
    NotFiniteError,
    limit_of,
    spent_before,
)
from gpt2.watchdog import END, STEP, Watchdog, last_line
from kmatrix.errors import ConfigError, DataError, KmatrixError
from kmatrix.records.checkpoint_dir import own_checkpoint_dir
from kmatrix.records.files import read_json
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.records.jobs.ranks import BACKWARD, DATA, FORWARD, NUMBERS, UPDATE
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
    rank, _, _ = dist.environment()
    run_dir = RunDir(args.run_dir.absolute())
    try:
        # Before any file of the run is touched: an earlier attempt may still have ranks, or this rank may be too late.
        join_attempt(run_dir)
        run = read_json(run_dir.run_json)
    except KmatrixError as error:  # without run.json this is not a run directory: do not write a result into it
        print(f"error: {error}", file=sys.stderr)
        if dist.node_environment()[0] > 0 and not run_dir.run_json.exists():
            print(f"  hint: {run_dir.path} must be on storage that all nodes of the run share", file=sys.stderr)
        dist.exit_now(dist.EXIT_REFUSED)
    log = RunLog(run_dir, str(run.get("run_id")), args.attempt, main=rank == 0, phases=phases_of_node(run_dir))
    # Signals and hangs are handled from here on, because the set-up already takes minutes (data, weights, compilation).
    watchdog = Watchdog(log, rank)
    stop = dist.Stop(watchdog.give_up)
    try:
        code = train(run, log, stop, watchdog, resume=args.resume, micro_batch=args.micro_batch)
    # Broad, because result.json must have the reason of any failure: the runner retries by its kind (oom, for example).
    # The error is printed with its traceback, recorded, and ends the process.
    except Exception as error:
        with suppress(OSError):  # on a full disk there may still be space for the small result
            print(f"error: {error}" if isinstance(error, KmatrixError) else traceback.format_exc(), file=sys.stderr)
        stop.acknowledge()  # this rank responds: a signal during the next lines must not report it as hanging
        watchdog.fail(error)
    watchdog.end()
    dist.finish(code)


def phases_of_node(run_dir: RunDir) -> Path | None:
    """Return the file of the phases of this node, for its first rank; None for others, and if nothing watches it."""
    node = NodeDir(run_dir, dist.node_environment()[0])
    _, local_rank, _ = dist.environment()
    # Without its folder, torchrun was started by hand on this node: there is no recording to divide.
    return node.recording.phases if local_rank == 0 and node.recording.path.is_dir() else None


def train(
    run: Mapping[str, object],
    log: RunLog,
    stop: dist.Stop,
    watchdog: Watchdog,
    *,
    resume: str = "none",
    micro_batch: int | None = None,
) -> int:
    """Train, write the result and return the exit status. Failures other than a bad loss are exceptions."""
    loop = set_up(run, log, stop, watchdog, resume=resume, micro_batch=micro_batch)
    between, training = loop.between, loop.between.training
    gc.collect()
    gc.freeze()  # objects that live as long as the run: later collections skip them
    log.end_phase("set-up", log.started_at)
    try:
        ended_by = loop.run()
        stop.acknowledge()  # all ranks left the loop after the same step: none waits for a rank that has stopped
        finished = ended_by is not EndReason.STOP and between.evaluate(log.step)
        if finished:
            between.benchmark(log.step, final=True)
    except NotFiniteError as error:  # on every rank, because all have the same numbers: a barrier is safe
        stop.acknowledge()
        log.event(log.step, "nan", str(error))
        between.checkpoints.wait()
        log.end("failed", "nan", str(error))
        leave_together(training.world, log)
        return dist.EXIT_FAILED
    finally:
        between.checkpoints.wait()  # finish writing the current checkpoint, however the loop ended
        loop.profile.end()

    watchdog.work(END, log.step)
    code = between.end_finished(ended_by) if finished else between.end_stopped()
    leave_together(training.world, log)
    return code


def leave_together(world: dist.World, log: RunLog) -> None:
    """Wait until rank 0 has written the result: torchrun kills the others as soon as one fails."""
    try:
        world.barrier()
    except RuntimeError as error:
        if not world.main:
            raise
        log.say(f"Note: a rank was lost after the end of the run: {last_line(error)}")  # the result is complete


def set_up(
    run: Mapping[str, object],
    log: RunLog,
    stop: dist.Stop,
    watchdog: Watchdog,
    *,
    resume: str,
    micro_batch: int | None,
) -> TrainingLoop:
    """Make all parts of the training, and restore their state from a checkpoint if `resume` says so."""
    # Configuration and process group
    values = run.get("train")
    planned = TrainConfig.from_json(values if isinstance(values, dict) else {})
    config = planned.with_micro_batch(micro_batch) if micro_batch else planned
    watchdog.begin(config.stall_factor)
    world = dist.start(config)
    check_shared([("RESULTS_DIR", log.dir.path), ("CHECKPOINT_DIR", own_checkpoint_dir(log.dir))], world)
    # Data: before the model, because wrong data are found in a second, and a large model takes minutes
    batches, validation = load_data(config, world, log)
    benchmarks = Benchmarks(config, world, log)

    # Model and optimizer
    log.say(configure(config, world.device))
    raw = build_model(config).to(world.device)  # before the optimizers, whose state is on the device of its parameters
    optimizers = shard(build_optimizers(config, raw), config.zero_stage, world)
    pruner = prune.build(config, raw, optimizers)
    # raw and compiled share their parameters. Checkpoints are of raw: the names do not depend on the compiler.
    compiled = compile_model(raw, config) if config.compile else raw
    norms = LayerNorms(raw, config.log_interval, config.max_iters - 1) if config.log_norms and world.main else None
    log.norms = norms
    adjusted = changes(planned, config, "another micro-batch was asked for")
    log.begin(config, world, raw.params, pruner, adjusted, attention=kernels_of(raw, config, world.device))

    # State that a checkpoint holds besides the model and the optimizers
    early_stopping = EarlyStopping(config)
    # A GPU has two more steps in its queue when the loop sees the end of one, and they run to their end.
    budget = Budget(limit_of(config), ahead=2 if world.device.type == "cuda" else 0)
    stateful: dict[str, Stateful] = {
        "log": log,
        "benchmarks": benchmarks,
    }
    stateful |= {"early stopping": early_stopping, "budget": budget, **({"pruner": pruner} if pruner else {})}
    training = TrainingState(config=config, world=world, model=raw, optimizers=optimizers, stateful=stateful)
    checkpoints = Saver(training, log)
    resumed = checkpoints.resume(resume)  # restores all of the above, so everything that it holds exists by now
    if config.init_from and not resumed:
        initialize(raw, config)
        log.say(f"Initial weights: {config.init_from}, SHA-256 {config.init_sha256[:12]}")
    # The runner's measure includes the launch of the earlier attempts, and work after their last checkpoint.
    budget.begin(spent_s=0.0 if resume == "none" else spent_before(), final_s=checkpoints.final_s)
    log.spent = lambda: budget.spent_s
    batches.seek(log.step)
    # After the weights were restored: DDP sends those of rank 0 to the other ranks, so all certainly start equal.
    ddp = distributed(compiled, config, world) if world.size > 1 else None

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
        early_stopping=early_stopping,
        budget=budget,
        checkpoints=checkpoints,
        steps=Steps(world),
        timings=Timings(log.dir.timings(world.rank), config.log_interval),
    )
    if keeps_gradients(config):
        optimizers.keeps_gradients = True
        for parameter in raw.parameters():
            parameter.grad = torch.zeros_like(parameter)
    if ddp:
        # no annotations: register_comm_hook checks them at runtime, and refuses the strings that they are here
        bf16 = bool(config.ddp_bf16_gradients)
        ddp.register_comm_hook(None, lambda _, bucket: average_gradients(between.steps, bucket, bf16=bf16))
    profile = Profile(config.profile if world.main else "", log.dir.profile)
    return TrainingLoop(
        between=between,
        ddp=ddp,
        pruner=pruner,
        norms=norms,
        profile=profile,
        parameters=list(raw.parameters()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """The training loop of one rank."""

    between: BetweenSteps
    ddp: DistributedDataParallel | None  # None with one rank
    pruner: Pruner | None
    norms: LayerNorms | None
    profile: Profile
    parameters: list[nn.Parameter]

    def run(self) -> EndReason | None:
        """Train until the last step, the end of the budget, early stopping or a stop request.

        Return which it was.
        """
        between, log, steps = self.between, self.between.log, self.between.steps
        max_iters = between.training.config.max_iters
        ended_by: EndReason | None = None
        steps.restart()  # the set-up is not part of the first step
        while ended_by is None:
            step = log.step
            if step == max_iters or between.due(step):
                # A step's numbers arrive one step late: wait for them before its weights are evaluated or saved.
                ended_by = between.finish_step(steps.drain())
                if log.step == max_iters:
                    ended_by = EndReason.MAX_ITERS
                if ended_by:
                    continue
                ended_by = between.evaluate_and_save(step)
                if ended_by:
                    break
            if not between.wait_for_data():
                ended_by = EndReason.STOP
                break
            ended_by = between.finish_step(self._step(step))
        between.finish_step(steps.drain())  # the last step's, if the loop ended before they were read
        if log.step == max_iters and ended_by is not EndReason.STOP:
            ended_by = EndReason.MAX_ITERS  # the budget was used up by the last step: it cut nothing off
        return ended_by

    def _step(self, step: int) -> StepNumbers | None:
        """Train one step and send its numbers. Return those of the step before."""
        between, optimizers = self.between, self.between.training.optimizers
        config, world = between.training.config, between.training.world
        between.watchdog.work(STEP, step)
        self.profile.at(step)
        # Random numbers (dropout) depend on seed, step and rank only: no state of a generator is saved.
        torch.manual_seed(dropout_seed(config.seed, step, world.rank))
        optimizers.set_scale(scale(config, step), step)
        lr = optimizers.lr
        loss = self._gradients()

        between.watchdog.at(UPDATE)
        norm = self._update(step)
        if self.pruner:
            self.pruner.weights(step + 1)
        if self.norms:
            self.norms.end(step)
        optimizers.zero_grad()
        between.log.step = step + 1

        # This step's numbers are sent; those of the step before have arrived
        between.watchdog.at(NUMBERS)
        # Rank 0 decides by its clock; the others hear of it with these numbers, one step late, like rank 0 itself.
        over_budget = world.main and between.budget.is_up(between.due(step + 1))
        stop = between.stop.requested
        return between.steps.post(step, lr=lr, loss=loss, norm=norm, stop=stop, over_budget=over_budget)

    def _gradients(self) -> torch.Tensor:
        """Run forward and backward of all micro-batches; return this rank's mean loss ()."""
        between, watchdog = self.between, self.between.watchdog
        config, world = between.training.config, between.training.world
        model = self.ddp or between.compiled
        total = torch.zeros((), device=world.device)  # stays on the device, because .item() would wait for it
        for micro in range(config.gradient_accumulation):
            if self.ddp:  # nanoGPT's alternative to no_sync(): average the gradients after the last micro-batch only
                self.ddp.require_backward_grad_sync = micro == config.gradient_accumulation - 1
            watchdog.at(DATA)
            idx, targets = between.batches.next()  # (B, T)
            watchdog.at(FORWARD)
            begin_pass(config)
            with autocast(world.device.type, config.dtype):
                _, loss = model(idx, targets)  # (), nats/token
            watchdog.at(BACKWARD)
            (loss / config.gradient_accumulation).backward()  # gradients add up: the sum has to be a mean
            total += loss.detach()
        if not self.ddp:  # with DDP, its communication hook marks the end of the computation
            between.steps.computed()
        return total / config.gradient_accumulation

    def _update(self, step: int) -> torch.Tensor:
        """Update the weights; return the norm of the gradients before clipping ()."""
        if self.pruner:
            self.pruner.gradients()
        if self.norms:
            self.norms.begin(step)
        norm = clip(self.parameters, self.between.training.config.grad_clip)
        optimizers = self.between.training.optimizers
        optimizers.step()
        self.between.log.states(optimizers)
        return norm


def load_data(config: TrainConfig, world: dist.World, log: RunLog) -> tuple[Batches, Validation]:
    """Return the batches of training and the validation, and log what they consist of."""
    check_data(config, log)
    batches = Batches(config, world)
    validation = Validation(config, world)
    for line in (*validation.describe(), *data.describe(batches.stream.epochs(config.max_iters * config.global_batch))):
        log.say(line)
    return batches, validation


def check_data(config: TrainConfig, log: RunLog) -> None:
    """Raise DataError if the data changed since the run was planned; log a note if that is unknown."""
    folder = Path(config.data_path)
    found = data.planned_sha256(config)
    if found is None:
        log.say(f"Data: {folder} has no dataset.json; the hash of its files is not checked")
    elif found != config.data_sha256:  # a loss on other data must not be compared with the rest of the matrix
        raise DataError(
            f"the data in {folder} changed after the run was planned",
            why=f"hash {found[:12]}..., expected {config.data_sha256[:12]}...",
            hint="restore the former shards, or create a new matrix",
        )


def configure(config: TrainConfig, device: torch.device) -> str:
    """Set precision, determinism and attention kernel of this process, and return a line for the log.

    Raises ConfigError if the device or the installation lacks what is configured.
    """
    if config.fp8:
        check_device(device)
    configure_determinism(deterministic=config.deterministic)
    choose_kernel(config, device)
    return configure_precision(device.type, config.dtype, tf32=config.tf32)


def build_model(config: TrainConfig) -> LanguageModel:
    """Return the model with its initial weights, which only the seed decides."""
    if config.arch not in MODELS:
        raise ConfigError(f"arch is {config.arch!r}", why=f"gpt2/model/registry.py has {', '.join(MODELS)}")
    return MODELS[config.arch](
        config.shape,
        dropout=config.dropout,
        vocab_multiple=config.vocab_multiple,
        flash=config.flash_attention,
        seed=config.seed,
        recompute=config.recompute,
        recompute_scope=config.recompute_scope or "blocks",
        loss_chunk=config.loss_chunk,
        bf16_stream=bool(config.bf16_stream),
        fp8=bool(config.fp8),
    )


if __name__ == "__main__":
    main()
