"""What gpu_events.jsonl says of throttling at a moment, read as the file grows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kmatrix.gpu.nvml.source import THROTTLE

REASONS = tuple(reason for _, reason in THROTTLE)
SILENT = ("lost",)  # events after which nothing is known of a GPU until it is found


class Events:
    """Why clocks are held down, by GPU index. A GPU that was lost says nothing."""

    def __init__(self, path: Path, gpus: tuple[int, ...]) -> None:
        self._path, self._gpus = path, gpus
        self._offset = self._done = 0
        self._lines: list[tuple[float, str, int | None, tuple[str, ...]]] = []
        self._now: dict[int, tuple[str, ...]] = {}

    def throttle(self, at: float) -> Mapping[int, tuple[str, ...]]:
        """Return the reasons in force at a Unix time; a GPU of which none was ever asked is absent."""
        self._read()
        if self._done and self._lines[self._done - 1][0] > at:
            self._done, self._now = 0, {}
        while self._done < len(self._lines) and self._lines[self._done][0] <= at:
            _, event, gpu, reasons = self._lines[self._done]
            self._done += 1
            if event == "started":
                self._now = dict.fromkeys(self._gpus, ())
            elif event in SILENT and gpu is not None:
                self._now.pop(gpu, None)
            elif gpu is not None:
                self._now[gpu] = reasons
        return dict(self._now)

    @property
    def known(self) -> bool:
        """Whether anything was told until the last moment asked for: else a GPU that is absent need not be lost."""
        return self._done > 0

    def _read(self) -> None:
        """Take in the whole lines that were written since the last time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return  # not there yet
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue  # a line that a crash cut short
            if isinstance(value, dict) and value.get("event") in ("started", "lost", "found", "throttle"):
                self._lines.append(_event(value))


def _event(value: Mapping[str, Any]) -> tuple[float, str, int | None, tuple[str, ...]]:
    """Return time, event, GPU index and the reasons that its text names."""
    text = str(value.get("text") or "")
    gpu = value.get("gpu_index")
    return (
        float(value.get("time") or 0.0),
        str(value["event"]),
        int(gpu) if gpu is not None else None,
        tuple(reason for reason in REASONS if reason in text),
    )
