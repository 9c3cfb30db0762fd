"""Where the rooms plug in: tables of names, through which the core reaches code that it does not import.

A file directly in nanochat/ imports only its neighbours, so that the core can be read without anything else. What the
core's own code cannot do, such as reading a model of another family, is the work of a room: a folder of nanochat/.
Each table below is one seam. It maps a name, most often the value of a flag, to a place in a room, and `find` imports
that place when somebody asks for the name. A new capability is a file in a room and one row here.
"""

import importlib
import operator
from typing import Any

from nanochat.cli import UserError

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
    # A model on several processes.
    "layouts": {
        "shard": "nanochat.parallel.fsdp:shard",
    },
}

# Packages that only rooms import, and the extra of pyproject.toml that installs each.
EXTRAS: dict[str, str] = {"tokenizers": "families", "jinja2": "families"}


def names(seam: str) -> list[str]:
    """The names of a seam, in the order of its table."""
    return list(ROOMS[seam])


def find(seam: str, name: str) -> Any:
    """What a room offers at a seam under a name. The room is imported here, and not before.

    Raises UserError: when a package that the room needs is not installed, with the extra that brings it. Raises
    KeyError: when the table has no such name; flags check their values against `names` first.
    """
    place = ROOMS[seam][name]
    module, _, attribute = place.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise explain_missing(error) from error


def explain_missing(error: ModuleNotFoundError) -> Exception:
    """One line for a package of an extra that is not installed; any other error as it is."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return error
    extra = EXTRAS[package]
    return UserError(f"{package} is not installed: run `pip install 'nanochat[{extra}]'`, or setup_ascend.sh again")
