"""HellaSwag (Zellers et al. 2019, arXiv:1905.07830): which of four endings the model finds most probable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from gpt2.data.tokenizer import Tokenizer, load
from gpt2.dist import World
from gpt2.model.precision import autocast
from kmatrix.errors import DataError
from kmatrix.records.train_config import TrainConfig

# The binary format of llm.c, dev/data/data_common.py
MAGIC, VERSION = 20240522, 1
HEADER_INTS, START = 256, 65535
HEAD = 6  # values of an example before its context: start, bytes, index, label, endings, length of the context


@dataclass(frozen=True, slots=True)
class Example:
    """A context, its endings and the index of the correct one, as tokens."""

    context: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Accuracy, 0 to 1, as llm.c and lm-evaluation-harness (completion style) define it."""

    accuracy: float  # by the probability of the whole ending
    accuracy_norm: float  # by the mean over its tokens, so that short endings have no advantage
    examples: int


class HellaSwag:
    """The examples of one file. Rank r evaluates examples r, r + W, r + 2W, ..."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        path = Path(config.hellaswag)
        examples = read(path, config.tokenizer, Path(config.data_path))[: config.hellaswag_examples or None]
        check(path, examples, config.block_size, config.vocab_size)
        self.examples = len(examples)
        self.truncated = sum(longest(example) > config.block_size + 1 for example in examples)
        self._mine = examples[world.rank :: world.size]

    @torch.no_grad()
    def score(self, model: torch.nn.Module, stopping: Callable[[], bool] = lambda: False) -> Score | None:
        """Return the accuracy, the same on every rank; None if a rank was `stopping`.

        model: not compiled, because its inputs vary in length.
        """
        device = self.world.device
        counts = torch.zeros(3, dtype=torch.float64, device=device)  # correct, correct by the mean, examples
        model.eval()
        at_once = max(1, self.config.batch_size // 4)  # examples: each has 4 rows, and a training batch fits
        for start in range(0, len(self._mine), at_once):
            if stopping():
                break
            group = self._mine[start : start + at_once]
            idx, targets, mask = (part.to(device) for part in rows(group, self.config.block_size))
            with autocast(device.type, self.config.dtype):
                logits, _ = model(idx)  # (R, T, V)
            counts += count_correct(
                functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none") * mask, mask, group
            )
        model.train()
        # As in Validation.loss: every rank gets here, and all see whether the sum is complete.
        correct, correct_norm, examples = self.world.sum(counts).tolist()
        if examples != self.examples:
            return None
        return Score(accuracy=correct / examples, accuracy_norm=correct_norm / examples, examples=int(examples))


def count_correct(costs: Tensor, mask: Tensor, group: Sequence[Example]) -> Tensor:
    """Return (3,): examples answered correctly by summed loss, by mean loss per token, and their number.

    costs: loss of each ending token in nats, (R, T), 0 outside the mask, (R, T).
    """
    sums = costs.double().sum(1)  # (R,)
    means = sums / mask.sum(1)  # (R,)
    counts = torch.zeros(3, dtype=torch.float64, device=costs.device)
    row = 0
    for example in group:
        own = slice(row, row + len(example.endings))
        counts[0] += sums[own].argmin() == example.label  # the lowest cost is the highest probability
        counts[1] += means[own].argmin() == example.label
        counts[2] += 1
        row = own.stop
    return counts


def rows(group: Sequence[Example], block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return idx, targets and mask, each (R, T), with one row per ending; the mask is 1 on the ending's targets.

    A context that is too long loses its beginning. Rows are padded at the end, which earlier tokens cannot attend to.
    """
    pairs = [(example.context, ending) for example in group for ending in example.endings]
    # One token more than the context: the last one is a target only.
    texts = [([*context, *ending][-block_size - 1 :], len(ending)) for context, ending in pairs]
    width = max(len(text) for text, _ in texts) - 1
    idx, targets, mask = (torch.zeros(len(texts), width, dtype=torch.long) for _ in range(3))
    for row, (text, length) in enumerate(texts):
        idx[row, : len(text) - 1] = torch.tensor(text[:-1])
        targets[row, : len(text) - 1] = torch.tensor(text[1:])
        mask[row, len(text) - 1 - length : len(text) - 1] = 1
    return idx, targets, mask


def longest(example: Example) -> int:
    """Return the number of tokens of the context with its longest ending."""
    return len(example.context) + max(len(ending) for ending in example.endings)


