"""Datasets of a hub, shard by shard: a name in, verified parquet files on this disk out.

`fetch(name, hub, shards)` (text to pretrain on) and `fetch_split(name, split, hub)` (the rows of a task) answer at
once when the files are here. Otherwise each one goes through `<file>.partial`, resumed with an HTTP Range after a
break, checked for size and sha256, and renamed when whole. One process of a machine downloads, the others wait and
find the file.

Environment: HF_ENDPOINT and MODELSCOPE_ENDPOINT (a mirror's address), HF_TOKEN (gated datasets).
"""

import contextlib
import email.utils
import errno
import fcntl
import hashlib
import http.client
import json
import os
import random
import re
import shutil
import socket
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat.shell.cli import UserError
from nanochat.shell.paths import data_dir

CHUNK_BYTES = 1 << 20
LONGEST_WAIT_SECONDS = 300.0
CLIMBMIX_REVISION = "915333b4f8b8684f39aeaafea600fea6f43fb703"
CHINESE_REVISION = "a5b574efa48beb3a8f6887ef0b093becf004328b"
GSM8K_REVISION = "e53f048856ff4f594e959d75785d2c2d37b678ee"
MMLU_REVISION = "c30699e8356da336a370243923dbaf21066bb9fe"
ARC_REVISION = "210d026faf9955653af8916fad021475a3f00453"
HUMANEVAL_REVISION = "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544"
SMOLTALK_REVISION = "f73fe857d519ff6ac5af2ea67c4d3834da7b8bcc"
ULTRAFEEDBACK_REVISION = "3949bf5f8c17c394422ccfab0c31ea9c20bdeb85"


@dataclass(frozen=True)
class Shards:
    """Where one hub keeps a dataset."""

    repo: str
    revision: str
    pattern: str = ""  # shard number -> path; empty: ask the hub for the list of `folder`
    count: int = 0  # shards behind `pattern`; the last one is validation
    folder: str = ""
    train_shards: int = 8  # how many to train on when --shards is not given


@dataclass(frozen=True)
class Dataset:
    """One row of the table below."""

    hubs: dict[str, Shards]
    licence: str
    text_column: str = "text"


# How sure we are stands above each entry; nothing here was tried from a connected machine yet.
DATASETS = {
    # Repo, pattern, last shard 6542: nanochat upstream and its forks agree; a shard is about 92 MB, 84 row groups of
    # 1,024 documents. Revision: ten files of public projects name this one. Licence: of the source,
    # nvidia/ClimbMix; its card says MIT. ModelScope is not known to have the text (nv-community/ClimbMix is tokens).
    "climbmix": Dataset(
        {"hf": Shards("karpathy/climbmix-400b-shuffle", CLIMBMIX_REVISION, "shard_{:05d}.parquet", 6543)},
        licence="CC BY-NC 4.0",
    ),
    # hf: nanochat upstream until March 2026, last shard 1822, about 100 MB each; no pinned revision was found, so only
    # the sha256 that the hub sends guards against a change. Licence: of the source, HuggingFaceFW/fineweb-edu.
    # ModelScope: public scripts name such folders; that this mirror has this one, at about 2 GB a shard, is
    # unconfirmed.
    "fineweb-edu": Dataset(
        {
            "hf": Shards("karpathy/fineweb-edu-100b-shuffle", "main", "shard_{:05d}.parquet", 1823),
            "modelscope": Shards("AI-ModelScope/fineweb-edu", "master", folder="sample/100BT", train_shards=2),
        },
        licence="ODC-By 1.0",
    ),
    # Folder 4_5 holds the highest scores, 000000.parquet and up (9,767 of them in V2.2), columns text, score, source:
    # the dataset's commit pages and its readers agree. Revision: pinned by several projects of one author. The card
    # asks for an e-mail before commercial use. Several projects link the same repo on ModelScope.
    "fineweb-edu-chinese": Dataset(
        {
            "hf": Shards("opencsg/Fineweb-Edu-Chinese-V2.1", CHINESE_REVISION, folder="4_5"),
            "modelscope": Shards("opencsg/Fineweb-Edu-Chinese-V2.1", "master", folder="4_5"),
        },
        licence="Apache-2.0, commercial use by permission",
    ),
}


