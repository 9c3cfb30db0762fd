"""The HTTP server: OpenAI's routes, and the page.

In flows HTTP, checked by `gate.py` (host, origin, key, size) and `schema.py` (the body); out flow requests to the
scheduler, and their chunks as `replies.py` writes them. The event loop only waits and formats: the device belongs to
the scheduler's thread, long bodies are read and tokenized on another. What users write is never logged.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from nanochat.conversation import parts_of, render_prompt
from nanochat.serve import scheduler as scheduling
from nanochat.serve.gate import Gate, load_page, read_limited, refusal
from nanochat.serve.replies import ChatForm, EventStream, Form, Mailbox, Reply, TextForm, unless_gone
from nanochat.serve.scheduler import Overloaded, Stream
from nanochat.serve.schema import ApiError, ChatBody, CompletionBody, Sampling, components, error_body, read_body
from nanochat.serve.state import Served, State, closing_at_signals, metrics_text
from nanochat.shell.cli import UserError

INLINE_BYTES = 4096  # a longer body is read, and its prompts are tokenized, off the event loop
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def create_app(
    load: Callable[[], Served],
    *,
    api_key: str | None = None,
    hosts: Sequence[str] = LOOPBACK,
    grace: float = 8.0,
    stall_seconds: float = 20.0,
    on_failure: Callable[[BaseException], None] = lambda error: None,
    replica: int | None = None,
) -> FastAPI:
    """The ASGI application. `load` runs on a thread once the server has started; until it returns /ready says 503.

    `hosts` are the names a request may call this server by, () for any: against pages elsewhere whose name was
    pointed here. `grace` is how many seconds running replies have when the server is told to end, `stall_seconds` how
    long a reader may take nothing. `replica` labels the metrics where several processes share a port.
    """
    state = State(load, grace, on_failure)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=state.load, name="load", daemon=True).start()
        with closing_at_signals(state):
            yield
        await asyncio.to_thread(state.close)

    app = FastAPI(title="nanochat", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.nanochat = state
    page, policy = load_page()
    app.add_middleware(Gate, state=state, api_key=api_key, hosts=tuple(hosts), policy=policy)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return refusal(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        known = {404: "there is no such route", 405: "this route does not take this method"}
        message = known.get(error.status_code, str(error.detail))
        return JSONResponse(error_body(error.status_code, message), error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return JSONResponse(error_body(422, "a parameter of the address is not valid"), 422)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        if page is None:
            raise ApiError(404, "this installation has no page (nanochat/serve/ui.html); the API is below /v1")
        return HTMLResponse(page)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """The model is loaded and takes requests; 503 otherwise."""
        return {"status": "ready", "model": state.ready().name}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """What Prometheus reads."""
        return PlainTextResponse(metrics_text(state, replica), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(state.ready())]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        served = state.ready()
        _check_model(served, model)
        return _model(served)

    @app.post("/v1/chat/completions", openapi_extra=_describe(ChatBody))
    async def chat_completions(request: Request) -> Response:
        served, body, prompts = await read(request, ChatBody)
        return await answer(request, served, body, prompts, ChatForm(served, body.wanted_logprobs))

    @app.post("/v1/completions", openapi_extra=_describe(CompletionBody))
    async def completions(request: Request) -> Response:
        served, body, prompts = await read(request, CompletionBody)
        return await answer(request, served, body, prompts, TextForm(served, body.wanted_logprobs))

    async def read(
        request: Request, body_type: type[ChatBody] | type[CompletionBody]
    ) -> tuple[Served, ChatBody | CompletionBody, list[list[int]]]:
        content = await read_limited(request)

        def work() -> tuple[Served, ChatBody | CompletionBody, list[list[int]]]:
            body, served = read_body(body_type, content), state.ready()
            return served, body, make_prompts(served, body)

        return work() if len(content) <= INLINE_BYTES else await asyncio.to_thread(work)

    async def answer(
        request: Request, served: Served, body: ChatBody | CompletionBody, prompts: list[list[int]], form: Form
    ) -> Response:
        mailbox = Mailbox(submit(served, body, prompts, tools=isinstance(form, ChatForm)))
        reply = Reply(form, mailbox, prompt_tokens=sum(map(len, prompts)), with_usage=body.with_usage)
        if body.stream:
            return EventStream(reply.events(), mailbox.cancel, stall_seconds)
        return await unless_gone(request, reply.whole(), mailbox.cancel)

    described = app.openapi

    def openapi() -> dict[str, Any]:
        schema = described()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components(ChatBody, CompletionBody))
        return schema

    app.openapi = openapi
    return app


# ---------------------------------------------------------------------- from a body to requests


def _describe(body: type[Sampling]) -> dict[str, Any]:
    """The route reads its body by itself, to bound it: say here what it takes."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    errors = {str(status): {"description": "an error, in OpenAI's form"} for status in (400, 401, 404, 413, 429, 503)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}, "responses": errors}


