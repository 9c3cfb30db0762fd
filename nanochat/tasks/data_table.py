"""The table of the data that --tasks names: how many rows there are, and what becomes of each."""

from collections import Counter

from nanochat.ground.log import print_table
from nanochat.mixture import Mixture
from nanochat.tasks.recorded import RecordTask

COLUMNS = ("data", "rows", "learned from", "held out", "left out")


def print_data(train: Mixture, held_out: Mixture) -> None:
    """Print a line for each task that has rows; the last three columns add up to the rows."""
    learned: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for tasks, used in ((train.tasks, learned), (held_out.tasks, kept)):
        for task in tasks:
            if isinstance(task, RecordTask):
                learned_rows = len(task) - task.unlearned
                used[task.name] += learned_rows
                left_out[task.name] += len(task.records) - learned_rows
    rows = []
    for name in learned | kept | left_out:
        counts = (learned[name], kept[name], left_out[name])
        rows.append([name, *(f"{count:,}" for count in (sum(counts), *counts))])
    if rows:
        print_table(COLUMNS, rows)


def passes(mixture: Mixture, draws: int) -> str:
    """How often this many draws read each task that has rows, where that is twice or more; empty where it is not."""
    found = []
    for task, slots in zip(mixture.tasks, mixture.slots.tolist(), strict=True):
        times = draws * slots / int(mixture.slots.sum()) / len(task)
        if isinstance(task, RecordTask) and times >= 2:
            found.append(f"{times:,.0f} passes over the {len(task):,} rows of {task.name}")
    return ", ".join(found)
