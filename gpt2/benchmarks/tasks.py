"""Benchmarks by the answers that a model finds most probable: HellaSwag, and CORE with its 22 tasks.

CORE (Li et al. 2024, arXiv:2406.11794) is the mean of centered accuracies, by the rules of nanochat's core_eval.py
(https://github.com/karpathy/nanochat, commit 92d63d4). HellaSwag (Zellers et al. 2019, arXiv:1905.07830) has the two
accuracies of llm.c. Dimensions in comments: R rows, T tokens, E width, V vocabulary, N scored tokens.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from gpt2.benchmarks.bundle import Kind, Task, read_hellaswag, read_tasks
from gpt2.data.tokenizer import Tokenizer, load
from gpt2.dist import World
from gpt2.model.base import LanguageModel
from gpt2.model.precision import autocast
from kmatrix.records.train_config import TrainConfig
from kmatrix.text import count, plural

PROGRESS_S = 60.0  # between two lines about a long measurement
SHOTS_SEED = 1234  # plus the number of the example: which others are shown before it


@dataclass(frozen=True, slots=True)
class Question:
    """The rows of an example as tokens, with the part of each that is scored."""

    rows: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[int, int], ...]  # first scored token, and the one after the last
    correct: int
    exact: bool  # the scored tokens have to be the most probable ones
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model makes of a question."""

    correct: bool  # by the mean loss per token, so that short answers have no advantage
    correct_by_sum: bool  # by the probability of the whole answer
    losses: tuple[float, ...]  # mean over the scored tokens of each row, nats/token


