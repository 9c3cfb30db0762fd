"""POST /v1/responses for text: a request becomes a chat request, and its chunks become items and events of this route.

The server does not keep conversations: a client sends all items each time, as with `store: false`.
"""

import itertools
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from nanochat.serve.replies import EventsSerializer, encode
from nanochat.serve.scheduler import Chunk
from nanochat.serve.schema import (
    MAX_MESSAGES,
    SETTINGS,
    ApiError,
    ChatBody,
    CompletionBody,
    FunctionName,
    Items,
    SamplingFields,
    Strict,
    Unsupported,
    first_mistake,
)
from nanochat.serve.state import LoadedModel
from nanochat.serve.tools import make_writer

# ---------------------------------------------------------------------- the body


class InputText(Strict):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=128)  # ignored
    logprobs: list[Any] | None = Field(None, max_length=0)


class InputItem(Strict):
    """A message, a call, or its result; a client sends received items back."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Items[InputText] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Items[InputText] | None = None
    # Ignored.
    id: str | None = None
    status: str | None = None

    def message(self) -> dict[str, Any]:
        """The item as a message of the chat route."""
        needed = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments")}
        for name in needed.get(self.type, ("call_id", "output")):
            if getattr(self, name) is None:
                raise ApiError(400, f"an input item of type {self.type} has no {name}", param="input")
        if self.type == "message":
            return {"role": self.role, "content": _texts(self.content)}
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments}
            return {"role": "assistant", "tool_calls": [{"id": self.call_id, "function": function}]}
        return {"role": "tool", "tool_call_id": self.call_id, "content": _texts(self.output)}


def _texts(content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": part.text} for part in content]
    return content


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Strict):
    type: Literal["function"]
    name: FunctionName


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    content: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: str | None = None  # ignored


class EventOptions(Strict):
    include_obfuscation: bool = False  # ignored


class ResponsesBody(SamplingFields):
    """POST /v1/responses."""

    input: str | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: EventOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Refused: nothing is kept from one request to the next.
    store: Unsupported = None
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    background: Unsupported = None
    prompt: Unsupported = None
    top_logprobs: Unsupported = None
    # Ignored.
    parallel_tool_calls: bool | None = None
    include: Items[Literal["reasoning.encrypted_content"]] | None = None
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    def chat(self) -> ChatBody:
        """The equivalent request to the chat route. Raises ApiError: 400."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += _joined_calls([item.message() for item in self.input])
        fields: dict[str, Any] = {name: getattr(self, name) for name in SETTINGS}
        fields |= {"model": self.model, "max_tokens": self.max_output_tokens, "stream": self.stream}
        fields |= {"messages": messages, "truncation": self.truncation, "prompt_cache_key": self.prompt_cache_key}
        if self.tools:
            functions = [tool.model_dump(exclude={"type"}) for tool in self.tools]
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
        fields["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, FunctionChoice):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        form = self.text.format if self.text else None
        if form is not None:
            response_format: dict[str, Any] = {"type": form.type}
            if form.type == "json_schema":
                schema = {"name": form.name or "reply", "schema": form.content, "strict": form.strict}
                response_format["json_schema"] = schema
            fields["response_format"] = response_format
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            raise first_mistake(error, ChatBody) from None


def _joined_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the calls of one turn: they are separate items here, but one message of the chat route."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if "tool_calls" in message and joined and "tool_calls" in joined[-1]:
            joined[-1]["tool_calls"] += message["tool_calls"]
        else:
            joined.append(message)
    return joined


# ---------------------------------------------------------------------- the response


class ResponsesSerializer(EventsSerializer):
    """Turns the chunks of one response into output items, and into the events that announce them."""

    def __init__(self, model: LoadedModel, body: ResponsesBody, chat: ChatBody | CompletionBody):
        self.output: list[dict[str, Any]] = []
        self.incomplete = False
        self._texts: list[str] = []  # the parts of the last item
        self._calls = make_writer(chat.calls, chat.family_calls)
        self._sequence = itertools.count()
        settings = chat.sampling(model.sampling)
        form = body.text.format if body.text else None
        self.head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            "error": None,
            "previous_response_id": None,
            "parallel_tool_calls": False,
            "store": False,
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "truncation": body.truncation or "disabled",
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "metadata": body.metadata or {},
            **body.model_dump(include={"instructions", "max_output_tokens", "user"}),
        }

    def response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counts = None
        if usage is not None:
            counts = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
        return {**self.head, "status": status, "incomplete_details": details, "output": self.output, "usage": counts}

    def begin(self, streams: int) -> bytes:
        response = self.response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def event(self, number: int, chunk: Chunk) -> bytes:
        events = b""
        if chunk.kind == self._calls.kind:
            events += self._add_calls(chunk)
        elif chunk.kind == "text" and chunk.text:
            events += self._add_text(chunk.text)
        if chunk.finish_reason is not None:
            self.incomplete = chunk.finish_reason == "length"
            if not self.output:
                events += self._add_text("")
            events += self._close()
        return events

    def end(self, usage: dict[str, Any]) -> bytes:
        response = self._ended(usage)
        return self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> bytes:
        wrong = error.body["error"]
        return self._event("error", code=wrong["code"], message=wrong["message"], param=wrong["param"])

    add = event  # for a reply in one piece; its events are not sent

    def whole(self, usage: dict[str, Any]) -> Iterator[bytes]:
        yield encode(self._ended(usage)).encode()

    def _ended(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self.response("incomplete" if self.incomplete else "completed", usage)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """A server-sent event."""
        body = {"type": kind, "sequence_number": next(self._sequence), **fields}
        return f"event: {kind}\ndata: {encode(body)}\n\n".encode()

    # ---- items

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _open(self, item: dict[str, Any]) -> bytes:
        events = self._close()
        self.output.append({**item, "status": "in_progress"})
        self._texts = []
        return events + self._event(
            "response.output_item.added", output_index=len(self.output) - 1, item=self.output[-1]
        )

    def _add_text(self, text: str) -> bytes:
        events = b""
        if not self.output or self.output[-1]["type"] != "message":
            name = f"msg_{uuid.uuid4().hex}"
            events += self._open({"id": name, "type": "message", "role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events += self._event("response.content_part.added", **self._place, content_index=0, part=part)
        self._texts.append(text)
        return events + self._event(
            "response.output_text.delta", **self._place, content_index=0, delta=text, logprobs=[]
        )

    def _add_calls(self, chunk: Chunk) -> bytes:
        text, fragments = self._calls.add(chunk.text, chunk.finish_reason)
        events = self._add_text(text) if text else b""
        for fragment in fragments:
            function = fragment["function"]
            if "id" in fragment:
                item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": fragment["id"]}
                events += self._open({**item, "name": function["name"], "arguments": ""})
            self._texts.append(function["arguments"])
            events += self._event("response.function_call_arguments.delta", **self._place, delta=function["arguments"])
        return events

    def _close(self) -> bytes:
        """End the last item, if one is open."""
        if not self.output or self.output[-1]["status"] != "in_progress":
            return b""
        item = self.output[-1]
        text = "".join(self._texts)
        place = self._place
        item["status"] = "incomplete" if self.incomplete else "completed"
        if item["type"] == "message":
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            item["content"] = [part]
            events = self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=[])
            events += self._event("response.content_part.done", **place, content_index=0, part=part)
        else:
            item["arguments"] = text
            events = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        return events + self._event("response.output_item.done", output_index=place["output_index"], item=item)
