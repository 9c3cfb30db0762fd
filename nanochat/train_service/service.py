"""Sessions, models, samplers and futures: what the routes call, and the one thread that computes.

    a route             checks a request, and calls `Service.submit` or `Service.sample` on a separate thread
    Store               the request is on the disk
    the queue           a model's requests in the order of their numbers, an owner's in the order of arrival
    the worker          runs them in slices, the owners in turn; samples of the same weights together
    Store               the outcome is on the disk
    Promise             the result, which the client fetches by the request's id

One lock guards everything except running requests. The text of users is never logged.
"""

import contextlib
import functools
import hmac
import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
from nanochat.train_service.jobs import Job, Limits, Model, Queue, Weights, as_json, failure
from nanochat.train_service.sampling import SampleJob, make_engine, sample
from nanochat.train_service.store import DONE, EPHEMERAL, Damaged, Store, remove
from nanochat.train_service.tenants import AdamBody, Base, Slices, Trained, TrainedModel, load_weights

MAX_MODELS = 2_000  # models per owner
MAX_WAITING = 1 << 28  # bytes of an owner's bodies that wait
MAX_SAMPLING = 4  # owners whose samples are decoded at the same time; each takes memory for its slots
LOG_FACTOR = 16  # a snapshot also follows after this many requests per step of `snapshot_steps`
KEPT_ENGINES = 4  # samplers in memory; others are read from the disk again
KEPT_EPHEMERAL = 8  # unnamed sampler weights of a model, the newest ones
SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}  # kinds of checkpoints, and what the client calls them
REFUSED = "refused"  # a request that was answered with an error; its number is used up
WRITE_PAUSE = 1.0  # seconds between two tries to write an outcome


@dataclass(frozen=True)
class Ran:
    """What running a request has given. Its changes belong to the transaction of the outcome; they return the folders
    that the database no longer names."""

    result: bytes
    change: Callable[[], list[Path]] = list


