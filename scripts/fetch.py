"""Download the tasks of all later stages, or report what is missing, before the first stage trains.

python -m scripts.fetch --data fineweb-edu-chinese --hub modelscope
"""

from dataclasses import dataclass
from typing import Literal

from nanochat.ground.cli import run


@dataclass(frozen=True)
class Config:
    data: str = "demo"  # the pretraining text, which decides the default tasks; it is not downloaded here
    tasks: str = ""  # tasks of mid-training and SFT; default: as in those stages
    eval_tasks: str = ""  # tasks of chat_eval; default: none
    columns: str = ""  # columns of files in --tasks, as in the stage: question=COLUMN,answer=COLUMN
    hub: Literal["hf", "modelscope"] = "hf"  # where the tasks are downloaded from


def main(config: Config) -> None:
    from nanochat.tasks.defaults import default_tasks
    from nanochat.tasks.flag import Reading, open_task, parse_tasks

    learned = config.tasks or default_tasks(config.data, config.hub)
    rewarded = default_tasks(config.data, stage="rl")
    for spec in parse_tasks(f"{learned},{rewarded}"):
        open_task(spec, "train", Reading(hub=config.hub, columns=config.columns))
        open_task(spec, "test", Reading(hub=config.hub, columns=config.columns))
    if config.eval_tasks:
        for spec in parse_tasks(config.eval_tasks):
            open_task(spec, "test", Reading(hub=config.hub))
    print(f"tasks: mid-training and SFT {learned}; RL {rewarded}; evaluation {config.eval_tasks or 'none'}")


if __name__ == "__main__":
    run(main, Config)
