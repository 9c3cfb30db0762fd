"""Published figures: the records in docs/figures.toml, and the pages that show them.

`PYTHONPATH=. python tests/figures.py` writes the tables and sentences of the pages, and today's recipe into each run
whose recipe is "today". A recipe is what decides a figure: the settings of all commands that the run's command starts
(flags and defaults), the sizes and rates of their models, and fingerprints of the data that they name. Code is not in
it: tests compare code with references.
"""

import hashlib
import importlib
import json
import re
import shlex
import tempfile
from collections import Counter
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from test_setup import ROOT, tomllib
from test_speedrun import Speedrun

from nanochat import scaling
from nanochat.ground import cli, corpus
from nanochat.sampling import CHAT_SAMPLING, saved_settings
from nanochat.tasks.defaults import default_tasks
from nanochat.tasks.flag import open_mixture

RECORDS = ROOT / "docs/figures.toml"
RECIPES = ROOT / "docs/recipes.json"  # hash -> recipe
# A setting that is off by default is left out, so a new flag that is off changes no recipe.
OFF = (None, False, 0, "", "auto", "off", ())
# Settings that change no figure.
UNRELATED = {"log_every", "save_every", "hang_seconds", "model_tag", "resume", "hub", "show", "table_only", "json"}
TRAINERS: dict[str, Any] = {"scripts.mid_train": "sft", "scripts.chat_sft": "sft", "scripts.chat_rl": "rl"}


def read() -> dict[str, Any]:
    return tomllib.loads(RECORDS.read_text(encoding="utf-8"))


def records(figures: dict[str, Any], rows: str) -> list[dict[str, Any]]:
    """The records of a table or of the sentences. A record takes from its `run` what it does not state itself."""
    return [{**(figures["runs"][row["run"]] if "run" in row else {}), **row} for row in figures[rows]]


def pages(figures: dict[str, Any]) -> dict[str, str]:
    """The pages as the records have them."""
    texts: dict[str, str] = {}

    def replace(page: str, pattern: str, written: str) -> None:
        text = texts.get(page) or (ROOT / page).read_text(encoding="utf-8")
        texts[page], count = re.subn(pattern, lambda match: match[1] + written, text)
        assert count == 1, f"{page} has {count} places for {written}"

    for table in figures["tables"]:
        lines = [table["header"]] if "header" in table else []
        for record in records(figures, table["rows"]):
            where = ", ".join(record[name] for name in ("machine", "date") if name in record)
            lines.append(table["line"].format(**record, where=where))
        first_list = rf"(\n{re.escape(table['heading'])}\n(?:(?![|-]|## ).*\n)*)(?:[|-].*\n)+"
        replace(table["page"], first_list, "\n".join([*lines, ""]))
    for record in records(figures, "sentences"):
        for page, sentence in record["pages"].items():
            pattern = re.sub(r"\\\{\w+\\\}", "[^;(]+?", re.escape(sentence))
            replace(page, f"(){pattern}", sentence.format(**record))
    return texts


# ---------------------------------------------------------------------- recipes


def recipe_of(command: str, folder: Path) -> dict[str, Any]:
    """What decides the figures of a command, by names. `folder` is an empty one."""
    recipe: dict[str, Any] = {}
    calls: Counter[str] = Counter()
    for script, flags in commands_of(command, folder):
        calls[script] += 1
        values = settings(cli.parse(importlib.import_module(script).Config, flags))
        if script in TRAINERS:
            values.setdefault("tasks", default_tasks("demo", stage=TRAINERS[script]))
            values |= {f"{name} of replies": value for name, value in saved_settings(CHAT_SAMPLING).items()}
        if "demo" in flags or "tasks" in values:
            recipe |= data_of(values, "train" if script in TRAINERS else "test")
        if "depth" in values:
            recipe |= model_of(values)
        recipe |= {f"{script} {calls[script]}: {name}": value for name, value in values.items()}
    return recipe


def commands_of(command: str, folder: Path) -> list[tuple[str, list[str]]]:
    """The script and the flags of each of our commands that a command runs."""
    ran = [shlex.split(command)]
    if command.startswith("bash speedrun_npu.sh "):
        ran = [one["command"] for one in Speedrun(folder).run(*ran[0][2:], DEVICE="cpu 1")[0]]
    return [(words[words.index("-m") + 1], words[words.index("-m") + 2 :]) for words in ran]


def settings(config: Any) -> dict[str, Any]:
    """The settings in a dataclass, and in its groups, that matter."""
    found = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found |= settings(value)
        elif field.name not in UNRELATED and not (value in OFF and value == field.default):
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def model_of(values: dict[str, Any]) -> dict[str, Any]:
    """The sizes and switches of a new model, and the rates by rule at one batch and horizon."""
    named = {name: values[name] for name in ("head_dim", "window_pattern", "mlp") if name in values}
    config = scaling.model_config(values["depth"], 1024, values["max_seq_len"], **named)
    rates = asdict(scaling.rates(config, batch=4096, tokens=1_000_000))
    rounded = {f"rate of {name}": float(f"{rate:.6g}") for name, rate in rates.items()}
    return {f"model: {name}": value for name, value in (settings(config) | rounded).items()}


def data_of(values: dict[str, Any], split: Any) -> dict[str, str]:
    """Fingerprints of the demo's texts and documents, or of the examples that are learned or graded."""
    found = {}
    if values.get("data") == "demo":
        texts = sorted(ROOT.glob("nanochat/demo/*.txt"))
        found = {f"nanochat/demo/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in texts}
        found["the demo's documents"] = corpus.fingerprint(corpus.open_corpus("demo")[0])
    tasks = values["tasks"].split(",") if "tasks" in values else []
    for task in tasks:
        name, _, path = task.partition(":")[0].partition("=")
        examples = open_mixture(f"{name}={ROOT / path}" if path else name, split)
        found[f"{split} examples of {name}"] = examples.fingerprint()
    return {name: fingerprint[:8] for name, fingerprint in found.items()}


def digest(recipe: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]


def write() -> None:
    """Today's recipe into each run that asks for it, then the pages."""
    text = RECORDS.read_text(encoding="utf-8")
    recipes = json.loads(RECIPES.read_text(encoding="utf-8"))
    for run in read()["runs"].values():
        if run.get("recipe") == "today":
            with tempfile.TemporaryDirectory() as folder:
                recipe = recipe_of(run["command"], Path(folder))
            recipes[digest(recipe)] = recipe
            assert 'recipe = "today"\n' in text, f'{run["command"]}: write recipe = "today", and nothing after it'
            text = text.replace('recipe = "today"\n', f'recipe = "{digest(recipe)}"\n', 1)
    RECORDS.write_text(text, encoding="utf-8")
    used = {name: recipe for name, recipe in recipes.items() if f'"{name}"' in text}
    RECIPES.write_text(json.dumps(used, indent=1) + "\n", encoding="utf-8")
    for page, text in pages(read()).items():
        (ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