def read(path: Path, tokenizer: str, folder: Path) -> list[Example]:
    """Return the examples of a file: llm.c's binary (GPT-2 tokens) or the dataset's JSONL (text).

    tokenizer, folder: tokenizer for JSONL, and the folder of its vocabulary.
    Raises DataError if the file is missing, damaged or of another tokenizer.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read", why=error.strerror or str(error), hint='HELLASWAG="" disables this benchmark'
        ) from None
    if data[:4] != np.int32(MAGIC).tobytes():  # JSONL starts with a brace
        examples = list(_parse_jsonl(path, data, load(tokenizer, folder)))
    elif tokenizer != "gpt2":
        raise DataError(
            f"{path} has gpt2 tokens", why=f"the run uses {tokenizer}", hint="use the JSONL file, which has text"
        )
    else:
        examples = list(_parse_binary(path, data))
    if not examples:
        raise DataError(f"{path} has no examples", hint="use hellaswag_val.jsonl or llm.c's hellaswag_val.bin")
    return examples


def check(path: Path, examples: Sequence[Example], block_size: int, vocab_size: int) -> None:
    """Raise DataError if an ending is longer than the context, or a token is not in the vocabulary."""
    for number, example in enumerate(examples):
        ending = max(len(ending) for ending in example.endings)
        if ending > block_size:
            raise DataError(
                f"{path}: example {number} has an ending of {ending} tokens",
                why=f"the model's context is {block_size}",
                hint='use a larger BLOCK_SIZE, or HELLASWAG=""',
            )
        greatest = max(max(part) for part in (example.context, *example.endings))
        if greatest >= vocab_size:
            raise DataError(
                f"{path}: example {number} has the token {greatest}", why=f"the vocabulary has {vocab_size} tokens"
            )


def _parse_binary(path: Path, data: bytes) -> Iterator[Example]:
    """Yield the examples of llm.c's format: a header of 256 int32, then uint16 values."""
    if len(data) < 4 * HEADER_INTS:
        raise DataError(
            f"{path} ends within its header, after {len(data)} of {4 * HEADER_INTS} bytes",
            hint="download the file again, or create it with llm.c",
        )
    header = np.frombuffer(data[: 4 * HEADER_INTS], "<i4")
    if header[1] != VERSION:
        raise DataError(f"{path} is not a HellaSwag file of version {VERSION}", hint="create it with llm.c")
    stream = np.frombuffer(data[4 * HEADER_INTS : len(data) & ~1], "<u2")  # a truncated file may have half a value
    at = 0
    for number in range(int(header[2])):
        example, size = _parse_example(stream[at:], path, number, 4 * HEADER_INTS + 2 * at)
        yield example
        at += size


def _parse_example(stream: npt.NDArray[np.uint16], path: Path, number: int, offset: int) -> tuple[Example, int]:
    """Return the first example of a stream, and its length in values. offset: its position in bytes."""
    broken = DataError(
        f"{path}: example {number}, at byte {offset}, is incomplete",
        hint="download the file again, or create it with llm.c",
    )
    if len(stream) < HEAD or stream[0] != START:
        raise broken
    size, label, endings, length = int(stream[1]) // 2, *(int(n) for n in stream[3:HEAD])  # size: bytes in the file
    at = HEAD + length
    context, found = stream[HEAD:at], []
    for _ in range(endings):
        length = int(stream[at]) if at < len(stream) else 0
        found.append(tuple(int(token) for token in stream[at + 1 : at + 1 + length]))
        if not length:
            raise broken
        at += 1 + length
    # A slice beyond the end is only shorter, so the lengths must agree with the size at the start.
    if at != size or at > len(stream) or not len(context) or not label < endings:
        raise broken
    return Example(tuple(int(token) for token in context), tuple(found), label), size


def _parse_jsonl(path: Path, data: bytes, tokenizer: Tokenizer) -> Iterator[Example]:
    """Yield the examples of the dataset's JSONL format: one object per line with ctx, endings and label."""
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            yield _as_tokens(value["ctx"], value["endings"], int(value["label"]), tokenizer)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
            raise DataError(
                f"{path}:{number} is not a HellaSwag example",
                why=f"expected ctx, endings and label: {type(error).__name__}: {error}",
                hint="use hellaswag_val.jsonl of the dataset",
            ) from None


def _as_tokens(context: Any, endings: Any, label: int, tokenizer: Tokenizer) -> Example:
    """Return an example as tokens. Each ending gets a leading space, as GPT-2's tokenizer expects."""
    if not all(isinstance(text, str) for text in (context, *endings)):
        raise TypeError("context and endings are texts")
    example = Example(
        tuple(int(token) for token in tokenizer.encode(context)),
        tuple(tuple(int(token) for token in tokenizer.encode(" " + ending)) for ending in endings),
        label,
    )
    if not example.context or not 0 <= label < len(endings):
        raise ValueError("no context, or no ending of that label")
    return example
