"""hub.py: the real clients against a server that imitates a hub: what lands on the disk, and the line that says why."""

import contextlib
import errno
import hashlib
import json
import multiprocessing
import sys
import threading
import urllib.parse
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import complaint

from nanochat.data import catalog, hashes, hub
from nanochat.data.catalog import Dataset, Source
from nanochat.data.hub import fetch, fetch_model, fetch_part, fetch_split
from nanochat.data.splits import choose_config, choose_files
from nanochat.ground import corpus, storage
from nanochat.tasks.flag import Reading, open_task, parse_tasks

BODY = bytes(range(256)) * 400  # 102,400 bytes
COMMIT = "c0ffee" + "0" * 34


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def lfs(body: bytes) -> dict:
    return {"sha256": sha256(body), "size": len(body), "pointerSize": 1}


class FakeHub:
    """A hub that lists `files` and serves them, with a Hugging Face and a ModelScope face.

    `faults` are used up, one per request for a file: "cut N" ends the connection after N bytes, a number is a status,
    "wrong" sends other bytes.
    """

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.faults: deque[str] = deque()
        self.status = 200  # of every answer
        self.listing: bytes | None = None  # instead of the true one
        self.seen: list[tuple[str, str, dict[str, str]]] = []  # method, path, headers
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def requests(self, method: str, part: str) -> list[dict[str, str]]:
        return [headers for verb, path, headers in self.seen if verb == method and part in path]

    def handler(fake):  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format, *args):
                pass

            def answer(self, status: int, body: bytes = b"", sent: int | None = None, **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    with contextlib.suppress(OSError):
                        self.wfile.write(body[:sent])
                if sent is not None:
                    self.close_connection = True

            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                fake.seen.append((self.command, self.path, {key.lower(): value for key, value in self.headers.items()}))
                if fake.status != 200:
                    return self.answer(fake.status)
                if fake.listing is not None and "/api/" in url.path:
                    return self.answer(200, fake.listing)
                if url.path.startswith(("/api/datasets/", "/api/models/")):
                    siblings = [
                        {"rfilename": name, "size": len(body), "lfs": lfs(body)} for name, body in fake.files.items()
                    ]
                    return self.answer(200, json.dumps({"id": "o/n", "sha": COMMIT, "siblings": siblings}).encode())
                if url.path.endswith("/repo/tree"):
                    rows = [
                        {"Path": name, "Size": len(body), "Sha256": sha256(body), "Type": "blob"}
                        for name, body in sorted(fake.files.items())
                    ]
                    page = rows if query.get("PageNumber", "1") == "1" else []
                    return self.answer(200, json.dumps({"Code": 200, "Data": {"Files": page}}).encode())
                if "FilePath" in query:
                    return self.file(query["FilePath"])
                if url.path.startswith("/api/v1/datasets/"):
                    return self.answer(200, json.dumps({"Code": 200, "Data": {"Id": 5, "Type": 1}}).encode())
                if "/resolve/" in url.path:
                    return self.file(urllib.parse.unquote(url.path.split("/resolve/")[1].split("/", 1)[1]))
                return self.answer(200, b"of another address")

            def file(self, name: str):
                if name not in fake.files:
                    return self.answer(404, X_Error_Code="EntryNotFound")
                body = fake.files[name]
                headers = {"ETag": f'"{sha256(body)}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
                if self.command == "HEAD":
                    return self.answer(200, body, **headers)
                fault = fake.faults.popleft() if fake.faults else ""
                if fault.isdigit():
                    return self.answer(int(fault))
                if fault == "wrong":
                    body = body[:-1] + b"!"
                sent = int(fault[4:]) if fault.startswith("cut ") else None
                wanted = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
                if self.headers.get("Range"):
                    first, last = int(wanted[0]), int(wanted[1] or len(body) - 1)
                    headers["Content_Range"] = f"bytes {first}-{last}/{len(body)}"
                    return self.answer(206, body[first : last + 1], sent, **headers)
                return self.answer(200, body, sent, **headers)

        return Handler


@pytest.fixture
def fake(monkeypatch, tmp_path):
    fake = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", fake.url + "/")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", fake.url)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def data_files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name not in (".lock", "listing.json"))