@dataclass(frozen=True)
class Remote:
    """One file on a hub; what is not known yet is None."""

    path: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class TaskData:
    """One row of the table below: the files of each split, at the same paths on every hub."""

    hubs: dict[str, Shards]
    licence: str
    splits: dict[str, tuple[Remote, ...]]  # the sha256 are those of the pinned revision on hf


def _split(pattern: str, sha256: str | None = None, count: int = 1) -> tuple[Remote, ...]:
    """`data/test` -> data/test-00000-of-00001.parquet, as the `datasets` library names files."""
    return tuple(Remote(f"{pattern}-{n:05d}-of-{count:05d}.parquet", sha256=sha256) for n in range(count))


# All paths and revisions on hf: named alike by five or more public projects that pin them; the sha256: by two or more
# that check them. Nothing here was tried from a connected machine yet. ModelScope: the repo is linked by public
# projects; which of them also name a file there stands below.
TASKS = {
    # 7,473 and 1,319 rows. A newer revision (740312a) holds the same bytes. ModelScope: its main/test has this sha256.
    "gsm8k": TaskData(
        {"hf": Shards("openai/gsm8k", GSM8K_REVISION), "modelscope": Shards("AI-ModelScope/gsm8k", "master")},
        licence="MIT",
        splits={
            "train": _split("main/train", "ea82612ea9582142387730c793eb67d3b12849002bc0b7fa6f8efafa7351419d"),
            "test": _split("main/test", "ee7b8da9e381df27b9e3f7758a159ab2bdaa4dbaa910546cbbc47e0cb44e4f59"),
        },
    ),
    # 99,842, 1,531 and 14,042 rows (its card). ModelScope: a file of one subject is named there, of `all` none.
    "mmlu": TaskData(
        {"hf": Shards("cais/mmlu", MMLU_REVISION), "modelscope": Shards("cais/mmlu", "master")},
        licence="MIT",
        splits={
            "auxiliary_train": _split("all/auxiliary_train"),
            "validation": _split("all/validation"),
            "test": _split("all/test", "74a41822ce7d3def56e1682f958469c04642a5336a5ce912fa375fdb90fb25d7"),
        },
    ),
    # Easy 2,251 and 2,376 rows, Challenge 1,119 and 1,172. ModelScope: no file is named.
    "arc_easy": TaskData(
        {"hf": Shards("allenai/ai2_arc", ARC_REVISION), "modelscope": Shards("allenai/ai2_arc", "master")},
        licence="CC BY-SA 4.0",
        splits={
            "train": _split("ARC-Easy/train", "b315db8a4be597dc7daa50a4e70d48dd7c990c32085629e6ccd8c926beaa80b5"),
            "test": _split("ARC-Easy/test", "4160597d618ae851c7eb04e281574f3f654776216ac6b6641588d64527b47177"),
        },
    ),
    "arc_challenge": TaskData(
        {"hf": Shards("allenai/ai2_arc", ARC_REVISION), "modelscope": Shards("allenai/ai2_arc", "master")},
        licence="CC BY-SA 4.0",
        splits={
            "train": _split("ARC-Challenge/train", "e488c1587ffdcfc8443f916c53488a95cd471c5790e0746c6bfe4cecf20962cb"),
            "test": _split("ARC-Challenge/test", "62f03257e737aed263f55c6abf87c7bb0028a44a6bdd2a26eb1279eb42c1d1e9"),
        },
    ),
    # 164 rows. ModelScope has opencompass/humaneval, whose files nobody names: left out.
    "humaneval": TaskData(
        {"hf": Shards("openai/openai_humaneval", HUMANEVAL_REVISION)},
        licence="MIT",
        splits={"test": _split("openai_humaneval/test")},
    ),
    # smol-smoltalk, the part of SmolTalk meant for small models: about 460,000 and 24,000 rows, 923 and 48 MB (the
    # hub's own listing). No copy on ModelScope was found.
    "smoltalk": TaskData(
        {"hf": Shards("HuggingFaceTB/smol-smoltalk", SMOLTALK_REVISION)},
        licence="Apache-2.0",
        splits={
            "train": _split("data/train", count=4),
            "test": _split("data/test", "be6773dcce145f3918ff14237b1f765affa427b0b13f6a02d397e665ac908b9a"),
        },
    ),
    # 61,135 and 2,000 pairs. A sha256 that two projects check was not found; nor a copy on ModelScope.
    "ultrafeedback": TaskData(
        {"hf": Shards("HuggingFaceH4/ultrafeedback_binarized", ULTRAFEEDBACK_REVISION)},
        licence="MIT",
        splits={"train_prefs": _split("data/train_prefs"), "test_prefs": _split("data/test_prefs")},
    ),
}


