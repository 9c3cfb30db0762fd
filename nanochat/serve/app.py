"""The HTTP server: OpenAI's routes, and the chat page. How a request becomes a reply:

    bytes on a socket
      connection.py   bounds the headers, in size and time
      middleware.py   checks host, origin and key; refuses with 4xx before the body is read
      app.py          the route reads the body (`read_limited`), at most 1 MiB
      schema.py       JSON -> `ChatBody` or `CompletionBody`, every field checked
      grammar.py      if the reply follows a JSON schema: schema -> which tokens may come next
      bounds.py       made narrower, so that it is followed exactly and each field gets its share of the tokens
      closing.py      and the document ends before they do
      prompts.py      body -> token ids -> one `Request` per choice, submitted together
      scheduler.py    queues each request, then puts it into a slot of the running batch; its thread owns the device
      engine.py       decodes one token for all slots at once
      sampling.py     chooses each slot's token by the settings of its request
      scheduler.py    token -> `Chunk` with text, put into the request's `Stream`
      replies.py      chunks -> the event loop -> OpenAI's JSON, whole or as server-sent events
    bytes on a socket

An error at any step is an `ApiError` and leaves in OpenAI's form. The event loop only waits and formats; longer work
runs on other threads. The text of users is never logged.
"""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, disable_created_metrics, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.ground.cli import UserError
from nanochat.sampling import NEUTRAL
from nanochat.serve import page, prompts, schema
from nanochat.serve.middleware import CLIENT_LEFT, AccessMiddleware, http_error, read_limited
from nanochat.serve.replies import ChunkQueue, Reply, Waker, make_serializer
from nanochat.serve.state import LoadedModel, ServerState, closing_at_signals

INLINE_BYTES = 4096  # a longer body is parsed and tokenized off the event loop
Result = TypeVar("Result")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def create_app(
    load: Callable[[], LoadedModel],
    *,
    api_key: str | None = None,
    hosts: Sequence[str] = LOOPBACK,
    origins: Sequence[str] = (),
    on_failure: Callable[[BaseException], None] = lambda error: None,
) -> FastAPI:
    """The ASGI application. `load` runs on a thread once the server has started; until it returns, /ready responds 503.

    `hosts` are the names by which a request may call this server, () for any; `origins` the other sites whose pages may
    use it. `on_failure` is called with the error when the model could not be loaded or its device stopped working.
    """
    disable_created_metrics()  # drops the creation time of each metric
    state = ServerState(load, on_failure)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.waker = Waker()
        threading.Thread(target=state.load, name="load", daemon=True).start()
        with closing_at_signals(state.close, state.device_thread):
            yield
        await asyncio.to_thread(state.close)

    app = FastAPI(
        title="nanochat", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None,
        default_response_class=schema.EncodedResponse,
    )  # fmt: skip
    app.state.nanochat = state
    app.add_middleware(
        AccessMiddleware,
        responses=state.responses,
        api_key=api_key,
        hosts=tuple(hosts),
        origins=tuple(origins),
        open_paths=("/health", "/ready", *page.page_paths()),
        content_policy=page.content_policy(page.PAGE.read_text(encoding="utf-8")),
    )
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(404, _not_found)
    app.router.routes += page.page_routes()
    _add_server_routes(app, state)
    _add_openai_routes(app, state)
    _add_engine_routes(app, state)
    return app


async def _not_found(request: Request, error: Exception) -> Response:
    """Names the routes that reply: clients come with others, such as /v1/responses and Ollama's /api/chat."""
    if not isinstance(error, schema.ApiError):
        where = "this server replies at /v1/chat/completions and /v1/completions"
        error = schema.ApiError(404, f"Not Found: {request.url.path[:100]}; {where}")
    return await http_error(request, error)


def _add_server_routes(app: FastAPI, state: ServerState) -> None:
    """Routes about the server itself."""

    @app.head("/health")
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.head("/ready")
    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """All models are loaded and take requests; 503 otherwise."""
        state.ready_model()
        return {"status": "ready"}  # not which model: this route needs no key

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """The metrics, for Prometheus."""
        return Response(generate_latest(state.registry), media_type=CONTENT_TYPE_LATEST)


def _add_openai_routes(app: FastAPI, state: ServerState) -> None:
    """The routes of OpenAI's clients."""

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        loaded = state.ready_model()
        return {"object": "list", "data": [_model_object(one) for one in loaded.all]}

    @app.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, Any]:
        return _model_object(prompts.choose_model(state.ready_model(), model))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _generate(request, state, schema.ChatBody)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(request, state, schema.CompletionBody)