def shards(count: int) -> dict[str, bytes]:
    return {f"data/shard_{n:02d}.parquet": b"%d" % n * 10 for n in range(count)} | {"README.md": b"hello"}


def chats(word: str, count: int) -> bytes:
    rows = [{"prompt": f"{word} {n}", "completion": "yes"} for n in range(count)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def model_files(**changes: bytes) -> dict[str, bytes]:
    weights = {"model.safetensors": BODY, "consolidated.safetensors": BODY, "pytorch_model.bin": BODY}
    settings = {name: b"{}" for name in ("config.json", "tokenizer.json", "listing.json", "onnx/config.json")}
    shape = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 8}
    shape |= {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1}
    settings["config.json"] = json.dumps(shape).encode()
    return weights | settings | {"merges.txt": b"a b", "chat_template.jinja": b"x", "README.md": b"hello"} | changes


@pytest.fixture
def tiny_task(monkeypatch) -> None:
    """A task of one test file, whose hash is known, and two train files."""
    sources = {"hf": Source("org/task", COMMIT), "modelscope": Source("copy/task", "master")}
    splits = {
        "train": {"all/train-0.parquet": None, "all/train-1.parquet": None},
        "test": {"all/test.parquet": sha256(b"test")},
    }
    monkeypatch.setitem(catalog.TASKS, "tiny", Dataset(sources, "none", splits))


# ---------------------------------------------------------------------- texts


def test_the_first_shards_and_the_last_are_fetched_once(fake, tmp_path, monkeypatch):
    fake.files = shards(12)
    paths = fetch("org/name", shards=2)
    folder = tmp_path / "base" / "data" / "org--name"
    names = ["data--shard_00.parquet", "data--shard_01.parquet", "data--shard_11.parquet"]
    assert paths == [folder / name for name in names] and data_files(folder) == names
    assert [path.read_bytes() for path in paths] == [b"0" * 10, b"1" * 10, b"11" * 10]
    assert fake.requests("GET", f"/resolve/{COMMIT}/")  # the commit, not the branch
    seen = len(fake.seen)
    fake.files = shards(14)  # the branch has moved on: a resumed run reads what it read before
    assert fetch("org/name", shards=2) == paths
    assert len(fake.seen) == seen
    assert len(fetch("org/name")) == 9  # eight training shards without --shards
    assert len(fetch("org/name", shards=99)) == 12
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    assert fetch("org/name", shards=2) == paths


def test_a_source_in_a_folder_takes_its_files_only(fake, monkeypatch):
    monkeypatch.setitem(catalog.DATASETS, "tiny", Dataset({"hf": Source("org/name", "main", folder="data")}, "none"))
    fake.files = shards(2) | {"other/x.parquet": b"x", "database.parquet": b"y"}
    assert [path.name for path in fetch("tiny")] == ["data--shard_00.parquet", "data--shard_01.parquet"]


def test_a_cut_connection_resumes_where_it_ended(fake):
    fake.files = {"a.parquet": BODY * 110}
    fake.faults.append("cut 11000000")
    assert fetch("org/name")[0].read_bytes() == BODY * 110
    first, second = (headers.get("range") for headers in fake.requests("GET", "/resolve/"))
    assert first is None and second == "bytes=10485760-"  # the client writes 10 MiB at once


