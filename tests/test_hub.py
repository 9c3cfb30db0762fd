"""hub.py against a server that imitates a hub: what lands on the disk, and what the server was asked."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections import deque
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nanochat.data import hub
from nanochat.data.hub import Client, Dataset, Remote, Shards, TaskData, fetch, fetch_split
from nanochat.shell.cli import UserError

BODY = bytes(range(256)) * 400  # 102,400 bytes


class FakeHub:
    """Two servers: the hub redirects to the one that keeps the bytes. `faults` are used up, one a request."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.hub_faults: deque[str] = deque()
        self.faults: deque[str] = deque()
        self.etag = '"v1"'
        self.linked = True
        self.seen: list[tuple[str, str, dict[str, str]]] = []  # server, path, headers
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), self.handler(kind)) for kind in ("hub", "store")]
        self.hub_url, self.store_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in self.servers)
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def asked(self, kind: str) -> list[dict[str, str]]:
        """Headers of each request that one server saw."""
        return [headers for server, _, headers in self.seen if server == kind]

    def handler(fake, kind: str):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format, *args):
                pass

            def answer(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            def do_GET(self):
                fake.seen.append((kind, self.path, {key.lower(): value for key, value in self.headers.items()}))
                faults = fake.hub_faults if kind == "hub" else fake.faults
                fault = faults.popleft() if faults else ""
                if fault.isdigit():
                    return self.answer(int(fault))
                if fault.startswith("wait "):
                    return self.answer(429, Retry_After=fault[5:])
                if fault == "silent":
                    time.sleep(0.5)
                    return None
                return self.hub() if kind == "hub" else self.store(fault)

            def hub(self):
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                if url.path.startswith("/api/datasets/"):
                    return self.tree_hf(url, query)
                if url.path.startswith("/api/v1/datasets/"):
                    return self.tree_modelscope(query)
                name = urllib.parse.unquote(url.path.split("/resolve/")[1].split("/", 1)[1])
                if name not in fake.files:
                    return self.answer(404)
                sha256 = hashlib.sha256(fake.files[name]).hexdigest()
                linked = {"X_Linked_Etag": f'"{sha256}"', "X_Linked_Size": str(len(fake.files[name]))}
                location = f"{fake.store_url}/{urllib.parse.quote(name)}"
                return self.answer(302, Location=location, **(linked if fake.linked else {}))

            def tree_hf(self, url, query):
                names = sorted(fake.files)
                page = int(query.get("cursor", 0))
                rows = [{"type": "directory", "path": "some/folder"}] if page == 0 else []
                for name in names[page * 2 : page * 2 + 2]:
                    body = fake.files[name]
                    lfs = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body)}
                    rows.append({"type": "file", "path": name, "size": len(body), "lfs": lfs})
                more = page * 2 + 2 < len(names)
                # As behind a mirror: the link names the hub itself, which this machine may not reach.
                link = f'<https://hub.invalid{url.path}?cursor={page + 1}>; rel="next"' if more else ""
                return self.answer(200, json.dumps(rows).encode(), Link=link)

            def tree_modelscope(self, query):
                names = sorted(fake.files)
                start = (int(query["PageNumber"]) - 1) * 2
                rows = [
                    {"Path": name, "Size": len(body), "Sha256": hashlib.sha256(body).hexdigest(), "Type": "blob"}
                    for name in names[start : start + 2]
                    for body in [fake.files[name]]
                ]
                return self.answer(200, json.dumps({"Data": {"Files": rows}}).encode())

            def store(self, fault: str):
                body = fake.files[urllib.parse.unquote(self.path[1:])]
                if fault == "wrong":
                    body = body[:-1] + b"!"
                if fault == "slow":
                    time.sleep(0.4)
                offset, asked = 0, self.headers.get("Range")
                if asked and fault != "no range" and self.headers.get("If-Range") == fake.etag:
                    offset = int(asked.removeprefix("bytes=").removesuffix("-"))
                if asked and fault == "ignores if-range":
                    offset = int(asked.removeprefix("bytes=").removesuffix("-"))
                if offset >= len(body):
                    return self.answer(416, Content_Range=f"bytes */{len(body)}")
                rest = body[offset:]
                sent = rest[: int(fault[4:])] if fault.startswith("cut ") else rest
                headers = {"ETag": fake.etag}
                if offset:
                    headers["Content_Range"] = f"bytes {offset}-{len(body) - 1}/{len(body)}"
                return self.answer(206 if offset else 200, sent, len(rest), **headers)

        return Handler


