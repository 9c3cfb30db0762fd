"""What a client may ask for, and the form of every error: the server's borders, in OpenAI's words.

In flows the bytes of a request's body; out comes a checked `ChatBody` or `CompletionBody`, or an `ApiError` that says
which field is wrong. What OpenAI's API has and this server has not is refused by name rather than left out silently;
fields that change nothing here (`user`, `metadata`, ...) are taken and ignored. Fields of our own: `top_k`, `min_p`,
`repetition_penalty`, `truncation`, and in a message `nanochat`.
"""

import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nanochat.conversation import Message, check_messages

MAX_CHOICES = 128
MAX_MESSAGES = 10_000
CLIENT_LEFT = 499  # a status for what nobody reads: the client left first
SEED_BITS = 62  # what the samplers take

MOST_ERRORS = 100  # of one body that are looked at: collecting a hundred thousand would take seconds

Body = TypeVar("Body", bound=BaseModel)
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]  # the first wrong item is the last one looked at
Choices = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_CHOICES)]


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`; the type follows from the status."""
    named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = named.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Strict(BaseModel):
    """A text is a text, a number a finite number, and no field is unknown."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # of no meaning here


class ContentPart(Strict):
    type: Literal["text", "python", "python_output"]  # the last two: what the assistant called, and its answer
    text: str


class Reply(Strict):
    parts: Listed[ContentPart]


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Listed[ContentPart] | None = None  # None: an assistant's empty reply
    nanochat: Reply | None = None  # an earlier reply handed back as it came, with its calls: goes before content
    # Of no meaning here.
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    tool_calls: None = None
    function_call: None = None


class ResponseFormat(Strict):
    type: Literal["text"]


class Sampling(Strict):
    """What chat and completions have in common."""

    model: str | None = None  # None: the one that is served
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0.01, lt=100)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: str | Listed[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Taken where they ask for nothing, refused where they would change the answer.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    # Of no meaning here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _check_sampling(self) -> "Sampling":
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not served here; there is repetition_penalty")
        if len(self.stops) > 16 or any(not 1 <= len(text) <= 256 for text in self.stops):
            raise ValueError("stop is at most 16 texts of 1 to 256 characters each")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        return self.n or 1

    def settings(self) -> dict[str, Any]:
        """As `scheduler.Request` names them; a request without a seed is given one."""
        seed = secrets.randbits(SEED_BITS) if self.seed is None else self.seed % 2**SEED_BITS
        given = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if getattr(self, name) is not None
        }
        return {**given, "seed": seed, "stop": self.stops}

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: Listed[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    truncation: Literal["auto", "disabled"] | None = None  # auto: leave out the oldest turns where all are too long
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: Listed[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatBody":
        if self.tools or self.functions:
            raise ValueError("tools are not served here: the model has a calculator of its own and no others")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs: true")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    def conversation(self) -> list[Message]:
        """The messages as `conversation.py` takes them.

        Raises ApiError: when they are no conversation that waits for a reply.
        """
        messages: list[Message] = []
        for message in self.messages:
            content = message.content
            if message.role == "assistant" and message.nanochat is not None:
                content = message.nanochat.parts
            parts = [part.model_dump() for part in content] if isinstance(content, list) else content or ""
            role = "system" if message.role == "developer" else message.role
            if content is None and role != "assistant":
                raise ApiError(400, f"message {len(messages)} ({role}) has no content", param="messages")
            messages.append({"role": role, "content": parts})
        try:
            check_messages(messages)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
        if messages[-1]["role"] != "user":
            raise ApiError(400, "the last message is not by the user: there is nothing to reply to", param="messages")
        return messages


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: str | Choices[str] | Listed[int] | Choices[Listed[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionBody":
        if self.echo or self.suffix or (self.best_of is not None and self.best_of != self.choices):
            raise ValueError("echo, suffix and best_of are not served here")
        if not self.prompts:
            raise ValueError(f"prompt is one text, or 1 to {MAX_CHOICES} of them")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each as a text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType] (checked: a list of whole numbers)
        return self.prompt  # pyright: ignore[reportReturnType]

    @property
    def most_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default for this route

    @property
    def wanted_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


def read_body(body_type: type[Body], content: bytes) -> Body:
    """The checked body.

    Raises ApiError: 400, with the field that is wrong.
    """
    try:
        return body_type.model_validate_json(content)
    except ValidationError as error:
        if error.error_count() > MOST_ERRORS:
            raise ApiError(400, f"the body has {error.error_count():,} mistakes", code="invalid_value") from None
        # Of a choice between types every branch complains: the one that got furthest knows best.
        wrong = max(error.errors(include_url=False, include_input=False), key=lambda one: len(one["loc"]))
    if wrong["type"] == "json_invalid":
        raise ApiError(400, f"the body is no JSON: {_clean(wrong['msg'].partition(': ')[2])}", code="invalid_json")
    place = [part for part in wrong["loc"] if isinstance(part, int) or part in _FIELDS]
    param = ".".join(str(part) for part in place) or None
    if wrong["type"] == "extra_forbidden":
        name = _clean(str(wrong["loc"][-1]))
        raise ApiError(400, f"{name}: this server knows no such field", param=name, code="unknown_parameter")
    message = wrong["msg"].removeprefix("Value error, ")
    raise ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")


_FIELDS = {
    name
    for model in (ChatBody, CompletionBody, ChatMessage, Reply, ContentPart, StreamOptions, ResponseFormat)
    for name in model.model_fields
}


def _clean(text: str) -> str:
    """A client's own words, short enough to be handed back."""
    return text if len(text) <= 200 else text[:200] + "..."


def components(*models: type[BaseModel]) -> dict[str, Any]:
    """The models' JSON schemas by name, for the API's description."""
    found: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        found |= schema.pop("$defs", {})
        found[model.__name__] = schema
    return found
