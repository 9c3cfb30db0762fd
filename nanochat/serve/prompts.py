"""Turn a checked body into requests for the scheduler: encode its prompts, and check that they fit the context."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanochat.conversation import Message, Part, fit_prompt, parts_of, render_prompt
from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.families.tool_calls import MARKS, THOUGHT_BEGIN, THOUGHT_END, THOUGHT_SEPARATOR, opens_thought
from nanochat.ground.cli import UserError
from nanochat.serve.grammar import AfterThought, Grammar, SchemaError
from nanochat.serve.scheduler import Chunk, Overloaded, Request, Stream
from nanochat.serve.schema import ApiError, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from nanochat.serve.state import LoadedModel
from nanochat.serve.tools import FamilyCalls

# The most logprobs in one request, over all its replies and tokens, alternatives included. Logprobs make a reply large:
# this many take 15 MB and half a second to write, spread over the reply's tokens.
MAX_LOGPROBS = 250_000
MAX_TOKENIZED = 100_000  # tokens of /tokenize and /detokenize
ALIAS = "nanochat"  # a name for the default model, so that a client's settings survive the next training


@dataclass(frozen=True)
class EncodedPrompt:
    """The tokens of a prompt."""

    ids: list[int]
    first_message_read: int | None = None  # index in the request; None: the prompt must not be shortened
    in_thought: bool | None = None  # whether the reply begins within a thought; None: it has no thought
    thought_end: list[int] = field(default_factory=list)  # the tokens between a thought and a document by a schema


def encode_prompts(model: LoadedModel, body: ChatBody | CompletionBody) -> list[EncodedPrompt]:
    """Each prompt of a body.

    Raises ApiError: 400 when the body is not for this model, or requests more replies than there are slots.
    """
    num_prompts = 1 if isinstance(body, ChatBody) else len(body.prompts)
    slots = model.scheduler.size
    if num_prompts * body.num_choices > slots:  # the queue is for other clients
        message = f"{num_prompts} x {body.num_choices} replies in one request: this server generates {slots} at once"
        raise ApiError(400, f"{message}; request fewer", param="n")
    if isinstance(body, CompletionBody):
        encode = exact_ids if body.return_token_ids else encode_text
        return [EncodedPrompt(encode(model, prompt)) for prompt in body.prompts]
    if not model.chats:
        raise ApiError(400, f"{model.name} is a base model, which continues text: POST /v1/completions")
    prompt = encode_chat(model, body)
    # Where the reply is a call of our form, the prompt includes its first token.
    if body.family_calls is None and body.calls in ("calculator", "schema"):
        prompt = replace(prompt, ids=[*prompt.ids, model.tokenizer.encode_special("<|python_start|>")])
    return [prompt]


def make_grammar(
    model: LoadedModel,
    body: ChatBody | CompletionBody,
    prompts: Sequence[EncodedPrompt],
    schema: dict[str, Any],
    *,
    only_recent: bool = False,
) -> Grammar | AfterThought | None:
    """The grammar of the replies, from their schema. The first time it takes up to half a second; with `only_recent` it
    is then None.

    Raises ApiError: 400 when the schema cannot be followed, or not within the tokens of a reply.
    """
    max_tokens = min(reply_tokens(model, body, prompt) for prompt in prompts)
    end = prompts[0].thought_end
    make = model.vocabulary.recent if only_recent else model.vocabulary.compile
    try:
        # Other families have learned to write calls with a space after each comma and colon.
        is_compact = body.calls == "schema" and body.family_calls is None
        grammar = make(schema, max(1, max_tokens - len(end)), is_compact=is_compact)
    except SchemaError as error:
        param = "tools" if body.calls == "schema" else "response_format"
        raise ApiError(400, str(error), param=param, code="invalid_value") from error
    if grammar is None or not end:
        return grammar
    return AfterThought(grammar, end, model.tokenizer, max_tokens)


def choose_model(model: LoadedModel, name: str | None) -> LoadedModel:
    """The model that a request names; `model` is the default. Raises ApiError: 404 when there is none."""
    chosen = model if name in (None, ALIAS) else next((one for one in model.all if one.name == name), None)
    if chosen is None:
        names = ", ".join(one.name for one in model.all)
        message = f"the model does not exist: this server has {names}; {ALIAS} is another name of {model.name}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return chosen


def encode_chat(model: LoadedModel, body: ChatBody) -> EncodedPrompt:
    """The prompt of a chat. Raises ApiError: 400 when the model cannot read it."""
    try:
        if isinstance(model.tokenizer, ImportedTokenizer):
            return _encode_family_chat(model, model.tokenizer, body)
        for name in ("chat_template_kwargs", "enable_thinking"):
            if getattr(body, name):
                message = f"{name}: {model.name} has no chat template"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        return _encode_messages(model, body, *body.conversation())
    except UserError as error:  # an error of the chat template, such as "roles must alternate"
        raise ApiError(400, str(error), param="messages") from error


def _encode_messages(
    model: LoadedModel, body: ChatBody, messages: list[Message], starts: list[int], tools: Sequence[Any] | None = None
) -> EncodedPrompt:
    """The prompt of messages, of which each begins at its index of `starts` in the request."""
    settings = body.template_settings
    if body.truncation != "auto":
        check_length(model, [message["content"] for message in messages])
        return EncodedPrompt(render_prompt(model.tokenizer, messages, settings=settings, tools=tools))

    # The oldest turns are dropped. The system message and the last question stay.
    first = 1 if messages[0]["role"] == "system" else 0
    question = messages[:first]
    question += messages[max(place for place, one in enumerate(messages) if one["role"] == "user") :]
    check_length(model, [message["content"] for message in question])
    prompt = fit_prompt(model.tokenizer, messages, model.context, body.requested_tokens, settings, tools)
    return EncodedPrompt(prompt.ids, 0 if prompt.oldest == first else starts[prompt.oldest])


def _encode_family_chat(model: LoadedModel, tokenizer: ImportedTokenizer, body: ChatBody) -> EncodedPrompt:
    """The prompt in another family's format; with tools, the body learns how the model writes calls.

    Raises ApiError: 400 when this server does not read the form of these calls.
    """
    template = tokenizer.chat_format.template
    messages, starts = body.family_conversation(template.has_thoughts or template.thought_field is not None)
    form = None
    if body.candidates or any(message["role"] == "tool" for message in messages):
        form = tokenizer.chat_format.call_form
        if form is None:
            message = (
                f"tools: the chat template of {model.name} has no tools, or calls in a form that this server does not "
                "read: it reads the forms of Qwen, Llama 3.1 and Mistral; leave them out"
            )
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
    tools = None
    if body.candidates:
        tools = [{"type": "function", "function": one.described()} for one in body.listed_functions]
    prompt = _encode_messages(model, body, messages, starts, tools)
    begun = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
    text = tokenizer.decode(prompt.ids[-64 - len(begun) :])
    in_thought = _begins_in_thought(text, begun) if template.has_thoughts or form is not None else None
    opening = ""  # the text with which a required call begins
    if form is not None and tools:
        functions = {one.name: one.parameters for one in body.candidates}
        body._family_calls = calls = FamilyCalls(form, functions, body.parallel_tool_calls is False)
        opening = calls.opening if body.calls == "schema" else ""
        if opening and form.is_xml:
            message = f"tool_choice: {model.name} writes calls in XML, which this server cannot require: send auto"
            raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
    if body.reply_schema is None:
        return replace(prompt, in_thought=in_thought)

    # A document, or the call that the client requires, comes after the thought.
    encode = tokenizer.chat_format.encode_begun
    if in_thought is False and template.thought_end:
        prompt = replace(prompt, ids=[*prompt.ids, *encode(THOUGHT_BEGIN)])
        in_thought = True
    if in_thought:
        before, _, after = (template.thought_end or THOUGHT_SEPARATOR).partition(THOUGHT_END)
        _, mark, call = opening.rpartition(THOUGHT_END)  # the call that a template writes may have an empty thought
        end = encode(before + THOUGHT_END + (call if mark else after + call))
        return replace(prompt, in_thought=True, thought_end=end)
    # The reply begins as a call does. The prompt may have the first part of that, such as an empty thought.
    sizes = range(len(opening), -1, -1)
    common = next(size for size in sizes if text.endswith(opening[:size]))
    return replace(prompt, ids=[*prompt.ids, *encode(opening[common:])])


def _begins_in_thought(prompt: str, begun: str) -> bool | None:
    """See EncodedPrompt; `begun` is the part of the reply that is the end of the prompt."""
    if begun:
        is_open = begun.lstrip().startswith(THOUGHT_BEGIN) or opens_thought(prompt.removesuffix(begun))
        return True if is_open and THOUGHT_END not in begun else None
    return None if prompt.rstrip().endswith(THOUGHT_END) else opens_thought(prompt)


def exact_ids(model: LoadedModel, prompt: str | list[int]) -> list[int]:
    """The prompt of a trainer, which contains the special tokens of a conversation.

    Raises ApiError: 400 for a text, and on a server that does not sample for a trainer.
    """
    if model.read_update is None:
        message = "return_token_ids is for trainers: this server samples for one when it is started with --for_rl"
        raise ApiError(400, message, param="return_token_ids", code="unsupported_parameter")
    if isinstance(prompt, str):
        raise ApiError(400, "return_token_ids needs a prompt of token ids", param="prompt", code="invalid_value")
    check_ids(model, "prompt", prompt)
    return prompt


def encode_text(model: LoadedModel, prompt: str | list[int]) -> list[int]:
    """The begin token, then the tokens of a text or the given ids. A client must not send special tokens."""
    bos = model.tokenizer.get_bos_token_id()
    if isinstance(prompt, str):
        check_length(model, [prompt])
        return model.tokenizer.encode(prompt, prepend=bos)
    vocabulary = model.tokenizer.vocab_size
    special = set(model.tokenizer.special_ids.values())
    prompt = prompt[_is_begun(model, prompt) :]
    if not all(0 <= token < vocabulary and token not in special for token in prompt):
        raise ApiError(400, f"token ids are 0 to {vocabulary - 1}, without the special tokens", param="prompt")
    return [bos, *prompt]


def _is_begun(model: LoadedModel, prompt: str | list[int]) -> bool:
    """Whether a client's prompt has the begin token; clients that tokenize themselves (lm-eval) may send it."""
    return isinstance(prompt, list) and prompt[:1] == [model.tokenizer.get_bos_token_id()]


