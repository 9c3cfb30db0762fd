"""Samples drawn ahead: the samples of step s use the weights of step s - staleness, and are drawn during training.

With a staleness of 1, and a sampler outside this process:

    trainer                                     sampler
    hand over the weights of step 0             samples of step 0, by the weights of step 0
                                                samples of step 1, by the weights of step 0
    train step 0
    hand over the weights of step 1             samples of step 2, by the weights of step 1
    train step 1
    hand over the weights of step 2             samples of step 3, by the weights of step 2

Weights are handed over only while no rank samples, so every sample has exactly the weights of its step. The first steps
use the weights of step 0. The engine of the training process cannot sample during training: it draws the same samples
between two steps, which shows the cost of staleness but saves no time.

Unfinished samples are not saved when a run stops. A resumed run draws them again, with the weights that it loads. With
a staleness of 0 an uninterrupted run would draw the same.
"""

import threading
from collections.abc import Callable
from typing import Any

from nanochat.gpt import GPT
from nanochat.rollout import EngineSampler, OnPolicy, RankSamples


class Ahead(OnPolicy):
    """Draws this rank's samples of all steps below `last`, each by one call of `draw(step)`."""

    def __init__(self, sampler: Any, model: GPT, draw: Callable[[int], RankSamples], staleness: int, last: int) -> None:
        super().__init__(sampler, model, draw)
        self.staleness = staleness
        self.last = last
        self._drawn: dict[int, RankSamples] = {}  # by step
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def hand_over(self, step: int) -> None:
        self._wait()
        super().hand_over(step)

    def take(self, step: int) -> RankSamples:
        self._wait()
        if step not in self._drawn:  # the run's first step, or every step with a staleness of 0
            return super().take(step)
        return self._drawn.pop(step)

    def forget(self) -> None:
        """The sampler may have other weights: hand them over and draw the samples again. All ranks call it together."""
        self._wait()
        self._drawn.clear()
        self.handed_over = -1

    def begin(self, step: int) -> None:
        """Draw the samples of the steps up to `step` + staleness with the weights of `step`. All ranks call it
        together, after `gather_samples` of `take`'s samples: then no rank samples with older weights."""
        ahead = [number for number in range(step + 1, min(step + self.staleness + 1, self.last))]
        ahead = [number for number in ahead if number not in self._drawn]
        if not ahead:
            return
        self.hand_over(step)
        if isinstance(self.sampler, EngineSampler):
            self._draw(ahead)
        else:
            # A daemon thread: a run that fails does not wait for the sampler.
            self._thread = threading.Thread(target=self._draw, args=(ahead,), name="sampling", daemon=True)
            self._thread.start()

    def _draw(self, steps: list[int]) -> None:
        try:
            for step in steps:
                self._drawn[step] = self.draw(step)
        except BaseException as error:  # raised where the main thread waits for it
            self._error = error

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
