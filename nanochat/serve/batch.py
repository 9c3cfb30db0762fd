"""Reply to many prompts from a file: through the server's checks and its scheduler, without HTTP.

The output file has a line with the reply for each line of the input, in the same order. The forms of a line:

    {"custom_id": "a", "body": {"messages": [...], "max_tokens": 9}}    {"custom_id": "a", "response": {...}, ...}
    {"messages": [...], ...}                                            the same, and the reply among the messages
    {"prompt": "...", ...} or a JSON text                               {"prompt": "...", "completion": "...", ...}

The first form is a line of OpenAI's batches: its body may have all fields of the API, and its `response` is as in the
API. The other forms use the command's settings, and their output is training data. If the file is not a .jsonl, every
line is a prompt. A line without a reply has an `error` instead; all other lines are answered.
"""

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from nanochat.ground.cli import UserError
from nanochat.ground.log import warn
from nanochat.ground.screen import Bar
from nanochat.ground.untrusted import json_of
from nanochat.sampling import seed_of
from nanochat.serve import prompts
from nanochat.serve.replies import ChoicesSerializer, make_serializer, usage_of
from nanochat.serve.scheduler import Chunk, Stream
from nanochat.serve.schema import ApiError, ChatBody, CompletionBody, read_body
from nanochat.serve.state import LoadedModel


@dataclass(frozen=True)
class Line:
    """A line of the input that is not empty."""

    number: int  # its number in the file, from 1
    record: Any  # parsed from JSON; None: the line is not JSON


@dataclass(eq=False)
class Running:
    """A line whose replies are being generated."""

    serializer: ChoicesSerializer
    streams: list[Stream]
    prompt_tokens: list[int]
    unfinished: int  # replies


def read_lines(path: Path) -> list[Line]:
    """Raises UserError: when the file cannot be read, or is empty."""
    try:
        texts = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"--in {path}: {error.strerror}: name a file with a prompt in each line") from error
    lines = []
    for number, text in enumerate(texts, 1):
        if text.strip():
            lines.append(Line(number, json_of(text) if path.suffix == ".jsonl" else text.rstrip("\r")))
    if not lines:
        raise UserError(f"--in {path}: it has no lines")
    return lines


def answered(path: Path, lines: list[Line]) -> int:
    """The number of lines whose replies are already in the output. Removes a last line that a kill has cut.

    Raises UserError: when the output holds replies to other prompts.
    """
    if not path.exists():
        return 0
    whole = path.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    kept = [json_of(text) for text in whole.decode(errors="replace").split("\n")[:-1]]
    if len(kept) > len(lines) or any(_subject(a) != _subject(b.record) for a, b in zip(kept, lines, strict=False)):
        raise UserError(f"--out {path} holds replies to other prompts: name another file, or remove it")
    path.write_bytes(whole)
    return len(kept)


def _subject(record: Any) -> Any:
    """The part that a line of the input and its output have in common."""
    if not isinstance(record, dict):
        return record
    for name in ("custom_id", "prompt"):
        if name in record:
            return record[name]
    messages = record.get("messages")
    return messages[0] if isinstance(messages, list) and messages else None