def test_the_token_is_sent_to_the_hub_alone(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fake.files = {"a.parquet": BODY}
    fetch("org/name")
    assert {headers.get("authorization") for _, _, headers in fake.seen} == {"Bearer hf_secret"}


def test_a_full_disk_is_one_line_and_a_closed_folder_is_explained_elsewhere(fake, monkeypatch):
    fake.files = {"a.parquet": BODY}
    number = errno.ENOSPC

    def fails(descriptor):
        raise OSError(number, "an error", "/shared/a.parquet")

    monkeypatch.setattr(hub.os, "fsync", fails)
    assert "disk" in complaint(lambda: fetch("org/name"))
    number = errno.EACCES
    with pytest.raises(PermissionError, match="/shared/a.parquet"):
        fetch("org/name")


def test_processes_download_once(fake, tmp_path):
    fake.files = {"a.parquet": BODY}
    processes = [multiprocessing.get_context("fork").Process(target=fetch, args=("org/name",)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(fake.requests("GET", "/resolve/")) == 1
    assert data_files(tmp_path / "base" / "data" / "org--name") == ["a.parquet"]


# ---------------------------------------------------------------------- what a user can fix

NOBODY = "http://127.0.0.1:9"
# The endpoint, or the status of every answer, the files, what is fetched, and what the line names.
MISTAKES: dict[str, tuple[Any, dict[str, bytes], Callable[[], Any], tuple[str, ...]]] = {
    "no such repository": (404, {}, lambda: fetch("org/name"), ("org/name: ", "404", "check the name")),
    "without a token": (401, {}, lambda: fetch("climbmix"), ("climbmix: ", "401", "HF_TOKEN")),
    "not allowed": (403, {}, lambda: fetch_split("gsm8k", "test"), ("gsm8k: ", "403", "HF_TOKEN")),
    "a gated data set": (401, {}, lambda: fetch_part("o/gated", None, None, "train"), ("HF_TOKEN",)),
    "a gated model": (401, {}, lambda: fetch_model("hf:org/gated"), ("HF_TOKEN", "/org/gated")),
    "no such model": (404, {}, lambda: fetch_model("hf:org/mistyped"), ("check the name",)),
    "no network": (NOBODY, {}, lambda: fetch("climbmix"), (NOBODY, "HF_ENDPOINT", "--data demo")),
    "another hub": (NOBODY, {}, lambda: fetch("fineweb-edu"), ("--hub modelscope",)),
    "a task": (NOBODY, {}, lambda: fetch_split("gsm8k", "test"), ("--hub modelscope", "gsm8k=PATH")),
    "a model": (NOBODY, {}, lambda: fetch_model("hf:org/name"), (NOBODY, "HF_ENDPOINT")),
    "no address": ("my-mirror", {}, lambda: fetch("org/name"), ("HF_ENDPOINT='my-mirror'",)),
    "not on this hub": (200, {}, lambda: fetch("climbmix", "modelscope"), ("--hub hf", "--data fineweb-edu or")),
    "no copy": (200, {}, lambda: fetch_split("humaneval", "test", "modelscope"), ("humaneval=PATH",)),
    "no parquet": (200, {"a.txt": b""}, lambda: fetch("org/name"), ("parquet",)),
    "another text": (
        200, {"all/test.parquet": b"another"}, lambda: fetch_split("tiny", "test"), ("tiny: all/test.parquet",)
    ),
    "other files": (200, {"other.parquet": b""}, lambda: fetch_split("tiny", "train"), ("all/train-0.parquet",)),
    "no configuration": (200, {"en/train.jsonl": b"", "zh/train.jsonl": b""},
                         lambda: fetch_part("o/n", None, None, "train"), ("ORG/NAME/en",)),
    "another configuration": (200, {"en/train.jsonl": b""}, lambda: fetch_part("o/n", "fr", None, "train"), (" fr",)),
    "a pickle": (200, {"pytorch_model.bin": b"", "config.json": b"{}"}, lambda: fetch_model("hf:o/pickled"),
                 (".bin",)),
    "a gguf": (200, {"model-q4.gguf": b""}, lambda: fetch_model("hf:o/gguf"), (".gguf",)),
    "another kind of model": (
        200, model_files(**{"config.json": b'{"model_type": "qwen3_next", "vision_config": {"depth": 2}}'}),
        lambda: fetch_model("hf:org/hybrid"), ("hf:org/hybrid: ", "qwen3_next", "docs/finetune.md"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_user_can_fix_is_one_line(fake, tiny_task, monkeypatch, name):
    condition, fake.files, call, words = MISTAKES[name]
    if isinstance(condition, int):
        fake.status = condition
    else:
        monkeypatch.setenv("HF_ENDPOINT", condition)
    line = complaint(call)
    assert all(word in line for word in words)
    assert not fake.requests("GET", "safetensors")  # no weights were downloaded


def test_no_other_hub_is_named_where_no_copy_is_known(fake, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    assert "--hub" not in complaint(lambda: fetch_split("humaneval", "test"))


# ---------------------------------------------------------------------- the split of a task, chats of any data set


def test_a_split_is_fetched_once(fake, tiny_task, tmp_path, capsys, monkeypatch):
    fake.files = {"all/train-0.parquet": BODY, "all/train-1.parquet": b"more", "all/test.parquet": b"test"}
    paths = fetch_split("tiny", "train")
    folder = tmp_path / "base" / "data" / "tiny"
    assert paths == [folder / "all--train-0.parquet", folder / "all--train-1.parquet"]
    assert [path.read_bytes() for path in paths] == [BODY, b"more"]
    assert "2 of 2 files" in capsys.readouterr().err
    assert fetch_split("tiny", "test")[0].read_bytes() == b"test"
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    assert fetch_split("tiny", "train") == paths


def test_modelscope_through_its_own_client(fake, tiny_task, tmp_path):
    pytest.importorskip("modelscope")
    fake.files = shards(3) | {"all/test.parquet": b"written anew"}
    paths = fetch_split("tiny", "test", "modelscope")  # the table's hash is that of hf
    assert paths == [tmp_path / "base" / "data" / "tiny.modelscope" / "all--test.parquet"]
    assert paths[0].read_bytes() == b"written anew"
    paths = fetch("org/name", "modelscope", shards=1)
    assert [path.read_bytes() for path in paths] == [b"written anew", b"2" * 10]


def test_pages_of_a_listing_end(fake, monkeypatch):
    """Every page of this hub has one more file; a hub that lists 200,000 of them so keeps us for hours."""
    monkeypatch.setitem(sys.modules, "modelscope.hub.api", None)
    assert "pip install modelscope" in complaint(lambda: fetch("org/name", "modelscope"))
    asked = []

    class HubApi:
        def __init__(self, endpoint):
            pass

        def get_dataset_files(self, repo, revision, root_path, page_number):
            asked.append(page_number)
            return [{"Path": f"{page_number}.parquet"}]

    for name in ("modelscope", "modelscope.hub", "modelscope.hub.api"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(HubApi=HubApi))
    assert "1,000" in complaint(lambda: fetch("org/name", "modelscope"))
    assert asked == list(range(1, 1001))


def test_chats_of_any_data_set(fake, tmp_path):
    fake.files = {"data/train.jsonl": chats("learn", 5), "data/test.jsonl": chats("test", 3), "README.md": b"hello"}
    [spec] = parse_tasks("org/name:2")
    train, test = (open_task(spec, part) for part in ("train", "test"))
    assert (train.name, spec.weight, len(train), len(test)) == ("org/name", 2.0, 5, 3)
    assert test.example(2).messages[0]["content"] == "test 2"
    assert data_files(tmp_path / "base/data/org--name") == ["data--test.jsonl", "data--train.jsonl"]
    seen = len(fake.seen)
    [spec] = parse_tasks("org/name@test")  # nothing else is held out: a share of it is
    tasks = [open_task(spec, part, Reading(val_share=0.5)) for part in ("train", "test")]
    assert sorted(task.example(0).messages[0]["content"] for task in tasks) == ["test 0", "test 1"]
    assert len(fake.seen) == seen
    assert "prompt, completion" in complaint(lambda: open_task(spec, "train", Reading(files="pairs")))
    line = complaint(lambda: open_task(parse_tasks("org/name@en")[0], "train"))
    assert line.startswith("--tasks org/name@en ") and "test, train" in line


def test_a_configuration_of_a_data_set(fake):
    fake.files = {f"{name}/train-00000-of-00001.jsonl": chats(name, 4) for name in ("en", "zh")}
    train, held_out = fetch_part("o/n", "zh", None, "train")
    assert [path.name for path in train] == ["zh--train-00000-of-00001.jsonl"] and not held_out


LISTS = [
    ("data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet data/test-00000-of-00001.parquet", "", "2 1"),
    ("alpaca_data.json dataset_infos.json", "", "1 0"),
    ("train.json test.json train.parquet", "", "1 0"),  # of two copies one
    ("data/train_sft-00000-of-00001-a3ecf9.parquet data/test_sft-00000-of-00001.parquet", "", "1 1"),
    ("train_sft.jsonl test_sft.jsonl train_gen.jsonl test_gen.jsonl", "@train_gen", "1 1"),
    ("train_sft.jsonl test_sft.jsonl train_gen.jsonl", "", "name one by @"),
    ("code.jsonl math.jsonl chat.jsonl", "", "3 0"),
    ("code.jsonl math.jsonl dev.jsonl", "@train", "2 1"),
    ("code.jsonl math.jsonl dev.jsonl", "@math", "1 1"),
    ("train/a.csv train/b.csv valid/a.csv", "", "2 1"),
    ("contest.jsonl latest.jsonl", "", "2 0"),
    ("test.jsonl", "", "name one by @test"),
    ("test.jsonl train.jsonl", "@test", "1 0"),
    ("default/train/0000.parquet other/train/0000.parquet", "", "1 0"),
    ("README.md .hidden/train.jsonl", "", "no file"),
]


@pytest.mark.parametrize(("paths", "split", "chosen"), LISTS)
def test_the_files_of_a_split_by_their_names(paths, split, chosen):
    def choose() -> str:
        found = choose_files(choose_config(paths.split(), None), split.strip("@") or None)
        return f"{len(found.train)} {len(found.held_out)}"

    assert chosen in (complaint(choose) if "name" in chosen or "no file" in chosen else choose())


# ---------------------------------------------------------------------- models, a file on no hub


def test_a_model_is_fetched_once_without_what_it_does_not_need(fake, tmp_path, monkeypatch):
    fake.files = model_files()
    folder = tmp_path / "base" / "models" / "Org--Name-0.6B"
    assert fetch_model("hf:Org/Name-0.6B", without_weights=True) == folder  # its shape, for a dry run
    assert data_files(folder) == ["config.json"]
    assert fetch_model("hf:Org/Name-0.6B") == folder
    names = ["chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
    assert data_files(folder) == names and (folder / "model.safetensors").read_bytes() == BODY
    assert fake.requests("GET", "/api/models/Org/Name-0.6B") and fake.requests("GET", f"/resolve/{COMMIT}/config.json")
    assert fetch_model("hf:Org/Name-0.6B@v1.0").name == "Org--Name-0.6B@v1.0"
    assert fake.requests("GET", "/revision/v1.0")
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    assert fetch_model("hf:Org/Name-0.6B") == folder
    # A run with adapters asks for the hash of the weights: it was computed while they arrived.
    monkeypatch.setattr(storage, "sha256", lambda path: pytest.fail(f"{path} is read again"))
    assert hashes.sha256(folder / "model.safetensors") == sha256(BODY)


def test_the_tables_name_real_files():
    assert (*catalog.DATASETS, "ORG/NAME") == corpus.HUB_NAMES
    assert list(catalog.TASKS["gsm8k"].splits["test"]) == ["main/test-00000-of-00001.parquet"]
    assert list(catalog.TASKS["smoltalk"].splits["train"])[3] == "data/train-00003-of-00004.parquet"
    for task in catalog.TASKS.values():
        assert len(task.sources["hf"].revision) == 40
        hashes = [sha256 for files in task.splits.values() for sha256 in files.values() if sha256]
        assert len(set(hashes)) == len(hashes) and all(len(one) == 64 for one in hashes)
