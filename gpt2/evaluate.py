"""Validation loss, benchmarks and sample texts at intervals.

The validation loss is a mean over fixed sequences, the same for every micro-batch size and number of ranks. It is in
nats/token, which depends on the tokenizer; bits per byte are comparable across tokenizers, and come from the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.benchmarks.tasks import Evaluator
from gpt2.data.sequences import Batch, Place, Windows, on_device, sequences_of, sources
from gpt2.data.tokenizer import load
from gpt2.dist import World
from gpt2.inference.generate import GeneratedText, Sampling, generate
from gpt2.log import RunLog
from gpt2.model.base import LanguageModel
from gpt2.model.compiled import begin_pass
from gpt2.model.loss import IGNORED
from gpt2.model.precision import autocast
from kmatrix.errors import DataError
from kmatrix.records.dataset import SourceEntry
from kmatrix.records.train_config import TrainConfig

SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 64, 0.8  # of each text; it ends earlier with its document
PROMPT_SEPARATOR = "|"  # in sample_prompt, whose prompts may have spaces and commas


@dataclass(frozen=True, slots=True)
class ValidationPart:
    """The validation sequences of one dataset, of all ranks."""

    source: SourceEntry
    windows: Windows
    places: list[Place]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationLoss:
    """What a model makes of the validation sequences."""

    loss: float  # nats/token, mean over the datasets weighted as in training
    by_source: dict[str, float]  # nats/token of each dataset
    bits_per_byte: float | None  # of text; None if the tokens' bytes are unknown


class Validation:
    """A fixed sample of each dataset's validation set: eval_samples sequences at equal distances.

    Rank r evaluates sequences r, r + W, r + 2W, ... The loss of a mix is the mean weighted as in training.
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        """Raise DataError if a dataset has no validation sequence."""
        self.config, self.world = config, world
        self.parts: list[ValidationPart] = []
        for source in sources(config):
            windows = sequences_of(config, source, "val")
            self.parts.append(ValidationPart(source, windows, windows.spread(config.eval_samples)))
        self.token_bytes: Tensor | None = None  # UTF-8 bytes of each token: (V,)
        with suppress(DataError):  # the vocabulary is missing, which training does not need
            if (sizes := load(config.tokenizer, Path(config.data_path)).token_bytes()) is not None:
                self.token_bytes = torch.from_numpy(sizes).to(world.device)

    def describe(self) -> list[str]:
        """Return a note if the datasets have fewer sequences than asked for."""
        found, wanted = sum(len(part.places) for part in self.parts), self.config.eval_samples * len(self.parts)
        return [] if found == wanted else [f"Validation: all {found} sequences ({wanted} asked for)"]

    @torch.no_grad()
    def measure(self, model: torch.nn.Module, stopping: Callable[[], bool] = lambda: False) -> ValidationLoss | None:
        """Return the loss, the same on every rank; None if a rank was `stopping`.

        No random numbers are drawn. The model is left in training mode.
        """
        device, size = self.world.device, self.config.batch_size
        pad = size if self.config.compile else 0  # a compiled model is compiled again for each new size
        # In 64 bits, and on the device: the sum depends less on the micro-batch, and the loop never waits for the GPU.
        # Summed loss, sequences, nats of text, bytes of text
        sums = torch.zeros(len(self.parts), 4, dtype=torch.float64, device=device)
        model.eval()
        for part, part_sums in zip(self.parts, sums, strict=True):
            mine = part.places[self.world.rank :: self.world.size]  # at most one sequence more than another rank
            groups = [mine[start : start + size] for start in range(0, len(mine), size)]
            reads = (partial(read_padded, part.windows, group, pad) for group in groups)
            for group, (idx, targets) in zip(groups, on_device(reads, device), strict=True):
                if stopping():
                    break
                begin_pass(self.config)
                with autocast(device.type, self.config.dtype):
                    losses, loss = model(idx, targets)  # (B T,) and (), mean over the sequences
                part_sums[0] += loss.double() * len(group)  # the last may be smaller: weight by sequences
                part_sums[1] += len(group)
                if self.token_bytes is not None:
                    part_sums[2:] += text_costs(losses, targets.reshape(-1), self.token_bytes)
        model.train()
        # Every rank gets here, even if it stopped: a rank that returned earlier would leave the others in the sum.
        found: list[list[float]] = self.world.sum(sums).tolist()
        if any(count != len(part.places) for part, (_, count, *_) in zip(self.parts, found, strict=True)):
            return None
        weights = [part.source.weight for part in self.parts]

        def weighted(values: Sequence[float]) -> float:
            return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

        means = [total / count for total, count, *_ in found]
        bits = [nats / math.log(2) / size for *_, nats, size in found if size]  # unknown if a dataset has none
        return ValidationLoss(
            loss=weighted(means),
            by_source={part.source.name: mean for part, mean in zip(self.parts, means, strict=True)},
            bits_per_byte=weighted(bits) if len(bits) == len(found) else None,
        )


