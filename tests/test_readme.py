"""The READMEs say what is there: their commands parse, their tree exists, both languages give the same."""

import contextlib
import importlib
import io
import re
import shlex
from pathlib import Path

import pytest
from test_chat_cli import SUM, SUM_ANSWERED, add_checkpoint, table_model
from test_house import STORY
from test_house import lines as count_lines

from nanochat.ground.cli import parse

ROOT = Path(__file__).resolve().parent.parent
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
DOCUMENTS = {path.name: path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}


def commands(text: str) -> list[str]:
    """Every call of a script, without what stands behind it as a comment."""
    found = re.findall(r"-m scripts\.(?:[^\n`\\]|\\\n)*", text)
    return [re.split(r"\s+#|\s\|", one.replace("\\\n", " "))[0].strip() for one in found]


# docs/extending.md is run by test_extending.py: its commands exist in the extended copy of the code only.
ALL_COMMANDS = sorted({one for name, text in DOCUMENTS.items() if name != "extending.md" for one in commands(text)})


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_every_documented_command_has_flags_that_exist(command):
    name, *flags = shlex.split(command.removeprefix("-m scripts."))
    parse(importlib.import_module(f"scripts.{name}").Config, flags)  # a flag that does not exist exits with 2


SCRIPTS = sorted({path.stem for path in (ROOT / "scripts").glob("*.py")} - {"__init__"})


def test_every_script_is_in_a_list_of_commands():
    """The nine commands of a run are in README, the others in docs/commands.md."""
    assert set(SCRIPTS) == set(re.findall(r"-m scripts\.(\w+)", ENGLISH + DOCUMENTS["commands.md"]))


COMMANDS = [*sorted({*SCRIPTS} - {"bench"}), "bench train", "bench serve"]


def flags_of(words: str) -> set[str]:
    """The flags of a script, or of its subcommand, by their names in `--help`."""
    script, *subcommand = words.split()
    help_text = io.StringIO()
    with contextlib.redirect_stdout(help_text), pytest.raises(SystemExit):
        parse(importlib.import_module(f"scripts.{script}").Config, [*subcommand, "--help"])
    flags = set(re.findall(r"--\w+", help_text.getvalue()))
    return flags - {flag for flag in flags if flag.startswith("--no_")}


@pytest.mark.parametrize("words", COMMANDS)
def test_every_flag_is_in_a_document(words):
    """By its name, `--flag`, outside of the measurements."""
    pages = "".join(text for name, text in DOCUMENTS.items() if name != "measurements.md")
    flags = flags_of(words)
    assert flags and not flags - set(re.findall(r"--\w+", pages))


def test_every_flag_of_the_tables_exists():
    first_cells = re.findall(r"(?m)^\| (`--.*?) \|", DOCUMENTS["commands.md"])
    documented = set(re.findall(r"--\w+", " ".join(first_cells)))
    assert len(documented) > 50 and documented <= set().union(*map(flags_of, COMMANDS))


def test_the_table_of_other_trainers_flags_names_flags_that_exist():
    table = re.findall(r"(?m)^\| (`\w+`.*?) \| (.*) \|$", DOCUMENTS["finetune.md"].partition("\n| there | here |\n")[2])
    assert len(table) > 50
    ours = set()
    for script in SCRIPTS:
        ours |= set(importlib.import_module(f"scripts.{script}").Config.__dataclass_fields__)
    for _, here in table:
        assert set(re.findall(r"--(\w+)", here)) <= ours, here


def test_both_languages_give_the_same_sample_and_percentages():
    """test_docs.py compares headings, commands and flags."""
    for pattern in (r"```\n> .*?```", r"\d+(?:\.\d+)?%"):
        english, chinese = (re.findall(pattern, text, re.DOTALL) for text in (ENGLISH, CHINESE))
        assert english == chinese and english


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_the_map_of_the_code_is_complete_and_true(text):
    """The reading list is the story, with the lines of each row and of all, and every folder is named."""
    (reading_list,) = re.findall(r"```\n(device\.py.*?)```", text, re.DOTALL)
    names = re.findall(r"\b\w+\.py\b", reading_list)
    assert sorted(names) == sorted(f"{name}.py" for name in STORY.split())
    lines = 0
    for row in reading_list.splitlines():
        there = sum(count_lines(f"nanochat/{name}") for name in re.findall(r"\b\w+\.py\b", row))
        (stated,) = re.findall(r"\.py +(\d+)  ", row)
        assert abs(there - int(stated)) <= there / 10, row
        lines += there
    (thousands, hundreds) = re.search(r"(\d),(\d00) (?:lines|行)", text).groups()
    assert abs(lines - int(thousands + hundreds)) <= 150, lines
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("nanochat/*/__init__.py")}
    assert folders | {"scripts", "tests"} == set(re.findall(r"`((?:nanochat/\w+)|scripts|tests)`", text))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    folder = ROOT / "docs" if (ROOT / "docs" / name).exists() else ROOT
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", DOCUMENTS[name]):
        assert (folder / target).exists(), target


# What other code relies on: these names, with these arguments.
CONTRACT = """
from nanochat.checkpoint_manager import load_model
from nanochat.engine import Engine
model, tokenizer, meta = load_model("sft", device="cpu")
engine = Engine(model, tokenizer)
tokens = tokenizer.encode("hello", prepend=tokenizer.get_bos_token_id())
generated, masks = engine.generate_batch(tokens, num_samples=1, max_tokens=4, temperature=0.7)
print(tokenizer.decode(generated[0]))
"""


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, CONTRACT], ids=["en", "zh", "contract"])
def test_the_python_example_prints_a_reply(text, tmp_path, monkeypatch, capsys):
    """The model here is a table that answers a chat prompt and nothing else."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    add_checkpoint("sft", table_model(SUM, SUM_ANSWERED))
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL) or [text]
    exec(compile(code, "the example", "exec"), {})
    printed = capsys.readouterr().out
    if text is CONTRACT:
        assert printed.startswith("<|bos|>hello")
    else:
        assert printed == "S=.\n"  # the text, without the call and its result