class Service:
    """One base model and all models of the clients, in `folder`."""

    def __init__(self, base: Base, folder: Path, name: str, limits: Limits | None = None):
        self.base = base
        self.name = name
        self.limits = limits or Limits()
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what clients send is for this user only
        paths.lock(folder, "--folder")
        self.store = Store(folder)
        self.lock = self.store.lock
        self.wake = threading.Condition(self.lock)
        self.queue = Queue()
        # Only the worker touches these. The samples of an owner that are being decoded; first the next in turn:
        self.sampling: dict[str, Slices[None]] = {}
        self.running: dict[str, Job] = {}  # by model: the request that has begun, and waits for its next slice
        self.promises: dict[str, Job] = {}  # requests without an outcome
        self.models: dict[str, Model] = {}
        self.engine = functools.lru_cache(KEPT_ENGINES)(self._make_engine)  # saved weights never change
        self.closing = False
        self.ending = threading.Lock()
        self.ended = False
        base_sha256 = base.about["base_sha256"]
        if self._first("base", base_sha256) != base_sha256:
            raise UserError(f"--folder {folder} holds models that were trained over another base: name another folder")
        self.secret = self._first("secret", secrets.token_hex(16)).encode()
        # For clients on this machine, whose get_tokenizer reads a folder as well as a hub.
        self.tokenizer_folder = folder / "tokenizer"
        self.tokenizer_folder.mkdir(exist_ok=True)
        for name_of_file, content in tokenizer_files(base.tokenizer, base.model.config.sequence_len, True).items():
            file = (content if isinstance(content, str) else json.dumps(content)).encode()
            path = self.tokenizer_folder / name_of_file
            # A restart on a full disk writes nothing.
            if not path.exists() or path.read_bytes() != file:
                storage.write_file(path, [file])
        with self.lock:
            self._restore()
        self.thread = threading.Thread(target=self._work, name="device", daemon=True)
        self.thread.start()

    def _first(self, name: str, value: str) -> str:
        """What the first start in this folder has written under a name."""
        known = self.store.get("base", name=name)
        if known is None:
            with self.store.transaction():
                self.store.put("base", name=name, sha256=value)
        return known["sha256"] if known else value

    def _row(self, table: str, **key: Any) -> dict[str, Any] | None:
        """A row; None: there is none. Raises ApiError: 400 when it is damaged."""
        try:
            return self.store.get(table, **key)
        except Damaged as error:
            warn(str(error))
            message = f"{table} {' '.join(map(str, key.values()))[:100]} cannot be read: create another one"
            raise ApiError(400, message, code="damaged") from error

    # ------------------------------------------------------------------ sessions

    def create_session(self, owner: str) -> str:
        """A name that only this owner can use. It is not kept: models and samplers are named after it."""
        token = secrets.token_hex(8)
        return token + self._proof(owner, token)

    def require_session(self, owner: str, session: str) -> None:
        """Raises ApiError: 404 when it was made for another key, or not here."""
        if session != session[:16] + self._proof(owner, session[:16]):
            raise ApiError(404, f"session {session[:100]!r} does not exist", param="session_id", code="not_found")

    def _proof(self, owner: str, token: str) -> str:
        return hmac.new(self.secret, f"{owner} {token}".encode(errors="replace"), "sha256").hexdigest()[:16]

    # ------------------------------------------------------------------ models

    def _restore(self) -> None:
        """Find the models of an earlier start, and queue their requests without an outcome."""
        self.store.clean_up()
        for row in self.store.rows("models"):
            if isinstance(row, Damaged):
                warn(f"a model is passed over: {row}")
                continue
            covered = row["covered"]
            model = Model(row["id"], row["owner"], json.loads(row["facts"]), covered, row["snapshot"], covered)
            model.next = covered + 1
            self.models[model.id] = model
            for number, size, state in self.store.outline(model.id):
                if not state:
                    self._add(model, number, size)
                elif number == model.done + 1 == model.next:
                    model.done = number
                    model.next += 1
                else:
                    self._stop(model, f"{self.store.path} is damaged (it lacks request {model.done + 1})")
                    break

    def _stop(self, model: Model, damage: str) -> None:
        """Run no more requests of a model with damaged files: it would become another one."""
        model.stopped = (
            f"model {model.id} has stopped after request {model.done}, {damage}: restart the server, if need be "
            "with its folder from a backup, or create a training client from a saved state"
        )
        warn(model.stopped)
        with self.lock:
            for job in model.early.values():
                self._finish(job, failure(UserError(model.stopped)))
            model.early.clear()

    def create_model(
        self, owner: str, session: str, number: int, trained: Trained, metadata: Any, load: dict[str, Any] | None = None
    ) -> str:
        """Create a model, with `load` from a checkpoint; returns the promise's id.

        A repeated request does not create another model.
        """
        self.require_session(owner, session)
        model_id = f"{session}:train:{number}"
        with self.lock:
            if model_id not in self.models:
                self._require_disk(owner)
                self._require_room(owner)
                if sum(model.owner == owner for model in self.models.values()) >= MAX_MODELS:
                    message = f"this key has {MAX_MODELS:,} models, the most that there may be: use another key"
                    raise ApiError(400, message, code="too_many_models")
                self._row("models", id=model_id)  # the start has passed a damaged one over: it becomes no new one
                model = Model(
                    model_id, owner, {"created": time.time(), "metadata": metadata, "trained": asdict(trained)}
                )
                with _full_disk(), self.store.transaction():
                    self._put_model(model)
                    # The checkpoint may be overwritten or deleted before this request is run.
                    pinned = self._folder_of(owner, load["path"]) if load else ""
                    self._put_request(model, 0, "create_model", as_json(load or {}))
                    self.store.put("runs", model=model_id, number=0, state="", pinned=pinned)
                self.models[model_id] = model
                self._add(model, 0, 0)
        return f"{model_id}:0"

    def _put_model(self, model: Model, covered: int = -1, snapshot: str = "") -> None:
        about = {"session": model.id.partition(":")[0], "owner": model.owner, "facts": json.dumps(model.facts)}
        self.store.put("models", id=model.id, **about, covered=covered, snapshot=snapshot)

    def _put_request(self, model: Model, number: int, kind: str, content: bytes) -> None:
        self.store.put("requests", model=model.id, number=number, kind=kind, content=content)

    def owned(self, owner: str) -> list[Model]:
        """The owner's models, the newest first."""
        with self.lock:
            models = [model for model in self.models.values() if model.owner == owner]
        return sorted(models, key=lambda model: -model.facts["created"])

    def _require_disk(self, owner: str) -> None:
        """Raises ApiError: 400 when the weights of the owner's models fill their quota."""
        if self.limits.owner_bytes:
            used = self.store.used_bytes(owner)
            if used >= self.limits.owner_bytes:
                message = f"the models of this key take {used:,} of {self.limits.owner_bytes:,} bytes on the server's "
                raise ApiError(400, message + "disk: delete checkpoints first", code="disk_quota")

    def find_model(self, owner: str, model_id: str) -> Model:
        """Raises ApiError: 404, also for a model of another key."""
        model = self.models.get(model_id)
        if model is None or model.owner != owner:
            raise ApiError(404, f"model {model_id[:100]!r} does not exist", param="model_id", code="model_not_found")
        return model

    def submit(self, owner: str, model_id: str, number: int | None, kind: str, content: bytes) -> str:
        """Record and queue a request to a model; returns the promise's id.

        Raises ApiError: 400 without a number, 429 when too many requests wait. A known number is not run again.
        """
        model = self.find_model(owner, model_id)
        if number is None or not 1 <= number < 10**9:
            raise ApiError(400, "seq_id: the number of the request, from 1 on", param="seq_id", code="invalid_value")
        with self.lock:
            if model.stopped:
                raise ApiError(400, model.stopped, code="damaged")
            if number >= model.next and number not in model.early:
                self._require_room(owner, is_early=number != model.next)
                with _full_disk(), self.store.transaction():
                    self._put_request(model, number, kind, content)
                self._add(model, number, len(content))
        return f"{model.id}:{number}"

    def refuse(self, owner: str, model_id: str, number: int | None) -> None:
        """Use up the number of a refused request: later requests would wait for it for ever."""
        model = self.models.get(model_id)
        if model is not None and model.owner == owner and number is not None and 1 <= number < 10**9:
            self.submit(owner, model_id, number, REFUSED, b"")

    def _add(self, model: Model, number: int, size: int) -> None:
        """Queue a request once all requests before it are queued."""
        job = Job(f"{model.id}:{number}", model.owner, size=size)
        job.slices = self._run(model, number, job)
        self.promises[job.id] = job
        model.early[number] = job
        while model.next in model.early:
            self._enqueue(model.early.pop(model.next))
            model.next += 1

    def _enqueue(self, job: Job) -> None:
        job.is_queued = True
        self.queue.append(job)
        self.wake.notify()

    def _require_room(self, owner: str, is_early: bool = False) -> None:
        """Raises ApiError: 429 when too many of an owner's requests wait. The one that others wait for is accepted as
        long as the queue has room; for any other one, those that came before their turn count too."""
        waiting = [job for job in self.promises.values() if job.owner == owner and (is_early or job.is_queued)]
        if len(waiting) >= self.limits.queue or sum(job.size for job in waiting) > MAX_WAITING:
            message = f"{len(waiting):,} requests wait already: try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})

    def _finish(self, job: Job, result: bytes) -> None:
        with self.lock:
            job.result.set_result(result)
            self.promises.pop(job.id, None)

    def promise(self, owner: str, request_id: str) -> Job:
        """Raises ApiError: 410 for a promise that this server does not know (any more): the client asks again."""
        with self.lock:
            job = self.promises.get(request_id)
            if job is None:
                with contextlib.suppress(ApiError):  # one that is damaged is as one that is gone
                    row = self._row("outcomes", id=request_id)
                    if row and row["owner"] == owner:
                        return Job.finished(request_id, row["result"])
        if job is not None and job.owner == owner:
            return job
        model_id, _, number = request_id.rpartition(":")
        model = self.models.get(model_id)
        if model is not None and model.owner == owner and re.fullmatch(r"[0-9]{1,9}", number):
            if int(number) <= model.done:  # if the client sent it again, it would wait without end
                message = f"request {number} was carried out, and its result is no longer kept: continue with the next"
                return Job.finished(request_id, failure(UserError(message)))
            if model.stopped:
                return Job.finished(request_id, failure(UserError(model.stopped)))
        raise ApiError(410, "this server has no such request (any more): send it again", code="unknown_request")

    # ------------------------------------------------------------------ checkpoints

    def path_of(self, owner: str, uri: str) -> tuple[Path, Model]:
        """The step's folder of tinker://<model>/<kind>/<name>, and its model. Raises ApiError: 404."""
        parts = uri.removeprefix(SCHEME).split("/")
        if uri.startswith(SCHEME) and len(parts) == 3:
            model = self.find_model(owner, parts[0])
            row = self._row("checkpoints", model=model.id, kind=parts[1], name=parts[2])
            found = model_folder.steps(self.folder / row["folder"]) if row else []
            if row and found:
                return model_folder.step_path(self.folder / row["folder"], found[-1]), model
        form = f"{SCHEME}MODEL/weights/NAME or .../sampler_weights/NAME"
        message = f"checkpoint {uri[:200]!r} does not exist: name one as {form}"
        raise ApiError(404, message, param="path", code="not_found")

    def _folder_of(self, owner: str, uri: str) -> str:
        """A checkpoint's folder, as the database names it."""
        return str(self.path_of(owner, uri)[0].parent.relative_to(self.folder))

    def list_checkpoints(self, model: Model) -> list[dict[str, Any]]:
        found = []
        for row in self.store.rows("checkpoints", model=model.id):
            if isinstance(row, Damaged):
                warn(str(row))
            elif not row["name"].startswith(EPHEMERAL):
                folder = self.store.get("folders", path=row["folder"])
                path = f"{row['kind']}/{row['name']}"
                found.append({
                    "checkpoint_id": path, "checkpoint_type": KINDS[row["kind"]], "time": iso(row["saved"]),
                    "tinker_path": f"{SCHEME}{model.id}/{path}", "public": False,
                    "size_bytes": folder["bytes"] if folder else 0,
                })  # fmt: skip
        return found

    def delete_checkpoint(self, owner: str, uri: str) -> None:
        self.path_of(owner, uri)
        model_id, kind, name = uri.removeprefix(SCHEME).split("/")
        with _full_disk():
            self.store.forget(lambda: self.store.delete("checkpoints", model=model_id, kind=kind, name=name))

    # ------------------------------------------------------------------ samplers

    def create_sampler(self, owner: str, session: str, number: int, uri: str | None) -> str:
        """A sampling session for the base, or for saved weights. Raises ApiError: 404 when they do not exist."""
        self.require_session(owner, session)
        if uri is not None:
            self.path_of(owner, uri)
        return _sampler_of(session, number, uri)

    def sampled_path(self, owner: str, sampler: str) -> str | None:
        """The tinker:// path that a sampler was made for; None: the base."""
        session, _, rest = sampler.partition(":")
        self.require_session(owner, session)
        path = rest.partition(":")[2].partition(":")[2]
        return SCHEME + path if path else None

    def sampled_weights(self, owner: str, sampler: str) -> Weights | None:
        """Those that a sampler has now; None: the base."""
        uri = self.sampled_path(owner, sampler)
        if uri is None:
            return None
        step, model = self.path_of(owner, uri)
        return Weights(step, model.settings)

    def sample(self, owner: str, sampler: str, number: int, job: SampleJob) -> str:
        """Queue a sample; returns the promise's id. A known number is not sampled again."""
        weights = self.sampled_weights(owner, sampler)
        request_id = f"{sampler}:{number}"
        with self.lock:
            if request_id not in self.promises and request_id not in self.store.kept.get(owner, ()):
                self._require_room(owner)
                self.promises[request_id] = Job(request_id, owner, sampler=weights, sample=job)
                self._enqueue(self.promises[request_id])
        return request_id

    # ------------------------------------------------------------------ the worker

    def _work(self) -> None:
        while True:
            with self.lock:
                while not self.queue and not self.sampling and not self.closing:
                    self.wake.wait()
                if self.closing:
                    return
                jobs = self.queue.take(self._may_run)
            if jobs and jobs[0].sample is not None:
                self.sampling[jobs[0].owner] = self._sample(jobs)
            elif jobs:
                self._run_slice(jobs[0])
            if self.sampling:
                owner, slices = next(iter(self.sampling.items()))
                has_more = _has_more(slices)
                del self.sampling[owner]
                if has_more:
                    self.sampling[owner] = slices  # at the end

    def _may_run(self, job: Job) -> bool:
        if job.sample is not None:
            # One set of samples of an owner at a time: a second one would take the device from the others.
            return len(self.sampling) < MAX_SAMPLING and job.owner not in self.sampling
        if job.model_id in self.running:  # the requests of a model run one after the other
            return job is self.running[job.model_id]
        return len(self.running) < self.limits.models  # a model whose request has begun stays in memory

    def _run_slice(self, job: Job) -> None:
        """Run a request, or its part up to the next pause."""
        assert job.slices is not None
        model = self.models[job.model_id]
        self.running.pop(job.model_id, None)
        try:
            if _has_more(job.slices):
                self.running[job.model_id] = job
                with self.lock:
                    self.queue.put_back(job)
        except Exception as error:  # any kind: this thread serves all clients
            model.live = None  # in memory it may be another one than on the disk
            self._stop(model, f"the server failed ({type(error).__name__})")
            self._finish(job, failure(error))

    def _sample(self, jobs: Sequence[Job]) -> Slices[None]:
        """Decode samples of the same weights together."""
        wanted = [job.sample for job in jobs if job.sample is not None]
        results: list[bytes] = []
        try:
            for results in sample(self.engine(jobs[0].sampler), wanted, self.limits.slots):
                if not results:
                    yield
        except Exception as error:  # any kind: it must not end this thread or another client's request
            results = [failure(error)]
        if len(results) < len(jobs):  # one of them has failed: each again, without the others
            for job in jobs:
                yield from self._sample([job])
            return
        try:
            self._record(jobs, results)
        except Exception as error:
            for job in jobs:
                self._finish(job, failure(error))

    def _make_engine(self, weights: Weights | None) -> Engine:
        model = self.base.model
        if weights is not None:
            model = self.base.adapted(weights.trained)
            load_weights(model, weights.step)
        return make_engine(model, self.base.tokenizer, self.base.device)

    def _record(self, jobs: Sequence[Job], results: Sequence[bytes], change: Callable[[], list[Path]] = list) -> bool:
        """Write the outcomes of requests to the disk, then tell the clients. While the disk is full, this waits.

        Returns False: the service closes before that; the requests run again after the next start.
        """
        warned = False
        while True:
            try:
                with self.lock:
                    with self.store.transaction():
                        unused = change()
                        for job, result in zip(jobs, results, strict=True):
                            bucket = job.id.rpartition(":")[0] if job.sample is None else job.owner
                            self.store.settle(job.id, job.owner, bucket, result)
                    for job, result in zip(jobs, results, strict=True):
                        self._finish(job, result)
                for path in unused:
                    remove(path)
                return True
            except OSError as error:
                if not warned:
                    warn(f"all requests wait: {self.store.path} cannot be written ({error.strerror})")
                warned = True
            if self.closing:
                return False
            time.sleep(WRITE_PAUSE)

    def _live(self, model: Model) -> Slices[TrainedModel]:
        """The model in memory: new, or from its snapshot. Raises Damaged: when its files cannot be read."""
        model.used = time.monotonic()
        if model.live is None:
            self._make_room()
            try:
                model.live = yield from self._restored(model)
            except OSError as error:  # not the request's mistake: it gets no outcome
                raise Damaged(f"its files cannot be read ({error.strerror or error})") from error
        return model.live

    def _restored(self, model: Model) -> Slices[TrainedModel]:
        """Load the snapshot, and repeat what has run since."""
        trained = TrainedModel(self.base, model.settings, self.limits.batch_tokens)
        if model.snapshot:
            found = model_folder.newest(self.folder / model.snapshot)
            if found is None:
                raise Damaged(f"{self.folder / model.snapshot} is damaged")
            trained.load(found[0], with_optimizer=True)
        model.saved_steps = trained.steps
        for number in range(model.covered + 1, model.done + 1):
            entry = self.store.request(model.id, number)
            if entry["state"] != DONE:
                if number == 0:
                    raise Damaged("it could not be created")
                trained.repeat_failure(entry["state"])
            elif not entry["kind"].startswith("save_weights"):
                yield from self._compute(model, trained, entry)
        return trained

    def _make_room(self) -> None:
        """Let models go that are not in use, the longest unused first; those with pending gradients last.

        Gradients are in no snapshot: such a model repeats its requests when it is needed.
        """
        models = [one for one in list(self.models.values()) if one.id not in self.running]  # others create some now
        in_memory = [(one.live.has_gradients, one.used, one) for one in models if one.live is not None]
        in_memory.sort(key=lambda entry: entry[:2])
        for _, _, model in in_memory[: max(0, len(in_memory) + len(self.running) + 1 - self.limits.models)]:
            self._snapshot(model)
            model.live = None

    def _run(self, model: Model, number: int, job: Job) -> Slices[None]:
        """Run a request, and record what it has come to before its client learns of it."""
        ran = None
        if not model.stopped:
            try:
                ran = yield from self._outcome(model, number)
            except Damaged as error:  # the request gets no outcome: it runs after a restart with files that can be read
                self._stop(model, str(error))
        if ran is None:
            self._finish(job, failure(UserError(model.stopped)))
        elif self._record([job], [ran.result], ran.change):
            model.done = number
            steps = model.live.steps - model.saved_steps if model.live else 0
            requests = model.done - model.covered
            if steps >= self.limits.snapshot_steps or requests >= LOG_FACTOR * self.limits.snapshot_steps:
                self._snapshot(model)
        else:
            model.live = None  # it is further than the database
        self.store.reading = ""

    def _outcome(self, model: Model, number: int) -> Slices[Ran]:
        """What a request comes to. One that fails leaves something behind too, which its row says."""
        entry = self.store.request(model.id, number)
        try:
            if entry["kind"] == REFUSED:
                raise UserError("this request was refused")
            trained = yield from self._live(model)
            ran = yield from self._compute(model, trained, entry)
            state, pinned = DONE, entry["pinned"]
        except Damaged:
            raise
        except Exception as error:  # any kind: the number of a failed request is used up too
            state, pinned = "kept" if model.live is None else model.live.after_failure(), ""
            is_unknown = entry["kind"] == "optim_step" and state == "none" and not isinstance(error, UserError)
            if is_unknown:
                model.live = None  # the step may have changed some of the weights
            ran = Ran(failure(error))

        def change() -> list[Path]:
            self.store.put("runs", model=model.id, number=number, state=state, pinned=pinned)
            return ran.change()

        return Ran(ran.result, change)

    def _load(self, model: Model, trained: TrainedModel, entry: dict[str, Any], load: dict[str, Any]) -> None:
        """Load the checkpoint of a request: the same files whenever it is repeated."""
        if not entry["pinned"]:
            with self.store.lock:  # the folder stays until the outcome is written, also on a full disk
                entry["pinned"] = self.store.reading = self._folder_of(model.owner, load["path"])
        try:
            folder = self.folder / entry["pinned"]
            found = model_folder.steps(folder)
            if not found:
                raise model_folder.DamagedCheckpoint(f"{folder} is damaged")
            trained.load(model_folder.step_path(folder, found[-1]), load["optimizer"])
        except Exception as error:
            model.live = None  # it may have loaded a part
            if isinstance(error, model_folder.DamagedCheckpoint) and (entry["state"] or not entry["number"]):
                raise Damaged(error.what) from error
            raise  # in its first run it is the client's choice

    def _compute(self, model: Model, trained: TrainedModel, entry: dict[str, Any]) -> Slices[Ran]:
        kind, number = entry["kind"], entry["number"]
        if kind == "forward_backward":
            request = wire.read_forward_backward(entry["content"])
            batch = (request.data, request.loss, request.settings, request.has_backward)
            return Ran(wire.write_forward_backward(*(yield from trained.forward(*batch))))
        body = json.loads(entry["content"])
        if kind == "optim_step":
            return Ran(as_json({"metrics": trained.step(AdamBody(**body))}))
        if kind in ("create_model", "load_weights"):
            if body:
                self._load(model, trained, entry, body)
            model.saved_steps = trained.steps
            answer = {"type": "load_weights", "path": body["path"]} if body else {"type": kind}
            return Ran(as_json({**answer, "model_id": model.id}))
        return self._save(model, trained, number, kind, body)

    def _save(self, model: Model, trained: TrainedModel, number: int, request_kind: str, body: dict[str, Any]) -> Ran:
        kind = "weights" if request_kind == "save_weights" else "sampler_weights"
        name = body["name"] or f"{EPHEMERAL}{number:09d}"
        key = {"model": model.id, "kind": kind, "name": name}
        uri = f"{SCHEME}{model.id}/{kind}/{name}"
        if self._row("checkpoints", **key) and not body["overwrite"]:
            raise UserError(f"there is a checkpoint {name!r} already: choose another name, or set overwrite")
        self._require_disk(model.owner)
        folder, size = self._write(model, f"{kind}/{name}.{number}", trained, with_optimizer=kind == "weights")
        answer = {"type": request_kind, "path": uri}
        session = model.id.partition(":")[0]
        if body["sampler"] is not None:
            answer = {"type": request_kind, "sampling_session_id": _sampler_of(session, body["sampler"], uri)}

        def change() -> list[Path]:
            self.store.put("folders", path=folder, owner=model.owner, bytes=size)
            self.store.put("checkpoints", **key, folder=folder, saved=time.time())
            rows = self.store.rows("checkpoints", model=model.id, kind=kind)
            unnamed = [row["name"] for row in rows if isinstance(row, dict) and row["name"].startswith(EPHEMERAL)]
            for old in unnamed[:-KEPT_EPHEMERAL]:
                self.store.delete("checkpoints", model=model.id, kind=kind, name=old)
            return self.store.unused()

        return Ran(as_json(answer), change)

    def _write(self, model: Model, name: str, trained: TrainedModel, with_optimizer: bool) -> tuple[str, int]:
        """Save weights into a new folder of the model; returns its name in the database, and its bytes."""
        folder = self.folder / "models" / model.id / name
        shutil.rmtree(folder, ignore_errors=True)  # what an earlier try has left
        try:
            trained.save(folder, with_optimizer=with_optimizer)
            for parent in (folder.parent, *folder.parents[1:4]):
                storage.flush(parent)
        except BaseException:
            remove(folder)  # give the room back
            raise
        return str(folder.relative_to(self.folder)), sum(file.stat().st_size for file in folder.glob("*/*"))

    def _snapshot(self, model: Model) -> None:
        """Write a model to the disk, and let its requests go."""
        # A snapshot never contains gradients: none is taken between forward_backward and optim_step.
        live = model.live
        if live is None or live.has_gradients or live.lost_gradients or live.is_broken or model.done <= model.covered:
            return
        try:
            folder, size = self._write(model, f"state/{model.done}", live, with_optimizer=True)
            if model_folder.newest(self.folder / folder) is None:
                raise UserError(f"{folder} cannot be read back")

            def change() -> None:
                self.store.put("folders", path=folder, owner=model.owner, bytes=size)
                self._put_model(model, model.done, folder)
                for table in ("requests", "runs"):
                    self.store.delete_up_to(table, model.id, model.done)

            self.store.forget(change)
        except (OSError, UserError) as error:  # the requests are still there
            remove(self.folder / "models" / model.id / f"state/{model.done}")
            warn(f"no snapshot of {model.id}: {error}")
            return
        model.covered, model.snapshot, model.saved_steps = model.done, folder, live.steps

    def close(self) -> None:
        """End the worker at its next pause, and save the trained models."""
        self.closing = True  # without the lock: a disk that hangs may keep it
        with self.lock:
            self.wake.notify_all()
        with self.ending:
            if self.ended:
                return
            self.thread.join()
            for model in self.models.values():
                self._snapshot(model)
            self.store.close()
            paths.unlock(self.folder)
            self.ended = True


def _sampler_of(session: str, number: int, uri: str | None) -> str:
    """The id of a sampler, which says all that is known of it."""
    return f"{session}:sample:{number}" + (f":{uri.removeprefix(SCHEME)}" if uri else "")


def _has_more(slices: Slices[None]) -> bool:
    """Run a slice; returns whether there are more."""
    try:
        next(slices)
    except StopIteration:
        return False
    return True


def iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    """Raises ApiError: 503 when a transaction cannot be written; the client tries again for some minutes."""
    try:
        yield
    except OSError as error:
        message = f"the server cannot write ({error.strerror}): make room on its disk"
        raise ApiError(503, message, code="disk") from error