def text_costs(losses: Tensor, targets: Tensor, token_bytes: Tensor) -> Tensor:
    """Return (2,), float64: the nats of all targets that are text, and their UTF-8 bytes.

    losses: nats, (N,).  targets: (N,); negative ones are ignored.  token_bytes: (V,); 0: a special token, whose nats
    do not count (evaluate_bpb in nanochat's loss_eval.py, commit 92d63d4).
    """
    sizes = torch.where(targets >= 0, token_bytes[targets.clamp(min=0)], 0)  # (N,)
    return torch.stack([torch.where(sizes > 0, losses.double(), 0).sum(), sizes.sum().double()])


def read_padded(windows: Windows, places: Sequence[Place], size: int) -> Batch:
    """Return windows as idx and targets, filled up to `size` sequences that the loss does not count: each (B, T)."""
    idx, targets = windows.read(places)
    # Copies of the last sequence, because other tokens could widen the range of values that FP8 is scaled to.
    copies = idx[-1:].expand(max(0, size - len(places)), -1)
    return torch.cat([idx, copies]), torch.cat([targets, torch.full_like(copies, IGNORED)])


class Benchmarks:
    """Runs HellaSwag, CORE and sample texts at intervals. Every rank calls it at the same steps."""

    def __init__(self, config: TrainConfig, world: World, log: RunLog) -> None:
        """Raise DataError if a configured file or tokenizer is unusable, or lacks a character of a prompt."""
        self.config, self.log = config, log
        self._newest: int | None = None  # step of the newest benchmarks
        self.tasks = Evaluator(config, world) if config.hellaswag or config.core else None
        self.prompts: list[tuple[str, list[int]]] = []
        if config.sample_interval and world.main:
            self.tokenizer = load(config.tokenizer, Path(config.data_path))
            texts = (config.sample_prompt or "").split(PROMPT_SEPARATOR)
            self.prompts = [(text, self.tokenizer.encode(text).tolist()) for text in texts]

    def due(self, step: int) -> bool:
        """Return whether a benchmark is due for the weights after `step` updates, and was not run yet."""
        intervals = (self.config.benchmark_interval, self.config.sample_interval)
        return any(is_due(step, interval) for interval in intervals) and step != self._newest

    def measure(
        self, step: int, model: LanguageModel, stopping: Callable[[], bool] = lambda: False, *, final: bool = False
    ) -> None:
        """Run the benchmarks that are due after `step` updates; all of them at the end of a run.

        model: not compiled, because its inputs vary in length.
        """
        # First what all ranks do together, then what rank 0 does alone: the others wait at their next collective.
        if self.tasks and (final or is_due(step, self.config.benchmark_interval)):
            scores = self.tasks.score(model, stopping)
            if scores is None:
                return  # a rank was asked to stop: the resumed attempt repeats the benchmark
            self.log.scores(step, scores)
        if self.prompts and (final or is_due(step, self.config.sample_interval)):
            for prompt, text in self.samples(model):
                self.log.event(step, "sample", f"{prompt!r}: {text!r}")  # text with line breaks stays one line
        self._newest = step

    def samples(self, model: LanguageModel) -> list[tuple[str, str]]:
        """Return each prompt and its text, and leave the model in training mode.

        The seed of a text is the same at every interval, so that only the weights make a difference. Each has its own
        random generator: training continues as if none had been generated.
        """
        found = []
        model.eval()
        for number, (prompt, tokens) in enumerate(self.prompts):
            seed = self.config.seed + number  # two equal prompts get different texts
            sampling = Sampling(max_tokens=SAMPLE_TOKENS, temperature=SAMPLE_TEMPERATURE, seed=seed)
            text = GeneratedText(tokens, sampling, self.tokenizer)
            found.append((prompt, "".join(generate(model, text))))
        model.train()
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"judged": self._newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._newest = state["judged"]


def is_due(step: int, interval: int | None) -> bool:
    """Return whether an event with this interval happens at a step. 0 and None mean never."""
    return bool(interval) and step % (interval or 1) == 0