class Batch:
    """Answers the lines of a file. It keeps twice as many replies in progress as there are slots, so that a free slot
    finds the next prompt."""

    def __init__(self, model: LoadedModel, max_tokens: int, system: str = ""):
        self.model = model
        self.max_tokens = max_tokens  # tokens of a reply whose line sets no limit
        self.system = system  # for conversations without a system message; bodies do not change
        self.failed = 0  # lines without a reply
        self.running: dict[int, Running] = {}  # by place of the line
        self.chunks: SimpleQueue[tuple[int, int, Chunk]] = SimpleQueue()  # (place, number of the choice, chunk)

    def answer(self, lines: list[Line], out: Path) -> None:
        """Append the missing lines to `out`, each as soon as all earlier lines are written.

        Raises UserError: when the device fails, or `out` cannot be written. Whole lines stay in the file.
        """
        place = answered(out, lines)  # the next line to write
        waiting = deque(range(place, len(lines)))
        results: dict[int, dict[str, Any]] = {}  # results that wait for an earlier line
        with out.open("a", encoding="utf-8", errors="replace") as file, Bar("replies", len(lines)) as progress:
            while place < len(lines):
                while waiting and sum(one.unfinished for one in self.running.values()) < self.model.scheduler.size * 2:
                    number = waiting.popleft()
                    try:
                        self.running[number] = self.start(number, lines[number].record)
                    except (ApiError, ValueError) as error:
                        results[number] = self.refusal(lines[number], error)
                if place not in results:
                    self.take(lines, results)
                while place in results:
                    file.write(json.dumps(results.pop(place), ensure_ascii=False) + "\n")
                    place += 1
                file.flush()
                progress.done = place

    def start(self, place: int, record: Any) -> Running:
        """Submit a line's replies. Raises ApiError or ValueError: when the line cannot be answered."""
        body_type, fields = self.request_of(record)
        fields = {"seed": seed_of(self.model.sampling.seed, place), **fields}
        body = read_body(body_type, json.dumps(fields).encode())
        encoded = prompts.encode_prompts(self.model, body)
        lengths = [len(prompt.ids) for prompt in encoded]
        if not {"max_tokens", "max_completion_tokens"} & set(fields):
            room = max(self.model.context - max(lengths), 1)
            body = body.model_copy(update={"max_tokens": min(self.max_tokens, room)})
        schema = body.reply_schema
        grammar = None if schema is None else prompts.make_grammar(self.model, body, encoded, schema)
        streams = prompts.submit(
            self.model, body, encoded, grammar, lambda choice, chunk: self.chunks.put((place, choice, chunk))
        )
        serializer = make_serializer(self.model, body, encoded[0].first_message_read)
        return Running(serializer, streams, lengths, len(streams))

    def request_of(self, record: Any) -> tuple[type[ChatBody] | type[CompletionBody], dict[str, Any]]:
        """The request that a client would send. Raises ValueError: when the line has an unknown form."""
        if isinstance(record, str):
            record = {"prompt": record}
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        if isinstance(record.get("body"), dict):
            # The loaded model replies, whatever model the file names.
            left_out = ("model", "stream", "stream_options")
            body = {name: value for name, value in record["body"].items() if name not in left_out}
            return (ChatBody if "messages" in body else CompletionBody), body
        messages = record.get("messages")
        if isinstance(record.get("prompt"), str):
            if not self.model.chats:
                return CompletionBody, {"prompt": record["prompt"]}
            messages = [{"role": "user", "content": record["prompt"]}]
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise ValueError('it has no text "prompt", no "messages" with a message in it, and no "body"')
        if messages[-1].get("role") == "assistant":
            raise ValueError("its last message is the assistant's: there is nothing to reply to")
        if self.system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return ChatBody, {"messages": messages}

    def take(self, lines: list[Line], results: dict[int, dict[str, Any]]) -> None:
        """Wait for the next chunk; the last chunk of a line completes its result."""
        place, choice, chunk = self.chunks.get()
        if place not in self.running:  # another choice of the line has failed
            return
        one = self.running[place]
        if chunk.finish_reason == "error" and chunk.is_clients_error:
            for stream in one.streams:
                stream.cancel()
            del self.running[place]
            results[place] = self.refusal(lines[place], ValueError(chunk.error))
        elif chunk.finish_reason in ("error", "cancelled"):
            problem = chunk.error or "the device takes no more work"
            raise UserError(f"line {lines[place].number}: {problem}; the same command goes on after what is written")
        else:
            one.serializer.add(choice, chunk)
            one.unfinished -= chunk.finish_reason is not None
            if not one.unfinished:
                del self.running[place]
                content = b"".join(one.serializer.whole(usage_of(one.streams, one.prompt_tokens)))
                results[place] = self.result(lines[place].record, json.loads(content))

    def result(self, record: Any, response: dict[str, Any]) -> dict[str, Any]:
        if isinstance(record, dict) and "body" in record:
            return batch_line(record, 200, response)
        fields = {"prompt": record} if isinstance(record, str) else record
        choice = response["choices"][0]
        if "text" in choice:
            return {**fields, "completion": choice["text"]}
        message = choice["message"]
        thought = {"reasoning_content": message["reasoning_content"]} if "reasoning_content" in message else {}
        if "prompt" in fields:
            return {**fields, **thought, "completion": message["content"] or ""}
        reply = {"role": "assistant", **thought, "content": message["content"] or ""}
        return {**fields, "messages": [*fields["messages"], reply]}

    def refusal(self, line: Line, error: ApiError | ValueError) -> dict[str, Any]:
        """The output of a line that gets no reply."""
        message = error.detail if isinstance(error, ApiError) else str(error)
        self.failed += 1
        warn(f"line {line.number} of --in: {message}")
        if isinstance(line.record, dict) and "body" in line.record:
            refused = error if isinstance(error, ApiError) else ApiError(400, message)
            return batch_line(line.record, refused.status_code, refused.body)
        if isinstance(line.record, dict):
            return {**line.record, "error": message}
        return {"prompt": line.record, "error": message}


def batch_line(record: dict[str, Any], status: int, body: dict[str, Any]) -> dict[str, Any]:
    """A line of the output of OpenAI's batches."""
    return {"custom_id": record.get("custom_id"), "response": {"status_code": status, "body": body}, "error": None}
