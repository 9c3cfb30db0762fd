"""Sessions, models, samplers and futures: what the routes call, and the one thread that computes.

    a route             checks a request, and calls `Service.submit` or `Service.sample` on a separate thread
    RequestLog          the request is on the disk
    the queue           a model's requests in the order of their numbers, an owner's in the order of arrival
    the worker          runs them one at a time, the owners in turn; samples of the same weights together, in slices
    Promise             the result, which the client fetches by the request's id

One lock guards everything except running requests. The text of users is never logged.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanochat import model_folder
from nanochat.engine import Engine
from nanochat.exported.tokenizer_files import tokenizer_files
from nanochat.ground import paths, storage
from nanochat.ground.cli import UserError
from nanochat.ground.log import warn
from nanochat.serve.schema import ApiError
from nanochat.train_service import wire
from nanochat.train_service.jobs import EPHEMERAL, Job, Limits, Model, Queue, Sampling, as_json, created, failure
from nanochat.train_service.log import REFUSED, DamagedLog, Entry, RequestLog, read_record, write_record
from nanochat.train_service.sampling import SampleJob, make_engine, sample
from nanochat.train_service.tenants import AdamBody, Base, Trained, TrainedModel, load_weights

KEPT_RESULTS = 5_000  # finished requests of a model, or of a session's samplers, whose results can still be fetched,
KEPT_BYTES = 1 << 26  # and how large these are together
SESSION_SECONDS = 30 * 86_400  # a session without models is forgotten so long after the last sign of its client
MAX_SESSIONS = 10_000  # sessions per owner; then a new one replaces the one that was silent for longest
MAX_MODELS = 2_000  # models per owner
MAX_WAITING = 1 << 28  # bytes of an owner's bodies in the queue, and as many of those that came before their turn
MAX_OWNER_RESULTS = 1 << 29  # bytes of an owner's results that can still be fetched
PARKED_SECONDS = 900.0  # a request that waits longer for an earlier one waits for one that was lost
SNAPSHOT_PAUSE = 60.0  # seconds after a snapshot that could not be written
MAX_SAMPLING = 4  # owners whose samples are decoded at the same time; each takes memory for its slots
LOG_FACTOR = 16  # a snapshot also follows after this many requests per step of `snapshot_steps`
KEPT_ENGINES = 4  # samplers in memory; others are read from the disk again
KEPT_EPHEMERAL = 8  # unnamed sampler weights of a model, the newest ones
SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}  # folders of checkpoints, and what the client calls them
NEW, OLD, DELETED = ".new", ".old", ".deleted"  # ends the names of folders while a checkpoint is replaced or deleted
# Marks of requests that save a checkpoint: .<checkpoint>.<request>, with SAVED once it is whole.
SAVED = ".saved"
MARK_NAME = re.compile(r"\.(.*)\.(\d+)(\.saved)?")
READ_TRIES = 3  # a network's disk may fail to read for a moment
READ_PAUSE = 0.2  # seconds between two of them


class Service:
    """One base model and all models of the clients, in `folder`."""

    def __init__(self, base: Base, folder: Path, name: str, limits: Limits | None = None):
        self.base = base
        self.name = name
        self.limits = limits or Limits()
        self.folder = folder
        self.lock = threading.Lock()
        self.wake = threading.Condition(self.lock)
        self.queue = Queue()
        self.sampling: deque[Sampling] = deque()  # only the worker touches it
        self.promises: dict[str, Job] = {}
        self.kept: dict[str, dict[str, int]] = {}  # by model or session: finished requests and their results' bytes
        self.owner_bytes: dict[str, int] = defaultdict(int)  # of an owner's results, as in `kept`
        self.models: dict[str, Model] = {}
        self.engines: OrderedDict[Path | None, Engine] = OrderedDict()
        self.closing = False
        self.expired = 0.0  # when sessions were last looked through
        self.ending = threading.Lock()
        self.ended = False
        for part in ("sessions", "models", "samplers"):
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part).chmod(0o700)  # what clients send is for this user only
        paths.lock(folder, "--folder")
        self._require_base()
        # For clients on this machine, whose get_tokenizer reads a folder as well as a hub.
        self.tokenizer_folder = folder / "tokenizer"
        self.tokenizer_folder.mkdir(exist_ok=True)
        for name_of_file, content in tokenizer_files(base.tokenizer, base.model.config.sequence_len, True).items():
            file = (content if isinstance(content, str) else json.dumps(content)).encode()
            path = self.tokenizer_folder / name_of_file
            # A restart on a full disk writes nothing.
            if not path.exists() or path.read_bytes() != file:
                unfinished = path.with_name(path.name + ".tmp")
                storage.write_file(unfinished, [file])
                unfinished.rename(path)
        self.sessions: dict[str, dict[str, Any]] = {}
        for path in (folder / "sessions").glob("*.json"):
            with _named("the session"):
                self.sessions[path.stem] = read_record(path)
        with self.lock:
            self._restore()
        self._expire_sessions()
        self.thread = threading.Thread(target=self._work, name="device", daemon=True)
        self.thread.start()

    def _require_base(self) -> None:
        """Raises UserError: when the folder holds models of another base."""
        path = self.folder / "base.json"
        if not path.exists():
            write_record(path, self.base.about)
        about = read_record(path)
        if about.get("base_sha256") != self.base.about["base_sha256"]:
            base = about.get("base")
            raise UserError(f"--folder {self.folder} holds models that were trained over {base}: name another folder")

    # ------------------------------------------------------------------ sessions

    def create_session(self, owner: str, user_metadata: Any) -> str:
        self._expire_sessions()
        if sum(facts["owner"] == owner for facts in list(self.sessions.values())) >= MAX_SESSIONS:
            self._forget_silent_session(owner)
        session = secrets.token_hex(8)
        facts = {"owner": owner, "created": time.time(), "user_metadata": user_metadata}
        self._write("sessions", session, facts)
        self.sessions[session] = facts
        return session

    def touch_session(self, owner: str, session: str) -> None:
        """A client says that it is still there."""
        self.require_session(owner, session)
        with contextlib.suppress(OSError):
            os.utime(self.folder / "sessions" / f"{session}.json")

    def _heard(self, session: str) -> float:
        """When a session's client gave its last sign, in seconds since 1970."""
        try:
            return (self.folder / "sessions" / f"{session}.json").stat().st_mtime
        except OSError:
            return 0.0

    def _forget_silent_session(self, owner: str) -> None:
        """Raises ApiError: 400 when all sessions of the owner have models."""
        with self.lock:
            with_models = {model_id.partition(":")[0] for model_id in self.models}
            own = [one for one, facts in self.sessions.items() if facts["owner"] == owner and one not in with_models]
            if not own:
                message = f"this key has {MAX_SESSIONS:,} sessions with models: delete models first"
                raise ApiError(400, message, code="too_many_sessions")
            self._forget({min(own, key=self._heard)})

    def _forget(self, sessions: set[str]) -> None:
        for session in sessions:
            (self.folder / "sessions" / f"{session}.json").unlink(missing_ok=True)
            owner = self.sessions.pop(session)["owner"]
            self._drop_results(owner, f"{session}:sample")
        for path in (self.folder / "samplers").glob("*.json") if sessions else ():
            if path.name.partition(":")[0] in sessions:
                path.unlink(missing_ok=True)

    def _drop_results(self, owner: str, group: str) -> None:
        for request_id, size in self.kept.pop(group, {}).items():
            self.owner_bytes[owner] -= size
            self.promises.pop(request_id, None)

    def _expire_sessions(self) -> None:
        """Forget the sessions that have no models and of which nothing was heard, with their samplers; once an hour."""
        now = time.time()
        with self.lock:
            if now < self.expired + 3600:
                return
            self.expired = now
            with_models = {model_id.partition(":")[0] for model_id in self.models}
            without = self.sessions.keys() - with_models
            self._forget({session for session in without if self._heard(session) < now - SESSION_SECONDS})

    def require_session(self, owner: str, session: str) -> dict[str, Any]:
        """Raises ApiError: 404, also for a session of another key."""
        facts = self.sessions.get(session)
        if facts is None or facts["owner"] != owner:
            raise ApiError(
                404, f"session {session[:100]!r} does not exist", param="session_id", code="session_not_found"
            )
        return facts

    # ------------------------------------------------------------------ models

    def _restore(self) -> None:
        """Find the models of an earlier start, and queue what their logs hold. One that cannot be read is named."""
        self._clean_up()
        for folder in sorted((self.folder / "models").glob("[!.]*/")):
            if (folder / "model.json").exists():
                with _named("the model"):
                    _read_patiently(lambda path=folder / "model.json": self._restore_model(path))
            elif _has_requests(folder):
                warn(f"the model is passed over: {folder} has no model.json: restore it from a backup")

    def _clean_up(self) -> None:
        """Remove what a kill left half-way; a checkpoint that was being replaced gets its name back."""
        for path in (self.folder / "models").glob(f".*{DELETED}"):
            shutil.rmtree(path, ignore_errors=True)
        for kind in KINDS:
            for path in (self.folder / "models").glob(f"*/{kind}/.*"):
                name = path.name[1:].removesuffix(OLD)
                if path.name.endswith(OLD) and not path.with_name(name).exists():
                    path.rename(path.with_name(name))
                elif path.name.endswith((OLD, NEW, DELETED)):
                    shutil.rmtree(path, ignore_errors=True)

    def _restore_model(self, path: Path) -> None:
        model = self._make_model(path.parent.name, read_record(path))
        model.done = model.log.covered
        model.next = model.done + 1
        results = model.log.results()
        entries, damage = model.log.entries()  # the snapshot is read, and checked, when it is needed
        self.models[model.id] = model
        for number, content in results.items():
            self._finish(self._keep(Job(f"{model.id}:{number}", model.owner)), content)
        if not model.done:
            self._finish(self._keep(Job(f"{model.id}:0", model.owner)), created(model))
        for entry in entries:
            self._park(model, entry)
        if damage:
            self._stop(model, damage, model.next - 1)

    def _stop(self, model: Model, damage: str, after: int) -> None:
        """Run no request after number `after` of a model with damaged files: it would become another one."""
        model.stopped_after = after
        model.stopped = (
            f"model {model.id} has stopped after request {after}, {damage}: restore its folder from a backup and "
            "restart the server, or create a training client from a saved state"
        )
        warn(model.stopped)

    def create_model(
        self,
        owner: str,
        session: str,
        number: int,
        settings: Trained,
        metadata: Any,
        load: dict[str, Any] | None = None,
    ) -> str:
        """Create a model, with `load` from a checkpoint; returns the promise's id.

        A repeated request does not create another model.
        """
        self.require_session(owner, session)
        model_id = f"{session}:train:{number}"
        if model_id not in self.models:
            self._require_disk(owner)
        with self.lock:
            if model_id not in self.models:
                self._require_room(owner)
                if sum(model.owner == owner for model in self.models.values()) >= MAX_MODELS:
                    message = f"this key has {MAX_MODELS:,} models: delete some first"
                    raise ApiError(400, message, code="too_many_models")
                facts = {"owner": owner, "created": time.time(), "metadata": metadata, "trained": asdict(settings)}
                facts["load"] = load
                folder = self.folder / "models" / model_id
                # The start has passed it over: a new model would begin where the old one stopped.
                if (folder / "model.json").exists() or _has_requests(folder):
                    raise ApiError(400, f"model {model_id} cannot be read: create another one", code="damaged")
                # On the disk first: a model that exists only in memory would lose acknowledged steps.
                with _full_disk():
                    folder.mkdir(exist_ok=True)  # a kill may have left an empty one
                    model = self._make_model(model_id, facts)
                    if load:
                        model.log.pin(0, self.path_of(owner, load["path"])[0])
                    write_record(folder / "model.json", facts)
                    storage.flush(folder.parent)
                self.models[model_id] = model
                self._enqueue(Job(f"{model_id}:0", owner, lambda: self._create(model)))
        return f"{model_id}:0"

    def _create(self, model: Model) -> bytes:
        try:
            self._live(model)
        except DamagedLog as error:
            self._stop(model, str(error), 0)
            return failure(UserError(model.stopped))
        return created(model)

    def _make_model(self, model_id: str, facts: dict[str, Any]) -> Model:
        settings = Trained(**facts["trained"])
        return Model(model_id, facts["owner"], settings, facts, RequestLog(self.folder / "models" / model_id))

    def owned(self, owner: str) -> list[Model]:
        """The owner's models, the newest first."""
        with self.lock:
            models = [model for model in self.models.values() if model.owner == owner]
        return sorted(models, key=lambda model: -model.facts["created"])

    def used_bytes(self, owner: str) -> int:
        """What the owner's models take on the disk. A file with two names, as of a loaded checkpoint, counts once."""
        sizes = {}
        for model in self.owned(owner):
            for path in (self.folder / "models" / model.id).rglob("*"):
                with contextlib.suppress(OSError):  # it was replaced meanwhile
                    facts = path.lstat()
                    sizes[facts.st_ino] = facts.st_size
        return sum(sizes.values())

    def _require_disk(self, owner: str) -> None:
        """Raises ApiError: 400 when the owner's models fill their quota."""
        if self.limits.owner_bytes:
            used = self.used_bytes(owner)
            if used >= self.limits.owner_bytes:
                message = f"the models of this key take {used:,} of {self.limits.owner_bytes:,} bytes on the server's "
                raise ApiError(400, message + "disk: delete checkpoints or models first", code="disk_quota")

    def delete_model(self, owner: str, model_id: str) -> Job:
        """Queue the deletion of a model with all its checkpoints; it takes no requests from now on."""
        with self.lock:
            model = self.find_model(owner, model_id)
            model.stopped = f"model {model.id} was deleted"
            model.stopped_after = 0
            job = Job(f"{model.id}:deletion", owner, lambda: self._delete(model))
            self.queue.append(job)
            self.wake.notify()
        return job

    def _delete(self, model: Model) -> bytes:
        model.live = None
        folder = self.folder / "models" / model.id
        deleted = folder.with_name(f".{model.id}.{secrets.token_hex(8)}{DELETED}")
        for weights in [path for path in self.engines if path is not None and folder in path.parents]:
            del self.engines[weights]
        with self.lock:
            if model.id not in self.models:  # deleted twice
                return as_json({})
            folder.rename(deleted)
            del self.models[model.id]
            self._refuse_parked(model)
            self._drop_results(model.owner, model.id)
            storage.flush(folder.parent)
        shutil.rmtree(deleted, ignore_errors=True)
        return as_json({})

    def find_model(self, owner: str, model_id: str) -> Model:
        """Raises ApiError: 404, also for a model of another key."""
        model = self.models.get(model_id)
        if model is None or model.owner != owner:
            raise ApiError(404, f"model {model_id[:100]!r} does not exist", param="model_id", code="model_not_found")
        return model

    def submit(self, owner: str, model_id: str, number: int | None, kind: str, content: bytes) -> str:
        """Put a request into a model's log and queue; returns the promise's id.

        Raises ApiError: 400 without a number, 429 when too many requests wait. A known number is not run again.
        """
        model = self.find_model(owner, model_id)
        if number is None or not 1 <= number < 10**9:
            raise ApiError(400, "seq_id: the number of the request, from 1 on", param="seq_id", code="invalid_value")
        with self.lock:
            request_id = f"{model.id}:{number}"
            if model.stopped:
                raise ApiError(400, model.stopped, code="damaged")
            if number < model.next or number in model.parked:
                return request_id
            # The request that others wait for is accepted as long as the queue itself has room. For any other one,
            # the owner's requests that came before their turn count too.
            early: list[Job] = []
            if number != model.next:
                for one in self.models.values():
                    if one.owner == owner:
                        early += one.parked.values()
            self._require_room(owner, early)
            entry = Entry(number, kind, content, is_early=number != model.next)
            with _full_disk():
                model.log.append(entry)
            self._park(model, entry)
        return request_id

    def refuse(self, owner: str, model_id: str, number: int | None) -> None:
        """Use up the number of a refused request: later requests would wait for it for ever."""
        model = self.models.get(model_id)
        if model is not None and model.owner == owner and number is not None and 1 <= number < 10**9:
            self.submit(owner, model_id, number, REFUSED, b"")

    def _park(self, model: Model, entry: Entry) -> None:
        """Queue a request once all requests before it are queued."""
        job = Job(f"{model.id}:{entry.number}", model.owner, lambda: self._run(model, entry), size=len(entry.content))
        self._keep(job)
        model.parked[entry.number] = job
        if entry.is_early:
            model.early[entry.number] = entry
        while model.next in model.parked:
            self._enqueue(model.parked.pop(model.next))
            if model.next in model.early:
                model.log.in_turn(model.early.pop(model.next))
            model.next += 1

    def _refuse_parked(self, model: Model) -> None:
        for job in model.parked.values():
            self._finish(job, failure(UserError(model.stopped)))
        model.parked.clear()

    def _require_room(self, owner: str, parked: Sequence[Job] = ()) -> None:
        count = self.queue.count(owner) + len(parked)
        parked_bytes = sum(job.size for job in parked)
        if count >= self.limits.queue or self.queue.bytes(owner) > MAX_WAITING or parked_bytes > MAX_WAITING:
            message = f"{count:,} requests wait already: try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})

    def _enqueue(self, job: Job) -> None:
        self._keep(job)
        self.queue.append(job)
        self.wake.notify()

    def _keep(self, job: Job) -> Job:
        self.promises[job.id] = job
        return job

    def _settle(self, job: Job, result: bytes) -> None:
        with self.lock:
            self._finish(job, result)

    def _finish(self, job: Job, result: bytes) -> None:
        """Keep a result, and let the oldest ones of the same model go. The traffic of others changes nothing here."""
        if job.result.done():  # it was cancelled
            return
        job.run = None  # with the body of the request
        job.result.set_result(result)
        if job.id not in self.promises:  # of a model that was deleted
            return
        kept = self.kept.setdefault(_group_of(job.id), {})
        kept[job.id] = len(result)
        self.owner_bytes[job.owner] += len(result)
        while len(kept) > 1 and (len(kept) > KEPT_RESULTS or sum(kept.values()) > KEPT_BYTES):
            self._drop_oldest(job.owner, kept)
        while self.owner_bytes[job.owner] > MAX_OWNER_RESULTS:
            own = [
                group
                for name, group in self.kept.items()
                if len(group) > (group is kept) and self._owns(job.owner, name)
            ]
            if not own:
                break
            self._drop_oldest(job.owner, max(own, key=lambda group: sum(group.values())))

    def _drop_oldest(self, owner: str, kept: dict[str, int]) -> None:
        oldest = next(iter(kept))
        self.owner_bytes[owner] -= kept.pop(oldest)
        self.promises.pop(oldest, None)

    def promise(self, owner: str, request_id: str) -> Job:
        """Raises ApiError: 410 for a promise that this server does not know (any more): the client asks again."""
        job = self.promises.get(request_id)
        model_id, _, number = request_id.rpartition(":")
        model = self.models.get(model_id)
        if job is not None and self._owns(owner, request_id):
            if model is not None and not job.result.done() and job.came < time.monotonic() - PARKED_SECONDS:
                self._give_up_waiting(model, job)
            return job
        if model is not None and model.owner == owner and re.fullmatch(r"[0-9]{1,9}", number):
            if int(number) == 0 and not model.stopped:
                return Job.finished(request_id, created(model))
            if int(number) <= model.done:  # if the client sent it again, it would wait without end
                message = f"request {number} was carried out, and its result is no longer kept: continue with the next"
                return Job.finished(request_id, failure(UserError(message)))
            if model.stopped:
                return Job.finished(request_id, failure(UserError(model.stopped)))
        raise ApiError(410, "this server has no such request (any more): send it again", code="unknown_request")

    def _give_up_waiting(self, model: Model, job: Job) -> None:
        """Stop a model whose next request does not come: a lost newest entry of its log looks like that."""
        with self.lock:
            if job in model.parked.values() and not model.stopped:
                self._stop(model, f"request {model.next} has not come", model.next - 1)
                self._refuse_parked(model)

    def _owns(self, owner: str, request_id: str) -> bool:
        return self.sessions.get(request_id.partition(":")[0], {}).get("owner") == owner

    # ------------------------------------------------------------------ checkpoints

    def path_of(self, owner: str, uri: str) -> tuple[Path, Model]:
        """The step's folder of tinker://<model>/<kind>/<name>, and its model. Raises ApiError: 404."""
        parts = uri.removeprefix(SCHEME).split("/")
        if uri.startswith(SCHEME) and len(parts) == 3 and parts[1] in KINDS:
            model = self.find_model(owner, parts[0])
            if paths.PLAIN_NAME.fullmatch(parts[2]):
                folder = self.folder / "models" / model.id / parts[1] / parts[2]
                found = model_folder.steps(folder)
                if found:
                    return model_folder.step_path(folder, found[-1]), model
        form = f"{SCHEME}MODEL/weights/NAME or .../sampler_weights/NAME"
        message = f"checkpoint {uri[:200]!r} does not exist: name one as {form}"
        raise ApiError(404, message, param="path", code="not_found")

    def list_checkpoints(self, model: Model) -> list[dict[str, Any]]:
        found = []
        for kind, name_for_client in KINDS.items():
            for folder in sorted((self.folder / "models" / model.id / kind).glob("*")):
                is_named = paths.PLAIN_NAME.fullmatch(folder.name) and not folder.name.startswith(EPHEMERAL)
                steps = model_folder.steps(folder) if is_named else []
                if steps:
                    step = model_folder.step_path(folder, steps[-1])
                    path = f"{kind}/{folder.name}"
                    found.append({
                        "checkpoint_id": path, "checkpoint_type": name_for_client, "time": iso(step.stat().st_mtime),
                        "tinker_path": f"{SCHEME}{model.id}/{path}", "public": False,
                        "size_bytes": sum(file.stat().st_size for file in step.iterdir()),
                    })  # fmt: skip
        return found

    def delete_checkpoint(self, owner: str, uri: str) -> None:
        with self.lock:
            folder = self.path_of(owner, uri)[0].parent
            deleted = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}{DELETED}")
            folder.rename(deleted)
        shutil.rmtree(deleted, ignore_errors=True)

    # ------------------------------------------------------------------ samplers

    def create_sampler(self, owner: str, session: str, number: int, uri: str | None) -> str:
        """A sampling session for the base, or for saved weights. Raises ApiError: 404 when they do not exist."""
        self.require_session(owner, session)
        if uri is not None:
            self.path_of(owner, uri)
        sampler = f"{session}:sample:{number}"
        self._write("samplers", sampler, {"owner": owner, "path": uri})
        return sampler

    def find_sampler(self, owner: str, sampler: str) -> dict[str, Any]:
        """Raises ApiError: 404 when its file is missing or belongs to another key."""
        path = self.folder / "samplers" / f"{sampler}.json"
        if re.fullmatch(r"[0-9a-f]{16}:sample:\d{1,9}", sampler) and path.is_file():
            try:
                content = read_record(path)
            except UserError as error:
                warn(str(error))
                raise ApiError(400, f"sampler {sampler} cannot be read: create another one", code="damaged") from error
            if content.get("owner") == owner:
                return content
        raise ApiError(404, f"there is no sampler {sampler[:100]!r}", param="sampler_id", code="sampler_not_found")

    def sample(self, owner: str, sampler: str, number: int, job: SampleJob) -> str:
        """Queue a sample; returns the promise's id. A known number is not sampled again."""
        uri = self.find_sampler(owner, sampler)["path"]
        weights = self.path_of(owner, uri)[0] if uri is not None else None
        request_id = f"{sampler}:{number}"
        with self.lock:
            if request_id not in self.promises:
                self._require_room(owner)
                self._enqueue(Job(request_id, owner, sampler=weights, sample=job))
        return request_id

    def cancel(self, owner: str, request_id: str) -> None:
        """End a sample that waits, or at its next pause one that is being decoded."""
        with self.lock:
            job = self.promises.get(request_id)
            if job is not None and job.sample is not None and self._owns(owner, request_id):
                job.sample.is_cancelled = True
                self.queue.remove(job)
                self._finish(job, failure(UserError("the sample was cancelled")))

    # ------------------------------------------------------------------ the worker

    def _work(self) -> None:
        while True:
            with self.lock:
                while not self.queue and not self.sampling and not self.closing:
                    self.wake.wait()
                if self.closing:
                    return
                jobs = self.queue.take(self._may_sample)
            if jobs and jobs[0].run is None:
                self.sampling.append(Sampling(jobs))
            elif jobs:
                (job,) = jobs
                assert job.run is not None
                try:
                    result = job.run()
                except Exception as error:  # any kind: this thread serves all clients
                    result = failure(error)
                self._settle(job, result)
            if self.sampling:
                self._sample_on(self.sampling[0])
                self.sampling.popleft()  # it is at the end again, unless it is done

    def _may_sample(self, owner: str) -> bool:
        """One set of samples of an owner at a time: a second one would take the device from the others."""
        return len(self.sampling) < MAX_SAMPLING and all(one.jobs[0].owner != owner for one in self.sampling)

    def _sample_on(self, sampling: Sampling) -> None:
        """Decode samples of the same weights together for one slice of time."""
        jobs = [job for job in sampling.jobs if not job.result.done()]
        if not jobs:  # all are cancelled
            return
        wanted = [job.sample for job in sampling.jobs if job.sample is not None]
        try:
            if sampling.slices is None:
                sampling.slices = sample(self._engine(jobs[0].sampler), wanted, self.limits.slots)
            results = next(sampling.slices)
        except Exception as error:  # any kind: it must not end this thread or another client's request
            if len(jobs) > 1:
                self.sampling.extend(Sampling([job]) for job in jobs)
                return
            self._settle(jobs[0], failure(error))
            return
        if not results:
            self.sampling.append(sampling)
        for job, result in zip(sampling.jobs, results, strict=False):
            self._settle(job, result)

    def _engine(self, weights: Path | None) -> Engine:
        if weights not in self.engines:
            model = self.base.model
            if weights is not None:
                source = read_record(weights.parents[2] / "model.json")
                model = self.base.adapted(Trained(**source["trained"]))
                load_weights(model, weights)
            self.engines[weights] = make_engine(model, self.base.tokenizer, self.base.device)
        self.engines.move_to_end(weights)
        while len(self.engines) > KEPT_ENGINES:
            self.engines.popitem(last=False)
        return self.engines[weights]

    def _live(self, model: Model) -> TrainedModel:
        """The model in memory: new, or from its snapshot. Raises DamagedLog: when its files cannot be read."""
        model.used = time.monotonic()
        if model.live is None:
            self._make_room()
            try:
                _read_patiently(lambda: self._restore_live(model))
            except OSError as error:  # not the request's mistake: it stays in the log
                raise DamagedLog(f"its files cannot be read ({error.strerror or error})") from error
        assert model.live is not None
        return model.live

    def _restore_live(self, model: Model) -> None:
        live = TrainedModel(self.base, model.settings, self.limits.batch_tokens)
        snapshot = model.log.snapshot()
        if snapshot is not None:
            live.load(snapshot, with_optimizer=True)
        elif model.facts["load"]:
            self._load(model, live, 0, model.facts["load"])
        model.live = live  # only now: without its checkpoint it would be another model
        model.saved_steps = live.steps
        self._repeat(model)

    def _repeat(self, model: Model) -> None:
        """Run what has run since the snapshot again: the model left the memory without a new one."""
        try:
            entries, damage = model.log.entries(last=model.done)
            for entry in entries:
                if entry.left:
                    self._live(model).repeat_failure(entry.left)
                elif not entry.kind.startswith("save_weights"):
                    self._compute(model, entry)
            if damage and model.done > max((entry.number for entry in entries), default=model.log.covered):
                raise DamagedLog(damage)
        except BaseException:
            model.live = None
            raise

    def _make_room(self) -> None:
        """Let models go that are not in use, the longest unused first; those with pending gradients last.

        Gradients are in no snapshot: such a model runs its log again when it is needed.
        """
        models = list(self.models.values())  # others create models meanwhile
        in_memory = [(one.live.has_gradients, one.used, one) for one in models if one.live is not None]
        in_memory.sort(key=lambda entry: entry[:2])
        for _, _, model in in_memory[: max(0, len(in_memory) + 1 - self.limits.models)]:
            self._snapshot(model)
            model.live = None

    def _run(self, model: Model, entry: Entry) -> bytes:
        """Run a request of the log."""
        if model.stopped and entry.number > model.stopped_after:
            return failure(UserError(model.stopped))
        try:
            result = self._outcome(model, entry)
        except DamagedLog as error:  # the request stays in the log
            self._stop(model, str(error), model.done)
            return failure(UserError(model.stopped))
        model.results[entry.number] = result
        model.done = entry.number
        steps = model.live.steps - model.saved_steps if model.live else 0
        requests = model.done - model.log.covered
        if steps >= self.limits.snapshot_steps or requests >= LOG_FACTOR * self.limits.snapshot_steps:
            self._snapshot(model)
        return result

    def _outcome(self, model: Model, entry: Entry) -> bytes:
        """The result of a request. The log knows that it has failed before the client does: it is never run again."""
        if entry.left:
            if model.live is not None:
                model.live.repeat_failure(entry.left)
            message = "this request failed, and the server has been started again since: send it once more"
            return failure(UserError(message))
        try:
            return self._compute(model, entry)
        except DamagedLog:
            raise
        except Exception as error:  # any kind: the number of a failed request is used up too
            left = "kept" if model.live is None else model.live.after_failure()
            if entry.kind == "optim_step" and left == "none" and not isinstance(error, UserError):
                model.live = None  # the step may have changed some of the weights
            try:
                model.log.fail(entry, left)
            except OSError as failed:
                raise DamagedLog(f"its log cannot be written ({failed.strerror})") from failed
            return failure(error)

    def _load(self, model: Model, trained: TrainedModel, number: int, body: dict[str, Any]) -> None:
        """Load the checkpoint of request `number`: the same files whenever the log is run again."""
        with self.lock:  # no checkpoint is replaced or deleted meanwhile; links are quick
            pinned = model.log.loaded(number)
            step = pinned or model.log.pin(number, self.path_of(model.owner, body["path"])[0])
        try:
            trained.load(step, body["optimizer"])
        except Exception as error:
            model.live = None  # it may have loaded a part
            if not isinstance(error, model_folder.DamagedCheckpoint):
                raise
            if pinned is None:  # it was damaged before
                shutil.rmtree(step.parent, ignore_errors=True)
                raise
            raise DamagedLog(error.what) from error

    def _compute(self, model: Model, entry: Entry) -> bytes:
        if entry.kind == REFUSED:
            return failure(UserError("this request was refused"))
        trained = self._live(model)
        if entry.kind == "forward_backward":
            request = wire.read_forward_backward(entry.content)
            outputs, metrics = trained.forward(request.data, request.loss, request.settings, request.has_backward)
            return wire.write_forward_backward(outputs, metrics)
        body = json.loads(entry.content)
        if entry.kind == "optim_step":
            return as_json({"metrics": trained.step(AdamBody(**body))})
        if entry.kind == "load_weights":
            self._load(model, trained, entry.number, body)
            model.saved_steps = trained.steps
            return as_json({"type": "load_weights", "path": body["path"], "model_id": model.id})
        return self._save(model, trained, entry, body)

    def _save(self, model: Model, trained: TrainedModel, entry: Entry, body: dict[str, Any]) -> bytes:
        kind = "weights" if entry.kind == "save_weights" else "sampler_weights"
        name = body["name"] or f"{EPHEMERAL}{entry.number:09d}"
        folder = self.folder / "models" / model.id / kind / name
        path = f"{SCHEME}{model.id}/{kind}/{name}"
        sampler = None
        if body["sampler"] is not None:
            sampler = f"{model.id.partition(':')[0]}:sample:{body['sampler']}"
        # A request that runs again after a restart finds its mark. What it had begun, it does again. What it had
        # finished it leaves alone: the client may have replaced or deleted that meanwhile.
        begun, saved = (folder.with_name(f".{name}.{entry.number}{end}") for end in ("", SAVED))
        if not saved.exists():
            if _last_saved(folder) > entry.number:
                raise UserError("it could not be saved; the server has been started again since: save it once more")
            if model_folder.steps(folder) and not body["overwrite"] and not begun.exists():
                raise UserError(f"there is a checkpoint {name!r} already: choose another name, or set overwrite")
            if not begun.exists():  # otherwise it was there before
                self._require_disk(model.owner)
            folder.parent.mkdir(exist_ok=True)
            begun.touch()
            self._replace(folder, trained, with_optimizer=kind == "weights")
            if sampler is not None:
                self._write("samplers", sampler, {"owner": model.owner, "path": path})
            begun.rename(saved)
            for old in sorted(folder.parent.glob(f"{EPHEMERAL}*"))[:-KEPT_EPHEMERAL]:
                shutil.rmtree(old, ignore_errors=True)
        if sampler is not None:
            return as_json({"type": entry.kind, "sampling_session_id": sampler})
        return as_json({"type": entry.kind, "path": path})

    def _replace(self, folder: Path, trained: TrainedModel, with_optimizer: bool) -> None:
        """Save a checkpoint beside the old one, and swap the two: a full disk leaves the old one."""
        beside = folder.with_name(f".{folder.name}{NEW}")
        replaced = folder.with_name(f".{folder.name}{OLD}")
        shutil.rmtree(beside, ignore_errors=True)
        try:
            trained.save(beside, with_optimizer=with_optimizer)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)  # give the room back
            raise
        with self.lock:
            if folder.exists():
                folder.rename(replaced)
            beside.rename(folder)
            storage.flush(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        for weights in [path for path in self.engines if path is not None and path.parent == folder]:
            del self.engines[weights]

    def _snapshot(self, model: Model) -> None:
        """Write a model to the disk, and empty its log."""
        # A snapshot never contains gradients: none is taken between forward_backward and optim_step.
        live = model.live
        if live is None or live.has_gradients or live.lost_gradients or live.is_broken:
            return
        if model.done <= model.log.covered or time.monotonic() < model.snapshot_after:
            return
        try:
            with model.log.new_snapshot(model.done, model.results) as folder:
                live.save(folder, with_optimizer=True)
        except (OSError, UserError) as error:  # the requests are still in the log
            warn(f"no snapshot of {model.id}: {error}")
            model.snapshot_after = time.monotonic() + SNAPSHOT_PAUSE
            return
        with self.lock:  # so that nothing is appended in the meantime
            model.log.end_snapshot()
        for mark in (self.folder / "models" / model.id).glob("*/.*"):
            match = MARK_NAME.fullmatch(mark.name)
            if match and int(match[2]) <= model.log.covered:  # these requests never run again
                mark.unlink(missing_ok=True)
        model.saved_steps = live.steps
        model.results = {}

    def close(self) -> None:
        """End the worker after its present request, and save the trained models."""
        self.closing = True  # without the lock: a disk that hangs may keep it
        with self.lock:
            self.wake.notify_all()
        with self.ending:
            if self.ended:
                return
            self.thread.join()
            for model in self.models.values():
                self._snapshot(model)
            paths.unlock(self.folder)
            self.ended = True

    def _write(self, part: str, name: str, content: dict[str, Any]) -> None:
        with _full_disk():
            write_record(self.folder / part / f"{name}.json", content)


def _has_requests(folder: Path) -> bool:
    """Whether a model has been in a folder."""
    return any(True for part in ("log", "state") for _ in (folder / part).glob("*"))


def _group_of(request_id: str) -> str:
    """The model of a request; for samples their session, which may have thousands of samplers."""
    before, _, _ = request_id.rpartition(":")
    return before.rpartition(":")[0] if ":sample:" in before else before


def _last_saved(folder: Path) -> int:
    """The last request since the snapshot that has saved this checkpoint; 0: none."""
    marks = [MARK_NAME.fullmatch(path.name) for path in folder.parent.glob(f".*{SAVED}")]
    return max((int(mark[2]) for mark in marks if mark and mark[1] == folder.name), default=0)


def iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Passes over what cannot be read in the block, and says so: the others are served."""
    try:
        yield
    except (UserError, OSError, ValueError, KeyError, TypeError) as error:
        warn(f"{what} is passed over: {str(error) or type(error).__name__}")


def _read_patiently(read: Callable[[], None]) -> None:
    """Calls `read`, and again after a read error: one that passes must cost no step."""
    for left in reversed(range(READ_TRIES)):
        try:
            read()
            return
        except (OSError, DamagedLog):
            if not left:
                raise
            time.sleep(READ_PAUSE)


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    """Raises ApiError: 503 when a file cannot be written; the client tries again for some minutes."""
    try:
        yield
    except OSError as error:
        raise ApiError(
            503, f"the server cannot write ({error.strerror}): make room on its disk", code="disk"
        ) from error