def tokenize(model: LoadedModel, body: TokenizeBody) -> dict[str, Any]:
    """The token ids of a text, as `/v1/completions` reads it. Raises ApiError: 400 over MAX_TOKENIZED."""
    model = choose_model(model, body.model)
    tokenizer = model.tokenizer
    too_many = ApiError(400, f"prompt: more than {MAX_TOKENIZED:,} tokens in one request", param="prompt")
    if len(body.prompt) // model.longest_token > MAX_TOKENIZED:
        raise too_many
    bos = tokenizer.get_bos_token_id()
    if body.add_special_tokens is not False:
        tokens = tokenizer.encode(body.prompt, prepend=bos)
    elif body.prompt == tokenizer.decode([bos]):
        tokens = [bos]  # this is how lm-eval looks up its id
    else:
        tokens = tokenizer.encode(body.prompt)
    if len(tokens) > MAX_TOKENIZED:
        raise too_many
    return {"count": len(tokens), "max_model_len": model.context, "tokens": tokens}


def detokenize(model: LoadedModel, body: DetokenizeBody) -> dict[str, Any]:
    """The text of token ids; a special token becomes its name. Raises ApiError: 400 over MAX_TOKENIZED."""
    model = choose_model(model, body.model)
    if len(body.tokens) > MAX_TOKENIZED:
        raise ApiError(400, f"tokens: more than {MAX_TOKENIZED:,} tokens in one request", param="tokens")
    check_ids(model, "tokens", body.tokens)
    return {"prompt": model.tokenizer.decode(body.tokens)}


