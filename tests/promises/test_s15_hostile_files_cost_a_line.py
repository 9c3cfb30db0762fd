"""S15. Files from outside cost an error line.

A table of hostile files and answers: bombs, pipes and devices, deep nesting, wrong shapes, wrong bytes. Each is opened
in a fork of this process that has two seconds of the processor and 500 MB more than it began with. It has to end with
one line; words of the line are in the table. Folders of other families are in tests/families.
"""

import gzip
import json
import os
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from test_checkpoint_manager import rewrite_manifest
from test_hub import fake  # noqa: F401 (a fixture)
from tiny import BYTES, cpu_device, save_step

from nanochat.checkpoint_manager import load_model
from nanochat.data import hub
from nanochat.evals.core import open_bundle
from nanochat.ground.cli import UserError
from nanochat.ground.corpus import open_corpus
from nanochat.tasks.conversations import Conversations
from nanochat.tokenizer import Tokenizer

MEBIBYTES = 500
SECONDS = 2


def refused(call: Callable[[], Any]) -> str:
    """The one line with which this ends, in a process with these limits."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # it waits for ever
            used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            most = used + (MEBIBYTES << 20)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            began = time.process_time()
            try:
                call()
                line = "it was opened"
            except UserError as error:
                line = str(error)
            except BaseException:
                line = traceback.format_exc()
            seconds = time.process_time() - began
            os.write(writer, f"{seconds < SECONDS} {line}".encode(errors="replace")[:60_000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, errors="replace") as file:
        line = file.read()
    assert os.waitpid(child, 0)[1] == 0, f"the process died: {line}"
    assert line.startswith("True ")
    assert "\n" not in line
    assert len(line) < 2000
    return line.removeprefix("True ")


# ---------------------------------------------------------------------- texts


def packed(path: Path, content: bytes) -> Path:
    """80 MiB of this."""
    with path.open("wb") if path.suffix == ".jsonl" else gzip.open(path, "wb", 1) as file:
        for _ in range(80):
            file.write(content * (1 << 20))
    return path


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def zeros(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


DEEP = "[" * 100_000
DEEPER = "[" * 1_000_000
TEXTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "zeros": (lambda folder: packed(folder / "a.jsonl.gz", b"\0"), "a.jsonl.gz"),
    "blank lines": (lambda folder: packed(folder / "a.jsonl.gz", b"\n"), "a.jsonl.gz"),
    "one long line": (lambda folder: packed(folder / "a.jsonl", b"a"), "a.jsonl"),
    "a cut archive": (lambda folder: written(folder / "a.jsonl.gz", gzip.compress(b"{}" * 999)[:20]), "damaged gzip"),
    "a pipe": (lambda folder: pipe(folder / "a.jsonl"), "a.jsonl"),
    "a device": (lambda folder: zeros(folder / "a.jsonl"), "a.jsonl"),
    "deep nesting": (lambda folder: written(folder / "a.jsonl", f"{DEEP}\n" * 2), "line 1"),
    "wrong bytes": (lambda folder: written(folder / "a.jsonl", b'{"text": "caf\xe9"}\n' * 99), "line 1"),
    "no parquet": (lambda folder: written(folder / "a.parquet", b"PAR1 nonsense"), "damaged parquet"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text(tmp_path, name):
    make, words = TEXTS[name]
    path = str(make(tmp_path))
    assert words in refused(lambda: open_corpus(path)[0].read_block(0))
    assert words in refused(lambda: Conversations("train", path))


@pytest.mark.slow
@pytest.mark.parametrize("content", ["one value", "many values", "a long page", "many rows"])
def test_a_parquet_bomb(tmp_path, content):
    """A dictionary holds a value once, however many rows have it, and brotli packs a million to one."""
    path = tmp_path / "a.parquet"
    places = {"one value": [0] * 1000, "many values": [*range(4)] * 250, "many rows": np.zeros(10**7, dtype=np.int32)}
    if content == "a long page":
        column: Any = pyarrow.array(["a" * (1 << 27)])
    else:
        values = ["a" * 100] if content == "many rows" else [letter * 800_000 for letter in "abcd"]
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array(places[content], pyarrow.int32()), values)
    options = {"compression": "brotli", "use_dictionary": content != "a long page", "row_group_size": 10**8}
    options |= {"compression_level": 5, "write_statistics": False}  # or a long page takes a quarter of a minute
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, dictionary_pagesize_limit=1 << 30, **options)
    assert path.stat().st_size < 200_000
    line = refused(lambda: open_corpus(str(path)))
    assert line.startswith(f"{path} unpacks to more than 100 times")


# ---------------------------------------------------------------------- checkpoints and tokenizers


def change_model(step: Path, **sizes: int) -> None:
    meta = json.loads((step / "meta.json").read_text())
    meta["model"] |= sizes
    (step / "meta.json").write_text(json.dumps(meta))


def in_place_of(step: Path, name: str, make: Callable[[Path], Path]) -> None:
    (step / name).unlink()
    make(step / name)


def replace_tokenizer(step: Path, name_it: bool) -> None:
    """Another one, with more ids than the model has."""
    other = Tokenizer([bytes([value]) for value in range(256)] + [b"th", b"he", b"the", b"an"])
    other.save(step)
    meta = json.loads((step / "meta.json").read_text())
    (step / "meta.json").write_text(json.dumps(meta | ({"tokenizer": other.fingerprint()} if name_it else {})))


def long_header(step: Path) -> None:
    entry = ",".join(f'"{number}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(500_000))
    header = f"{{{entry}}}".encode()
    written(step / "model.safetensors", len(header).to_bytes(8, "little") + header)


CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "many layers": (lambda step: change_model(step, n_layer=10**6), "1000000 layers"),
    "a wide model": (lambda step: change_model(step, width=10**6), "embedding.weight"),
    "a large vocabulary": (lambda step: change_model(step, vocab_size=10**9), "embedding.weight"),
    "a long context": (lambda step: change_model(step, sequence_len=10**9), "1000000000"),
    "deep meta data": (lambda step: written(step / "meta.json", DEEPER), "nested"),
    "long meta data": (lambda step: written(step / "meta.json", f"[{'[],' * 6_000_000}1]"), "16,777,216"),
    "a long header": (long_header, "header is too large"),
    **{
        f"a pipe as {name}": (lambda step, name=name: in_place_of(step, name, pipe), "no regular file")
        for name in ("meta.json", "model.safetensors", "tokenizer.json", "training.json", "training.rank0.safetensors")
    },
    "zeros as weights": (lambda step: in_place_of(step, "model.safetensors", zeros), "no regular file"),
    "zeros as tokenizer": (lambda step: in_place_of(step, "tokenizer.json", zeros), "no regular file"),
    "another model's option": (lambda step: change_model(step, gated=1), "'gated'"),
    "no step": (lambda step: written(step / "meta.json", '{"version": 2}'), "is damaged"),
    "another tokenizer": (lambda step: replace_tokenizer(step, name_it=False), "not the tokenizer"),
    "a large tokenizer": (lambda step: replace_tokenizer(step, name_it=True), "too large for the model"),
    "a deep tokenizer": (lambda step: written(step / "tokenizer.json", DEEPER), "nested"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint(folder, name):
    step = save_step(folder, 1)
    load_model(str(step), cpu_device())  # what torch imports at a first model is no cost of the folder
    change, words = CHECKPOINTS[name]
    manifest = json.loads((step / "manifest.json").read_text())
    change(step)
    if all((step / file).is_file() for file in manifest):
        rewrite_manifest(step)
    assert words in refused(lambda: load_model(str(step), cpu_device()))


OWN: dict[str, Callable[[Path], Any]] = {
    "a pipe": pipe,
    "a device": zeros,
    "deep nesting": lambda path: written(path, DEEPER),
    "a long list": lambda path: written(path, f"[{'[],' * 5_000_000}1]"),
    "wrong bytes": lambda path: written(path, b"\xff\xfe\x00"),
    "a large id": lambda path: written(
        path, '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}'
    ),
    "merges that are no texts": lambda path: written(path, '{"version": 1, "merges": [[1]]}'),
}


@pytest.mark.parametrize("name", OWN)
def test_a_tokenizer(tmp_path, name):
    path = BYTES.save(tmp_path)
    path.unlink()
    OWN[name](path)
    assert str(tmp_path) in refused(lambda: Tokenizer.load(tmp_path))


# ---------------------------------------------------------------------- bundles and hubs

BUNDLES: dict[str, Callable[[Path], Any]] = {
    "a pipe": pipe,
    "deep nesting": lambda path: written(path, "[" * 1000),
    "wrong shapes": lambda path: written(path, "icl_tasks: {a: [1]}"),
    "wrong bytes": lambda path: written(path, b"\xff\xfe\x00"),
    "a path that leads out": lambda path: written(
        path, "icl_tasks: [{label: a, icl_task_type: multiple_choice, num_fewshot: [0], dataset_uri: ../../x.jsonl}]"
    ),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_a_bundle_of_tasks(tmp_path, name):
    written(tmp_path / "eval_meta_data.csv", "Eval Task,Random baseline\na,25\n")
    BUNDLES[name](tmp_path / "core.yaml")
    assert "--core" in refused(lambda: open_bundle(str(tmp_path)))


ANSWERS = [b"<html>Please log in</html>", DEEP.encode(), b"[]", b'{"siblings": 3}', b"\xff"]


@pytest.mark.parametrize("answer", ANSWERS, ids=["a page", "deep nesting", "a list", "wrong shapes", "wrong bytes"])
def test_an_answer_of_a_hub(fake, tmp_path, answer):  # noqa: F811
    fake.files = {"a.parquet": b"x"}
    assert len(hub.fetch("org/name")) == 1  # the client is imported
    shutil.rmtree(tmp_path / "base")
    fake.listing = answer
    assert refused(lambda: hub.fetch("org/name")).startswith("org/name: ")


def test_a_file_that_is_not_the_listed_one(fake, tmp_path):  # noqa: F811
    fake.files = {"a.parquet": b"a" * 100_000}
    fake.faults.append("wrong")
    assert "a.parquet arrived damaged" in refused(lambda: hub.fetch("org/name"))
    assert not list((tmp_path / "base").rglob("*.parquet"))