@dataclass(frozen=True, slots=True, kw_only=True)
class HellaSwagScore:
    """Accuracies, 0 to 1, as llm.c and lm-evaluation-harness (completion style) define them."""

    accuracy: float  # by the probability of the whole ending
    accuracy_norm: float  # by the mean over its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """The score of one task of CORE."""

    label: str
    accuracy: float  # 0 to 1
    centered: float  # 0: as good as guessing, 1: all correct
    examples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreScore:
    """The score of all tasks of CORE."""

    core: float  # mean of the centered accuracies
    standard_error: float  # from the number of examples alone: other examples of the same kind
    truncated: int  # examples that exceed the context
    tasks: tuple[TaskScore, ...]

    @property
    def examples(self) -> int:
        return sum(task.examples for task in self.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of one measurement; None: not configured."""

    hellaswag: HellaSwagScore | None
    core: CoreScore | None


class Evaluator:
    """The tasks of a run. Rank r evaluates examples r, r + W, r + 2W, ... of each."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        """Raise DataError if a file or the tokenizer cannot be used."""
        self.config, self.world = config, world
        self.hellaswag = [read_hellaswag(Path(config.hellaswag))] if config.hellaswag else []
        self.core = read_tasks(Path(config.core), config.core_examples or 0) if config.core else []
        self.tasks = [*self.hellaswag, *self.core]
        self.examples = sum(len(task.items) for task in self.tasks)
        self.tokenizer = load(config.tokenizer, Path(config.data_path))
        self.tokenizer.encode("")  # loads the vocabulary, or says now that it is missing

    def describe(self) -> list[str]:
        """Return a line about each benchmark."""
        lines = [f"HellaSwag: {len(task.items)} examples of {self.config.hellaswag}" for task in self.hellaswag]
        if self.core:
            examples = count(sum(len(task.items) for task in self.core))
            lines.append(f"CORE: {plural(len(self.core), 'task')} with {examples} examples of {self.config.core}")
        return lines

    @torch.no_grad()
    def score(
        self,
        model: LanguageModel,
        stopping: Callable[[], bool] = lambda: False,
        say: Callable[[str], object] = lambda _: None,
    ) -> Scores | None:
        """Return the scores, the same on every rank; None if a rank was `stopping`.

        model: not compiled, because its inputs vary in length.  say: called with the progress once per minute.
        """
        # Correct answers by mean and by sum, examples, and those that were truncated
        counts = torch.zeros(len(self.tasks), 4, dtype=torch.float64, device=self.world.device)
        done, said = 0, time.monotonic()
        model.eval()
        for number, questions in self._groups():
            if stopping():
                break
            answers = answer(model, questions, dtype=self.config.dtype, padding=self.tokenizer.end_of_document)
            counts[number, 0] += sum(one.correct for one in answers)
            counts[number, 1] += sum(one.correct_by_sum for one in answers)
            counts[number, 2] += len(answers)
            counts[number, 3] += sum(one.truncated for one in questions)
            done += len(answers)
            if time.monotonic() - said >= PROGRESS_S:
                said = time.monotonic()
                say(f"Benchmarks: {count(done * self.world.size)} of {count(self.examples)} examples")
        model.train()
        # As in Validation.measure: every rank gets here, and all see whether the sum is complete.
        totals: list[list[float]] = self.world.sum(counts).tolist()
        if any(total != len(task.items) for task, (*_, total, _) in zip(self.tasks, totals, strict=True)):
            return None
        hellaswag, core = None, totals[len(self.hellaswag) :]
        if self.hellaswag:
            by_mean, by_sum, total, _ = totals[0]
            hellaswag = HellaSwagScore(accuracy=by_sum / total, accuracy_norm=by_mean / total)
        correct, truncated = [int(by_mean) for by_mean, *_ in core], int(sum(cut for *_, cut in core))
        return Scores(hellaswag=hellaswag, core=core_score(self.core, correct, truncated) if core else None)

    def _groups(self) -> Iterator[tuple[int, list[Question]]]:
        """Yield the number of a task with some questions of it: together at most a training batch, but one at least."""
        for number, task in enumerate(self.tasks):
            group: list[Question] = []
            for index in range(self.world.rank, len(task.items), self.world.size):
                # nanochat crops at the context, llm.c one token later: the last token is a target only.
                room = self.config.block_size + (task.kind is Kind.ENDING)
                one = cropped(question(task, index, self.tokenizer), room)
                if group and sum(len(other.rows) for other in group) + len(one.rows) > self.config.batch_size:
                    yield number, group
                    group = []
                group.append(one)
            if group:
                yield number, group


def core_score(tasks: Sequence[Task], correct: Sequence[int], truncated: int = 0) -> CoreScore:
    """Return the score from the number of correct answers of each task.

    centered = (accuracy - baseline) / (1 - baseline). The standard error is that of a mean of independent binomials.
    """
    scores, variance = [], 0.0
    for task, number in zip(tasks, correct, strict=True):
        size, room = len(task.items), 1 - task.baseline
        accuracy = number / size
        variance += accuracy * (1 - accuracy) / size / room**2
        scores.append(
            TaskScore(label=task.label, accuracy=accuracy, centered=(accuracy - task.baseline) / room, examples=size)
        )
    mean = math.fsum(score.centered for score in scores) / len(scores)
    error = math.sqrt(variance) / len(scores)
    return CoreScore(core=mean, standard_error=error, truncated=truncated, tasks=tuple(scores))


def shown(task: Task, index: int) -> list[int]:
    """Return the numbers of the examples that are shown before one."""
    others = [number for number in range(len(task.items)) if number != index]
    return random.Random(SHOTS_SEED + index).sample(others, task.shots)


def prompts(task: Task, index: int) -> list[str]:
    """Return the texts of an example; of a task with exact answers first the text without the continuation."""
    before = ""
    for number in shown(task, index):
        other = task.items[number]
        before += f"{other.contexts[other.correct]}{task.delimiter}{other.continuations[other.correct]}\n\n"
    item = task.items[index]
    texts = [
        f"{before}{context}{task.delimiter}{continuation}"
        for context, continuation in zip(item.contexts, item.continuations, strict=True)
    ]
    # Without white space at its end, which a tokenizer would join with the continuation.
    return [f"{before}{item.contexts[0]}{task.delimiter}".strip(), *texts] if task.kind is Kind.EXACT else texts


def question(task: Task, index: int, tokenizer: Tokenizer) -> Question:
    """Return an example as tokens, of CORE after an end of document.

    Scored is what differs: the tokens after the common beginning, or of a schema the common end; of HellaSwag the
    ending, which is encoded by itself.
    """
    if task.kind is Kind.ENDING:
        item = task.items[index]
        context, *endings = (tuple(tokenizer.encode(text).tolist()) for text in (item.contexts[0], *item.continuations))
        whole = tuple(context + ending for ending in endings)
        return Question(whole, tuple((len(context), len(row)) for row in whole), item.correct, exact=False)
    begin = (tokenizer.end_of_document,)
    rows = [begin + tuple(int(token) for token in tokenizer.encode(text)) for text in prompts(task, index)]
    if task.kind is Kind.SCHEMA:
        common = common_length([row[::-1] for row in rows])
        spans = [(len(row) - common, len(row)) for row in rows]
    else:
        common = common_length(rows)
        spans = [(common, len(row)) for row in rows]
    if task.kind is Kind.EXACT:
        rows, spans = rows[1:], spans[1:]
    return Question(tuple(rows), tuple(spans), task.items[index].correct, exact=task.kind is Kind.EXACT)


def common_length(rows: Sequence[tuple[int, ...]]) -> int:
    """Return the number of tokens with which all rows begin."""
    columns = zip(*rows, strict=False)
    return next((n for n, column in enumerate(columns) if len(set(column)) > 1), min(len(row) for row in rows))


def cropped(one: Question, room: int) -> Question:
    """Return a question whose rows have at most `room` tokens: a longer one loses its beginning."""
    if max(len(row) for row in one.rows) <= room:
        return one
    cuts = [max(0, len(row) - room) for row in one.rows]
    return Question(
        rows=tuple(row[cut:] for row, cut in zip(one.rows, cuts, strict=True)),
        spans=tuple((max(0, first - cut), end - cut) for (first, end), cut in zip(one.spans, cuts, strict=True)),
        correct=one.correct,
        exact=one.exact,
        truncated=True,
    )


@torch.no_grad()
def answer(model: LanguageModel, questions: Sequence[Question], *, dtype: str, padding: int) -> list[Answer]:
    """Return the answers of a model in evaluation mode.

    dtype: fp32 or bf16.  padding: token after the end of a row, which earlier ones cannot attend to.
    """
    rows = [row for one in questions for row in one.rows]
    spans = [span for one in questions for span in one.spans]
    idx = torch.full((len(rows), max(len(row) for row in rows)), padding, dtype=torch.long)  # (R, T)
    for number, row in enumerate(rows):
        idx[number, : len(row)] = torch.tensor(row)
    # A token is predicted at the one before it, so the first of a row has no cost.
    places = [(number, at - 1) for number, (first, end) in enumerate(spans) for at in range(max(1, first), end)]
    numbers = torch.tensor([number for number, _ in places], dtype=torch.long)  # (N,)
    columns = torch.tensor([column for _, column in places], dtype=torch.long)  # (N,)
    device = model.wte.weight.device
    with autocast(device.type, dtype):
        x = model.residual_stream(idx[:, :-1].to(device))  # (R, T - 1, E): the last token predicts nothing
        # Only of the scored tokens: the logits of all would be the largest tensor, many times over.
        logits = model.logits(x[numbers.to(device), columns.to(device)]).float()  # (N, V)
    targets = idx[numbers, columns + 1].to(device)  # (N,)
    losses = functional.cross_entropy(logits, targets, reduction="none").tolist()
    hits = (logits.argmax(-1) == targets).tolist()

    answers, at = [], 0
    for one in questions:
        sums, means, exact = [], [], True
        for first, end in one.spans:
            size = end - max(1, first)
            # Two equal answers have nothing to score: as in the public code, which compares with nan, the first wins.
            sums.append(math.fsum(losses[at : at + size]) if size > 0 else math.nan)
            means.append(sums[-1] / size if size > 0 else math.nan)
            exact = exact and all(hits[at : at + size])
            at += max(0, size)
        correct, by_sum = (exact if one.exact else costs.index(min(costs)) == one.correct for costs in (means, sums))
        answers.append(Answer(correct=correct, correct_by_sum=by_sum, losses=tuple(means)))
    return answers