def check_ids(model: LoadedModel, param: str, ids: Iterable[int]) -> None:
    """Raises ApiError: 400 when an id is not in the vocabulary, which includes special tokens."""
    if not all(0 <= token < model.tokenizer.vocab_size for token in ids):
        message = f"{param}: token ids are 0 to {model.tokenizer.vocab_size - 1}"
        raise ApiError(400, message, param=param, code="invalid_value")


def check_length(model: LoadedModel, contents: Sequence[str | list[Part]]) -> None:
    """Refuse texts that are far too long, before any work on them. Raises ApiError: 400."""
    characters = 0
    for content in contents:
        characters += sum(len(part["text"]) for part in parts_of(content))
    least = characters // model.longest_token  # in bytes, and a character has at least one
    if least > model.context:
        raise _too_long(model, f"at least {least}")


def _too_long(model: LoadedModel, prompt: str) -> ApiError:
    # OpenAI's words and plain digits: litellm and others recognise by them that the prompt is too long.
    message = f"This model's maximum context length is {model.context} tokens. However, "
    message += f"your messages resulted in {prompt} tokens. Please reduce the length of the messages."
    return ApiError(400, message, param="messages", code="context_length_exceeded")


def reply_tokens(model: LoadedModel, body: ChatBody | CompletionBody, prompt: EncodedPrompt) -> int:
    """How many tokens a reply may have: as many as requested, or as fit after its prompt.

    Raises ApiError: 400 when the prompt leaves no room for a token that is needed.
    """
    room = model.context - len(prompt.ids)
    requested = model.context if body.requested_tokens is None else body.requested_tokens
    if room < min(requested, 1):  # `max_tokens: 0` reads a prompt only
        raise _too_long(model, str(len(prompt.ids)))
    return min(requested, room)


