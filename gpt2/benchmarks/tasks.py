"""Benchmarks by the answers that a model finds most probable: HellaSwag, and CORE with its 22 tasks.

CORE (Li et al. 2024, arXiv:2406.11794) is the mean of centered accuracies, by the rules of nanochat's core_eval.py
(https://github.com/karpathy/nanochat, commit 92d63d4). HellaSwag (Zellers et al. 2019, arXiv:1905.07830) has the two
accuracies of llm.c. Dimensions in comments: R rows, T tokens, E width, V vocabulary, N scored tokens.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from gpt2.benchmarks.bundle import Kind, Task, read_hellaswag, read_tasks
from gpt2.data.tokenizer import Tokenizer, load
from gpt2.dist import World
from gpt2.model.base import LanguageModel
from gpt2.model.precision import autocast
from kmatrix.records.train_config import TrainConfig

SHOTS_SEED = 1234  # plus the number of the example: which others are shown before it


@dataclass(frozen=True, slots=True)
class Question:
    """The rows of an example as tokens, with the part of each that is scored."""

    rows: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[int, int], ...]  # first scored token, and the one after the last
    correct: int
    exact: bool  # the scored tokens have to be the most probable ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model makes of a question."""

    correct: bool  # by the mean loss per token, so that short answers have no advantage
    correct_by_sum: bool  # by the probability of the whole answer
    losses: tuple[float, ...]  # mean over the scored tokens of each row, nats/token


class Evaluator:
    """The tasks of a run. Rank r evaluates examples r, r + W, r + 2W, ... of each."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        """Raise DataError if a file or the tokenizer cannot be used."""
        self.config, self.world = config, world
        self.tasks = [read_hellaswag(Path(config.hellaswag))] if config.hellaswag else []
        self.tasks += read_tasks(Path(config.core), config.core_examples or 0) if config.core else []
        self.tokenizer = load(config.tokenizer, Path(config.data_path))
        self.tokenizer.encode("")  # loads the vocabulary, or says now that it is missing

    @torch.no_grad()
    def score(self, model: LanguageModel, stopping: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Return the scores by their names in the metrics, the same on every rank; None if a rank was `stopping`.

        hellaswag/accuracy, hellaswag/accuracy_norm: by the probability of the whole ending, and by its mean per token,
        as llm.c and lm-evaluation-harness define them.  core/LABEL: accuracy of a task; core/metric: their centered
        mean.  model: not compiled, because its inputs vary in length.
        """
        # Correct answers by mean and by sum, and examples
        counts = torch.zeros(len(self.tasks), 3, dtype=torch.float64, device=self.world.device)
        model.eval()
        for number, questions in self._groups():
            if stopping():
                break
            for one in answer(model, questions, dtype=self.config.dtype, padding=self.tokenizer.end_of_document):
                counts[number] += counts.new_tensor([one.correct, one.correct_by_sum, 1])
        model.train()
        # As in Validation.measure: every rank gets here, and all see whether the sum is complete.
        totals: list[list[float]] = self.world.sum(counts).tolist()
        if any(total != len(task.items) for task, (*_, total) in zip(self.tasks, totals, strict=True)):
            return None
        scores, core = dict[str, float](), []
        for task, (by_mean, by_sum, total) in zip(self.tasks, totals, strict=True):
            if task.kind is Kind.ENDING:
                scores |= {"hellaswag/accuracy": by_sum / total, "hellaswag/accuracy_norm": by_mean / total}
            else:
                core.append((task, by_mean / total))
        if core:
            scores["core/metric"], scores["core/standard_error"] = core_score(core)
        return scores | {f"core/{task.label}": accuracy for task, accuracy in core}

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


def core_score(accuracies: Sequence[tuple[Task, float]]) -> tuple[float, float]:
    """Return the mean of the centered accuracies, and its standard error: that of a mean of independent binomials.

    centered = (accuracy - baseline) / (1 - baseline): 0 is as good as guessing, 1 is all correct.
    """
    centered = [(accuracy - task.baseline) / (1 - task.baseline) for task, accuracy in accuracies]
    variance = sum(one * (1 - one) / len(task.items) / (1 - task.baseline) ** 2 for task, one in accuracies)
    return math.fsum(centered) / len(centered), math.sqrt(variance) / len(centered)


def prompts(task: Task, index: int) -> list[str]:
    """Return the texts of an example; of a task with exact answers first the text without the continuation."""
    before, others = "", [other for number, other in enumerate(task.items) if number != index]
    for other in random.Random(SHOTS_SEED + index).sample(others, task.shots):
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
    item = task.items[index]
    if task.kind is Kind.ENDING:
        context, *endings = (tuple(tokenizer.encode(text).tolist()) for text in (item.contexts[0], *item.continuations))
        whole = tuple(context + ending for ending in endings)
        return Question(whole, tuple((len(context), len(row)) for row in whole), item.correct, exact=False)
    rows = [(tokenizer.end_of_document, *tokenizer.encode(text).tolist()) for text in prompts(task, index)]
    if task.kind is Kind.SCHEMA:
        common = common_length([row[::-1] for row in rows])
        spans = [(len(row) - common, len(row)) for row in rows]
    else:
        spans = [(common_length(rows), len(row)) for row in rows]
    if task.kind is Kind.EXACT:
        rows, spans = rows[1:], spans[1:]
    return Question(tuple(rows), tuple(spans), item.correct, exact=task.kind is Kind.EXACT)


def common_length(rows: Sequence[tuple[int, ...]]) -> int:
    """Return the number of tokens with which all rows begin."""
    same = (len(set(column)) == 1 for column in zip(*rows, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, same))


def cropped(one: Question, room: int) -> Question:
    """Return a question whose rows have at most `room` tokens: a longer one loses its beginning."""
    cuts = [max(0, len(row) - room) for row in one.rows]
    rows = tuple(row[cut:] for row, cut in zip(one.rows, cuts, strict=True))
    spans = tuple((max(0, first - cut), end - cut) for (first, end), cut in zip(one.spans, cuts, strict=True))
    return replace(one, rows=rows, spans=spans)


@torch.no_grad()
def answer(model: LanguageModel, questions: Sequence[Question], *, dtype: str, padding: int) -> list[Answer]:
    """Return the answers of a model in evaluation mode.

    dtype: fp32 or bf16.  padding: token after the end of a row, which earlier ones cannot attend to.
    """
    rows = [torch.tensor(row) for one in questions for row in one.rows]
    idx = pad_sequence(rows, batch_first=True, padding_value=padding)  # (R, T)
    # A token is predicted at the one before it, so the first of a row has no cost.
    spans = enumerate(span for one in questions for span in one.spans)
    places = [(number, at - 1) for number, (first, end) in spans for at in range(max(1, first), end)]
    numbers, columns = torch.tensor(places, dtype=torch.long).view(-1, 2).T  # each (N,)
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
