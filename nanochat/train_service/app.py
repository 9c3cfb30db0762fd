"""The HTTP side of the training service: the routes of the tinker client, version 0.38. How a request becomes a result:

    serve/connection.py, serve/middleware.py   bound and check the request, as for the chat server
    bodies.py, wire.py                         JSON or protocol buffers -> checked fields
    service.py, jobs.py                        queue it, and return the id of a promise
    store.py                                   the request on the disk, and later its outcome
    tenants.py, losses.py, sampling.py         compute it, on the one thread that owns the device
    app.py                                     the client asks for the promise until it is kept

A mistake in a request is answered with 400 at once. A mistake that appears only in the computation is reported by the
promise. Both are one line that names the fix.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Scope

from nanochat.ground.cli import UserError
from nanochat.ground.untrusted import json_of
from nanochat.serve.app import INLINE_BYTES, LOOPBACK
from nanochat.serve.middleware import AccessMiddleware, http_error, read_limited
from nanochat.serve.schema import ApiError, Strict, read_body
from nanochat.serve.state import closing_at_signals
from nanochat.train_service import bodies, wire
from nanochat.train_service.service import SCHEME, Model, Service, iso
from nanochat.train_service.tenants import Trained

MAX_BODY = 16 << 20  # bytes of a batch; the client cuts it into requests of about 5 MB
MAX_JSON = 2 << 20  # bytes of any other body: a prompt of a quarter of a million tokens
OWNER_BODIES = 64 << 20  # bytes of a key's bodies in memory, from their announcement until they are on the disk
ALL_BODIES = 256 << 20  # and of all keys
POLL_SECONDS = 20.0  # a request for a promise waits this long before the client has to ask again
CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": False, "use_pyqwest_transport": False,
    "sample_use_retrieve_futures": False, "custom_loss_server_side": False, "pjwt_auth_enabled": False,
}  # fmt: skip


class _Access(AccessMiddleware):
    """The chat server's checks, with the key where the tinker client sends it. Each key is a separate owner."""

    max_body = MAX_BODY

    def __init__(self, app: ASGIApp, keys: Sequence[str], **options: Any):
        super().__init__(app, api_key=None, origins=(), **options)
        self.keys = keys  # () for any

    def refuse_stranger(self, headers: Headers, scope: Scope) -> ApiError | None:
        key = headers.get("x-api-key", "").encode("latin-1")
        if self.keys and not any(hmac.compare_digest(key, one.encode()) for one in self.keys):
            return ApiError(401, "the API key is missing or wrong: set TINKER_API_KEY", code="invalid_api_key")
        # On a server without keys, all clients share everything.
        scope["state"]["owner"] = hashlib.sha256(key if self.keys else b"").hexdigest()[:16]
        return None