def check_logprobs(requests: Sequence[Request]) -> None:
    """Raises ApiError: 400 when the replies could have more than MAX_LOGPROBS."""
    tokens = sum(request.max_tokens + request.echo for request in requests)
    each = 1 + requests[0].logprobs
    if tokens * each > MAX_LOGPROBS:
        message = f"{len(requests)} replies of {tokens:,} tokens in all with {each} logprobs a token are over the limit"
        message += f" of {MAX_LOGPROBS:,} logprobs in a request: lower max_tokens, n or the number of logprobs"
        raise ApiError(400, message, param="max_tokens", code="invalid_value")


def submit(
    model: LoadedModel,
    body: ChatBody | CompletionBody,
    prompts: Sequence[EncodedPrompt],
    grammar: Grammar | AfterThought | None,
    on_chunk: Callable[[int, Chunk], None],
) -> list[Stream]:
    """Pass every choice of every prompt to the scheduler, or none of them; `n` choices have consecutive seeds.

    Raises ApiError: 400 when one does not fit the context, 429 when slots and queue are full.
    """
    sampling = body.sampling(model.sampling)
    logit_bias = body.logit_bias or {}
    stop_ids = frozenset(body.stop_token_ids or ())
    check_ids(model, "logit_bias", logit_bias)
    check_ids(model, "stop_token_ids", stop_ids)
    # A tokenizer may put a space before each text. A whole reply loses it; a continuation needs it.
    is_whole = isinstance(body, ChatBody) and body.messages[-1].role != "assistant"
    # The special tokens that belong to thoughts and calls, with their names: without them these would not be found.
    special = model.tokenizer.special_ids if body.calls == "family" or prompts[0].in_thought is not None else {}
    marks = {special[name]: name.encode() for name in MARKS if name in special}
    requests = []
    for place, prompt in enumerate(prompts):
        max_tokens = reply_tokens(model, body, prompt)
        # An echo begins with the client's own tokens: without the begin token that this server has added.
        echo = 0
        if isinstance(body, CompletionBody) and body.echo:
            echo = len(prompt.ids) - (not _is_begun(model, body.prompts[place]))
        for number in range(body.num_choices):
            request = Request(
                prompt=tuple(prompt.ids),
                max_tokens=max_tokens,
                limit="max_tokens" if max_tokens == body.requested_tokens else "context",
                sampling=replace(sampling, seed=sampling.seed + number),
                stop=body.stop_strings if body.calls != "schema" else (),  # they would break the call
                logprobs=body.num_logprobs,
                echo=echo,
                strips_space=is_whole and model.tokenizer.strips_space,
                spelled=marks,
                logit_bias=logit_bias,
                stop_ids=stop_ids,
                calls=body.calls,
                grammar=None if grammar is None else grammar.copy(max_tokens),
                in_thought=prompt.in_thought,
                every_token=isinstance(body, CompletionBody) and bool(body.return_token_ids),
            )
            requests.append(request)
    check_logprobs(requests)
    try:
        return model.scheduler.submit_all(requests, on_chunk)
    except Overloaded as error:
        wait = {"retry-after": str(max(1, round(error.retry_after)))}
        if error.is_closing:
            raise ApiError(503, "the server is closing", code="not_ready", headers=wait) from error
        raise ApiError(429, "the server is busy: try again later", code="overloaded", headers=wait) from error
