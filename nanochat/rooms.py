"""Where the rooms plug in: tables of names, through which the core reaches code that it does not import.

A file directly in nanochat/ imports only its neighbours, so that the core can be read without anything else. What the
core's own code cannot do, such as reading a model of another family, is the work of a room: a folder of nanochat/.
Each table below is one seam. It maps a name, most often the value of a flag, to a place in a room, and `find` imports
that place when somebody asks for the name. A new capability is a file in a room and one row here.
"""

import functools
import importlib
import operator
import pkgutil
from pathlib import Path
from typing import Any

from nanochat.cli import UserError
from nanochat.extras import advice

# seam -> name -> "module:attribute". Each seam has one meaning, which its comment states.
ROOMS: dict[str, dict[str, str]] = {
    # Reads a tokenizer.json that is not ours: (path, content) -> a Tokenizer.
    "tokenizers": {"hugging_face": "nanochat.families.imported_tokenizer:read_tokenizer"},
    # What accompanies a run, by the flag that asks for it: a class whose objects a run takes (loop.Attendant), or what
    # makes one. The watchdog is --hang_seconds.
    "attendants": {
        "watchdog": "nanochat.run.watchdog:Watchdog",
        "profile": "nanochat.run.profiling:Recorder",
        "compile": "nanochat.run.compiling:compile_model",
        "dry_run": "nanochat.run.memory:begin",
        "check_track": "nanochat.run.trackers:check_trackers",
        "track": "nanochat.run.trackers:start_trackers",
    },
    # Formats of model folders other than ours, asked in this order: `FolderFormat` of model_folder.py.
    "folders": {
        "huggingface": "nanochat.families.hf:FORMAT",
        "peft": "nanochat.adapters.peft:FORMAT",
    },
    # Where --source hf:ORG/NAME is downloaded from: a function from that text to a folder.
    "hubs": {
        "hf": "nanochat.data.hub:fetch_model",
        "modelscope": "nanochat.data.hub:fetch_model",
    },
    # Folders that hold only adapters: where their base is, and the weights of both together.
    "adapters": {
        "lineage": "nanochat.adapters.folders:lineage",
        "weights": "nanochat.adapters.folders:with_saved_adapters",
        "base": "nanochat.adapters.folders:base_of",
    },
    # What changes a model while it is loaded: `Preparation` of checkpoint_manager.py.
    "preparations": {
        "lora": "nanochat.adapters.lora:NewAdapters.from_flags",
        "merge": "nanochat.adapters.folders:MergeAdapters",
    },
    # How a run is spread over several processes, by --parallel: (device, --replicate) -> a Layout of layout.py.
    "layouts": {
        "ddp": "nanochat.parallel.ddp:lay_out",
        "fsdp": "nanochat.parallel.fsdp:lay_out",
    },
    # Opens a file of text or records that is not .txt, .jsonl or .parquet, by its suffix: path -> a DataFile.
    "file formats": {
        ".jsonl.gz": "nanochat.data.formats:GzipFile",
        ".csv": "nanochat.data.formats:CsvFile",
        ".json": "nanochat.data.formats:JsonFile",
    },
    # Text that --data names and that this machine has: "train" or "val" -> a Corpus.
    "corpora": {"demo": "nanochat.demo.corpus:DemoCorpus", "pydoc": "nanochat.data.python_docs:PydocCorpus"},
    # Text that --data names on a hub: (name, hub, shards) -> its files here, of which the last one is validation.
    "hub corpora": {
        "climbmix": "nanochat.data.hub:fetch",
        "fineweb-edu": "nanochat.data.hub:fetch",
        "fineweb-edu-chinese": "nanochat.data.hub:fetch",
        "ORG/NAME": "nanochat.data.hub:fetch",
    },
    # Keeps the tokens of a corpus for the next epoch: (corpus, tokenizer, size in GiB, threads) -> a Corpus of tokens.
    "token caches": {"disk": "nanochat.data.token_cache:cached"},
    # The names of --tasks -> a Task. A program writes the examples of these ...
    "tasks": {
        "stories": "nanochat.tasks.stories:Stories",
        "questions": "nanochat.tasks.stories:StoryQuestions",
        "addition": "nanochat.tasks.arithmetic:Addition",
        "arithmetic": "nanochat.tasks.arithmetic:Arithmetic",
        "spelling": "nanochat.tasks.spelling:Spelling",
        "letters": "nanochat.tasks.spelling:LetterCount",
        "identity": "nanochat.tasks.identity:Identity",
        "unknown": "nanochat.tasks.identity:Unknown",
    },
    # ... these are episodes of several turns with a reward (an Environment): for RL, and for SFT before it ...
    "environments": {"nim": "nanochat.tasks.nim:Nim", "tool_use": "nanochat.tasks.tool_use:ToolUse"},
    # ... these come from a hub or from NAME=PATH ...
    "task datasets": {
        "gsm8k": "nanochat.tasks.gsm8k:Gsm8k",
        "mmlu": "nanochat.tasks.mmlu:Mmlu",
        "arc_easy": "nanochat.tasks.arc:ArcEasy",
        "arc_challenge": "nanochat.tasks.arc:ArcChallenge",
        "humaneval": "nanochat.tasks.humaneval:HumanEval",
        "smoltalk": "nanochat.tasks.smoltalk:SmolTalk",
        "smoltalk_zh": "nanochat.tasks.smoltalk:SmolTalkChinese",
        "ultrafeedback": "nanochat.tasks.ultrafeedback:UltraFeedback",
    },
    # ... and these only from NAME=PATH, to evaluate.
    "task files": {"first_questions": "nanochat.tasks.first_questions:FirstQuestions"},
    # Methods of `chat_rl --loss` beyond the ones that teach: `PolicyLoss` of losses.py.
    "policy losses": {
        "rloo": "nanochat.alignment.policy_losses:RLOO",
        "reinforce++": "nanochat.alignment.policy_losses:REINFORCE_PLUS_PLUS",
        "ppo": "nanochat.alignment.policy_losses:PPO",
        "gspo": "nanochat.alignment.policy_losses:GSPO",
        "cispo": "nanochat.alignment.policy_losses:CISPO",
        "distill": "nanochat.alignment.policy_losses:DISTILL",
    },
    # Losses of `chat_dpo --loss` beyond dpo: `PairLoss` of losses.py.
    "pair losses": {
        "ipo": "nanochat.alignment.pair_losses:IPO",
        "simpo": "nanochat.alignment.pair_losses:SIMPO",
        "cpo": "nanochat.alignment.pair_losses:CPO",
        "orpo": "nanochat.alignment.pair_losses:ORPO",
        "kto": "nanochat.alignment.kto:KTO",
        "reward": "nanochat.alignment.reward_model:REWARD",
    },
    # The parts of a --reward flag that names more than the task's own reward: text -> a list of `Reward` (rollout.py).
    "rewards": {"parse": "nanochat.alignment.rewards:parse_rewards"},
    # KIND of `--reward KIND:SOURCE`: (folder, device, verified) -> a function from conversations to numbers.
    "reward models": {"rm": "nanochat.alignment.reward_model:load_reward_model"},
    # What --sampler begins with, for samples from outside of this process: a class with the methods of EngineSampler
    # (rollout.py), `check_flag` and `open`.
    "samplers": {
        "http": "nanochat.samplers.http:HttpSampler",
        "https": "nanochat.samplers.http:HttpSampler",
        "ray": "nanochat.samplers.ray:RaySampler",
    },
    # When the samples of a step are drawn, other than in the step (`OnPolicy` of rollout.py): --staleness.
    "sampling": {"ahead": "nanochat.samplers.ahead:Ahead"},
    # What a PATH without a task's name holds -> a Task.
    "file forms": {
        "conversations": "nanochat.tasks.conversations:Conversations",
        "prompts": "nanochat.tasks.conversations:Prompts",
        "pairs": "nanochat.tasks.preferences:Preferences",
        "labelled": "nanochat.tasks.preferences:Labelled",
    },
    # The default of --tasks, by stage: (--data of the pretraining, hub) -> the flag's text.
    "default tasks": {
        "sft": "nanochat.tasks.defaults:default_tasks",
        "rl": "nanochat.tasks.defaults:default_rl_tasks",
        "dpo": "nanochat.tasks.defaults:default_dpo_tasks",
    },
}


@functools.cache
def table(seam: str) -> dict[str, str]:
    """The rows of a seam: what every room's `__init__.py` names in PLUGS."""
    rows = dict(ROOMS.get(seam, {}))
    for room in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if room.ispkg:  # its __init__ holds names only: nothing of the room is imported yet
            rows |= getattr(importlib.import_module(f"nanochat.{room.name}"), "PLUGS", {}).get(seam, {})
    return rows


def names(seam: str) -> list[str]:
    """The names of a seam, in the order of its table."""
    return list(table(seam))


def find(seam: str, name: str) -> Any:
    """What a room offers at a seam under a name. The room is imported here, and not before.

    Raises UserError: when a package that the room needs is not installed, with the extra that brings it. Raises
    KeyError: when the table has no such name; flags check their values against `names` first.
    """
    place = table(seam)[name]
    module, _, attribute = place.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise explain_missing(error) from error


def explain_missing(error: ModuleNotFoundError) -> Exception:
    """One line for a package of an extra that is not installed; any other error as it is."""
    line = advice(error)
    return error if line is None else UserError(line)
