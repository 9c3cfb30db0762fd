"""Downloads: `fetch` for text to pretrain on, `fetch_split` for the examples of a task, `fetch_url` for a single file.

The hub's own client does the transfer: huggingface_hub, or modelscope with `--hub modelscope`. This file adds what a
training run needs:

- A resumed run reads the same files: the commit and its list of files are recorded once, in `listing.json`.
- A file is whole or absent: size and sha256 are checked in `.download/`, then it moves into place under a flat name.
- One process of a machine downloads; the others wait and find the file.
- A failure is one line with the next step.

Environment: HF_ENDPOINT (a mirror's address), HF_TOKEN (gated datasets); MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path, PurePosixPath

from nanochat.data.catalog import DATASETS, TASKS, Dataset, RemoteFile, Source, TaskData
from nanochat.shell.cli import UserError
from nanochat.shell.paths import data_dir

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 20.0
MAX_LISTED_FILES = 200_000  # of one repo: a hub that lists more is broken or hostile


@dataclass(frozen=True)
class Listing:
    """The files of a repo at one commit, sorted by path."""

    commit: str
    files: list[RemoteFile]


class HuggingFace:
    """huggingface_hub, imported at the first request: `--help` and runs on local text do without it."""

    variable = "HF_ENDPOINT"

    def __init__(self) -> None:
        mirror = os.environ.get(self.variable)
        self.endpoint = (mirror or "https://huggingface.co").rstrip("/")
        if not re.match(r"https?://[^/]", self.endpoint):
            raise UserError(f"{self.variable}={mirror!r} is not an address: it starts with https://")
        if mirror:
            # The client's second protocol (xet) bypasses the mirror: it fetches from the hub's own storage servers.
            os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
        if not sys.stderr.isatty():
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def listing(self, source: Source) -> Listing:
        from huggingface_hub import HfApi

        # One request for commit and files. It is not retried, so that a machine without a network learns it at once.
        api = HfApi(endpoint=self.endpoint)
        info = api.dataset_info(source.repo, revision=source.revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
        siblings = info.siblings or []
        files = [RemoteFile(file.rfilename, file.size, file.lfs.sha256 if file.lfs else None) for file in siblings]
        return Listing(info.sha or source.revision, files)

    def download(self, repo: str, commit: str, path: str, folder: Path) -> Path:
        """Fetch one file into `folder` and return its path there."""
        from huggingface_hub import hf_hub_download

        where = hf_hub_download(
            repo, path, repo_type="dataset", revision=commit, endpoint=self.endpoint, local_dir=folder
        )
        return Path(where)


class ModelScope:
    """The client of ModelScope, an extra that only `--hub modelscope` imports."""

    variable = "MODELSCOPE_ENDPOINT"

    def __init__(self) -> None:
        try:
            import modelscope.hub.api  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError("--hub modelscope needs its client: pip install modelscope") from error
        self.endpoint = (os.environ.get(self.variable) or "https://www.modelscope.cn").rstrip("/")

    def listing(self, source: Source) -> Listing:
        from modelscope.hub.api import HubApi  # pyright: ignore[reportMissingImports]

        api = HubApi(endpoint=self.endpoint)
        entries: dict[str, dict] = {}  # by path; the page after the last one is empty, or repeats
        for page in range(1, MAX_LISTED_FILES):
            count = len(entries)
            folder = source.folder or "/"
            rows = api.get_dataset_files(source.repo, revision=source.revision, root_path=folder, page_number=page)
            entries |= {row["Path"]: row for row in rows}
            if len(entries) == count or count > MAX_LISTED_FILES:
                break
        files = [row for row in entries.values() if row.get("Type") != "tree"]
        listed = [RemoteFile(row["Path"], row.get("Size"), row.get("Sha256") or None) for row in files]
        return Listing(source.revision, listed)  # this hub's listing names no commit

    def download(self, repo: str, commit: str, path: str, folder: Path) -> Path:
        """Fetch one file into `folder` and return its path there."""
        from modelscope.hub.file_download import dataset_file_download  # pyright: ignore[reportMissingImports]

        return Path(dataset_file_download(repo, path, revision=commit, local_dir=str(folder), endpoint=self.endpoint))


Hub = HuggingFace | ModelScope
HUBS: dict[str, type[Hub]] = {"hf": HuggingFace, "modelscope": ModelScope}


def fetch(name: str, hub: str = "hf", shards: int | None = None) -> list[Path]:
    """Download what is missing and return the shards in order: the training shards, then the validation shard.

    `name` is a key of DATASETS or any `org/name` of the hub. Raises UserError: with what to do next.
    """
    dataset = DATASETS.get(name) or Dataset(
        {"hf": Source(name, "main"), "modelscope": Source(name, "master")}, licence="see its page"
    )
    copied = [other for other in DATASETS if hub in DATASETS[other].sources]
    instead = "--data demo" if hub in dataset.sources else f"--data {' or '.join(copied)}"
    with _opened(name, dataset, hub, instead) as (client, source, folder):
        files = [file for file in _listing(client, source, folder).files if file.path.endswith(".parquet")]
        if not files:
            raise UserError(f"{client.endpoint} lists no parquet file in {source.repo}/{source.folder}")
        validation = files[-1]
        train = files[: min(shards or source.train_shards, max(len(files) - 1, 1))]
        wanted = train if validation in train else [*train, validation]
        return _download(client, source, folder, wanted, f"{name} (licence: {dataset.licence})")


def fetch_split(name: str, split: str, hub: str = "hf") -> list[Path]:
    """Download what is missing of one split of a task's dataset and return its files in order.

    `name` and `split` are keys of TASKS. Raises UserError: with what to do next.
    """
    task = TASKS[name]
    files = task.splits[split]
    if hub != "hf":  # the sha256 in the table are those of hf
        files = tuple(replace(file, sha256=None) for file in files)
    with _opened(name, task, hub, f"a local file or folder by {name}=PATH") as (client, source, folder):
        return _download(client, source, folder, files, f"{name} (licence: {task.licence})")


def fetch_url(url: str, target: Path, sha256: str) -> Path:
    """Download one file that is on no hub. Raises UserError: with the reason."""
    host = urllib.parse.urlsplit(url).netloc
    partial = target.with_name(target.name + ".partial")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response, partial.open("wb") as file:
            shutil.copyfileobj(response, file, CHUNK_BYTES)
    except Exception as error:
        raise UserError(_reason(error, host, url)) from error
    _check(partial, RemoteFile(target.name, sha256=sha256))
    partial.replace(target)
    return target


def leaves_folder(path: str) -> bool:
    """Whether a relative path could lead out of its folder, here or on a system with other separators."""
    parts = PurePosixPath(path).parts
    return bool(re.search(r"\\|^\w:|\0", path)) or PurePosixPath(path).is_absolute() or ".." in parts


@contextlib.contextmanager
def _opened(name: str, dataset: Dataset | TaskData, hub: str, instead: str) -> Iterator[tuple[Hub, Source, Path]]:
    """The client, the source and the local folder of a dataset; whatever fails inside is one line.

    `instead`: what to use without this dataset.
    """
    if hub not in HUBS:
        raise UserError(f"--hub {hub!r} is unknown: hf or modelscope")
    if hub not in dataset.sources:
        raise UserError(f"no copy of {name} is known on {hub}: use --hub hf, or {instead}")
    source = dataset.sources[hub]
    client = HUBS[hub]()
    folder = data_dir(name.replace("/", "--") + ("" if hub == "hf" else f".{hub}"))
    try:
        yield client, source, folder
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:
        reason = _reason(error, client.endpoint, f"{client.endpoint}/datasets/{source.repo}")
        if reason.startswith("cannot reach"):
            others = [f"--hub {other}" for other in dataset.sources if other != hub]
            reason += ": " + ", or ".join([f"set {client.variable} to a mirror", *others, f"use {instead}"])
        raise UserError(f"{name}: {reason}") from error


def _listing(client: Hub, source: Source, folder: Path) -> Listing:
    """The recorded listing of a source; the first call records it."""
    record = folder / "listing.json"
    origin = f"{source.repo}@{source.revision}/{source.folder}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(record.read_text())
        if saved["origin"] == origin:
            return Listing(saved["commit"], [RemoteFile(*file) for file in saved["files"]])
    listing = client.listing(source)
    if len(listing.files) > MAX_LISTED_FILES:
        raise UserError(f"{client.endpoint} lists more than {MAX_LISTED_FILES:,} files")
    hostile = [file.path for file in listing.files if leaves_folder(file.path)]
    if hostile:
        raise UserError(f"{client.endpoint} lists {hostile[0]!r}, which leads out of the folder; nothing was fetched")
    inside = [file for file in listing.files if not source.folder or file.path.startswith(source.folder + "/")]
    listing = Listing(listing.commit, sorted(inside, key=lambda file: file.path))
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"listing.{os.getpid()}.tmp"
    files = [astuple(file) for file in listing.files]
    unfinished.write_text(json.dumps({"origin": origin, "commit": listing.commit, "files": files}))
    unfinished.replace(record)
    return listing


def _download(client: Hub, source: Source, folder: Path, wanted: Sequence[RemoteFile], what: str) -> list[Path]:
    """The wanted files below `folder`, flat: a path of a repo becomes one file name, which cannot leave the folder."""
    targets = [folder / file.path.replace("/", "--").lstrip(".") for file in wanted]
    missing = sum(not target.exists() for target in targets)
    if not missing:
        return targets
    listing = _listing(client, source, folder)
    listed = {file.path: file for file in listing.files}
    print(f"download {missing} of {len(targets)} files from {client.endpoint}: {what}", file=sys.stderr, flush=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other processes of this machine wait here, and find the files
        for file, target in zip(wanted, targets, strict=True):
            if target.exists():
                continue
            if file.path not in listed:
                raise UserError(f"{source.repo} has no {file.path} at {client.endpoint}: does this mirror have it?")
            arrived = client.download(source.repo, listing.commit, file.path, folder / ".download")
            # A sha256 that is known here counts, whatever this mirror claims.
            _check(arrived, replace(listed[file.path], sha256=file.sha256 or listed[file.path].sha256))
            arrived.replace(target)
        shutil.rmtree(folder / ".download", ignore_errors=True)
    return targets


def _check(path: Path, expected: RemoteFile) -> None:
    """Raise UserError and delete the file when its bytes are not the expected ones; leave it safe on the disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
        os.fsync(file.fileno())  # so that the move that follows survives a power cut
    size = path.stat().st_size
    problem = ""
    if expected.size is not None and size != expected.size:
        problem = f"{size:,} bytes instead of {expected.size:,}"
    elif expected.sha256 and digest.hexdigest() != expected.sha256:
        problem = f"sha256 {digest.hexdigest()[:12]}… instead of {expected.sha256[:12]}…"
    if problem:
        path.unlink()
        raise UserError(f"{expected.path} arrived damaged ({problem}): run it again, or use another mirror")


def _reason(error: BaseException, endpoint: str, page: str) -> str:
    """What went wrong in a client, from its chain of causes, in one line."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and len(causes) < 20:
        causes.append(cause)
    for cause in causes:
        status = _status(cause)
        if status in (401, 403):
            return f"{page} is closed (HTTP {status}): check the name, accept the terms there and set HF_TOKEN"
        if status == 404:
            return f"{page} answers HTTP 404: check the name; does this mirror have it?"
        if status:
            return f"{page} answers HTTP {status}: try again later"
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return "the disk is full: free some space, or move NANOCHAT_BASE_DIR"
        if isinstance(cause, json.JSONDecodeError):
            return f"{endpoint} does not answer in JSON: is a proxy or a login page in between?"
    for cause in causes[::-1]:
        if isinstance(cause, (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)):
            return f"cannot reach {endpoint} ({cause.strerror or cause})"
    first_line = (str(error).splitlines() or [""])[0]
    return f"{endpoint} failed with {type(error).__name__}: {first_line}"


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error of huggingface_hub, modelscope or urllib."""
    for owner in (getattr(error, "response", None), error):
        for name in ("status_code", "code"):
            status = getattr(owner, name, None)
            if isinstance(status, int) and status >= 400:
                return status
    return None
