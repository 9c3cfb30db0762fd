"""The HTTP server: OpenAI's routes, and the chat page. How a request becomes a reply:

    bytes on a socket
      connection.py   bounds the headers, in size and time
      middleware.py   checks host, origin and key; refuses with 4xx before the body is read
      app.py          the route reads the body (`read_limited`), at most 1 MiB
      schema.py       JSON -> `ChatBody` or `CompletionBody`, every field checked
      prompts.py      body -> token ids -> one `Request` per choice, submitted together
      scheduler.py    queues each request, then puts it into a slot of the running batch; its thread owns the device
      engine.py       decodes one token for all slots at once
      sampling.py     chooses each slot's token by the settings of its own request
      scheduler.py    token -> `Chunk` with text, put into the request's `Stream`
      replies.py      chunks -> the event loop -> OpenAI's JSON, whole or as server-sent events
    bytes on a socket

An error at any step is an `ApiError` and leaves in OpenAI's form. The event loop only waits and formats; whatever takes
longer runs on other threads. What users write is never logged.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from nanochat.serve import prompts
from nanochat.serve.metrics import ServerCollector
from nanochat.serve.middleware import AccessMiddleware, load_page, read_limited
from nanochat.serve.replies import ChatSerializer, ChunkQueue, CompletionSerializer, EventStream, Reply
from nanochat.serve.schema import ApiError, ChatBody, CompletionBody, error_body, read_body
from nanochat.serve.state import LoadedModel, ServerState, closing_at_signals

INLINE_BYTES = 4096  # a longer body is parsed and tokenized off the event loop
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def create_app(
    load: Callable[[], LoadedModel],
    *,
    api_key: str | None = None,
    hosts: Sequence[str] = LOOPBACK,
    grace: float = 8.0,
    stall_seconds: float = 20.0,
    on_failure: Callable[[BaseException], None] = lambda error: None,
    replica: int | None = None,
) -> FastAPI:
    """The ASGI application. `load` runs on a thread once the server has started; until it returns, /ready responds 503.

    `hosts` are the names by which a request may call this server, () for any. Running replies get `grace` seconds when
    the server closes; a client that reads nothing for `stall_seconds` is dropped. `replica` labels the metrics where
    several processes share a port.
    """
    state = ServerState(load, grace, on_failure)
    metrics = ServerCollector(state, replica)
    page, content_policy = load_page()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=state.load, name="load", daemon=True).start()
        with closing_at_signals(state):
            yield
        await asyncio.to_thread(state.close)

    app = FastAPI(title="nanochat", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.nanochat = state
    app.add_middleware(
        AccessMiddleware, state=state, api_key=api_key, hosts=tuple(hosts), content_policy=content_policy
    )

    # ------------------------------------------------------------------ errors

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            body = error.body
        else:  # Starlette's own
            messages = {404: "there is no such route", 405: "this route does not take this method"}
            body = error_body(error.status_code, messages.get(error.status_code, str(error.detail)))
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid_address(request: Request, error: RequestValidationError) -> Response:
        return JSONResponse(error_body(422, "a parameter of the address is not valid"), 422)

    # ------------------------------------------------------------------ routes for people and machines that watch

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        if page is None:
            raise ApiError(404, "this installation has no page (nanochat/serve/ui.html); the API is under /v1")
        return HTMLResponse(page)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """The model is loaded and takes requests; 503 otherwise."""
        return {"status": "ready", "model": state.ready_model().name}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """For Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    # ------------------------------------------------------------------ OpenAI's routes

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_object(state.ready_model())]}

    @app.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, Any]:
        loaded = state.ready_model()
        prompts.check_model_name(loaded, model)
        return _model_object(loaded)

    @app.post("/v1/chat/completions", openapi_extra=_describe(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await generate(request, ChatBody)

    @app.post("/v1/completions", openapi_extra=_describe(CompletionBody))
    async def completions(request: Request) -> Response:
        return await generate(request, CompletionBody)

    parsing = asyncio.Lock()

    async def generate(request: Request, body_type: type[ChatBody] | type[CompletionBody]) -> Response:
        # 1. Take in the body. FastAPI could read and check it by itself, but it describes every mistake in it: a body
        #    with 100,000 unknown fields would hold the event loop for seconds.
        content = await read_limited(request)

        # 2. Check its fields and tokenize its prompts, a long body on another thread. Only one at a time is parsed
        #    there, because parsing holds Python's lock, and between two bodies the event loop must get its turn.
        def parse() -> tuple[LoadedModel, ChatBody | CompletionBody, list[list[int]]]:
            body = read_body(body_type, content)
            loaded = state.ready_model()
            return loaded, body, prompts.encode_prompts(loaded, body)

        if len(content) <= INLINE_BYTES:
            loaded, body, token_ids = parse()
        else:
            async with parsing:
                loaded, body, token_ids = await asyncio.to_thread(parse)

        # 3. Submit one request per choice. The scheduler's thread takes over; its chunks arrive in the queue. A chat
        #    may call the calculator, a plain completion may not.
        is_chat = isinstance(body, ChatBody)
        queue = ChunkQueue(prompts.submit(loaded, body, token_ids, tools=is_chat))

        # 4. Write the chunks in the route's format, as they arrive or in one piece.
        serializer_type = ChatSerializer if is_chat else CompletionSerializer
        serializer = serializer_type(loaded, body.num_logprobs)
        prompt_tokens = sum(len(ids) for ids in token_ids)
        reply = Reply(serializer, queue, prompt_tokens, body.include_usage)
        if body.stream:
            return EventStream(reply, stall_seconds)
        return await reply.respond(request)

    # ------------------------------------------------------------------ the description of the API

    describe_routes = app.openapi

    def openapi() -> dict[str, Any]:
        description = describe_routes()
        bodies = [(ChatBody, "validation"), (CompletionBody, "validation")]
        _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
        description.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return description

    app.openapi = openapi
    return app


def _describe(body: type[ChatBody] | type[CompletionBody]) -> dict[str, Any]:
    """What /openapi.json says of a route that reads its body by itself."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    errors = {str(status): {"description": "an error, in OpenAI's form"} for status in (400, 401, 404, 413, 429, 503)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}, "responses": errors}


def _model_object(model: LoadedModel) -> dict[str, Any]:
    details = {"context": model.context, "chats": model.chats}
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "nanochat", "nanochat": details}