def _model_object(model: LoadedModel) -> dict[str, Any]:
    sampling = {name: getattr(model.sampling, name) for name in NEUTRAL}
    details = {"context": model.context, "chats": model.chats, "sampling": sampling, "slots": model.scheduler.size}
    details |= model.about
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "nanochat", "nanochat": details}


async def _generate(
    request: Request, state: ServerState, body_type: type[schema.ChatBody | schema.CompletionBody]
) -> Response:
    # 1. Read the body. FastAPI could read and check it, but it would describe every mistake in it: a body with 100,000
    #    unknown fields would hold the event loop for seconds.
    content = await read_limited(request, is_closing=lambda: state.closing)

    # 2. Check its fields and tokenize its prompts.
    def parse() -> tuple[LoadedModel, schema.ChatBody | schema.CompletionBody, list[prompts.EncodedPrompt]]:
        body = schema.read_body(body_type, content)
        loaded = prompts.choose_model(state.ready_model(), body.model)
        return loaded, body, prompts.encode_prompts(loaded, body)

    loaded, body, encoded = await _parsed(state, content, parse)

    # A schema becomes a grammar. Compiling takes a whole core, so it is done one at a time, and clients take turns.
    grammar = None
    reply_schema = body.reply_schema
    if reply_schema is not None:
        make = functools.partial(prompts.make_grammar, loaded, body, encoded, reply_schema)
        grammar = await asyncio.to_thread(make, only_recent=True)
        client = request.client.host if request.client else ""
        if grammar is None:
            async with state.turns.setdefault(client, asyncio.Lock()), state.compiling:
                if await request.is_disconnected():
                    raise schema.ApiError(CLIENT_LEFT, "the client left")
                grammar = await asyncio.to_thread(make)

    # 3. Submit one request per choice. The scheduler's thread takes over; its chunks arrive in the queue.
    queue = ChunkQueue(request.app.state.waker)
    streams = prompts.submit(loaded, body, encoded, grammar, queue.put)

    # 4. Write the chunks in the route's format, as they arrive or in one piece.
    return Reply(
        make_serializer(loaded, body, encoded[0].first_message_read),
        queue,
        streams,
        prompt_tokens=[len(prompt.ids) for prompt in encoded],
        as_events=bool(body.stream),
    )


def _add_engine_routes(app: FastAPI, state: ServerState) -> None:
    """Routes of vLLM and SGLang."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """A route of vLLM: the token ids of a text."""
        return await _answer(request, state, schema.TokenizeBody, prompts.tokenize)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """A route of vLLM: the text of token ids, which lm-eval's tokenizer asks for."""
        return await _answer(request, state, schema.DetokenizeBody, prompts.detokenize)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, str]:
        """A route of vLLM, with the fields that lm-eval needs to tokenize with this server."""
        model = state.ready_model()
        tokenizer = model.tokenizer
        bos, eos = (tokenizer.decode([token]) for token in (tokenizer.get_bos_token_id(), model.end))
        return {"bos_token": bos, "eos_token": eos}

    @app.post("/update_weights_from_disk")
    async def update_weights(request: Request) -> dict[str, Any]:
        """A route of SGLang: a trainer (chat_rl) hands over weights for sampling, as a folder on this machine."""
        body = schema.read_body(schema.UpdateWeightsBody, await read_limited(request, is_closing=lambda: state.closing))
        async with state.updates:
            updated = await asyncio.to_thread(state.update, body.model_path)
        return {"success": True, "message": f"{updated.name} has the weights {updated.fingerprint}"}


async def _answer(
    request: Request, state: ServerState, body_type: type[schema.Strict], work: Callable[..., dict[str, Any]]
) -> Response:
    content = await read_limited(request, is_closing=lambda: state.closing)
    return await _parsed(
        state, content, lambda: schema.EncodedResponse(work(state.ready_model(), schema.read_body(body_type, content)))
    )


async def _parsed(state: ServerState, content: bytes, parse: Callable[[], Result]) -> Result:
    # A long body is parsed on another thread. Only one at a time, because parsing holds Python's lock, and between two
    # bodies the event loop must get its turn. The tokenizer and the template of another family are programs by
    # strangers: they run there for every body.
    models = () if state.model is None else state.model.all
    is_foreign = any(isinstance(one.tokenizer, ImportedTokenizer) for one in models)
    try:
        if len(content) <= INLINE_BYTES and not is_foreign:
            return parse()
        async with state.parsing:
            return await asyncio.to_thread(parse)
    except UserError as error:
        raise schema.ApiError(400, str(error), code="invalid_value") from error
