"""Ollama's `POST /api/chat`, and the routes that describe the models, for programs that speak only Ollama's API.

A request becomes one of ours, and its reply lines of JSON. Unknown fields and options are ignored, as Ollama does;
tools and images are refused by name. null is an absent field. An error is `{"error": "text"}`, also within a stream,
and names the field that the client sent.
Source: https://docs.ollama.com/api
"""

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, Literal

from pydantic import ConfigDict, Field

from nanochat.serve.replies import encode
from nanochat.serve.scheduler import Chunk
from nanochat.serve.schema import (
    MAX_MESSAGES,
    SETTINGS,
    ApiError,
    ChatBody,
    Items,
    SamplingFields,
    StopText,
    StopTexts,
    Strict,
    Unsupported,
    sampling_field,
)  # fmt: skip
from nanochat.serve.state import LoadedModel

ROUTES = "/api/"  # where all paths of Ollama's begin
VERSION = {"version": "0.6.0"}  # of Ollama's API
LATEST = ":latest"  # Ollama's names have a tag; a name without one means this


class Options(SamplingFields):
    model_config = ConfigDict(extra="ignore")

    repeat_penalty: float | None = sampling_field("repetition_penalty")[1]
    num_predict: int | None = None  # tokens of the reply; 0 or negative: as many as fit
    stop: StopText | StopTexts | None = None


class OllamaMessage(Strict):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "user", "assistant"]
    content: str | None = None
    images: Unsupported = None
    tool_calls: Unsupported = None


class OllamaBody(Strict):
    """POST /api/chat."""

    model_config = ConfigDict(extra="ignore")

    model: str
    messages: Items[OllamaMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool | None = None  # None: True
    format: Literal["", "json"] | dict[str, Any] | None = None  # "json", or a JSON schema
    options: Options | None = None
    tools: Unsupported = None

    def chat(self) -> ChatBody:
        """The equivalent request to our chat route. It has no mistake that this body has not: its errors would name
        our fields."""
        options = self.options or Options()
        messages = [{"role": message.role, "content": message.content or ""} for message in self.messages]
        fields: dict[str, Any] = {name: getattr(options, name) for name in SETTINGS}
        fields |= {"model": self.model.removesuffix(LATEST), "messages": messages, "truncation": "auto"}
        fields |= {"stream": self.stream is not False, "stop": options.stop}
        if options.repeat_penalty is not None:
            fields["repetition_penalty"] = options.repeat_penalty
        if options.num_predict is not None and options.num_predict > 0:
            fields["max_tokens"] = options.num_predict
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": self.format}}
        return ChatBody.model_validate(fields)


class OllamaSerializer:
    """A line of JSON for each chunk; the last line has the counts, and the times in nanoseconds."""

    media_type = "application/x-ndjson"

    def __init__(self, body: OllamaBody):
        self.model = body.model
        self.texts: list[str] = []  # of a reply in one piece
        self.reason: str | None = None
        self.began = time.monotonic_ns()
        self.first = 0  # when the first token came

    def line(self, text: str, **fields: Any) -> bytes:
        created = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
        head = {"model": self.model, "created_at": created, "message": {"role": "assistant", "content": text}}
        return encode({**head, "done": False, **fields}).encode() + b"\n"

    def text_of(self, chunk: Chunk) -> str:
        self.first = self.first or time.monotonic_ns()
        self.reason = chunk.finish_reason
        return chunk.text if chunk.kind == "text" else ""  # calls of the calculator are not part of the text

    def begin(self, streams: int) -> bytes:
        return b""

    def event(self, number: int, chunk: Chunk) -> bytes:
        text = self.text_of(chunk)
        return self.line(text) if text else b""

    def heartbeat(self) -> bytes:
        return self.line("")

    def end(self, usage: dict[str, Any]) -> bytes:
        now = time.monotonic_ns()
        prompt = {"prompt_eval_count": usage["prompt_tokens"], "prompt_eval_duration": self.first - self.began}
        reply = {"eval_count": usage["completion_tokens"], "eval_duration": now - self.first}
        times = {"total_duration": now - self.began, "load_duration": 0, **prompt, **reply}
        return self.line("".join(self.texts), done=True, done_reason=self.reason, **times)

    def fail(self, error: ApiError) -> bytes:
        return encode(error.plain_body).encode() + b"\n"

    def add(self, number: int, chunk: Chunk) -> None:
        self.texts.append(self.text_of(chunk))

    def whole(self, usage: dict[str, Any]) -> Iterator[bytes]:
        yield self.end(usage)


class ShowBody(Strict):
    """POST /api/show."""

    model_config = ConfigDict(extra="ignore")

    model: str


def listed(model: LoadedModel) -> dict[str, Any]:
    """The model in the list of /api/tags."""
    name = model.name + LATEST
    parameters = model.about.get("parameters", 0)
    details = {"family": "nanochat", "format": "safetensors", "parameter_size": f"{parameters / 1e6:.1f}M"}
    trained = datetime.fromtimestamp(model.about.get("trained_at", 0), timezone.utc).isoformat()
    digest = model.fingerprint.removeprefix("fp_")
    return {
        "name": name, "model": name, "modified_at": trained, "size": 4 * parameters, "digest": digest,
        "details": details,
    }  # fmt: skip


def shown(model: LoadedModel) -> dict[str, Any]:
    """The answer of /api/show."""
    info = {"general.architecture": "nanochat", "nanochat.context_length": model.context}
    capabilities = ["completion"]
    return {"details": listed(model)["details"], "model_info": info, "capabilities": capabilities, "template": ""}
