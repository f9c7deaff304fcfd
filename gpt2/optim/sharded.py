"""Optimizer states sharded over the ranks: ZeRO, stage 1, on top of DDP.

DDP averages the gradients on every rank as before. Each rank holds the optimizer states of its share, updates its share
of the weights, and gets the others' shares. Checkpoints have the states as one rank alone would save them.
Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.distributed
from torch import nn

from gpt2.dist import World, gather
from gpt2.optim.optimizers import Optimizers
from kmatrix.errors import ConfigError

# Entries. torch's fused kernels round the last entries of a tensor, which do not fill a vector of the CPU, in another
# way than the others: a share that ended between two vectors would differ from the unsharded update in its last bits.
ALIGN = 64
SMALL = 1024  # tensors with fewer entries are updated by every rank: nothing to exchange
BUFFER = 1 << 26  # bytes: the most that an exchange keeps on each rank (kmatrix.plan.memory.EXCHANGE)

# Newer PyTorch renamed the function.
_all_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor


class Division(Enum):
    """What an optimizer can be divided into."""

    ENTRIES = auto()  # the update of an entry depends on that entry alone, and on numbers of the group
    TENSORS = auto()  # an update needs the whole tensor


# By the name of the class, because some come from libraries that are not always imported. A class is listed itself, not
# by its bases: a subclass may need more than they do.
SHARES: dict[str, Division] = {
    **dict.fromkeys(("SGD", "Adam", "AdamW", "Spam", "Lion", "ADOPT"), Division.ENTRIES),
    **dict.fromkeys(("Muon", "NanochatMuon", "ScheduledMuon", "SOAP", "Adafactor"), Division.TENSORS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A parameter, and who updates which of its entries."""

    parameter: nn.Parameter
    bounds: tuple[int, ...] | None  # first entry of each rank's share, and the number of entries; None: all on each
    share: nn.Parameter | None  # what this rank updates: the parameter, or a view of its entries; None: nothing

    def entries(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the entries of a tensor like the parameter that a rank updates, as a view (n,)."""
        assert self.bounds
        return tensor.view(-1)[self.bounds[rank] : self.bounds[rank + 1]]

    @property
    def divided(self) -> bool:
        """Return whether the share is a view of some entries, not the parameter itself."""
        return self.share is not None and self.share is not self.parameter


class ShardedOptimizers(Optimizers):
    """Optimizers of which each rank holds a share. All ranks call the same methods.

    state_dict returns the states of all ranks on rank 0, as copies in CPU memory, and none on the others.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer, world: World) -> None:
        """Divide optimizers that have not taken a step. Raises ConfigError if one cannot be divided."""
        super().__init__(*optimizers)
        self.world = world
        self.kinds = [share_of(optimizer) for optimizer in optimizers]
        self.placed = place(optimizers, self.kinds, rank=world.rank, size=world.size)
        self._group_sizes = [[len(group["params"]) for group in o.param_groups] for o in optimizers]
        for optimizer, placed in zip(optimizers, self.placed, strict=True):
            shares = iter(placed)
            for group in optimizer.param_groups:  # states are made at the first step, so only for the shares
                own = [next(shares).share for _ in group["params"]]
                group["params"] = [share for share in own if share is not None]
        self._exchanges = self._all_exchanges()

    @property
    def sharded(self) -> bool:
        return True

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's share with the averaged gradients, and exchange the updated weights."""
        for item in self._items():
            if item.divided and item.share is not None:
                grad = item.parameter.grad
                item.share.grad = None if grad is None else item.entries(self.world.rank, grad)
        super().step()
        for exchange in self._exchanges:
            exchange.run()

    def zero_grad(self) -> None:
        # Of all parameters: the optimizers know only the shares, whose gradients are views.
        for item in self._items():
            gradient = item.parameter.grad
            if item.share is not None:
                item.share.grad = None
            item.parameter.grad = None
            if self.keeps_gradients and gradient is not None:
                item.parameter.grad = gradient.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, and {"optimizers": []} on the others. A collective."""
        packed = [optimizer.state_dict() for optimizer in self.optimizers]
        held = [_by_index(value["state"], placed) for value, placed in zip(packed, self.placed, strict=True)]
        # What each rank has of the tensors that are not on all ranks: descriptions first, then one stream of bytes.
        sent = [{i: v for i, v in h.items() if p[i].bounds} for h, p in zip(held, self.placed, strict=True)]
        for states, placed in zip(sent, self.placed, strict=True):
            for index, state in states.items():
                _check_divided(placed[index], state)
        own = [_bytes(tensor) for states in sent for state in states.values() for tensor in _tensors(state)]
        length = max(gather(self.world, sum(map(len, own))))
        described: list[Any] | None = [None] * self.world.size if self.world.main else None
        torch.distributed.gather_object([_described(states) for states in sent], described, dst=0)
        pieces: list[list[torch.Tensor]] = [[] for _ in range(self.world.size)]
        found: list[dict[str, Any]] = []
        if described is not None:
            for number, value in enumerate(packed):
                known = [states[number] for states in described]
                found.append({"state": self._whole_states(number, held[number], known, pieces), "param_groups": []})
                first = 0
                for group, size in zip(value["param_groups"], self._group_sizes[number], strict=True):
                    found[-1]["param_groups"].append({**group, "params": list(range(first, first + size))})
                    first += size
        self._collect(own, pieces, length)
        return {"optimizers": found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's share of the states that `state_dict` or the unsharded optimizers have saved."""
        parts = zip(self.optimizers, self.placed, self._group_sizes, state["optimizers"], strict=True)
        for optimizer, placed, sizes, saved in parts:
            if [len(group["params"]) for group in saved["param_groups"]] != sizes:
                raise ValueError("the groups of the optimizer have other parameters")
            optimizer.load_state_dict(self._own_part(placed, saved))

    def _own_part(self, placed: Sequence[Placed], saved: dict[str, Any]) -> dict[str, Any]:
        """Return what one of torch's optimizers over the shares of this rank would have saved."""
        states, groups, index = {}, [], 0
        count = 0  # of the shares of this rank
        for group in saved["param_groups"]:
            first = count
            for name in group["params"]:
                item = placed[index]
                index += 1
                if item.share is None:
                    continue
                if name in saved["state"]:
                    states[count] = self._own_state(item, saved["state"][name])
                count += 1
            groups.append({**group, "params": list(range(first, count))})
        return {"state": states, "param_groups": groups}

    def _own_state(self, item: Placed, state: Any) -> Any:
        def own(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.ndim or not item.divided:
                return value
            if value.shape != item.parameter.shape:
                raise ValueError(f"a state is {tuple(value.shape)}, its parameter {tuple(item.parameter.shape)}")
            return item.entries(self.world.rank, value.contiguous()).clone()  # a view would keep all of it in memory

        return _each(state, own)

    def _whole_states(
        self, number: int, held: dict[int, Any], known: list[dict[int, Any]], pieces: list[list[torch.Tensor]]
    ) -> dict[int, Any]:
        """Return the states of one optimizer by parameter, with memory for the tensors of all ranks.

        known: descriptions of the states of each rank.  pieces: gets the parts of that memory in each rank's order.
        """
        states: dict[int, Any] = {}
        for index, item in enumerate(self.placed[number]):
            if item.bounds is None:
                if index in held:
                    states[index] = _each(held[index], _copied)
                continue
            holders = [rank for rank, of_rank in enumerate(known) if index in of_rank]
            if not holders:  # no step was taken yet
                continue
            divided = self.kinds[number] is Division.ENTRIES
            shape = item.parameter.shape if divided else None
            states[index] = _each(known[holders[0]][index], partial(_memory, shape=shape))
            for rank in holders:
                for tensor in _tensors(states[index]):
                    pieces[rank].append(_bytes(item.entries(rank, tensor) if divided else tensor))
        return states

    def _collect(self, own: Sequence[torch.Tensor], pieces: Sequence[Sequence[torch.Tensor]], length: int) -> None:
        """Send the bytes of this rank to rank 0, which writes those of each rank to its pieces."""
        world = self.world
        each = max(ALIGN, BUFFER // world.size)
        for begin in range(0, length, each):
            count = min(each, length - begin)
            sent = torch.zeros(count, dtype=torch.uint8, device=_device(world))
            for part, place in _cut(own, begin, begin + count):
                sent[place].copy_(part)
            rows = list(torch.empty(world.size, count, dtype=torch.uint8, device=sent.device)) if world.main else None
            torch.distributed.gather(sent, rows, dst=0)
            for row, parts in zip(rows or (), pieces, strict=False):
                for part, place in _cut(parts, begin, begin + count):
                    part.copy_(row[place])

    def _all_exchanges(self) -> list[Exchange]:
        """Return the exchange of the weights, one for each of their types."""
        divided = [item for item in self._items() if item.bounds]
        found = []
        for dtype in sorted({item.parameter.dtype for item in divided}, key=str):
            items = [item for item in divided if item.parameter.dtype == dtype]
            pieces = [
                [item.entries(rank, item.parameter.detach()) for item in items] for rank in range(self.world.size)
            ]
            found.append(Exchange(pieces, self.world))
        return found

    def _items(self) -> Iterator[Placed]:
        for placed in self.placed:
            yield from placed


class Exchange:
    """Sends flat tensors of one rank to all others, through a buffer of at most BUFFER bytes.

    pieces: for each rank, in the same order everywhere, the tensors (n,) that it has and the others get.
    """

    def __init__(self, pieces: Sequence[Sequence[torch.Tensor]], world: World) -> None:
        self._rank, size = world.rank, len(pieces)
        lengths = [sum(map(len, own)) for own in pieces]
        length = max(lengths)
        like = next(piece for own in pieces for piece in own)
        each = min(length, max(ALIGN, BUFFER // (size * like.element_size())))
        buffer = torch.empty(size * each, dtype=like.dtype, device=_device(world))
        self._rounds: list[tuple[torch.Tensor, list[_Copies]]] = []
        for begin in range(0, length, each):
            count = min(each, length - begin)
            rows = buffer[: size * count].view(size, count)
            copies = [_Copies(*_pairs(own, row, begin)) for own, row in zip(pieces, rows, strict=True)]
            self._rounds.append((rows, copies))
        self.bytes = buffer.nbytes

    def run(self) -> None:
        """Send and receive the tensors. Every rank calls it."""
        for rows, copies in self._rounds:
            copies[self._rank].to_buffer()
            # All rows have the length of the largest share: NCCL sends shares of one size in one message.
            _all_gather(rows.view(-1), rows[self._rank])
            for rank, theirs in enumerate(copies):
                if rank != self._rank:
                    theirs.from_buffer()


@dataclass(frozen=True, slots=True)
class _Copies:
    """Parts of tensors and their places in a buffer."""

    parts: list[torch.Tensor]
    places: list[torch.Tensor]

    # torch._foreach_*: one kernel for a list of tensors. Private, but torch's own optimizers are written with them.
    def to_buffer(self) -> None:
        if self.parts:  # foreach functions refuse empty lists
            torch._foreach_copy_(self.places, self.parts)

    def from_buffer(self) -> None:
        if self.parts:
            torch._foreach_copy_(self.parts, self.places)


def shard(optimizers: Optimizers, stage: int, world: World) -> Optimizers:
    """Return the optimizers with states sharded over the ranks if the stage is 1 and there are several ranks."""
    return ShardedOptimizers(*optimizers.optimizers, world=world) if stage and world.size > 1 else optimizers


def share_of(optimizer: torch.optim.Optimizer) -> Division:
    """Return what an optimizer can be divided into. Raises ConfigError if that is not known."""
    name = type(optimizer).__name__
    if name not in SHARES:
        raise ConfigError(
            f"the states of {name} cannot be sharded over the ranks",
            why="it is not known whether its update of an entry needs other entries",
            hint="set GPT2_ZERO_STAGE=0, or add it to SHARES in gpt2/optim/sharded.py",
        )
    return SHARES[name]


def place(
    optimizers: Sequence[torch.optim.Optimizer], kinds: Sequence[Division], *, rank: int, size: int
) -> list[list[Placed]]:
    """Return who updates what of each optimizer's parameters, in the order of its groups: alike on all ranks."""
    # Whole tensors go to the rank with the fewest states so far, the largest first.
    load = [0] * size
    owners: dict[nn.Parameter, int] = {}
    whole = [
        (_weight(optimizer, parameter), parameter)
        for optimizer, kind in zip(optimizers, kinds, strict=True)
        for parameter in _parameters(optimizer)
        if kind is Division.TENSORS and parameter.numel() >= SMALL
    ]
    for weight, parameter in sorted(whole, key=itemgetter(0), reverse=True):  # a stable sort: equal ones stay in order
        owners[parameter] = load.index(min(load))
        load[owners[parameter]] += weight
    return [[_placed(p, owners.get(p), rank, size) for p in _parameters(optimizer)] for optimizer in optimizers]


def _weight(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    """Return how large the states of a tensor are, relative to others: their work grows with them as well."""
    # SOAP has two squares for each side up to this one, and two numbers for each entry.
    widest = optimizer.param_groups[0].get("max_precondition_dim", 0)
    return parameter.numel() + sum(side * side for side in parameter.shape if side <= widest)


def _placed(parameter: nn.Parameter, owner: int | None, rank: int, size: int) -> Placed:
    count = parameter.numel()
    if count < SMALL:
        return Placed(parameter=parameter, bounds=None, share=parameter)
    if owner is not None:
        bounds = (0,) * (owner + 1) + (count,) * (size - owner)
        return Placed(parameter=parameter, bounds=bounds, share=parameter if rank == owner else None)
    bounds = (*(ALIGN * round(count * number / size / ALIGN) for number in range(size)), count)
    placed = Placed(parameter=parameter, bounds=bounds, share=None)
    mine = placed.entries(rank, parameter.detach())
    share = nn.Parameter(mine) if len(mine) else None  # shares its memory with the parameter
    return Placed(parameter=parameter, bounds=bounds, share=share)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _device(world: World) -> torch.device:
    """Return the device of messages: gloo does not gather tensors of a GPU in every version."""
    return torch.device("cpu") if world.backend == "gloo" else world.device


def _cut(pieces: Sequence[torch.Tensor], begin: int, end: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield the parts of flat pieces, laid end to end, within [begin, end), each with its place from `begin` on."""
    at = 0
    for piece in pieces:
        low, high = max(begin, at), min(end, at + len(piece))
        if low < high:
            yield piece[low - at : high - at], slice(low - begin, high - begin)
        at += len(piece)


def _pairs(
    pieces: Sequence[torch.Tensor], row: torch.Tensor, begin: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parts of pieces that a row of a buffer has from `begin` on, and their places in it."""
    found = [(part, row[place]) for part, place in _cut(pieces, begin, begin + len(row))]
    return [part for part, _ in found], [place for _, place in found]


# States are nested: SOAP has lists of matrices.


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor of a state that another rank has."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # products of matrices round by it: SOAP's eigenvectors are stored by columns
    dtype: torch.dtype


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nested value with `change` applied to everything in its dictionaries and lists."""
    if isinstance(value, dict):
        return {name: _each(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_each(item, change) for item in value)
    return change(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested value that are not single numbers, in order."""
    found: list[torch.Tensor] = []
    _each(value, lambda item: found.append(item) if isinstance(item, torch.Tensor) and item.ndim else None)
    return found


def _described(states: dict[int, Any]) -> dict[int, Any]:
    """Return states with descriptions instead of tensors. Single numbers, such as step counts, stay."""

    def described(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return _Described(tuple(value.shape), _dense(value).stride(), value.dtype) if value.ndim else _copied(value)

    return {index: _each(state, described) for index, state in states.items()}


def _memory(value: Any, *, shape: Sequence[int] | None) -> Any:
    """Return memory for a described tensor; anything else as it is. shape: another shape than the described one."""
    if not isinstance(value, _Described):
        return value
    if shape is None:
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    return torch.empty(tuple(shape), dtype=value.dtype)


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor (n,) in the order of its memory: a view if it has no gaps."""
    return _ordered(_dense(tensor.detach())).view(-1).view(torch.uint8)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gaps in its memory: itself, or a copy."""
    return tensor if _ordered(tensor).is_contiguous() else tensor.contiguous()


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view whose dimensions are in the order of the memory."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _check_divided(item: Placed, state: Any) -> None:
    """Check that every tensor in the state of a view has an entry for each of the view's."""
    assert item.share is not None
    for tensor in _tensors(state):
        assert not item.divided or tensor.shape == item.share.shape, "not an optimizer of single entries"


def _by_index(states: dict[int, Any], placed: Sequence[Placed]) -> dict[int, Any]:
    """Return the states of the shares of this rank by the number of their parameter, in its order.

    An optimizer may have made them in another order, and rank 0 reads those of all ranks in this one.
    """
    numbers = [number for number, item in enumerate(placed) if item.share is not None]
    return {numbers[index]: states[index] for index in sorted(states)}
