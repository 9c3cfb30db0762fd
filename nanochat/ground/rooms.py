"""Where the rooms plug in: tables of names, through which the core reaches code that it does not import.

The core is the story, which is the files directly in nanochat/, and ground/. It imports no room, so that it can be read
without anything else. A room, a folder of nanochat/, does the work that the core cannot do, such as reading a model of
another family. SEAMS lists the places where a room may plug in. A room's `__init__.py` has a table PLUGS, from seam to
name to the "module:attribute" that it offers; `find` imports it when the name is requested. A new capability is a file
in a room and one row of the room's table: the core does not change.
"""

import functools
import importlib
import pkgutil
from pathlib import Path
from typing import Any

from nanochat.ground.cli import UserError
from nanochat.ground.extras import advice

# The purpose of each seam. A name is usually the value of a flag.
SEAMS = {
    # Formats of model folders other than ours, asked in this order: `FolderFormat` of model_folder.py. Hugging Face's
    # also reads a tokenizer.json that is not ours.
    "folders",
    # Where to download from, by --hub and in --source hf:ORG/NAME: `Hub` of data/hub.py.
    "hubs",
    # Adapters: new ones to train, as a `Preparation` of checkpoint_manager.py, and what a checkpoint says about their
    # base; for a checkpoint that holds nothing else, where the base is, and the weights of both together.
    "adapters",
    # How a run is spread over several processes, by --parallel: (device, --replicate) -> a Layout of ranks.py.
    # context: (device, such a Layout) -> the same, but with neighbours that share rows (--context_parallel).
    # experts: (device, --parallel, --replicate) -> such a Layout, with whole experts on a rank (--expert_parallel).
    # dry_run: (device, models) -> the Ledger that counts a step's memory; dry_run_devices: (device, ranks) -> a device.
    "layouts",
    # Opens a file of text or records that is not .txt or .jsonl, by its suffix: (path, columns) -> a DataFile.
    "file formats",
    # Text that --data names and that this machine has: "train" or "val" -> a Corpus.
    "corpora",
    # A task by its name in --tasks: a Task, or an Environment, whose episodes have several turns. A PATH without a
    # name has a task, too, by the form of its content (`FileForm` of tasks/flag.py).
    "tasks",
    # Methods of `chat_rl --loss` beyond grpo: `PolicyLoss` of losses.py.
    "policy losses",
    # Losses of `chat_dpo --loss`: `PairLoss` of alignment/pair_losses.py.
    "pair losses",
    # The beginning of --sampler, for samples from outside this process: (flags, Start of run/stage.py, should_stop) ->
    # an object with the methods of EngineSampler (rollout.py). The class also has `check_flag`.
    "samplers",
    # A kind of device: a subclass of `Runtime` of device.py, which also finds the operators.
    "kernels",
}


@functools.cache
def table(seam: str) -> dict[str, str]:
    """The rows of a seam, name -> "module:attribute", of all rooms."""
    rows: dict[str, str] = {}
    for room in pkgutil.iter_modules([str(Path(__file__).parents[1])]):
        if room.ispkg:  # its __init__ holds names only: nothing of the room is imported yet
            rows |= getattr(importlib.import_module(f"nanochat.{room.name}"), "PLUGS", {}).get(seam, {})
    return rows


def names(seam: str) -> list[str]:
    """The names of a seam, in the order of its table."""
    return list(table(seam))


def find(seam: str, name: str) -> Any:
    """The offer of a room at a seam, by name. This imports the room, which is not imported before.

    Raises UserError: when a package that the room needs is not installed, with the extra that installs it; when no room
    has the name. Flags check their values against `names` first.
    """
    place = table(seam).get(name)
    if place is None:
        raise UserError(f"no room offers {name!r} for {seam}: a folder of nanochat/ is missing, get it back from git")
    try:
        return pkgutil.resolve_name(place)
    except ModuleNotFoundError as error:
        raise explain_missing(error) from None  # `from error` could make it its own cause


def explain_missing(error: ModuleNotFoundError) -> Exception:
    """One line for a package of an extra that is not installed; any other error unchanged."""
    line = advice(error)
    return error if line is None else UserError(line)
