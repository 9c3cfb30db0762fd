"""This project beside what people would pick instead, in turns within one run. A person's tool, not a test.

    python tests/beside.py trl                # a CPU: LoRA and AdamW of TRL and peft, generate of transformers
    python tests/beside.py nanochat CLONE     # a CUDA card: training and decoding of a clone of karpathy/nanochat

beside.toml has the commands. `pip install -e .[dev]` brings TRL, peft and transformers; `--python` runs the other side
where it is installed elsewhere, as by `python -m venv other && other/bin/pip install torch==2.13.0 trl peft`. Threads
that wait for each other distort a measurement beside other work: OMP_NUM_THREADS=1 is for both sides.
"""

import argparse
import functools
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

from simnpu import tomllib

ROOT = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def run(command: str, **places: object) -> dict[str, float]:
    """The numbers of a command. Its peak memory is at least this process's, which imports no torch."""
    command = command.format(**places).replace("\n", " ")
    print("+", command, file=sys.stderr, flush=True)
    variables = {**os.environ, "NANOCHAT_BASE_DIR": str(places["folder"]), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as output:
        started = subprocess.Popen(command, shell=True, cwd=ROOT, env=variables, stdout=output, stderr=output)
        _, status, usage = os.wait4(started.pid, 0)
        output.seek(0)
        text = output.read()
    if status:
        sys.exit(f"it failed:\n{text[-3000:]}")
    return numbers(text) | {"peak GB": usage.ru_maxrss * 1024 / 1e9}


def numbers(text: str) -> dict[str, float]:
    """What beside.toml wants to be read, by name."""
    found: dict[str, list[float]] = {}
    for name, pattern in TABLE["read"]:
        for label, value in re.findall(pattern, text):
            found.setdefault(name.format(label), []).append(float(value.replace(",", "")))
    if "seconds" in found:
        return {"tokens/s": found["tokens"][-1] / found["seconds"][-1]}
    return {name: statistics.median(values[-20:]) for name, values in found.items()}


def make(folder: Path) -> None:
    import transformers
    from tiny import write_rows
    from tiny_families import CHATML_MARKED, CORPUS, save_family

    (save_family(folder, "qwen3") / "chat_template.jinja").write_text(CHATML_MARKED)
    config = transformers.Qwen3Config(**TABLE["model"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    drawn = random.Random(0)
    words = " ".join(CORPUS).split()
    (folder / "chats").mkdir()
    chats = []
    for _ in range(64):
        asked, said = (" ".join(drawn.choices(words, k=drawn.choice((4, 8, 16, 32)))) for _ in range(2))
        chats.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]})
    write_rows(folder / "chats/chats.jsonl", chats)


def generate(folder: Path) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    for rows in (1, 16, 64):
        ids = torch.tensor([range(300 + row, 316 + row) for row in range(rows)])
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 128, "do_sample": False}
        seconds = min(timeit.repeat(functools.partial(model.generate, ids, **settings), number=1, repeat=4))
        print(f"batch {rows}: {rows * 128 / seconds:.1f} tokens/s")


def letters(folder: Path) -> None:
    from tiny import write_rows

    (folder / "base_data_climbmix").mkdir()
    for name, count in (("shard_00000", 1500), ("shard_06542", 100)):  # the last one is held out
        rows = [{"text": "".join(random.choices("abcdefghijklmnopqrstuvwxyz ", k=4000))} for _ in range(count)]
        write_rows(folder / f"base_data_climbmix/{name}.parquet", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="The speed of this project beside others.")
    parser.add_argument("what", choices=("trl", "nanochat", "make", "generate", "letters"), help="trl or nanochat")
    parser.add_argument("folder", type=Path, nargs="?", help="with nanochat: its clone")
    parser.add_argument("--python", default=sys.executable, help="the interpreter with the other side's packages")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.what in ("make", "generate", "letters"):
        sys.exit(globals()[options.what](options.folder))
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        places = {"ours": sys.executable, "theirs": options.python, "folder": folder, "clone": options.folder}
        for command in TABLE[options.what]["prepare"]:
            run(command, **places)
        for part, sides in [part for part in TABLE[options.what]["parts"].items() for _ in range(options.rounds)]:
            ours, theirs = (run(sides[side], **places) for side in ("ours", "theirs"))
            for name in ours.keys() & theirs.keys():
                found.setdefault(f"{part}, {name}", []).append((ours[name], theirs[name]))
                print(f"{part}, {name}: {ours[name]:,.4g}; theirs {theirs[name]:,.4g}", flush=True)
    for name, pairs in found.items():
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        print(f"{name}: {statistics.median(ratios):.2f} times theirs ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