def _model(served: Served) -> dict[str, Any]:
    facts = {"context": served.context, "chats": served.chats}
    return {"id": served.name, "object": "model", "created": served.created, "owned_by": "nanochat", "nanochat": facts}


def _check_model(served: Served, name: str | None) -> None:
    if name is not None and name != served.name:
        raise ApiError(
            404, f"there is no such model: this server has {served.name}", param="model", code="model_not_found"
        )


def make_prompts(served: Served, body: ChatBody | CompletionBody) -> list[list[int]]:
    """The token ids of each prompt of a body; the work of a moment for a long one.

    Raises ApiError: when they are not for this model, or too many for this server.
    """
    _check_model(served, body.model)
    scheduler, number = served.scheduler, 1 if isinstance(body, ChatBody) else len(body.prompts)
    if number * body.choices > scheduler.capacity:
        raise ApiError(
            400,
            f"{number} x {body.choices} replies in one request: this server holds {scheduler.capacity} at once; ask "
            "for fewer",
            param="n",
        )
    if isinstance(body, CompletionBody):
        return [_text_prompt(served, prompt) for prompt in body.prompts]
    if not served.chats:
        raise ApiError(400, f"{served.name} is a base model, which continues text: POST /v1/completions")
    return [_chat_prompt(served, body)]


def _chat_prompt(served: Served, body: ChatBody) -> list[int]:
    messages = body.conversation()
    question = [message for message in messages[:1] if message["role"] == "system"] + messages[-1:]
    needed = question if body.truncation == "auto" else messages
    _check_length(served, sum(len(part["text"]) for message in needed for part in parts_of(message["content"])))
    if body.truncation != "auto":
        return render_prompt(served.tokenizer, messages)
    # Turns make room for the reply that is asked for, up to half the context; an eighth where its length is left open.
    reply = min(body.most_tokens or served.context // 8, served.context // 2)
    try:
        return render_prompt(served.tokenizer, messages, served.context - reply)
    except UserError:  # the question alone leaves less: the reply has what is left
        return render_prompt(served.tokenizer, question)


def _text_prompt(served: Served, prompt: str | list[int]) -> list[int]:
    begin = served.tokenizer.get_bos_token_id()
    if isinstance(prompt, str):
        _check_length(served, len(prompt))
        return served.tokenizer.encode(prompt, prepend=begin)
    if not all(0 <= token < len(served.tokenizer.tokens) for token in prompt):
        raise ApiError(
            400, f"token ids are 0 to {len(served.tokenizer.tokens) - 1}; marks are not a client's", param="prompt"
        )
    return [begin, *prompt]


def _check_length(served: Served, characters: int) -> None:
    """Refuse at once what is far too long. Raises ApiError: 400."""
    least = characters // max(map(len, served.tokenizer.tokens))  # a character has a byte or more
    if least > served.context:
        raise _too_long(served, f"at least {least:,}", None)


def _too_long(served: Served, prompt: str, asked: int | None) -> ApiError:
    context = f"the model's context of {served.context:,}"
    message = f"the prompt has {prompt} tokens, which leaves no room for a reply in {context}; shorten the prompt"
    if asked is not None:
        message = f"the prompt has {prompt} tokens and max_tokens is {asked:,}, together more than {context}; "
        message += "shorten the prompt or lower max_tokens"
    return ApiError(400, message, code="context_length_exceeded")


def submit(
    served: Served, body: ChatBody | CompletionBody, prompts: Sequence[Sequence[int]], tools: bool
) -> list[Stream]:
    """Hand every choice of every prompt to the scheduler, or none.

    Raises ApiError: 400 when one does not fit the context, 429 when there is no room now.
    """
    settings = body.settings()
    requests = []
    for prompt in prompts:
        left = served.context - len(prompt)
        asked = None if isinstance(body, ChatBody) and body.truncation == "auto" else body.most_tokens
        if left < (asked or 1):
            raise _too_long(served, f"{len(prompt):,}", asked)
        request = scheduling.Request(
            tuple(prompt),
            min(body.most_tokens or left, left),
            **settings,
            logprobs=body.wanted_logprobs,
            tools=tools,
        )
        requests += [replace(request, seed=request.seed + number) for number in range(body.choices)]
    try:
        return served.scheduler.submit_all(requests)
    except UserError as error:
        raise ApiError(400, str(error)) from error
    except Overloaded as error:
        wait = {"retry-after": str(max(1, round(error.retry_after)))}
        raise ApiError(429, "the server is busy: try again later", code="overloaded", headers=wait) from error
