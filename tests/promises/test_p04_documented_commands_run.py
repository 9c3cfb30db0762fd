"""P4. Every command in the README runs.

Its Python commands are taken from the text and run one after the other, in sizes that the environment makes tiny. The
two commands for the shell are P1's. A command of any other document has flags that exist, and every flag is documented.
The blocks of docs/extending.md are run by test_extending.py, the cells of docs/tour.ipynb by test_notebook.py.
"""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from runs import ROOT, call

from nanochat.ground.cli import parse
from scripts import chat_web

DOCUMENTS = {path.name: path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
ENGLISH = DOCUMENTS["README.md"]
SCRIPTS = sorted({path.stem for path in (ROOT / "scripts").glob("*.py")} - {"__init__"})


def commands(text: str) -> list[str]:
    """Every call of a script, without the comment after it."""
    found = re.findall(r"-m scripts\.(?:[^\n`;\\]|\\\n)*", text)
    return [re.split(r"\s+#|\s\|", one.replace("\\\n", " "))[0].strip() for one in found]


# ---------------------------------------------------------------------- the README's commands run

# Flags in the environment come last, so they count.
MODEL = "--device=cpu --dtype=float32"
TRAIN = f"{MODEL} --num_iterations=2 --device_batch_size=2 --compile=off"
FEW = "--max_tokens=8 --temperature=0"
TINY = {
    "tok_train": "--vocab_size=320 --max_chars=100000",
    "base_train": f"{TRAIN} --depth=1 --head_dim=32 --max_seq_len=256 --total_batch_size=512 --eval_tokens=512 "
    "--data=demo",
    "mid_train": f"{TRAIN} --total_batch_size=512 --eval_tokens=512",
    "chat_sft": f"{TRAIN} --target_examples_per_step=4 --eval_examples=4",
    "chat_dpo": f"{TRAIN} --target_examples_per_step=4 --eval_examples=4",
    "chat_rl": f"{TRAIN} --examples_per_step=2 --num_samples=2 --max_tokens=8 --eval_examples=2",
    "chat_eval": f"{MODEL} --max_examples=2 --max_tokens=8",
    "chat_cli": f"{MODEL} {FEW}",
    "chat_web": f"{MODEL} --port=0 --slots=1",
    "report": "",
}

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


@pytest.mark.slow
def test_the_commands_of_the_readme_run(base_folder: Path, monkeypatch, capsys):
    """Every script of the README, the stages in their order, then its example in Python."""
    pages = []

    def served_once(app, grace):
        """A server that ends after its page was read."""
        server = real_server(app, grace)

        def visit() -> None:
            while not server.started:
                time.sleep(0.01)
            _, port = server.servers[0].sockets[0].getsockname()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as page:
                pages.append(page.status)
            server.should_exit = True

        threading.Thread(target=visit, daemon=True).start()
        return server

    real_server = chat_web.make_server
    monkeypatch.setattr(chat_web, "make_server", served_once)
    order = [*TINY]
    calls = sorted(
        {one.removeprefix("-m scripts.") for one in commands(ENGLISH)}, key=lambda one: order.index(name(one))
    )
    assert {name(one) for one in calls} == set(order)
    for one in calls:
        script, *flags = shlex.split(one)
        monkeypatch.setenv(f"NANOCHAT_{script.upper()}", TINY[script])
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
        call(script, *flags)
    saved = {path.name for path in base_folder.glob("checkpoints/*")}
    assert saved == {"base", "mid", "sft", "dpo", "rl"} and pages == [200] * sum(
        one.startswith("chat_web") for one in calls
    )
    assert "</html>" in next(base_folder.glob("runs/report/*/report.html")).read_text()
    capsys.readouterr()
    examples = [re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0] for text in (ENGLISH, DOCUMENTS["README.zh.md"])]
    for code in (*examples, CONTRACT):
        exec(compile(code, "the example", "exec"), {})
        assert capsys.readouterr().out.endswith("\n")


def name(command: str) -> str:
    return command.split()[0]


# ---------------------------------------------------------------------- commands and flags of all documents

# docs/extending.md is run by test_extending.py: its commands exist in the extended copy of the code only.
ALL_COMMANDS = sorted({one for page, text in DOCUMENTS.items() if page != "extending.md" for one in commands(text)})


def test_every_documented_command_has_flags_that_exist():
    assert len(ALL_COMMANDS) > 50
    for command in ALL_COMMANDS:
        script, *flags = shlex.split(command.removeprefix("-m scripts."))
        # A flag that does not exist exits with 2.
        parse(importlib.import_module(f"scripts.{script}").Config, flags)


def test_every_script_is_in_a_list_of_commands():
    """The nine commands of a run are in README, the others in docs/commands.md."""
    assert set(SCRIPTS) == set(re.findall(r"-m scripts\.(\w+)", ENGLISH + DOCUMENTS["commands.md"]))


def flags_of(words: str) -> set[str]:
    """The flags of a script, or of its subcommand, by their names in `--help`."""
    script, *subcommand = words.split()
    help_text = io.StringIO()
    with contextlib.redirect_stdout(help_text), pytest.raises(SystemExit):
        parse(importlib.import_module(f"scripts.{script}").Config, [*subcommand, "--help"])
    flags = set(re.findall(r"--\w+", help_text.getvalue()))
    return flags - {flag for flag in flags if flag.startswith("--no_")}


def test_every_flag_is_in_a_document_and_every_flag_of_the_tables_exists():
    """By its name, `--flag`, outside of the measurements."""
    pages = "".join(text for page, text in DOCUMENTS.items() if page != "measurements.md")
    mentioned = set(re.findall(r"--\w+", pages))
    ours = {words: flags_of(words) for words in (*sorted({*SCRIPTS} - {"bench"}), "bench train", "bench serve")}
    assert all(ours.values())
    assert {words: flags - mentioned for words, flags in ours.items() if flags - mentioned} == {}
    first_cells = re.findall(r"(?m)^\| (`--.*?) \|", DOCUMENTS["commands.md"])
    documented = set(re.findall(r"--\w+", " ".join(first_cells)))
    # Other trainers' flags, each with ours.
    table = re.findall(r"(?m)^\| `\w+`.*? \| (.*) \|$", DOCUMENTS["finetune.md"].partition("\n| there | here |\n")[2])
    documented |= set(re.findall(r"--\w+", " ".join(table)))
    assert len(table) > 50 and len(documented) > 90 and documented <= set().union(*ours.values())


@pytest.mark.parametrize(
    "called", ["python check_npu.py", "bash setup_ascend.sh", "bash speedrun_npu.sh", "python tests/simnpu/run"]
)
def test_flags_of_the_other_programs_exist(called: str):
    text = "\n".join(DOCUMENTS.values()) + (ROOT / "Dockerfile.npu").read_text(encoding="utf-8")
    calls = re.findall(rf"{called}((?: [^\s`#|&()]+)*)", text)
    assert calls
    program, file = called.split()
    command = [sys.executable if program == "python" else program, file, "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    known = set(re.findall(r"--\w+", result.stdout))
    for one in calls:
        own = re.split(r" python | torchrun ", one)[0]  # what follows belongs to the command that is run
        assert set(re.findall(r"--\w+", own)) <= known, one
