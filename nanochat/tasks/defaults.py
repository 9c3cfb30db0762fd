"""Which tasks a stage trains on by default: they fit what the model has read."""

from pathlib import Path
from typing import Literal

from nanochat.data.catalog import DATASETS, TASKS
from nanochat.ground.log import warn

Stage = Literal["sft", "rl", "dpo"]

# For a model pretrained on the demo corpus, on the web, on Chinese.
BUILT_IN_TASKS = "stories:12,questions:7,addition:1,arithmetic:9,identity:7,unknown:5,memory:6,repeat:3"
HUB_TASKS = "smoltalk:460,mmlu:100,gsm8k:16,arc_easy:2,arc_challenge:1,spelling:40,letters:20,addition:5,identity:1"
PAIRS = "HuggingFaceH4/ultrafeedback_binarized@train_prefs"  # by Cui et al. 2023, UltraFeedback
CHINESE_TASKS = "smoltalk_zh:460,gsm8k:16,addition:5,identity:1"
# A model loses what it is not rewarded for: rewarded for stories only it gets more sums wrong, 42 of 200 where it was
# 12, and forgets small talk (2026-11-22); with one question in thirteen about a story it loses 10 points of those
# (2026-11-27). So more than half of the rewarded replies are to everything else that it has learned.
BUILT_IN_RL_TASKS = "stories:6,arithmetic:2,unknown:1,memory:1,questions:2,identity:2"


def default_tasks(pretraining_data: str, hub: str = "hf", stage: Stage = "sft") -> str:
    """The default of --tasks for a model pretrained on `--data pretraining_data`: the mixture of mid-training and SFT,
    the tasks that reward it, or the pairs that it compares. The mixture has only tasks that the hub has."""
    read = _names(pretraining_data)
    # Models from elsewhere have read "web" (families/hf.py).
    from_hub = any(name in DATASETS or name == "web" or ("/" in name and not Path(name).exists()) for name in read)
    if not from_hub:
        return {"sft": BUILT_IN_TASKS, "rl": BUILT_IN_RL_TASKS, "dpo": "stories"}[stage]
    if stage != "sft":
        return {"rl": "gsm8k", "dpo": PAIRS}[stage]
    is_chinese = any(DATASETS[name].language == "zh" for name in read if name in DATASETS)
    here = []
    for entry in (CHINESE_TASKS if is_chinese else HUB_TASKS).split(","):
        name = entry.partition(":")[0]
        if name in TASKS and hub not in TASKS[name].sources:
            warn(f"no copy of {name} is known on {hub}: it is left out; --tasks {name}=PATH names your own")
        else:
            here.append(entry)
    return ",".join(here)


def _names(data: str) -> list[str]:
    """The names and paths in `--data NAME:WEIGHT,...`, which may be gone by now."""
    if "," not in data or Path(data).exists():
        return [data]
    return [entry.rpartition(":")[0] or entry for entry in data.split(",")]
