"""Batches on their way to the device of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gpt2.data.sequences import Batch

Read = Callable[[], Batch]  # reads a batch of tokens into the memory of the CPU


class Loader:
    """Moves batches to a device.

    On a GPU, a thread reads the next batch into pinned memory during the computation of the current one, and the copy
    runs in the GPU's stream: the process that trains waits for neither.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread: ThreadPoolExecutor | None = None
        if device.type == "cuda":  # a new thread uses GPU 0, and would allocate memory there
            self._thread = ThreadPoolExecutor(1, "batches", torch.cuda.set_device, (device,))

    @property
    def reads_ahead(self) -> bool:
        """Return whether there is a thread. On the CPU it would only take a core from the computation."""
        return self._thread is not None

    def begin(self, read: Read) -> Future[Batch]:
        """Start to read a batch; `finish` gives it."""
        if self._thread is not None:
            return self._thread.submit(_pinned, read)
        done: Future[Batch] = Future()
        done.set_result(read())
        return done

    def finish(self, started: Future[Batch]) -> Batch:
        """Return a batch on the device: idx (B, T) and targets (B, T)."""
        idx, targets = started.result()
        # From pinned memory this only adds the copy to the stream; from other memory it would wait for its end.
        return idx.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def load(self, reads: Iterable[Read]) -> Iterator[Batch]:
        """Yield batches on the device, each of them read while the caller works on the one before."""
        ahead: Future[Batch] | None = None
        for read in reads:
            if not self.reads_ahead:
                yield self.finish(self.begin(read))
                continue
            current, ahead = ahead, self.begin(read)
            if current is not None:
                yield self.finish(current)
        if ahead is not None:
            yield self.finish(ahead)


def _pinned(read: Read) -> Batch:
    """Return a batch in pinned memory, without which a copy to the GPU is not asynchronous."""
    idx, targets = read()
    return idx.pin_memory(), targets.pin_memory()