def create_app(service: Service, *, keys: Sequence[str] = (), hosts: Sequence[str] = LOOPBACK) -> FastAPI:
    """The ASGI application; it closes the service when the server ends.

    `keys` are the keys of the clients; each client sees only its own models. `hosts` as in serve/app.py.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with closing_at_signals(service.close, lambda: service.thread):
            yield
            await asyncio.to_thread(service.close)

    wire.messages()  # imported before the first request
    app = FastAPI(title="nanochat training service", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        _Access, keys=keys, hosts=tuple(hosts), open_paths=("/api/v1/healthz",), content_policy="default-src 'none'"
    )
    app.add_exception_handler(HTTPException, http_error)

    # The parsers hold Python's lock, and what they make is larger than the body: one large body at a time.
    app.state.parsing = asyncio.Lock()
    app.state.bodies = Counter()  # bytes by owner
    _add_client_routes(app, service)
    _add_training_routes(app, service)
    _add_sampling_routes(app, service)
    _add_promise_routes(app, service)
    _add_model_routes(app, service)
    return app


@contextlib.asynccontextmanager
async def _body(request: Request, most: int) -> AsyncIterator[bytes]:
    """The body, as long as it is needed. Raises ApiError: 503 when those in memory leave no room for it."""
    held, owner = request.app.state.bodies, _owner(request)
    size = min(most, int(request.headers.get("content-length", most)))
    if held[owner] + size > OWNER_BODIES or held.total() + size > ALL_BODIES:
        message = "the server has no room for another body now: try again later"
        raise ApiError(503, message, code="bodies", headers={"retry-after": "1"})
    held[owner] += size
    try:
        yield await read_limited(request, most)
    finally:
        held[owner] -= size


async def _parsed(request: Request, body_type: type[Strict], content: bytes) -> Any:
    if len(content) <= INLINE_BYTES:
        return read_body(body_type, content)
    async with request.app.state.parsing:
        return await asyncio.to_thread(read_body, body_type, content)


def _owner(request: Request) -> str:
    return request.scope["state"]["owner"]


def _poster(app: FastAPI, service: Service) -> Callable[..., Any]:
    """A decorator for routes with a JSON body, as `(owner, body) -> answer`. They run on another thread: they may wait
    for the disk.

    With `uses_number` a refused body uses up its number: later requests would wait for it for ever.
    """

    def post(path: str, body_type: type[Strict], uses_number: bool = False) -> Callable[[Any], None]:
        def register(answer: Callable[[str, Any], dict[str, Any]]) -> None:
            @app.post(f"/api/v1/{path}")
            async def endpoint(request: Request) -> dict[str, Any]:
                async with _body(request, MAX_JSON) as content:
                    try:
                        body = await _parsed(request, body_type, content)
                    except ApiError:
                        if uses_number:
                            await asyncio.to_thread(_use_up, service, _owner(request), content)
                        raise
                    return await asyncio.to_thread(answer, _owner(request), body)

        return register

    return post


def _use_up(service: Service, owner: str, content: bytes) -> None:
    """Use up the number of a refused body, if it has one."""
    body = json_of(content)
    if isinstance(body, dict) and isinstance(body.get("model_id"), str) and type(body.get("seq_id")) is int:
        service.refuse(owner, body["model_id"], body["seq_id"])


def _add_client_routes(app: FastAPI, service: Service) -> None:
    """The client's own settings, and its sessions."""
    post = _poster(app, service)

    @app.get("/api/v1/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @post("client/config", bodies.ClientConfigBody)
    def client_config(owner: str, body: bodies.ClientConfigBody) -> dict[str, Any]:
        return CLIENT_CONFIG

    @post("client/dynamic_config", bodies.ClientConfigBody)
    def client_dynamic_config(owner: str, body: bodies.ClientConfigBody) -> dict[str, Any]:
        return {"refresh_interval_sec": 3600, "sample_cancel_enabled": False}

    @app.post("/api/v1/telemetry")
    async def telemetry(request: Request) -> dict[str, str]:
        """Reports of the client about itself: read, but not kept."""
        async with _body(request, MAX_JSON):
            return {"status": "accepted"}

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        context = service.base.model.config.sequence_len
        model = {"model_name": service.name, "max_context_length": context, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    @post("create_session", bodies.CreateSessionBody)
    def create_session(owner: str, body: bodies.CreateSessionBody) -> dict[str, Any]:
        return {"type": "create_session", "session_id": service.create_session(owner)}

    @post("session_heartbeat", bodies.SessionBody)
    def heartbeat(owner: str, body: bodies.SessionBody) -> dict[str, Any]:
        service.require_session(owner, body.session_id)
        return {"type": "session_heartbeat"}

    @app.post("/api/v1/sessions/{session}/finish")
    async def finish(request: Request, session: str) -> dict[str, Any]:
        """The end of a session ends nothing else: its models can be trained on, and its samplers can sample."""
        async with _body(request, MAX_JSON):
            service.require_session(_owner(request), session)
            return {}


def _add_training_routes(app: FastAPI, service: Service) -> None:
    """The calls of a training loop."""
    post = _poster(app, service)

    def submit(owner: str, body: Any, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        request_id = service.submit(owner, body.model_id, body.seq_id, kind, json.dumps(content).encode())
        return {"request_id": request_id, "model_id": body.model_id}

    @post("create_model", bodies.CreateModelBody)
    def create_model(owner: str, body: bodies.CreateModelBody) -> dict[str, Any]:
        _require_base(service, body.base_model)
        trained = Trained(0) if body.lora_config is None else bodies.trained_of(body.lora_config)
        about = (body.session_id, body.model_seq_id, trained, body.user_metadata)
        return {"request_id": service.create_model(owner, *about)}

    @post("get_info", bodies.ModelBody)
    def get_info(owner: str, body: bodies.ModelBody) -> dict[str, Any]:
        model = service.find_model(owner, body.model_id)
        data = {"arch": "nanochat", "model_name": service.name, "tokenizer_id": str(service.tokenizer_folder)}
        facts = {"model_id": model.id, "model_name": service.name, **_facts(model)}
        return {"type": "get_info", "model_data": data, **facts}

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        async with _body(request, MAX_BODY) as content:
            if request.headers.get("content-type", "").partition(";")[0] != wire.CONTENT_TYPE:
                raise ApiError(415, f"forward_backward: the body is {wire.CONTENT_TYPE}")
            async with request.app.state.parsing:
                found = await asyncio.to_thread(_checked_batch, service, _owner(request), content)
            batch = (found.model_id, found.number, "forward_backward", content)
            request_id = await asyncio.to_thread(service.submit, _owner(request), *batch)
            return {"request_id": request_id, "model_id": found.model_id}

    @post("optim_step", bodies.OptimStepBody, uses_number=True)
    def optim_step(owner: str, body: bodies.OptimStepBody) -> dict[str, Any]:
        return submit(owner, body, "optim_step", body.adam_params.model_dump())

    @post("save_weights", bodies.SaveWeightsBody, uses_number=True)
    def save_weights(owner: str, body: bodies.SaveWeightsBody) -> dict[str, Any]:
        return submit(owner, body, "save_weights", _saved(body))

    @post("save_weights_for_sampler", bodies.SaveWeightsBody, uses_number=True)
    def save_weights_for_sampler(owner: str, body: bodies.SaveWeightsBody) -> dict[str, Any]:
        return submit(owner, body, "save_weights_for_sampler", _saved(body))

    @post("load_weights", bodies.LoadWeightsBody)
    def load_weights(owner: str, body: bodies.LoadWeightsBody) -> dict[str, Any]:
        load = {"path": body.path, "optimizer": body.optimizer}
        if body.model_id is not None:
            return submit(owner, body, "load_weights", load)
        # A new model that trains the same parts as the checkpoint's model.
        if body.session_id is None or body.model_seq_id is None:
            raise ApiError(400, "load_weights: model_id and seq_id, or session_id and model_seq_id", param="model_id")
        _require_base(service, body.base_model or service.name)
        _, source = service.path_of(owner, body.path)
        about = (body.session_id, body.model_seq_id, source.settings, body.user_metadata, load)
        return {"request_id": service.create_model(owner, *about)}


def _add_sampling_routes(app: FastAPI, service: Service) -> None:
    """Sessions that sample, and their samples."""
    post = _poster(app, service)

    @post("create_sampling_session", bodies.CreateSamplerBody)
    def create_sampling_session(owner: str, body: bodies.CreateSamplerBody) -> dict[str, Any]:
        if body.model_path is None:
            _require_base(service, body.base_model or "")
        about = (body.session_id, body.sampling_session_seq_id, body.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": service.create_sampler(owner, *about)}

    @app.get("/api/v1/samplers/{sampler:path}")
    async def get_sampler(request: Request, sampler: str) -> dict[str, Any]:
        path = service.sampled_path(_owner(request), sampler)
        return {"sampler_id": sampler, "base_model": service.name, "model_path": path}

    @post("asample", bodies.SampleBody)
    def asample(owner: str, body: bodies.SampleBody) -> dict[str, Any]:
        config = service.base.model.config
        job = body.job(service.base.tokenizer, config.vocab_size, config.sequence_len)
        request_id = service.sample(owner, body.sampling_session_id, body.seq_id, job)
        sequences = [f"{request_id}:{number}" for number in range(job.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": sequences}


def _add_promise_routes(app: FastAPI, service: Service) -> None:
    """The results of what is queued."""

    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        async with _body(request, MAX_JSON) as content:
            body = await _parsed(request, bodies.FutureBody, content)
        job = await asyncio.to_thread(service.promise, _owner(request), body.request_id)
        waited = asyncio.wrap_future(job.result)
        done: set[Any] = set()
        end = time.monotonic() + POLL_SECONDS
        while not done and not service.closing and time.monotonic() < end:
            done, _ = await asyncio.wait({waited}, timeout=1.0)
        if not done:
            pending = {"type": "try_again", "request_id": job.id, "queue_state": "active"}
            return JSONResponse(pending, 408)
        content = waited.result()
        # A result is a JSON object, or a message with another first byte.
        media_type = "application/json" if content.startswith(b"{") else wire.CONTENT_TYPE
        return Response(content, media_type=media_type)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    """Models, and their checkpoints. FastAPI runs functions that are not `async` on other threads."""

    @app.get("/api/v1/training_runs")
    def list_models(request: Request) -> dict[str, Any]:
        models, cursor = _page(request, service.owned(_owner(request)))
        return {"training_runs": [_run_of(service, model) for model in models], "cursor": cursor}

    @app.get("/api/v1/training_runs/{model_id}")
    def get_model(request: Request, model_id: str) -> dict[str, Any]:
        return _run_of(service, service.find_model(_owner(request), model_id))

    @app.get("/api/v1/checkpoints")
    def list_all_checkpoints(request: Request) -> dict[str, Any]:
        found = [one for model in service.owned(_owner(request)) for one in service.list_checkpoints(model)]
        checkpoints, cursor = _page(request, found)
        return {"checkpoints": checkpoints, "cursor": cursor}

    @_poster(app, service)("weights_info", bodies.PathBody)
    def weights_info(owner: str, body: bodies.PathBody) -> dict[str, Any]:
        _, model = service.path_of(owner, body.tinker_path)
        return {"base_model": service.name, **_facts(model)}

    @app.get("/api/v1/training_runs/{model_id}/checkpoints")
    def list_checkpoints(request: Request, model_id: str) -> dict[str, Any]:
        return {"checkpoints": service.list_checkpoints(service.find_model(_owner(request), model_id))}

    @app.delete("/api/v1/training_runs/{model_id}/checkpoints/{checkpoint:path}")
    def delete_checkpoint(request: Request, model_id: str, checkpoint: str) -> Response:
        service.delete_checkpoint(_owner(request), f"{SCHEME}{model_id}/{checkpoint}")
        return Response(status_code=204)


def _require_base(service: Service, name: str) -> None:
    if name != service.name:
        raise ApiError(400, f"base_model {name[:100]!r}: this server has {service.name}", param="base_model")


def _facts(model: Model) -> dict[str, Any]:
    one = model.settings
    flags = {"train_unembed": one.head, "train_mlp": one.mlp, "train_attn": one.attention}
    return {"is_lora": bool(one.rank), "lora_rank": one.rank or None, **flags}


def _run_of(service: Service, model: Model) -> dict[str, Any]:
    """A model as the client lists it."""
    metadata = model.facts["metadata"] or {}
    return {
        "training_run_id": model.id, "base_model": service.name, "model_owner": model.owner,
        "is_lora": bool(model.settings.rank), "lora_rank": model.settings.rank or None,
        "corrupted": bool(model.stopped), "last_request_time": iso(model.facts["created"]),
        "user_metadata": {name: str(value) for name, value in metadata.items()},
    }  # fmt: skip


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """The part of a list that a request wants. Raises ApiError: 400 for what is not a number."""
    numbers = {}
    for name, default in (("limit", 20), ("offset", 0)):
        text = request.query_params.get(name, str(default))
        if not text.isdecimal() or len(text) > 9:
            raise ApiError(400, f"{name}: a whole number from 0 on", param=name)
        numbers[name] = min(int(text), 1000) if name == "limit" else int(text)
    page = items[numbers["offset"] : numbers["offset"] + numbers["limit"]]
    return page, {**numbers, "total_count": len(items)}


def _saved(body: bodies.SaveWeightsBody) -> dict[str, Any]:
    if body.path is None and body.sampling_session_seq_id is None:
        raise ApiError(400, "path: the name of the checkpoint", param="path")
    sampler = None if body.path else body.sampling_session_seq_id
    return {"name": body.path, "overwrite": body.overwrite, "sampler": sampler}


def _checked_batch(service: Service, owner: str, content: bytes) -> wire.Outline:
    """Raises ApiError: 404 for an unknown model, 400 when the batch cannot be computed; its number is then used up."""
    config = service.base.model.config
    found = None
    try:
        found = wire.outline(content)
        service.find_model(owner, found.model_id)
        if found.mistake:
            raise UserError(found.mistake)
        request = wire.read_forward_backward(content)
        bodies.check_batch(request, config.vocab_size, config.sequence_len)
    except (UserError, ApiError) as error:
        if found is not None:
            service.refuse(owner, found.model_id, found.number)
        if isinstance(error, ApiError):
            raise
        raise ApiError(400, str(error), param="loss_fn", code="invalid_value") from error
    return found
