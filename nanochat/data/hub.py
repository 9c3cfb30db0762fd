"""Downloads: `fetch` for text to pretrain on, `fetch_split` for the examples of a task, `fetch_part` for the examples
of any `org/name`, `fetch_model` for a model to start from.

The hub's own client does the transfer: huggingface_hub, or modelscope with `--hub modelscope`. This file adds what a
training run needs:

- A resumed run reads the same files: the commit and its list of files are recorded once, in `listing.json`.
- A file is whole or absent: its sha256 is checked in `.download/`, then it moves into place under a flat name.
- One process of a machine downloads; the others wait and find the file.
- A failure is one line with the next step.

Environment: HF_ENDPOINT (a mirror's address), HF_TOKEN (gated datasets); MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import ssl
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanochat.data import hashes
from nanochat.data.catalog import DATASETS, TASKS, Dataset, Files, Source
from nanochat.data.splits import choose_config, choose_files
from nanochat.ground import storage
from nanochat.ground.cli import UserError
from nanochat.ground.paths import base_dir, open_lock
from nanochat.model_folder import format_of

TIMEOUT_SECONDS = 20.0
MAX_LISTED_FILES = 200_000  # in one repo: a hub that lists more is broken or hostile
MAX_PAGES = 1000  # pages of such a list, one request each
Kind = Literal["dataset", "model"]  # the kind of a repository


class HuggingFace:
    """huggingface_hub, imported at the first request: `--help` and runs on local text do without it."""

    variable = "HF_ENDPOINT"
    branch = "main"

    def __init__(self, kind: Kind = "dataset") -> None:
        self.kind: Kind = kind
        mirror = os.environ.get(self.variable)
        self.endpoint = (mirror or "https://huggingface.co").rstrip("/")
        if not re.match(r"https?://[^/]", self.endpoint):
            raise UserError(f"{self.variable}={mirror!r} is not an address: it starts with https://")
        if mirror:
            # The client's second protocol (xet) bypasses the mirror: it fetches from the hub's own storage servers.
            os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

    def listing(self, source: Source) -> tuple[str, Files]:
        """The commit of a source's revision, and all files of the repo at that commit."""
        from huggingface_hub import HfApi

        # One request for commit and files. It is not retried, so that a machine without a network learns it at once.
        api = HfApi(endpoint=self.endpoint)
        ask = api.dataset_info if self.kind == "dataset" else api.model_info
        info = ask(source.repo, revision=source.revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
        files: Files = {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or []}
        return info.sha or source.revision, files

    def download(self, repo: str, commit: str, path: str, folder: Path) -> str:
        """Fetch one file into `folder` and return its path there."""
        from huggingface_hub import hf_hub_download

        return hf_hub_download(
            repo, path, repo_type=self.kind, revision=commit, endpoint=self.endpoint, local_dir=folder
        )


class ModelScope:
    """The client of ModelScope, an extra that only `--hub modelscope` imports."""

    variable = "MODELSCOPE_ENDPOINT"
    branch = "master"

    def __init__(self, kind: Kind = "dataset") -> None:
        self.kind: Kind = kind
        self.endpoint = (os.environ.get(self.variable) or "https://www.modelscope.cn").rstrip("/")

    def listing(self, source: Source) -> tuple[str, Files]:
        """The source's revision, as this hub's listing names no commit, and the files of the source's folder."""
        from modelscope.hub.api import HubApi  # pyright: ignore[reportMissingImports]

        api = HubApi(endpoint=self.endpoint)
        if self.kind == "model":
            rows = api.get_model_files(source.repo, revision=source.revision, recursive=True)
            return source.revision, {row["Path"]: row.get("Sha256") or None for row in rows if row["Type"] != "tree"}
        entries: dict[str, dict] = {}  # by path; the page after the last one is empty, or repeats
        for page in range(1, MAX_PAGES + 1):
            count = len(entries)
            folder = source.folder or "/"
            rows = api.get_dataset_files(source.repo, revision=source.revision, root_path=folder, page_number=page)
            entries |= {row["Path"]: row for row in rows}
            if len(entries) == count or count > MAX_LISTED_FILES:
                break
        else:
            raise UserError(f"{self.endpoint} lists more than {MAX_PAGES:,} pages of files")
        files = {path: row.get("Sha256") or None for path, row in entries.items() if row.get("Type") != "tree"}
        return source.revision, files

    def download(self, repo: str, commit: str, path: str, folder: Path) -> str:
        """Fetch one file into `folder` and return its path there."""
        from modelscope.hub import file_download  # pyright: ignore[reportMissingImports]

        if self.kind == "model":
            return file_download.model_file_download(repo, path, revision=commit, local_dir=str(folder))
        return file_download.dataset_file_download(
            repo, path, revision=commit, local_dir=str(folder), endpoint=self.endpoint
        )


HUBS = {"hf": HuggingFace, "modelscope": ModelScope}


def fetch(name: str, hub: str = "hf", shards: int | None = None) -> list[Path]:
    """Download what is missing and return the shards in order: the training shards, then the validation shard.

    `name` is a key of DATASETS or any `org/name` of the hub. Raises UserError: with what to do next.
    """
    dataset = DATASETS.get(name) or _any_dataset(name)
    copied = [other for other in DATASETS if hub in DATASETS[other].sources]
    instead = "--data demo" if hub in dataset.sources else f"--data {' or '.join(copied)}"
    with _opened(name, dataset, hub, instead) as copy:
        _, listed = copy.listing()
        paths = [path for path in listed if path.endswith(".parquet")]
        if not paths:
            raise UserError(f"{copy.client.endpoint} lists no parquet file in {copy.source.repo}/{copy.source.folder}")
        train = paths[: min(shards or copy.source.train_shards, max(len(paths) - 1, 1))]
        return copy.fetch({path: listed[path] for path in [*train, paths[-1]]})


def fetch_split(name: str, split: str, hub: str = "hf") -> list[Path]:
    """Download what is missing of one split of a task's dataset and return its files in order.

    `name` and `split` are keys of TASKS. Raises UserError: with what to do next.
    """
    files = TASKS[name].splits[split]
    if hub != "hf":
        files = dict.fromkeys(files)  # the table has the sha256 of hf's files
    with _opened(name, TASKS[name], hub, f"a local file or folder by {name}=PATH") as copy:
        return copy.fetch(files)


def fetch_part(
    repo: str, config: str | None, split: str | None, part: Literal["train", "test"], hub: str = "hf"
) -> tuple[list[Path], list[Path]]:
    """Download what is missing of one part of any `org/name`; returns (files to learn from, files held out).

    The files of the other part are named without being fetched, unless none are held out. Raises UserError: with what
    to do next.
    """
    with _opened(repo, _any_dataset(repo), hub, "a local file or folder") as copy:
        _, listed = copy.listing()
        chosen = choose_files(choose_config(listed, config), split)
        wanted = chosen.held_out if part == "test" and chosen.held_out else chosen.train
        copy.fetch({path: listed[path] for path in wanted})
        return copy.targets(chosen.train), copy.targets(chosen.held_out)


def _any_dataset(name: str) -> Dataset:
    """A dataset that is in no table here."""
    sources = {"hf": Source(name, "main"), "modelscope": Source(name, "master")}
    return Dataset(sources, licence="see its page")


# The files of a model: its weights under transformers' names (some repositories have them again under other names), its
# settings, and the files of its tokenizer.
MODEL_FILES = re.compile(r"model(-\d+-of-\d+)?\.safetensors|[^/]+\.(json|jinja|model|tiktoken)|merges\.txt|vocab\.txt")
# The files that describe a model's shape, which is all that a dry run reads.
SHAPE_FILES = ("config.json", "generation_config.json")


def fetch_model(source: str, without_weights: bool = False) -> Path:
    """Download what is missing of `hf:ORG/NAME` or `modelscope:ORG/NAME` and return its folder; `without_weights` only
    the SHAPE_FILES.

    `@REVISION` after the name is a branch, a tag or a commit. Raises UserError: with what to do next.
    """
    hub, _, name = source.partition(":")
    matched = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name, re.ASCII)
    if matched is None or leaves_folder(name):
        raise UserError(f"--source {source}: a model of a hub is {hub}:ORG/NAME, such as {hub}:Qwen/Qwen3-0.6B")
    repo, revision = matched.groups()
    client = HUBS[hub]("model")
    folder = base_dir() / "models" / (name.replace("/", "--") + ("" if hub == "hf" else f".{hub}"))
    with _one_line(source, client, f"{client.endpoint}/{repo}", ["name a folder on this machine"]):
        copy = _Copy(client, Source(repo, revision or client.branch), folder, f"{source} (licence: see its page)")
        _, listed = copy.listing()
        wanted = {path: digest for path, digest in listed.items() if MODEL_FILES.fullmatch(path)}
        if "config.json" not in wanted or not any(path.endswith(".safetensors") for path in wanted):
            kinds = {Path(path).suffix for path in listed} & {".bin", ".pt", ".pth", ".gguf"}
            instead = f"it has only {', '.join(sorted(kinds))}" if kinds else "it is another kind of repository"
            raise UserError(
                f"{client.endpoint}/{repo} has no config.json with model.safetensors ({instead}): name a repository of "
                "the original weights in safetensors"
            )
        # A model that is not computed here is refused before its gigabytes arrive. Ours have a manifest of all files.
        if "manifest.json" not in wanted:
            copy.fetch({"config.json": wanted["config.json"]})
            try:
                format_of(folder).describe(folder)
            except ValueError as error:
                raise UserError(str(error)) from error
        copy.fetch({path: digest for path, digest in wanted.items() if not without_weights or path in SHAPE_FILES})
    return folder


