"""Samples drawn ahead: those of step s by the weights of step s - staleness, while the trainer trains.

With a staleness of 1, and a sampler outside this process:

    trainer                                     sampler
    hand over the weights of step 0             samples of step 0, by the weights of step 0
                                                samples of step 1, by the weights of step 0
    train step 0
    hand over the weights of step 1             samples of step 2, by the weights of step 1
    train step 1
    hand over the weights of step 2             samples of step 3, by the weights of step 2

Weights change hands only while no rank samples, so every sample has exactly the weights of its step. The first
steps have the weights of step 0. This process's own engine cannot sample while it trains: it draws the same samples
between two steps, which shows what staleness costs, and saves no time.

Samples that are under way when a run stops are not saved. A resumed run draws them again, by the weights that it
resumes with: with a staleness of 0 a run without the stop draws the same.
"""

import threading
from collections.abc import Callable
from typing import Any

from nanochat.gpt import GPT
from nanochat.rollout import EngineSampler, OnPolicy, RankSamples


class Ahead(OnPolicy):
    """Draws this rank's shares of the samples of all steps below `last`, each by one call of `draw(step)`."""

    def __init__(self, sampler: Any, model: GPT, draw: Callable[[int], RankSamples], staleness: int, last: int) -> None:
        super().__init__(sampler, model, draw)
        self.staleness = staleness
        self.last = last
        self._shares: dict[int, RankSamples] = {}  # drawn, by step
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def hand_over(self, step: int) -> None:
        self._wait()
        super().hand_over(step)

    def take(self, step: int) -> RankSamples:
        self._wait()
        if step not in self._shares:  # the run's first one, or always, with a staleness of 0
            return super().take(step)
        return self._shares.pop(step)

    def begin(self, step: int) -> None:
        """Draw the samples of the steps up to `step` + staleness by the weights of `step`. All ranks call it
        together, after the exchange of what `take` returned: then no rank samples with older weights."""
        ahead = [number for number in range(step + 1, min(step + self.staleness + 1, self.last))]
        ahead = [number for number in ahead if number not in self._shares]
        if not ahead:
            return
        self.hand_over(step)
        if isinstance(self.sampler, EngineSampler):
            self._draw(ahead)
        else:
            # A daemon: where a run fails, it does not wait for the sampler.
            self._thread = threading.Thread(target=self._draw, args=(ahead,), name="sampling", daemon=True)
            self._thread.start()

    def _draw(self, steps: list[int]) -> None:
        try:
            for step in steps:
                self._shares[step] = self.draw(step)
        except BaseException as error:  # raised where the main thread waits for it
            self._error = error

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
