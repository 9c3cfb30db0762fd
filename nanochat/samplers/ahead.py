"""Samples drawn ahead: those of step s by the weights of step s - staleness, while the trainer trains.

With a staleness of 1, and a sampler outside of this process:

    trainer                                     sampler
    hand over the weights of step 0             samples of step 0, by the weights of step 0
                                                samples of step 1, by the weights of step 0
    train step 0
    hand over the weights of step 1             samples of step 2, by the weights of step 1
    train step 1
    hand over the weights of step 2             samples of step 3, by the weights of step 2

Weights change hands only while no rank samples, so every sample has exactly the weights of its step. Step s of the
first ones has those of step 0. This process's own engine cannot sample while it trains: it draws the same samples
between two steps, which shows what staleness costs, and saves no time.

What is under way when a run stops is not saved. A resumed run draws it again, by the weights that it resumes with: with
a staleness of 0 that is what a run without the stop draws.
"""

import threading
from collections.abc import Callable

from nanochat.gpt import GPT
from nanochat.rollout import Share
from nanochat.samplers.kinds import EngineSampler, PolicySampler


class Ahead:
    """Draws this rank's shares of the samples of all steps below `last`, each by one call of `draw(step)`."""

    def __init__(
        self, sampler: PolicySampler, model: GPT, draw: Callable[[int], Share], staleness: int, last: int
    ) -> None:
        self.sampler = sampler
        self.model = model
        self.draw = draw
        self.staleness = staleness
        self.last = last
        self.handed_over = -1  # the step whose weights the sampler has
        self._shares: dict[int, Share] = {}  # drawn, by step
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def hand_over(self, step: int) -> None:
        """Sample with the weights of this step, which are the model's present ones. All ranks call it together."""
        self._wait()
        if self.handed_over != step:
            self.sampler.hand_over(self.model)
            self.handed_over = step

    def take(self, step: int) -> Share:
        """This rank's share of the samples of a step. All ranks call it, and exchange it before anything else."""
        self._wait()
        if step not in self._shares:  # the run's first one, or always, with a staleness of 0
            self.hand_over(step)
            self._shares[step] = self.draw(step)
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