@pytest.fixture
def fake(monkeypatch, tmp_path):
    fake = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", fake.hub_url + "/")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", fake.hub_url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield fake
    fake.close()


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def client(fake, waits) -> Client:
    return Client(sleep=waits.append, jitter=lambda: 0.5)


def download(fake: FakeHub, client: Client, folder: Path, **known) -> Path:
    fake.files.setdefault("a.parquet", BODY)
    place = Shards("org/name", "main")
    return client.download(client.url(place, Remote("a.parquet")), folder / "a.parquet", Remote("a.parquet", **known))


def left_over(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name != ".lock")


def test_download_follows_the_redirect_and_leaves_one_whole_file(fake, client, waits, tmp_path):
    assert download(fake, client, tmp_path).read_bytes() == BODY
    assert [(server, path) for server, path, _ in fake.seen] == [
        ("hub", "/datasets/org/name/resolve/main/a.parquet"),
        ("store", "/a.parquet"),
    ]
    assert left_over(tmp_path) == ["a.parquet"] and waits == []
    download(fake, client, tmp_path)
    assert len(fake.seen) == 2  # the second call asked nobody


def test_the_token_stays_with_the_hub(fake, client, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    download(fake, client, tmp_path)
    assert [headers.get("authorization") for headers in fake.asked("hub")] == ["Bearer secret"]
    assert [headers.get("authorization") for headers in fake.asked("store")] == [None]


def test_a_cut_connection_resumes_where_it_ended(fake, client, waits, tmp_path):
    fake.faults.extend(["cut 1000", "cut 5000"])
    assert download(fake, client, tmp_path).read_bytes() == BODY
    assert [headers.get("range") for headers in fake.asked("store")] == [None, "bytes=1000-", "bytes=6000-"]
    assert [headers.get("if-range") for headers in fake.asked("store")] == [None, '"v1"', '"v1"']
    assert waits == [2.0, 2.0]  # each attempt brought bytes, so the backoff does not grow


def test_a_killed_process_is_resumed_by_the_next(fake, waits, tmp_path):
    fake.faults.append("cut 1000")
    first = Client(attempts=1, sleep=waits.append)
    with pytest.raises(UserError, match="1,000 of 102,400 bytes.*run it again to resume"):
        download(fake, first, tmp_path)
    assert left_over(tmp_path) == ["a.parquet.partial", "a.parquet.partial.json"]
    assert (tmp_path / "a.parquet.partial").read_bytes() == BODY[:1000]
    assert download(fake, Client(), tmp_path).read_bytes() == BODY
    assert fake.asked("store")[-1]["range"] == "bytes=1000-"


def test_a_whole_partial_is_only_renamed(fake, client, tmp_path):
    (tmp_path / "a.parquet.partial").write_bytes(BODY)
    known = {"etag": '"v1"', "size": len(BODY), "sha256": hashlib.sha256(BODY).hexdigest()}
    (tmp_path / "a.parquet.partial.json").write_text(json.dumps(known))
    assert download(fake, client, tmp_path).read_bytes() == BODY
    assert [headers.get("range") for headers in fake.asked("store")] == [f"bytes={len(BODY)}-"]


def test_a_partial_of_unknown_origin_starts_over(fake, client, tmp_path):
    (tmp_path / "a.parquet.partial").write_bytes(b"?" * 5000)
    assert download(fake, client, tmp_path).read_bytes() == BODY
    assert [headers.get("range") for headers in fake.asked("store")] == [None]


@pytest.mark.parametrize("server", ["", "ignores if-range"])
def test_a_file_that_changed_between_attempts_starts_over(fake, client, tmp_path, server):
    fake.linked = False  # no sha256 to save us
    fake.faults.append("cut 1000")
    with pytest.raises(UserError):
        download(fake, Client(attempts=1), tmp_path)
    fake.etag, fake.files["a.parquet"] = '"v2"', BODY[::-1]
    fake.faults.append(server)
    assert download(fake, client, tmp_path).read_bytes() == BODY[::-1]
    assert fake.asked("store")[1]["if-range"] == '"v1"'


def test_a_file_that_shrank_starts_over(fake, client, tmp_path):
    fake.faults.append("cut 5000")
    with pytest.raises(UserError):
        download(fake, Client(attempts=1), tmp_path)
    fake.files["a.parquet"] = BODY[:3000]
    fake.etag = '"v1"'  # a server that lies about it: 416 says the rest is not there
    assert download(fake, client, tmp_path).read_bytes() == BODY[:3000]


def test_a_server_without_ranges_sends_it_all_again(fake, client, tmp_path):
    fake.faults.extend(["cut 1000", "no range"])
    assert download(fake, client, tmp_path).read_bytes() == BODY
    assert len(fake.asked("store")) == 2


def test_retry_after_is_honoured_in_seconds_and_as_a_date(fake, client, waits, tmp_path):
    fake.hub_faults.extend(["wait 7", f"wait {formatdate(time.time() + 100, usegmt=True)}", "wait 86400"])
    assert download(fake, client, tmp_path).read_bytes() == BODY
    assert waits[0] == 7.0 and 95 < waits[1] <= 100 and waits[2] == 300.0


def test_server_errors_back_off_exponentially_then_give_up(fake, client, waits, tmp_path):
    fake.faults.extend(["503", "500", "502"])
    assert download(fake, client, tmp_path).read_bytes() == BODY
    assert waits == [2.0, 4.0, 8.0]
    fake.faults.extend(["503"] * 6)
    with pytest.raises(UserError, match=r"failed 6 times in a row \(HTTP 503\)"):
        download(fake, client, tmp_path / "other")
    assert waits[3:] == [2.0, 4.0, 8.0, 16.0, 32.0] and len(fake.asked("store")) == 10


def test_a_wrong_hash_is_fetched_once_more(fake, client, tmp_path):
    fake.faults.append("wrong")
    assert download(fake, client, tmp_path).read_bytes() == BODY
    assert [headers.get("range") for headers in fake.asked("store")] == [None, None]


def test_a_hash_wrong_twice_is_an_error_and_leaves_nothing(fake, client, tmp_path):
    fake.faults.extend(["wrong", "wrong"])
    with pytest.raises(UserError, match="damaged twice.*sha256"):
        download(fake, client, tmp_path)
    assert left_over(tmp_path) == []


def test_size_and_hash_of_a_listing_are_checked_too(fake, client, tmp_path):
    fake.linked = False
    with pytest.raises(UserError, match="102,400 bytes instead of 5"):
        download(fake, client, tmp_path, size=5)
    with pytest.raises(UserError, match="sha256"):
        download(fake, client, tmp_path, sha256="0" * 64)


@pytest.mark.parametrize(("status", "says"), [("404", "is the name right"), ("401", "HF_TOKEN"), ("403", "HF_TOKEN")])
def test_final_refusals_are_not_retried(fake, client, waits, tmp_path, status, says):
    fake.hub_faults.append(status)
    with pytest.raises(UserError, match=f"HTTP {status}.*{says}"):
        download(fake, client, tmp_path)
    assert waits == [] and len(fake.seen) == 1


def test_a_full_disk_says_what_is_needed_and_free(fake, client, tmp_path, monkeypatch):
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2000})())
    with pytest.raises(UserError, match="a.parquet needs 102,400 bytes, .* has 2,000 free"):
        download(fake, client, tmp_path)
    monkeypatch.undo()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    fake_url = Shards("org/name", "main")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the disk filled up at .*partial"):
        patch.setattr(hub.os, "fsync", full)
        client.download(client.url(fake_url, Remote("a.parquet")), tmp_path / "b.parquet", Remote("a.parquet"))


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_offline_is_one_line_at_once(fake, waits, monkeypatch):
    refused = Client(sleep=waits.append, endpoint=f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(UserError) as caught:
        fetch("climbmix", client=refused)
    line = str(caught.value)
    assert "HF_ENDPOINT" in line and "--hub modelscope --data fineweb-edu" in line and "--data demo" in line
    assert "\n" not in line and waits == []

    def no_names(*args, **kwargs):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", no_names)
    says = r"cannot reach hub.invalid \(Temporary.*or --hub modelscope, or use --data demo"
    with pytest.raises(UserError, match=says):
        fetch("fineweb-edu", client=Client(sleep=waits.append, endpoint="http://hub.invalid"))
    assert waits == []


def test_a_hub_that_never_answers_is_given_up_after_two_tries(fake, waits, tmp_path):
    fake.hub_faults.extend(["silent"] * 4)
    with pytest.raises(UserError, match="cannot reach.*HF_ENDPOINT"):
        download(fake, Client(sleep=waits.append, timeout_seconds=0.1), tmp_path)
    assert len(waits) == 1


def test_fetch_takes_the_first_shards_and_the_last(fake, client, monkeypatch, tmp_path):
    place = Shards("org/name", "abc123", "shard_{:02d}.parquet", 12)
    monkeypatch.setitem(hub.DATASETS, "tiny", Dataset({"hf": place}, "none", 0))
    fake.files = {f"shard_{index:02d}.parquet": b"%d" % index for index in range(12)}
    paths = fetch("tiny", shards=2, client=client)
    folder = tmp_path / "base" / "data" / "tiny"
    assert [(path.parent, path.name, path.read_bytes()) for path in paths] == [
        (folder, "shard_00.parquet", b"0"),
        (folder, "shard_01.parquet", b"1"),
        (folder, "shard_11.parquet", b"11"),
    ]
    assert fake.seen[0][1] == "/datasets/org/name/resolve/abc123/shard_00.parquet"
    assert len(fetch("tiny", client=client)) == 9  # eight train shards unless told otherwise
    assert len(fetch("tiny", shards=99, client=client)) == 12
    seen = len(fake.seen)
    assert len(fetch("tiny", shards=5, client=Client(endpoint="http://127.0.0.1:9"))) == 6  # here already: no network
    assert len(fake.seen) == seen


@pytest.mark.parametrize("name", ["hf", "modelscope"])
def test_any_dataset_of_a_hub_by_its_listing(fake, name, tmp_path):
    fake.files = {f"data/{index}.parquet": b"%d" % index * 10 for index in range(5)} | {"README.md": b"hello"}
    client = Client(name)
    paths = fetch("org/name", name, shards=2, client=client)
    assert [path.name for path in paths] == ["data--0.parquet", "data--1.parquet", "data--4.parquet"]
    assert paths[2].read_bytes() == b"4" * 10
    listings = [path for server, path, _ in fake.seen if server == "hub" and path.startswith("/api/")]
    assert len(listings) == {"hf": 3, "modelscope": 4}[name]  # 6 files, 2 a page
    assert all(fake.hub_url not in path for path in listings)
    fetch("org/name", name, shards=1, client=client)
    assert len([path for _, path, _ in fake.seen if path.startswith("/api/")]) == len(listings)  # remembered


def test_a_listing_guards_the_content(fake, client, tmp_path):
    fake.files = {"0.parquet": BODY, "1.parquet": BODY[:999]}
    fake.linked = False
    fake.faults.extend(["wrong", "wrong"])
    with pytest.raises(UserError, match="org/name: 0.parquet arrived damaged twice"):
        fetch("org/name", client=client)


def test_mistakes_in_flags_and_environment(fake, monkeypatch, client):
    with pytest.raises(UserError, match="--hub 'hugging' is unknown"):
        fetch("climbmix", "hugging")
    with pytest.raises(UserError, match="no copy of climbmix is known on modelscope.*--data fineweb-edu or"):
        fetch("climbmix", "modelscope")
    with pytest.raises(UserError, match="--shards 0"):
        fetch("climbmix", shards=0)
    with pytest.raises(UserError, match="lists no parquet file in org/name"):
        fetch("org/name", client=client)
    monkeypatch.setenv("HF_ENDPOINT", "my-mirror")
    with pytest.raises(UserError, match="HF_ENDPOINT='my-mirror' is not an address"):
        Client()


def test_the_table_names_real_shards():
    for dataset in hub.DATASETS.values():
        for place in dataset.hubs.values():
            assert place.repo.count("/") == 1 and bool(place.pattern) == bool(place.count)
            assert place.pattern or place.folder
    assert hub.DATASETS["climbmix"].hubs["hf"].pattern.format(6542) == "shard_06542.parquet"


# ---- The split of a task --------------------------------------------------------------------------------


@pytest.fixture
def tiny_task(monkeypatch) -> None:
    """A task of one test file and two train files, whose hashes are known but for the second train file's."""
    places = {"hf": Shards("org/task", "abc123"), "modelscope": Shards("copy/task", "master")}
    splits = {
        "train": (
            Remote("all/train-0.parquet", sha256=hashlib.sha256(BODY).hexdigest()),
            Remote("all/train-1.parquet"),
        ),
        "test": (Remote("all/test.parquet", sha256=hashlib.sha256(b"test").hexdigest()),),
    }
    monkeypatch.setitem(hub.TASKS, "tiny", TaskData(places, "none", splits))


def test_a_split_is_fetched_once(fake, client, waits, tiny_task, tmp_path, capsys):
    fake.files = {"all/train-0.parquet": BODY, "all/train-1.parquet": b"more", "all/test.parquet": b"test"}
    fake.faults.append("cut 1000")
    paths = fetch_split("tiny", "train", client=client)
    folder = tmp_path / "base" / "data" / "tiny"
    assert paths == [folder / "all--train-0.parquet", folder / "all--train-1.parquet"]
    assert [path.read_bytes() for path in paths] == [BODY, b"more"] and waits == [2.0]
    assert fake.seen[0][1] == "/datasets/org/task/resolve/abc123/all/train-0.parquet"
    assert "tiny: 2 files from http://127.0.0.1" in capsys.readouterr().err
    seen = len(fake.seen)
    assert fetch_split("tiny", "train", client=Client(endpoint="http://127.0.0.1:9")) == paths  # no network needed
    assert len(fake.seen) == seen
    assert fetch_split("tiny", "test", client=client)[0].read_bytes() == b"test"


def test_a_split_has_to_have_the_known_hash(fake, client, tiny_task):
    fake.files = {"all/test.parquet": b"another text"}  # whole, and its own hash is what this mirror sends
    with pytest.raises(UserError, match="tiny: all--test.parquet arrived damaged twice.*sha256"):
        fetch_split("tiny", "test", client=client)


def test_a_split_on_modelscope_has_a_folder_of_its_own_and_its_own_hash(fake, tiny_task, tmp_path):
    fake.files = {"all/test.parquet": b"written anew"}
    paths = fetch_split("tiny", "test", "modelscope", Client("modelscope"))
    assert paths == [tmp_path / "base" / "data" / "tiny.modelscope" / "all--test.parquet"]
    assert fake.seen[0][1] == "/datasets/copy/task/resolve/master/all/test.parquet"


def test_a_split_offline_is_one_line(fake, waits):
    def line(name: str, where: str, split: str = "test") -> str:
        refused = Client(where, sleep=waits.append, endpoint=f"http://127.0.0.1:{closed_port()}")
        with pytest.raises(UserError) as caught:
            fetch_split(name, split, where, refused)
        assert "\n" not in str(caught.value) and waits == []
        return str(caught.value)

    local = "a local file or folder by gsm8k=PATH"
    assert line("gsm8k", "hf").endswith(f"set HF_ENDPOINT to a mirror, or --hub modelscope, or {local}")
    assert line("gsm8k", "modelscope").endswith(f"set MODELSCOPE_ENDPOINT to a mirror, or --hub hf, or {local}")
    assert line("humaneval", "hf").endswith("to a mirror, or a local file or folder by humaneval=PATH")
    assert line("smoltalk", "hf", "train").startswith("smoltalk: cannot reach 127.0.0.1")


def test_mistakes_about_a_split(fake):
    with pytest.raises(UserError, match="no copy of humaneval is known on modelscope: use --hub hf, or a local file"):
        fetch_split("humaneval", "test", "modelscope")
    with pytest.raises(UserError, match="--hub 'hugging' is unknown"):
        fetch_split("gsm8k", "test", "hugging")


def test_the_table_of_tasks_names_real_files():
    files = {name: {split: [f.path for f in of] for split, of in t.splits.items()} for name, t in hub.TASKS.items()}
    assert files["gsm8k"]["test"] == ["main/test-00000-of-00001.parquet"]
    assert files["mmlu"]["auxiliary_train"] == ["all/auxiliary_train-00000-of-00001.parquet"]
    assert files["arc_easy"]["train"] == ["ARC-Easy/train-00000-of-00001.parquet"]
    assert files["humaneval"] == {"test": ["openai_humaneval/test-00000-of-00001.parquet"]}
    assert files["smoltalk"]["train"][3] == "data/train-00003-of-00004.parquet"
    for task in hub.TASKS.values():
        assert len(task.hubs["hf"].revision) == 40 and all(place.repo.count("/") == 1 for place in task.hubs.values())
        hashes = [file.sha256 for of in task.splits.values() for file in of if file.sha256]
        assert len(set(hashes)) == len(hashes) and all(len(one) == 64 for one in hashes)


FETCH = """
import sys
from pathlib import Path
from nanochat.data.hub import Client, Remote
Client().download(sys.argv[1], Path(sys.argv[2]), Remote("a.parquet"))
"""


def test_two_processes_download_once(fake, tmp_path):
    fake.files["a.parquet"] = BODY
    fake.faults.append("slow")
    url = f"{fake.hub_url}/datasets/org/name/resolve/main/a.parquet"
    command = [sys.executable, "-c", FETCH, url, str(tmp_path / "a.parquet")]
    root = Path(__file__).parent.parent
    both = [subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, env=os.environ) for _ in range(2)]
    for process in both:
        assert process.communicate(timeout=15)[1].count(b"Traceback") == 0 and process.returncode == 0
    assert (tmp_path / "a.parquet").read_bytes() == BODY
    assert len(fake.asked("store")) == 1 and left_over(tmp_path) == ["a.parquet"]


def test_a_second_process_waits_for_the_lock(fake, client, tmp_path):
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        worker = threading.Thread(target=download, args=(fake, client, tmp_path))
        worker.start()
        worker.join(0.2)
        assert worker.is_alive() and fake.seen == []
        (tmp_path / "a.parquet").write_bytes(b"from the other process")
    worker.join(5)
    assert fake.seen == [] and (tmp_path / "a.parquet").read_bytes() == b"from the other process"