def fetch(name: str, hub: str = "hf", shards: int | None = None, client: "Client | None" = None) -> list[Path]:
    """Download what is missing and return the shards in order: the train ones, then the validation one.

    `name` is a key of DATASETS or any `org/name` of the hub. Raises UserError: with what to do next.
    """
    _known(hub)
    if shards is not None and shards < 1:
        raise UserError(f"--shards {shards} is too few: at least 1")
    if name in DATASETS and hub not in DATASETS[name].hubs:
        has = [other for other, dataset in DATASETS.items() if hub in dataset.hubs]
        raise UserError(f"no copy of {name} is known on {hub}: use --hub hf, or --data {' or '.join(has)}")
    branch = "main" if hub == "hf" else "master"
    place = DATASETS[name].hubs[hub] if name in DATASETS else Shards(name, branch)
    client = client or Client(hub)
    other = "modelscope" if hub == "hf" else "hf"
    copied = name not in DATASETS or other in DATASETS[name].hubs
    client.elsewhere = f"--hub {other}" + ("" if copied else " --data fineweb-edu")
    folder = data_dir(name.replace("/", "--") + ("" if hub == "hf" else f".{hub}"))
    try:
        if place.pattern:
            files = [Remote(place.pattern.format(index)) for index in range(place.count)]
        else:
            files = _listed(client, place, folder)
        train = files[: min(shards or place.train_shards, max(len(files) - 1, 1))]
        wanted = train + [files[-1]] * (files[-1] not in train)
        missing = sum(not (folder / _flat(file.path)).exists() for file in wanted)
        if missing and name in DATASETS:
            licence = DATASETS[name].licence
            print(f"{name}: {missing} shards from {client.endpoint} (licence: {licence})", file=sys.stderr, flush=True)
        return [client.download(client.url(place, file), folder / _flat(file.path), file) for file in wanted]
    except UserError as error:
        here = sorted(folder.glob("*.parquet"))
        also = f"; {len(here)} whole shards are here already: --data {folder}" if here else ""
        raise UserError(f"{name}: {error}{also}") from error


def fetch_split(name: str, split: str, hub: str = "hf", client: "Client | None" = None) -> list[Path]:
    """Download what is missing of one split of a task's dataset and return its files in order.

    `name` and `split` are keys of TASKS. Raises UserError: with what to do next.
    """
    _known(hub)
    task, local = TASKS[name], f"a local file or folder by {name}=PATH"
    if hub not in task.hubs:
        raise UserError(f"no copy of {name} is known on {hub}: use --hub hf, or {local}")
    client = client or Client(hub)
    client.elsewhere = "".join(f"--hub {other}" for other in task.hubs if other != hub)
    client.at_home = local
    folder = data_dir(name if hub == "hf" else f"{name}.{hub}")
    files = [file if hub == "hf" else Remote(file.path) for file in task.splits[split]]
    missing = sum(not (folder / _flat(file.path)).exists() for file in files)
    if missing:
        text = f"{name}: {missing} {'file' if missing == 1 else 'files'} from {client.endpoint}"
        print(f"{text} (licence: {task.licence})", file=sys.stderr, flush=True)
    try:
        return [client.download(client.url(task.hubs[hub], file), folder / _flat(file.path), file) for file in files]
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _known(hub: str) -> None:
    if hub not in _ENDPOINTS:
        raise UserError(f"--hub {hub!r} is unknown: hf or modelscope")


def _flat(path: str) -> str:
    """A path of a repo as one file name, so that it cannot leave its folder."""
    return path.replace("/", "--").lstrip(".")


