"""Ollama's `POST /api/chat`, and the routes that describe the models, for programs that speak only Ollama's API.

A request becomes one of ours, and its reply lines of JSON. Unknown fields and options are ignored, as Ollama does;
tools and images are refused by name. Errors have OpenAI's form, as on all routes.
Source: https://docs.ollama.com/api
"""

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

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
    first_mistake,
)  # fmt: skip
from nanochat.serve.state import LoadedModel

VERSION = {"version": "0.6.0"}  # of Ollama's API
LATEST = ":latest"  # Ollama's names have a tag; a name without one means this


class Options(SamplingFields):
    model_config = ConfigDict(extra="ignore")

    repeat_penalty: float | None = None
    num_predict: int | None = None  # tokens of the reply; 0 or negative: as many as fit
    stop: StopText | StopTexts | None = None


class OllamaMessage(Strict):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "user", "assistant"]
    content: str = ""
    images: Unsupported = None
    tool_calls: Unsupported = None


class OllamaBody(Strict):
    """POST /api/chat."""

    model_config = ConfigDict(extra="ignore")

    model: str
    messages: Items[OllamaMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None  # "json", or a JSON schema
    options: Options = Options()
    tools: Unsupported = None

    def chat(self) -> ChatBody:
        """The equivalent request to our chat route. Raises ApiError: 400."""
        messages = [{"role": message.role, "content": message.content} for message in self.messages]
        fields: dict[str, Any] = {name: getattr(self.options, name) for name in SETTINGS}
        fields |= {"model": self.model.removesuffix(LATEST), "messages": messages, "truncation": "auto"}
        fields |= {"stream": self.stream, "stop": self.options.stop}
        if self.options.repeat_penalty is not None:
            fields["repetition_penalty"] = self.options.repeat_penalty
        if self.options.num_predict is not None and self.options.num_predict > 0:
            fields["max_tokens"] = self.options.num_predict
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": self.format}}
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            raise first_mistake(error, ChatBody) from None


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
        return encode(error.body).encode() + b"\n"

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
