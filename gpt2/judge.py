"""What a run is judged by beside its validation loss: HellaSwag and sample texts, at intervals and at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from gpt2.config import TrainConfig
from gpt2.dist import World
from gpt2.hellaswag import HellaSwag, Score
from gpt2.log import RunLog
from gpt2.model import GPT
from gpt2.sample import Samples


class Judge:
    """Measures and logs. Every rank has one, and all call it at the same steps; it goes on over a resume."""

    def __init__(self, config: TrainConfig, world: World, log: RunLog) -> None:
        """Raise DataError where a file or a tokenizer that is asked for cannot be used."""
        self.config, self.log = config, log
        self._judged: int | None = None  # the newest step whose weights were judged
        self.hellaswag = HellaSwag(config, world) if config.hellaswag else None
        self.samples = Samples(config) if config.sample_interval and world.main else None
        if self.hellaswag:
            cut = f", {self.hellaswag.cut} contexts cut to fit" if self.hellaswag.cut else ""
            log.say(f"HellaSwag: {self.hellaswag.examples} examples of {config.hellaswag}{cut}")

    def due(self, step: int) -> bool:
        """Whether the weights after `step` updates are to be judged, and were not."""
        wanted = at(step, self.config.hellaswag_interval) or at(step, self.config.sample_interval)
        return wanted and step != self._judged

    def measure(
        self, step: int, model: GPT, stopping: Callable[[], bool] = lambda: False, *, final: bool = False
    ) -> None:
        """Judge the weights after `step` updates by what is due; by all there is at the end of a run.

        model: not compiled, for its texts are of any length.
        """
        if step == self._judged and not final:
            return
        if self.hellaswag and (final or at(step, self.config.hellaswag_interval)):
            score = self.hellaswag.score(model, stopping)
            if score is None:
                return  # a rank is asked to stop: a resumed attempt does it
            self.log.hellaswag(step, score)
        if self.samples and (final or at(step, self.config.sample_interval)):
            self.log.samples(step, self.samples.texts(model))
        self._judged = step

    def state_dict(self) -> dict[str, Any]:
        score = self.log.hellaswag_score
        return {"judged": self._judged, "hellaswag": asdict(score) if score else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._judged, score = state["judged"], state["hellaswag"]
        self.log.hellaswag_score = Score(**score) if score else None


def at(step: int, interval: int | None) -> bool:
    """Whether something that happens every `interval` steps, 0 or None for never, happens at this one."""
    return bool(interval) and step % (interval or 1) == 0