def _listed(client: "Client", place: Shards, folder: Path) -> list[Remote]:
    """The parquet files of a repo, asked once and then remembered in `listing.json`."""
    memory, key = folder / "listing.json", f"{place.repo}@{place.revision}/{place.folder}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(memory.read_text())
        if known["key"] == key:
            return [Remote(*row) for row in known["files"]]
    listing = client.list_hf(place) if client.hub == "hf" else client.list_modelscope(place)
    files = sorted((file for file in listing if file.path.endswith(".parquet")), key=lambda file: file.path)
    if not files:
        raise UserError(f"{client.hub} lists no parquet file in {place.repo}/{place.folder}")
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"listing.{os.getpid()}.tmp"
    fresh.write_text(json.dumps({"key": key, "files": [[file.path, file.size, file.sha256] for file in files]}))
    fresh.replace(memory)
    return files


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, keeps what the hub says of the file on the way, keeps the token from other hosts."""

    def __init__(self) -> None:
        self.linked: dict[str, str] = {}

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        self.linked.update({key.lower(): value for key, value in headers.items() if key.lower().startswith("x-linked")})
        request = super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)
        if request and urllib.parse.urlsplit(newurl)[:2] != urllib.parse.urlsplit(req.full_url)[:2]:  # scheme, host
            request.remove_header("Authorization")
        return request

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302  # Python 3.10 does not know 308


class _Again(Exception):
    """This attempt failed in a way that another may mend."""

    def __init__(self, reason: object, wait_seconds: float | None = None):
        super().__init__(str(reason) or type(reason).__name__)
        self.wait_seconds = wait_seconds


@dataclass
class Client:
    """One hub over HTTP. `sleep` and `jitter` are arguments so that tests need no real time."""

    hub: str = "hf"
    attempts: int = 6  # in a row without a new byte
    timeout_seconds: float = 20.0
    sleep: Callable[[float], object] = time.sleep
    jitter: Callable[[], float] = random.random
    endpoint: str = ""
    reached: bool = field(default=False, init=False)  # an answer came, so this machine is not offline
    elsewhere: str = field(default="--hub modelscope", init=False)  # what to try when the hub is out of reach ...
    at_home: str = field(default="use --data demo", init=False)  # ... and without a network

    def __post_init__(self) -> None:
        variable, default = _ENDPOINTS[self.hub]
        self.endpoint = (self.endpoint or os.environ.get(variable) or default).rstrip("/")
        if not re.match(r"https?://[^/]", self.endpoint):
            raise UserError(f"{variable}={self.endpoint!r} is not an address: it begins with https://")

    def url(self, place: Shards, file: Remote) -> str:
        return f"{self.endpoint}/datasets/{place.repo}/resolve/{place.revision}/{urllib.parse.quote(file.path)}"

    def list_hf(self, place: Shards) -> Iterator[Remote]:
        """Every file below the folder, with the sha256 of those in large file storage."""
        where = f"/api/datasets/{place.repo}/tree/{place.revision}/{urllib.parse.quote(place.folder)}".rstrip("/")
        where += "?recursive=true&limit=1000"
        while where:
            rows, headers = self._json(self.endpoint + where)
            for row in rows:
                if row.get("type") == "file":
                    yield Remote(row["path"], row.get("size"), _sha256((row.get("lfs") or {}).get("oid")))
            following = re.search(r'<([^>]+)>;\s*rel="next"', headers.get("Link") or "")
            # A mirror repeats the hub's own address here: keep the path and query, ask the mirror.
            where = urllib.parse.urlsplit(following[1])._replace(scheme="", netloc="").geturl() if following else ""

    def list_modelscope(self, place: Shards) -> Iterator[Remote]:
        seen: set[str] = set()
        for page in range(1, 10_000):
            query = {"Revision": place.revision, "Root": place.folder, "Recursive": "True"}
            query |= {"PageNumber": str(page), "PageSize": "100"}
            where = f"/api/v1/datasets/{place.repo}/repo/tree?{urllib.parse.urlencode(query)}"
            reply, _ = self._json(self.endpoint + where)
            rows = [row for row in (reply.get("Data") or {}).get("Files") or [] if row["Path"] not in seen]
            if not rows:
                return
            seen.update(row["Path"] for row in rows)
            for row in rows:
                if row.get("Type") != "tree":
                    yield Remote(row["Path"], row.get("Size"), _sha256(row.get("Sha256")))

    def download(self, url: str, target: Path, expected: Remote) -> Path:
        """Leave the whole, verified file at `target`; a second call finds it there."""
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        with (target.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the other processes of this machine wait here
            if target.exists():
                return target
            for _ in range(2):  # a wrong hash gets a second chance
                known = self._patiently(lambda: self._transfer(url, partial, expected), partial)
                problem = _mismatch(partial, known)
                if not problem:
                    partial.replace(target)
                    descriptor = os.open(target.parent, os.O_RDONLY)
                    os.fsync(descriptor)  # the rename survives a power cut
                    os.close(descriptor)
                    _memory(partial).unlink(missing_ok=True)
                    return target
                _forget(partial)
        raise UserError(f"{target.name} arrived damaged twice ({problem}): try again later, or from another mirror")

    def _transfer(self, url: str, partial: Path, expected: Remote) -> Remote:
        """One connection: append what is missing to `partial`. Returns what the hub said of the file."""
        saved: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            saved = json.loads(_memory(partial).read_text())
        if partial.exists() and not saved.get("etag"):  # nothing to prove that the rest belongs to the same file
            _forget(partial)
        offset = partial.stat().st_size if partial.exists() else 0
        headers = {"Range": f"bytes={offset}-", "If-Range": saved["etag"]} if offset else {}
        redirects = _Redirects()
        with self._open(url, headers, redirects) as response:
            if response.status == 416:  # nothing is missing, or the file there is a shorter one
                if (response.headers.get("Content-Range") or "") != f"bytes */{offset}":
                    _forget(partial)
                    raise _Again("the file changed", wait_seconds=0)
                return Remote(expected.path, saved.get("size"), saved.get("sha256"))
            etag, total = response.headers.get("ETag") or "", int(response.headers.get("Content-Length") or -1)
            if response.status == 206:
                match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range") or "")
                if not match or int(match[1]) != offset or (etag and etag != saved["etag"]):
                    _forget(partial)
                    raise _Again("the file changed", wait_seconds=0)
                total = int(match[2]) if match[2] != "*" else offset + total
            else:  # everything from the start: first attempt, changed file, or a server without ranges
                offset = 0
            size = expected.size or int(redirects.linked.get("x-linked-size") or 0) or (total if total >= 0 else None)
            sha256 = expected.sha256 or _sha256(redirects.linked.get("x-linked-etag")) or _sha256(etag)
            if total >= 0:
                _need_room(partial, total - offset)
            if response.status != 206:
                partial.write_bytes(b"")
                strong = "" if etag.startswith("W/") else etag
                _memory(partial).write_text(json.dumps({"etag": strong, "size": size, "sha256": sha256}))
            with partial.open("ab") as file, _progress(expected.path, offset, total) as advance:
                while chunk := response.read1(CHUNK_BYTES):  # read() would lose what came before a break
                    file.write(chunk)
                    advance(len(chunk))
                file.flush()
                os.fsync(file.fileno())
        if total >= 0 and partial.stat().st_size < total:
            raise _Again(f"the connection ended at {partial.stat().st_size:,} of {total:,} bytes")
        return Remote(expected.path, size, sha256)

    def _json(self, url: str) -> tuple[Any, Any]:
        def ask() -> tuple[Any, Any]:
            with self._open(url, {}, _Redirects()) as response:
                return json.loads(response.read()), response.headers

        try:
            return self._patiently(ask)
        except json.JSONDecodeError as error:  # a login page in its place
            raise UserError(f"{self._host()} did not answer in JSON: is a proxy or a login page in between?") from error

    def _open(self, url: str, headers: dict[str, str], redirects: _Redirects):
        """A response, or the right exception: _Again to retry, UserError to give up."""
        token = os.environ.get("HF_TOKEN") if self.hub == "hf" else None
        headers = {"User-Agent": "nanochat", **headers} | ({"Authorization": f"Bearer {token}"} if token else {})
        opener = urllib.request.build_opener(redirects)
        try:
            response = opener.open(urllib.request.Request(url, headers=headers), timeout=self.timeout_seconds)
        except urllib.error.HTTPError as error:
            self.reached = True
            if error.code == 416:
                return error
            error.close()
            if error.code in (408, 425, 429) or error.code >= 500:
                raise _Again(f"HTTP {error.code}", _retry_after(error.headers.get("Retry-After"))) from error
            if error.code in (401, 403):
                mend = "accept the terms of this dataset there and set HF_TOKEN"
            else:
                mend = "is the name right, does this mirror have it?"
            raise UserError(f"{url} answers HTTP {error.code}: {mend}") from error
        self.reached = True
        return response

    def _patiently(self, attempt: Callable[[], Any], partial: Path | None = None) -> Any:
        """Call until it succeeds, with exponential backoff; give up fast when the hub was never reached."""
        failures, best = 0, -1
        while True:
            try:
                return attempt()
            except (_Again, OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and partial:
                    raise UserError(f"the disk filled up at {partial}: free space or move NANOCHAT_BASE_DIR") from error
                if isinstance(error, OSError) and not isinstance(error, (urllib.error.URLError, *_NETWORK)):
                    raise  # the disk's fault, not the network's
                bytes_here = partial.stat().st_size if partial and partial.exists() else 0
                failures, best = (1, bytes_here) if bytes_here > max(best, 0) else (failures + 1, best)
                reason = getattr(error, "reason", error)
                if not self.reached and (isinstance(reason, _OFFLINE) or failures >= 2):
                    raise UserError(self._way_out(reason)) from error
                if failures >= self.attempts:
                    text = f"{self._host()} failed {failures} times in a row ({reason}): run it again to resume"
                    raise UserError(text) from error
                wait = getattr(error, "wait_seconds", None)
                if wait is None:
                    wait = min(60.0, 2.0**failures) * (0.5 + self.jitter())
                self.sleep(min(wait, LONGEST_WAIT_SECONDS))

    def _host(self) -> str:
        return urllib.parse.urlsplit(self.endpoint).netloc

    def _way_out(self, reason: object) -> str:
        variable, why = _ENDPOINTS[self.hub][0], getattr(reason, "strerror", None) or reason
        ways = [f"set {variable} to a mirror", self.elsewhere, self.at_home]
        return f"cannot reach {self._host()} ({why}): {', or '.join(way for way in ways if way)}"


_ENDPOINTS = {
    "hf": ("HF_ENDPOINT", "https://huggingface.co"),
    "modelscope": ("MODELSCOPE_ENDPOINT", "https://www.modelscope.cn"),
}
_NETWORK = (ConnectionError, TimeoutError, socket.timeout, socket.gaierror, ssl.SSLError)  # noqa: UP041 (Python 3.10)
_OFFLINE = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)  # waiting will not mend these


def _memory(partial: Path) -> Path:
    """What is known of the file that `partial` is a part of: ETag, size, sha256."""
    return partial.with_name(partial.name + ".json")


def _forget(partial: Path) -> None:
    partial.unlink(missing_ok=True)
    _memory(partial).unlink(missing_ok=True)


def _sha256(text: str | None) -> str | None:
    match = re.search(r"\b[0-9a-f]{64}\b", text or "")
    return match[0] if match else None


def _mismatch(path: Path, known: Remote) -> str | None:
    if known.size is not None and path.stat().st_size != known.size:
        return f"{path.stat().st_size:,} bytes instead of {known.size:,}"
    if known.sha256:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != known.sha256:
            return f"sha256 {digest.hexdigest()[:12]}… instead of {known.sha256[:12]}…"
    return None


def _need_room(partial: Path, need_bytes: int) -> None:
    free_bytes = shutil.disk_usage(partial.parent).free
    if need_bytes > free_bytes:
        raise UserError(
            f"{partial.name.removesuffix('.partial')} needs {need_bytes:,} bytes, {partial.parent} has {free_bytes:,} "
            "free: make room or move NANOCHAT_BASE_DIR"
        )


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait from a Retry-After header: a number of seconds or a date."""
    if not value:
        return None
    if value.strip().isdigit():
        return float(value)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


@contextlib.contextmanager
def _progress(name: str, offset: int, total: int) -> Iterator[Callable[[int], object]]:
    """A bar in a terminal, a line when it begins and ends elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=total if total >= 0 else None, completed=offset)
            yield lambda count: bar.advance(task, count)
        return
    size = f"{total / 1e6:,.1f} MB" if total >= 0 else "size not said"
    began = time.monotonic()
    print(f"download {name}: {size}, from {offset / 1e6:,.1f} MB on", file=sys.stderr, flush=True)
    yield lambda count: None
    print(f"download {name}: {time.monotonic() - began:,.1f} s", file=sys.stderr, flush=True)
