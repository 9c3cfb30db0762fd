"""The bodies of the API, with OpenAI's field names, and the form of every error.

`read_body` turns the bytes of a request into a checked `ChatBody` or `CompletionBody`, or raises an `ApiError` that
names the wrong field. A field that OpenAI has and this server does not implement is refused by name, never ignored. A
field that cannot change a reply (`user`, `metadata`, ...) is accepted and ignored; so is a field of vLLM, SGLang,
llama.cpp, LM Studio or DeepSeek with a value that changes nothing here (IGNORED, NEUTRAL_VALUES). Additional fields:
`top_k`, `min_p`, `repetition_penalty`, `truncation`, and `nanochat` in a message.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from nanochat.conversation import Message, Part, text_of
from nanochat.families.tool_calls import THOUGHT_SEPARATOR, template_id
from nanochat.ground.cli import Range
from nanochat.ground.untrusted import json_of
from nanochat.sampling import SamplingParams
from nanochat.serve.tools import Calls, FamilyCalls, call_schema, call_text, is_calculator
from nanochat.tasks.messages import check_messages

MAX_CHOICES = 128
MAX_MESSAGES = 5_000
MAX_BIASES = 300  # entries of logit_bias; OpenAI's limit
MAX_STOP_IDS = 64
SEED_BITS = 64  # the sampler's seeds are whole numbers below 2**64
CLIENT_LEFT = 499  # status of a request whose client disconnected first; nobody reads the response

# pydantic holds Python's lock while it reads a body, so another thread would not keep the event loop free. Bounds on
# its content limit the time: a body of 1 MiB takes at most 60 ms (two cores of an AMD EPYC, 2026-11-22). Without them
# 350,000 empty lists took 0.4 s.
MAX_CONTAINERS = 20_000  # lists and objects in a body; 5,000 messages of one part each have 15,000
MAX_ERRORS = 100  # errors to describe in one body; pydantic takes seconds to describe 100,000


# ---------------------------------------------------------------------- JSON

# Clients that read server-sent events with `str.splitlines` (httpx, requests) end a line at these characters, too.
SEPARATORS = {ord(character): f"\\u{ord(character):04x}" for character in "\u0085\u2028\u2029"}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: it runs for every token


def encode(value: Any) -> str:
    """The value as JSON in one line, whatever a client takes for the end of one."""
    text = _encode(value)
    return text if text.isascii() else text.translate(SEPARATORS)


class EncodedResponse(JSONResponse):
    def render(self, content: Any) -> bytes:
        return encode(content).encode()


# ---------------------------------------------------------------------- errors


class ApiError(HTTPException):
    """A response with an error status. `body` has OpenAI's form."""

    def __init__(self, status: int, message: str, *, headers: Mapping[str, str] | None = None, **fields: str | None):
        super().__init__(status, message, headers)
        self.body = error_body(status, message, **fields)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`; the type follows from the status."""
    types = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": types.get(status, fallback), "param": param, "code": code}}


# ---------------------------------------------------------------------- types of fields

Item = TypeVar("Item")
# `fail_fast` ends at the first wrong item of a list. The description of 250,000 wrong ids took 5.3 s.
Items = Annotated[list[Item], Field(fail_fast=True)]
Prompts = Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
TokenIds = Annotated[list[int], Field(fail_fast=True, min_length=1)]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Field(fail_fast=True, max_length=16)]


def _only(*accepted: Any) -> AfterValidator:
    """The check of a field whose other values this server does not implement; null requests nothing, and passes."""

    def check(value: Any) -> Any:
        if value is not None and value not in accepted:
            raise ValueError("this server does not implement it: leave it out")
        return value

    return AfterValidator(check)


Unsupported = Annotated[Any, _only(False, 0, "", [], {})]


class Strict(BaseModel):
    """A strict model: it refuses numbers in quotes, NaN, infinity, and unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


# ---------------------------------------------------------------------- bodies


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # ignored
    continuous_usage_stats: Literal[False] | None = None  # vLLM's


class ContentPart(Strict):
    type: Literal["text", "python", "python_output"]  # the last two: a calculator call of the assistant, its result
    text: str
    cache_control: dict[str, Any] | None = Field(None, exclude=True)  # Anthropic's; ignored


class EarlierReply(Strict):
    """The `nanochat` field of an assistant's message, which a client sends back unchanged."""

    parts: Items[ContentPart] | None = None
    # Ignored: these fields describe the request to which the message was the reply.
    first_message_read: int | None = None
    limit: str | None = None


class CalledFunction(Strict):
    name: str
    # JSON, as the model wrote it. Some servers return an object.
    arguments: Annotated[str, BeforeValidator(lambda value: json.dumps(value) if isinstance(value, dict) else value)]


class ToolCall(Strict):
    """A call in an assistant's message that a client sends back."""

    id: str | None = None  # llama.cpp may leave it empty: then results follow in the order of the calls
    type: Literal["function"] | None = None
    function: CalledFunction
    # Ignored.
    index: int | None = None  # in a streamed call
    provider_specific_fields: Any = None  # LiteLLM's


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ContentPart] | None = None  # None: an empty reply of the assistant
    nanochat: EarlierReply | None = None  # replaces `content`, because it also holds the calculator calls
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None  # from an assistant
    tool_call_id: str | None = None  # from a tool: the call that it answers; without it, the oldest
    reasoning_content: str | None = None  # a reply's thought, which some templates write
    reasoning: str | None = None  # vLLM's newer name of the same
    # Refused.
    function_call: Unsupported = None
    # Ignored.
    name: str | None = None
    cache_control: dict[str, Any] | None = None
    refusal: str | None = None
    annotations: list[Any] | None = Field(None, max_length=128)
    audio: None = None
    prefix: bool | None = None  # DeepSeek's: this message is continued, as the last one of an assistant always is
    partial: bool | None = None  # the same, Qwen's
    reasoning_details: Any = None  # OpenRouter's
    thinking_blocks: Any = None  # LiteLLM's
    provider_specific_fields: Any = None  # LiteLLM's

    @property
    def text(self) -> str:
        return text_of(_joined(self.groups()))

    def groups(self) -> list[list[Part]]:
        """The content: each text is a group, or a reply as it was sent. See `_joined`."""
        if self.role == "assistant" and self.nanochat is not None and self.nanochat.parts is not None:
            return [[part.model_dump() for part in self.nanochat.parts]]
        if isinstance(self.content, list):
            return [[part.model_dump()] for part in self.content]
        if not self.content and self.role == "tool":  # an empty part would leave nothing in the prompt
            return [[{"type": "text", "text": "no result"}]]
        if self.content is None and self.role != "assistant":
            raise ApiError(400, f"a message of the {self.role} has no content", param="messages")
        return [[{"type": "text", "text": self.content}]] if self.content else []


class Function(Strict):
    name: FunctionName
    description: str | None = None  # models of other families read it
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments of a required call always follow the schema

    def described(self) -> dict[str, Any]:
        """The function as chat templates describe it to the model."""
        return self.model_dump(include={"name", "description", "parameters"} & self.model_fields_set)


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = None  # ignored


def _known_choice(value: Any) -> Any:
    # pydantic would name only the texts.
    if not isinstance(value, dict | Tool) and value not in (None, "none", "auto", "required"):
        raise ValueError('none, auto, required, or {"type": "function", "function": {"name": ...}}')
    return value


class JsonSchema(Strict):
    name: FunctionName
    description: str | None = None  # ignored, as the model does not read it
    content: dict[str, Any] | None = Field(None, alias="schema")  # None: any object
    strict: Any = None  # every schema is followed strictly


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    content: dict[str, Any] | None = Field(None, alias="schema")  # llama.cpp's, next to json_object

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, and is needed there")
        if self.content is not None and self.type != "json_object":
            raise ValueError("schema belongs to the type json_object; in json_schema it has the same name")
        return self


OPENAI_RANGES = {"temperature": Range(0, 2), "seed": Range(-(2**63), 2**64 - 1)}
SETTINGS = get_type_hints(SamplingParams, include_extras=True)  # such as `Annotated[float, Range(0, 1)]`
SYNONYMS = {"repetition_penalty": "repeat_penalty"}  # of llama.cpp, LM Studio and Ollama


def _minus_one(meaning: int | None) -> BeforeValidator:
    """Replaces -1, which vLLM, llama.cpp and LM Studio read as: no limit, or any."""
    return BeforeValidator(lambda value: meaning if value == -1 else value)


MINUS_ONE = {"top_k": _minus_one(0), "seed": _minus_one(None)}
UNLIMITED = 2**31  # tokens of a reply: as many as the context allows
TokenLimit = Annotated[Annotated[int, Field(ge=1)] | None, _minus_one(UNLIMITED)]


def sampling_field(name: str) -> tuple[Any, Any]:
    """An optional field with the range of the setting, or OpenAI's."""
    kind, own_range = get_args(SETTINGS[name])
    limits: Range = OPENAI_RANGES.get(name) or own_range
    optional: Any = Annotated[kind | None, Field(ge=limits.low, le=limits.high)]
    if name in MINUS_ONE:
        optional = Annotated[optional, MINUS_ONE[name]]
    names = AliasChoices(*filter(None, (name, SYNONYMS.get(name))))
    return optional, Field(None, validation_alias=names)


# A new field of `SamplingParams` needs no line here.
sampling_fields: dict[str, Any] = {name: sampling_field(name) for name in SETTINGS}

# Fields that change no reply, whatever their values: of OpenAI's API, vLLM and SGLang, llama.cpp, LM Studio and Ollama.
IGNORED = (
    *("prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user"),
    *("verbosity", "cache_salt", "priority", "request_id", "rid", "draft_model", "keep_alive", "ttl"),
    *("backend_sampling", "cache_prompt", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "id_slot"),
    *("dry_sequence_breakers", "dynatemp_exponent", "mirostat_eta", "mirostat_tau", "repeat_last_n", "samplers"),
    *("return_progress", "timings_per_token", "xtc_threshold"),
)
# Fields of these servers that would change a reply. Their clients send all of them, mostly with the value that switches
# the effect off.
NEUTRAL_VALUES = {
    "ignore_eos": False, "include_reasoning": True, "include_stop_str_in_output": False, "length_penalty": 1,
    "min_tokens": 0, "no_stop_trim": False, "reasoning_format": ("auto", "deepseek"), "separate_reasoning": True,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "stream_reasoning": True,
    "use_beam_search": False,
    "dry_multiplier": 0, "dynatemp_range": 0, "mirostat": 0, "n_probs": 0, "typ_p": 1, "typical_p": 1,
    "xtc_probability": 0, "store": False,
}  # fmt: skip
ignored_fields: dict[str, Any] = {name: (Any, None) for name in IGNORED}
neutral_fields: dict[str, Any] = {
    name: (Annotated[Any, _only(*value) if isinstance(value, tuple) else _only(value)], None)
    for name, value in NEUTRAL_VALUES.items()
}
GeneratedFields = create_model(
    "GeneratedFields", __base__=Strict, **sampling_fields, **ignored_fields, **neutral_fields
)


def _without_empty(stop: Any) -> Any:
    """Stop strings without empty ones, which other servers ignore."""
    if isinstance(stop, list):
        return [text for text in stop if text != ""]
    return None if stop == "" else stop


class RequestBody(GeneratedFields):
    """The common fields of both routes: the sampling settings, and the following."""

    model: str | None = None  # None: the loaded model
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: TokenLimit = None
    stop: Annotated[StopText | StopTexts | None, BeforeValidator(_without_empty)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_BIASES)
    stop_token_ids: list[int] | None = Field(None, fail_fast=True, max_length=MAX_STOP_IDS)  # vLLM's
    response_format: ResponseFormat | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)  # ignored

    # Set when the prompt is encoded: calls in the form of another model family; None: as our models write them.
    _family_calls: FamilyCalls | None = PrivateAttr(None)

    @property
    def family_calls(self) -> FamilyCalls | None:
        return self._family_calls

    @model_validator(mode="after")
    def _check_stream_options(self) -> "RequestBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def reply_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the reply follows; None: the reply is free text."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        content = form.content if form.json_schema is None else form.json_schema.content
        return {"type": "object"} if content is None else content

    @property
    def calls(self) -> Calls:
        """The tool calls that a reply may contain."""
        return "none"

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The settings of the body, and `defaults` for the others; a random seed if the body has none."""
        settings = {name: getattr(self, name) for name in SETTINGS if getattr(self, name) is not None}
        settings["seed"] = settings.get("seed", secrets.randbits(SEED_BITS)) % 2**SEED_BITS
        return replace(defaults, **settings)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Thinking(Strict):
    type: Literal["enabled", "disabled"]
    budget_tokens: int | None = None  # Anthropic's; ignored


# Variables of a model's chat template, such as enable_thinking in Qwen3's. A template can repeat a text.
TemplateSettings = dict[Annotated[str, Field(max_length=64)], bool | int | Annotated[str, Field(max_length=64)]]


class ChatBody(RequestBody):
    """POST /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: TokenLimit = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: drop the oldest turns of a conversation too long
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: Items[Literal["text"]] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    # None: auto.
    tool_choice: Annotated[Literal["none", "auto", "required"] | Tool | None, BeforeValidator(_known_choice)] = None
    # Refused.
    functions: Unsupported = None
    # vLLM's. The role of the last message decides both; they are refused if they contradict it.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[TemplateSettings, Field(max_length=16)] | None = None
    enable_thinking: bool | None = None  # Qwen's name of the template's variable
    thinking: Thinking | None = None  # DeepSeek's form of it
    reasoning_effort: str | None = None  # a variable of some templates; "none": the same as enable_thinking: false
    # Ignored.
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None  # false: one call at most, as our models write anyway

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatBody":
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ApiError(400, "tools: two have one name", param="tools", code="invalid_value")
        if self.must_call and not self.candidates:
            message = "tool_choice requires a call of a tool that is not among the tools"
            raise ApiError(400, message, param="tool_choice", code="invalid_value")
        return self

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, Tool)

    @property
    def listed_functions(self) -> list[Function]:
        return [tool.function for tool in self.tools or ()]

    @property
    def candidates(self) -> list[Function]:
        """The tools that a reply may call."""
        if isinstance(self.tool_choice, Tool):
            return [one for one in self.listed_functions if one.name == self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else self.listed_functions

    @property
    def calls(self) -> Calls:
        if self.family_calls is not None:
            return "schema" if self.must_call else "family"
        natives = [is_calculator(one.name, one.parameters) for one in self.candidates]
        if self.must_call:
            return "calculator" if natives == [True] else "schema"
        return "client" if any(natives) else "own"

    @property
    def reply_schema(self) -> dict[str, Any] | None:
        if self.calls == "schema":
            if self.family_calls is not None:
                return self.family_calls.schema
            return call_schema([(one.name, one.parameters) for one in self.candidates])
        return None if self.calls == "calculator" else super().reply_schema

    @property
    def requested_tokens(self) -> int | None:
        """The longest reply that the client wants; None: as long as the context allows."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int:
        """As in `scheduler.Request`: -1 for none, n for the token and n alternatives."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    def conversation(self) -> tuple[list[Message], list[int]]:
        """The messages in the form of `conversation.py`, and the index in the request at which each begins. If the last
        one is the assistant's, the reply continues it.

        Clients send messages in any order. The model has learned from at most one system message, at the beginning,
        and from strict turns. So system messages join at the beginning, and messages of one role in a row become one.
        Raises ApiError: when there is nothing to reply to.
        """
        system: list[list[Part]] = []
        turns: list[tuple[str, list[list[Part]]]] = []
        starts: list[int] = []
        unanswered: list[tuple[str, list[Part]]] = []  # ids of calls, each with the group that its result joins
        for index, message in enumerate(self.messages):
            if message.role == "tool":
                _answered(unanswered, message).append({"type": "python_output", "text": message.text})
                continue
            _check_answered(unanswered)
            groups = message.groups()
            for call in message.tool_calls or ():
                group = [{"type": "python", "text": call_text(call.function.name, call.function.arguments)}]
                unanswered.append((call.id or "", group))
                groups.append(group)
            if message.role in ("system", "developer"):
                system += groups
            elif turns and turns[-1][0] == message.role:
                turns[-1][1].extend(groups)
            else:
                turns.append((message.role, groups))
                starts.append(index)
        _check_answered(unanswered)
        messages: list[Message] = [{"role": "system", "content": _joined(system)}] if system else []
        starts = [0] * len(messages) + starts
        messages += [{"role": role, "content": _joined(groups)} for role, groups in turns]
        _check_messages(messages)

        last = messages[-1]
        if last["role"] == "assistant" and last["content"] and last["content"][-1]["type"] == "python":
            raise ApiError(400, "the last message ends with a call that has no result", param="messages")
        self._check_continuation(last["role"])  # after a tool's result the reply resumes as well
        return messages, starts

    def _check_continuation(self, last_role: str) -> None:
        """Raises ApiError: when the settings contradict the role of the last message."""
        continues = self.messages[-1].role == "assistant"
        if continues and super().reply_schema is not None:
            raise ApiError(400, "a reply that is begun cannot follow a schema", param="response_format")
        for name, expected in (("continue_final_message", continues), ("add_generation_prompt", not continues)):
            if getattr(self, name) not in (None, expected):
                why = f"{name} is {expected} where the last message is by {last_role}"
                raise ApiError(400, why.lower(), param=name)

    @property
    def template_settings(self) -> dict[str, Any]:
        """The variables of the model's chat template."""
        settings: dict[str, Any] = {}
        if self.reasoning_effort == "none":
            settings["enable_thinking"] = False
        elif self.reasoning_effort:
            settings["reasoning_effort"] = self.reasoning_effort
        if self.thinking is not None:
            settings["enable_thinking"] = self.thinking.type == "enabled"
        if self.enable_thinking is not None:
            settings["enable_thinking"] = self.enable_thinking
        return settings | (self.chat_template_kwargs or {})

    def family_conversation(self, has_thoughts: bool) -> tuple[list[Message], list[int]]:
        """The messages as chat templates read them, with calls and results as messages of their own; and the index in
        the request at which each begins. With `has_thoughts` the template reads the thoughts of replies.

        Raises ApiError: when there is nothing to reply to.
        """
        system = [message.text for message in self.messages if message.role in ("system", "developer")]
        messages: list[Message] = [{"role": "system", "content": "\n".join(system)}] if system else []
        starts = [0] * len(messages)
        unanswered: list[tuple[str, tuple[str, str]]] = []  # ids of calls, each with the template's id and the name
        for index, message in enumerate(self.messages):
            if message.role == "tool":
                call_id, name = _answered(unanswered, message)
                messages.append({"role": "tool", "name": name, "tool_call_id": call_id, "content": message.text})
                starts.append(index)
                continue
            if message.role in ("system", "developer"):
                continue
            last: Message = messages[-1] if messages else {}
            # A client may send a reply and its calls as several messages.
            joins = last.get("role") == message.role
            if unanswered and not (joins and message.tool_calls):
                _check_answered(unanswered)
            if not joins:
                last = {"role": message.role, "content": message.text}
                thought = (message.reasoning_content or message.reasoning or "").strip("\n")
                if has_thoughts and thought and message.role == "assistant":
                    is_cut = message is self.messages[-1] and not message.text  # the reply continues the thought
                    end = "" if is_cut else THOUGHT_SEPARATOR
                    last["content"] = f"<think>\n{thought}{end}{message.text}"
                messages.append(last)
                starts.append(index)
            elif message.text:
                last["content"] = f"{last['content']}\n{message.text}" if last["content"] else message.text
            for call in message.tool_calls or ():
                function = {"name": call.function.name, "arguments": _arguments_of(call)}
                calls = last.setdefault("tool_calls", [])
                call_id = template_id(call.id or f"{index} {len(calls)}")
                unanswered.append((call.id or "", (call_id, call.function.name)))
                calls.append({"id": call_id, "type": "function", "function": function})
        _check_answered(unanswered)
        _check_messages(messages)
        self._check_continuation(messages[-1]["role"])
        return messages, starts


def _arguments_of(call: ToolCall) -> dict[str, Any]:
    """The arguments of an earlier call. Templates write an object as JSON; a text would be quoted again."""
    arguments = json_of(call.function.arguments or "{}")
    if not isinstance(arguments, dict):
        raise ApiError(
            400,
            f"the arguments of the call {shortened(call.id or call.function.name)} are not a JSON object",
            param="messages",
        )
    return arguments


def _check_messages(messages: list[Message]) -> None:
    try:
        check_messages(messages)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error


def _answered(unanswered: list[tuple[str, Item]], message: ChatMessage) -> Item:
    """What is kept of the call that a tool's message answers, which is then answered; without an id, the oldest."""
    call_id = message.tool_call_id or ""
    matching = [entry for entry in unanswered if entry[0] == call_id]
    matching = matching or [entry for entry in unanswered if "" in (entry[0], call_id)]
    if not matching:
        raise ApiError(400, f"no call before it has the tool_call_id {shortened(call_id)}", param="messages")
    unanswered.remove(matching[0])
    return matching[0][1]


def _check_answered(unanswered: Sequence[tuple[str, Any]]) -> None:
    for call_id, _ in unanswered:
        why = f"the call {shortened(call_id)} has no result: a message of the role tool follows it"
        raise ApiError(400, why, param="messages")


def _joined(groups: list[list[Part]]) -> list[Part]:
    """The parts of several groups. If one ends and the next begins with a text, a newline joins the texts."""
    runs: list[tuple[str, list[str]]] = []  # (type, texts)
    for group in groups:
        for place, part in enumerate(group):
            if place == 0 and runs and runs[-1][0] == part["type"] == "text":
                runs[-1][1].append(part["text"])
            else:
                runs.append((part["type"], [part["text"]]))
    return [{"type": kind, "text": "\n".join(texts)} for kind, texts in runs]


class CompletionBody(RequestBody):
    """POST /v1/completions."""

    prompt: str | Prompts[str] | TokenIds | Prompts[Items[int]]
    # 0: with `echo` and `logprobs`, the prompt is measured.
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, _minus_one(UNLIMITED)] = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None  # the prompt comes before the reply, with its logprobs
    # vLLM's. A trainer samples with it (--for_rl): the prompt's ids are read unchanged, and RL's own engine gives the
    # same reply, with the token that ends it and with the calculator's answers, whose logprob is null.
    return_token_ids: bool | None = None
    best_of: Literal[1] | None = None
    # Refused.
    suffix: Unsupported = None

    @model_validator(mode="after")
    def _check_token_ids(self) -> "CompletionBody":
        if self.return_token_ids and (self.stream or self.echo or self.stop or self.reply_schema):
            raise ValueError("return_token_ids: leave out stream, echo, stop and response_format")
        return self

    @property
    def calls(self) -> Calls:
        return "own" if self.return_token_ids else "none"

    @property
    def prompts(self) -> list[Any]:
        """One entry per prompt, a text or a list of token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)

    @property
    def requested_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default for this route

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


class TokenizeBody(Strict):
    """POST /tokenize. vLLM's, for texts."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None  # the begin token before the text


class DetokenizeBody(Strict):
    """POST /detokenize. vLLM's."""

    model: str | None = None
    tokens: Items[int]


class UpdateWeightsBody(Strict):
    """POST /update_weights_from_disk. SGLang's."""

    model_path: str  # a folder of this machine
    weight_version: str | None = None  # ignored: replies name the fingerprint of their weights


# ---------------------------------------------------------------------- from bytes to a body

Body = TypeVar("Body", bound=Strict)


def read_body(body_type: type[Body], content: bytes) -> Body:
    """The checked body. Raises ApiError: 400, which names the wrong field."""
    # Brackets inside texts count too: a text with this many brackets, one in twenty characters, exceeds any context.
    if content.count(b"[") + content.count(b"{") > MAX_CONTAINERS:
        raise ApiError(400, f"the body has more than {MAX_CONTAINERS:,} lists and objects", code="invalid_value")
    try:
        return body_type.model_validate_json(content)
    except ValidationError as error:
        without_nulls = _without_unknown_nulls(content, error)
        if without_nulls != content:
            return read_body(body_type, without_nulls)
        raise _first_mistake(error, body_type) from None  # the error itself quotes what the user wrote


def _without_unknown_nulls(content: bytes, error: ValidationError) -> bytes:
    """The body without unknown fields that are null, which request nothing: clients send all fields of their server."""
    if error.error_count() > MAX_ERRORS:
        return content
    unknown = [one["loc"] for one in error.errors(include_url=False) if one["type"] == "extra_forbidden"]
    body = json_of(content) if unknown else None
    found = False
    for *path, name in unknown:
        parent: Any = body
        for step in path:  # names of fields, places in lists, and pydantic's names of types
            try:
                parent = parent[step]
            except (TypeError, LookupError):
                break
        if isinstance(parent, dict) and parent.get(name, "") is None:
            del parent[name]
            found = True
    return json.dumps(body).encode() if found else content


def _first_mistake(error: ValidationError, body_type: type[BaseModel]) -> ApiError:
    """The mistake in a body that most probably matters to its author."""
    if error.error_count() > MAX_ERRORS:
        return ApiError(400, f"the body has {error.error_count():,} mistakes", code="invalid_value")
    # If a field may have several types, pydantic reports an error for each. The client most probably meant the type
    # whose error is deepest or, at the same depth, not about the type itself: `stop` with 17 texts is too long a list.
    mistakes = error.errors(include_url=False, include_input=False)
    mistake = max(mistakes, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    if mistake["type"] == "json_invalid":
        why = mistake["msg"].partition(": ")[2]
        if why.startswith("recursion limit exceeded"):  # pydantic's limit of 200 levels
            return ApiError(400, "lists and objects of the body are nested too deeply", code="invalid_value")
        return ApiError(400, f"the body is not JSON: {shortened(why)}", code="invalid_json")
    if mistake["type"] == "extra_forbidden":
        name = shortened(str(mistake["loc"][-1]))
        return ApiError(400, f"{name}: this server has no such field", param=name, code="unknown_parameter")
    schema = body_type.model_json_schema()
    names: set[str] = set()
    for model in (schema, *schema.get("$defs", {}).values()):
        names.update(model.get("properties", ()))
    path = [str(part) for part in mistake["loc"] if isinstance(part, int) or part in names]  # without names of types
    param = ".".join(path) or None
    message = mistake["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")


def shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."