class Hub:
    """What the core requests of a hub (ground/rooms.py)."""

    texts = staticmethod(fetch)
    model = staticmethod(fetch_model)


def leaves_folder(path: str) -> bool:
    """Whether a relative path could lead out of its folder, here or on a system with other separators."""
    return re.search(r"\\|\0|^/|^\w:|(^|/)\.\.(/|$)", path) is not None


@contextlib.contextmanager
def _opened(name: str, dataset: Dataset, hub: str, instead: str) -> Iterator["_Copy"]:
    """A dataset on one hub; every error inside becomes one line.

    `instead`: what to use without this dataset.
    """
    if hub not in dataset.sources:
        raise UserError(f"no copy of {name} is known on {hub}: use --hub hf, or {instead}")
    source = dataset.sources[hub]
    client = HUBS[hub]()
    folder = base_dir() / "data" / (name.replace("/", "--") + ("" if hub == "hf" else f".{hub}"))
    others = [f"--hub {other}" for other in dataset.sources if other != hub]
    with _one_line(name, client, f"{client.endpoint}/datasets/{source.repo}", [*others, f"use {instead}"]):
        yield _Copy(client, source, folder, f"{name} (licence: {dataset.licence})")


@contextlib.contextmanager
def _one_line(name: str, client: HuggingFace | ModelScope, page: str, others: list[str]) -> Iterator[None]:
    """Every error of the hub inside becomes a UserError; `others`: the alternatives if the hub cannot be reached."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except PermissionError:  # the hub did not fail, a local folder did: `cli.run` prints the next step
        raise
    except Exception as error:
        reason = _reason(error, client.endpoint, page)
        if reason.startswith("cannot reach"):
            reason += ": " + ", or ".join([f"set {client.variable} to a mirror", *others])
        raise UserError(f"{name}: {reason}") from error


@dataclass(frozen=True)
class _Copy:
    """A dataset on one hub, and the folder of its files here."""

    client: HuggingFace | ModelScope
    source: Source
    folder: Path
    what: str  # the dataset and its licence, for the message

    def listing(self) -> tuple[str, Files]:
        """The commit and, sorted by path, the files of the source. The first call records them."""
        source = self.source
        record = self.folder / "listing.json"
        origin = f"{source.repo}@{source.revision}/{source.folder}"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads(record.read_text())
            if saved["origin"] == origin:
                return saved["commit"], dict(saved["files"])
        commit, listed = self.client.listing(source)
        if len(listed) > MAX_LISTED_FILES:
            raise UserError(f"{self.client.endpoint} lists more than {MAX_LISTED_FILES:,} files")
        for path in listed:
            if leaves_folder(path):
                raise UserError(f"{self.client.endpoint} lists {path!r}, which leads out of the folder")
        inside = f"{source.folder}/" if source.folder else ""
        files = {path: listed[path] for path in sorted(listed) if path.startswith(inside)}
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f"listing.{os.getpid()}.tmp"
        unfinished.write_text(json.dumps({"origin": origin, "commit": commit, "files": files}))
        unfinished.replace(record)
        return commit, files

    def targets(self, paths: Iterable[str]) -> list[Path]:
        """The local paths of files: a path in a repo becomes one file name, which cannot leave the folder."""
        return [self.folder / path.replace("/", "--").lstrip(".") for path in paths]

    def fetch(self, wanted: Files) -> list[Path]:
        """The wanted files; missing ones are downloaded."""
        targets = dict(zip(wanted, self.targets(wanted), strict=True))
        missing = [path for path in wanted if not targets[path].exists()]
        if not missing:
            return list(targets.values())
        endpoint = self.client.endpoint
        commit, listed = self.listing()
        print(f"download {len(missing)} of {len(targets)} files from {endpoint}: {self.what}", file=sys.stderr)
        with open_lock(self.folder / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the other processes of this machine wait here, and find the files
            for path in missing:
                if targets[path].exists():
                    continue
                if path not in listed:
                    raise UserError(f"{self.source.repo} has no {path} at {endpoint}: does this mirror have it?")
                arrived = Path(self.client.download(self.source.repo, commit, path, self.folder / ".download"))
                # A sha256 that is known here counts, whatever this mirror claims.
                digest = _check(arrived, path, wanted[path] or listed[path])
                arrived.replace(targets[path])
                if path.endswith(".safetensors"):  # weights: a run over them asks for their hash
                    hashes.keep(targets[path], digest)
            shutil.rmtree(self.folder / ".download", ignore_errors=True)
        return list(targets.values())


def _check(path: Path, name: str, sha256: str | None) -> str:
    """Leave a file safe on the disk and return its sha256. Raises UserError: when it is another one than `sha256`; the
    file is then deleted."""
    digest = storage.sha256(path)
    storage.flush(path)  # so that the move that follows survives a power cut
    if sha256 and digest != sha256:
        path.unlink()
        problem = f"sha256 {digest[:12]}… instead of {sha256[:12]}…"
        raise UserError(f"{name} arrived damaged ({problem}): run it again, or use another mirror")
    return digest


def _reason(error: BaseException, endpoint: str, page: str) -> str:
    """The cause of a client's error, from its chain of causes, in one line."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and len(causes) < 20:
        causes.append(cause)
    if isinstance(error, ImportError):
        return f"{error}: pip install {(error.name or 'its client').partition('.')[0]}"
    for cause in causes:
        # The HTTP status in an error of huggingface_hub and modelscope, or of urllib.
        status = getattr(getattr(cause, "response", None), "status_code", None) or getattr(cause, "code", None)
        if status in (401, 403):
            return f"{page} is closed (HTTP {status}): check the name, accept the terms there and set HF_TOKEN"
        if status == 404:
            return f"{page} answers HTTP 404: check the name; does this mirror have it?"
        if isinstance(status, int) and status >= 400:
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
