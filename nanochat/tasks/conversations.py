"""Your conversations, or any data set of a hub: one conversation per row, in one of these forms.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    [{"role": "user", "content": "..."}, ...]                         only the list
    {"conversations": [{"from": "human", "value": "..."}, ...]}       ShareGPT's: human, gpt, system
    {"conversation": [{"human": "...", "assistant": "..."}, ...]}     old ms-swift's; xtuner's input and output, too
    {"instruction": "...", "input": "...", "output": "..."}           Alpaca's
    {"input": "...", "target": "..."}                                 firefly's: "input" is the question if it is alone
    {"input": "...", "output": "...", "answer": "..."}                blossom-math's: the reply ends with the answer
    {"input": "...", "reasoning_content": "...", "content": "..."}    a thought before the reply
    {"prompt": ..., "completion": ...}                                texts, messages or lists of messages; a reply in
                                                                      the prompt is not learned

columns.py has the other names of each column, and --columns chooses one; forms.py has the other forms of their values;
messages.py has the other names of roles, and what else a message may say: which replies are not learned, thoughts,
calls of functions. A text under "system" or "system_prompt" goes before all, and "history", a list of [question,
answer], before the question. Functions that the assistant may call are a list "tools"; only a model with a chat
template learns from calls. A row of weight 0 is read and not learned.

data/records.py reads the rows. All are checked when they are opened. A row that is damaged, not a conversation, in an
unknown form, or with a placeholder (<image>, {{NAME}}) is skipped and counted. Each warning is an error with
--strict_data. A file without any row in a known form is always an error. A last question without an answer is dropped:
it teaches nothing. A file whose replies have labels, good or bad, is refused. What is read and what is not, of columns
and of messages, is printed once, when the training part is opened.

`--columns rendered=COLUMN` names a column with whole chats that a chat template wrote: {"text": "<|im_start|>user..."}.
Only there the names of special tokens in a text are these tokens.

If rewards need no right answer (chat_rl --reward), a question is enough, under the same names.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nanochat.conversation import Message, text_of
from nanochat.data.formats import without_nulls
from nanochat.data.records import open_part
from nanochat.ground.cli import UserError
from nanochat.ground.log import doubt, print0
from nanochat.ground.screen import track
from nanochat.ground.text_files import DataFile
from nanochat.task import Example, Split
from nanochat.tasks.columns import (
    LABELS,
    MEDIA,
    NAMES,
    ROLES,
    first_name,
    first_of,
    has,
    is_mark,
    is_off,
    known_name,
    label_of,
    origins,
    parse_columns,
    tidied,
    weight_of,
)
from nanochat.tasks.flag import DEFAULT_READING, Reading
from nanochat.tasks.forms import parsed, value_of
from nanochat.tasks.messages import (
    LOST,
    begun_reply,
    check_messages,
    given,
    plain,
    plain_messages,
    refuse_placeholders,
    spelled_marks,
    systems_in,
    thoughts_in,
    unread_keys,
    with_thought,
    without_thoughts,
)
from nanochat.tasks.recorded import RecordTask

KNOWN = (
    '{"messages": [...]}, a list of messages, {"conversations": [...]}, {"instruction", "input", "output"}, '
    '{"prompt", "completion"}'
)
# The roles of the columns that a conversation is made from.
TURNS = ("messages", "question", "input", "thought", "answer", "system", "history", "tools")
ADVICE = "name yours: --columns question=COLUMN,answer=COLUMN"


class UnknownForm(ValueError):
    """A record is in none of the forms above; its text says which are known."""


class LabelledReply(ValueError):
    """A reply that a label calls good or bad, as in files for KTO: its whole file is refused."""


class Conversations(RecordTask):
    """A dialogue to learn from."""

    name = "conversations"
    kind = "dialogue"
    rest = "not"  # what the other columns are, in the line that says what is read
    roles: tuple[str, ...] = (*TURNS, "rendered")  # the columns with these roles are read

    def __init__(
        self,
        split: Split,
        path: str | None = None,
        hub: str = "hf",
        label: str | None = None,
        reading: Reading = DEFAULT_READING,
    ):
        """`path`: a file, a folder or ORG/NAME[/CONFIG], each with `@SPLIT` or without; `label`: another name."""
        if path is None:
            raise UserError(f"{self.name}: name a .jsonl file or a folder of them")
        self.name = label or self.name
        self.columns = parse_columns(reading.columns)
        for role in self.columns:
            if role not in self.roles:
                raise UserError(f"--columns {role}=...: {self.name} have the roles {', '.join(self.roles)}")
        if "rendered" in self.columns and (reading.learn, reading.thoughts) != ("all", "keep"):
            raise UserError("--learn last, --thoughts drop: they need messages; --columns rendered=COLUMN has texts")
        self.thoughts = reading.thoughts
        self.strict_data = reading.strict_data
        self.heads: set[str] = set()  # the columns of .parquet files, also those that are not read
        self.records = open_part(
            path, split, hub, self.columns_to_read, reading.val_share, self.read_with_fields, reading.strict_data
        )
        self.seen = Seen()
        self.rejected = bytearray()  # a hash of each pair's rejected reply
        self.numbers = self._checked(f"{path} ({split})")
        self.identity += bytes(self.rejected)
        if split == "train":
            self.seen.report(path, self)

    def read(self, record: Any) -> Example:
        if "rendered" in self.columns:
            return Example([{"role": "rendered", "content": rendered_chat(record)}])
        return Example(self.chosen_thoughts(messages_of(record)), tools=tools_of(record))

    def check(self, record: Any) -> None:
        """Raises ValueError: when a tidied record is not a conversation."""
        refuse_labels(record)
        if "rendered" in self.columns:
            if _is_off(record):
                raise ValueError("it has the weight 0")
            refuse_placeholders([{"role": "user", "content": rendered_chat(record)}], record)
            return
        messages = conversation_of(record)
        tools_of(record)
        refuse_placeholders(messages, (*record, *self.heads))
        fields = record if isinstance(record, dict) else {}
        if isinstance(fields.get("choices"), list) and isinstance(fields.get("answer"), int):
            raise ValueError("its answer is the number of a choice: write the text of the answer")
        self.seen.messages(messages)
        self.unlearned += not any(map(is_learned_reply, answered(messages)))
        self.seen.questions += len(answered(messages)) < len(messages)

    def tidy(self, record: Any) -> Any:
        return tidied(record, self.columns)

    def chosen_thoughts(self, messages: list[Message]) -> list[Message]:
        """A conversation with or without its thoughts, as `thoughts` says."""
        return without_thoughts(messages) if self.thoughts == "drop" else messages

    @staticmethod
    def is_known(names: Collection[str]) -> bool:
        """Whether records with these names are in a known form."""
        is_asked = has(names, "question") or "input" in names
        return has(names, "messages") or has(names, "rendered") or (is_asked and has(names, "answer"))

    def columns_to_read(self, names: list[str]) -> list[str] | None:
        """The columns of a .parquet to read; all of them if the form is unknown, so that the message can list them."""
        self.heads.update(names)
        found = origins(names, self.columns)
        if not self.is_known(found):
            return None
        return [head for name, head in found.items() if ROLES.get(name) in self.roles or is_mark(head)]

    def roles_of(self, fields: Mapping[str, Any]) -> list[str]:
        """The roles whose columns are read in a tidied record."""
        unread: tuple[str, ...] = ()
        if _listed(fields) is not None:
            unread = ("question", "input", "thought", "answer", "history")
        elif not isinstance(first_of(fields, "question"), str | None) or not isinstance(first_of(fields, "input"), str):
            unread = ("messages", "input")
        if not isinstance(first_of(fields, "thought"), str):  # "thinking" may say only whether there is one
            unread += ("thought",)
        return [role for role in self.roles if role not in unread]

    def _checked(self, source: str) -> np.ndarray:
        """The numbers of the records that are conversations; a warning counts the others.

        Raises UserError: for a file without a record in a known form; with --strict_data for any record that is not a
        conversation; when no conversation is left; and when no record has a column of --columns.
        """
        used = np.ones(len(self.records), dtype=bool)
        left_out = LeftOut()
        known: set[DataFile] = set()  # files that have a record in a known form
        unknown: dict[DataFile, ValueError] = {}  # the problem of a file's first record in an unknown form
        for index in track(range(len(self.records)), f"checking {self.name}"):
            file, _ = self.records.place(index)
            try:
                record = self.records[index]
            except UserError as error:  # a line that is cut off; it says its place
                used[index] = False
                left_out.count("damaged", lambda error=error: error)
                continue
            fields = self.tidy(record)
            try:
                self.seen.columns(record, fields, self)
                refuse_media(fields)
                self.check(fields)
                known.add(file)
            except LabelledReply as error:
                raise self.records.error(index, f"cannot be used: {error}") from error
            except UnknownForm as error:
                used[index] = False
                absent = ", ".join(absent_columns(record if isinstance(record, dict) else (), self.columns))
                hint = f"; it has no column {absent} of --columns" if absent else ""
                problem = f"cannot be used: unknown form ({contents(record)}){error}{hint}"
                left_out.count("unknown form", lambda index=index, problem=problem: self.records.error(index, problem))
                if file not in unknown:
                    unknown[file] = self.records.error(index, problem)
            except ValueError as error:
                used[index] = False
                known.add(file)
                cause = re.sub(r"\d+", "", str(error))[:60]  # without the numbers of messages
                problem = f"cannot be used: {error}"
                left_out.count(cause, lambda index=index, problem=problem: self.records.error(index, problem))
        for file, error in unknown.items():
            if file not in known:  # as a rule all of its records have this form
                raise error
        left_out.report(source, len(self.records), self.strict_data)
        absent = absent_columns(self.seen.heads, self.columns)
        if absent and self.seen.heads:
            heads = ", ".join(map(str, self.seen.heads))[:400]
            raise UserError(f"--columns: no record of {source} has {', '.join(absent)}: its columns are {heads}")
        return used.nonzero()[0]


class LeftOut:
    """Why records are left out: how often, and the first of each cause."""

    def __init__(self):
        self.causes: Counter[str] = Counter()
        self.firsts: dict[str, ValueError] = {}

    def count(self, cause: str, error: Callable[[], ValueError]) -> None:
        """`error` is called for the first one: to say the place of each would read the file each time."""
        self.causes[cause] += 1
        if cause not in self.firsts:
            self.firsts[cause] = error()

    def report(self, source: str, count: int, strict_data: bool) -> None:
        """Warn of the records that are left out. Raises UserError: where all of the `count` are, or with
        --strict_data."""
        if not self.causes:
            return
        total = self.causes.total()
        named = [f"{error} ({self.causes[cause]:,} such)" for cause, error in self.firsts.items()]
        if len(named) > 3:
            rest = total - sum(self.causes[cause] for cause in [*self.firsts][:3])
            named[3:] = [f"and {rest:,} for other causes"]
        shown = "; ".join(named) if len(named) > 1 else str(next(iter(self.firsts.values())))
        problem = f"{total:,} of {count:,} records left out: first {shown}".replace(" cannot be used:", ":")
        if total == count:
            raise UserError(f"--tasks {source}: {problem}")
        doubt(f"--tasks {source}: {problem}", strict_data)


class Prompts(Conversations):
    """A question, for rewards that need no right answer. All fields of its record are read."""

    name = "prompts"
    rest = "and, for rewards,"
    roles = TURNS

    @staticmethod
    def is_known(names: Collection[str]) -> bool:
        return has(names, "messages") or has(names, "question") or "input" in names

    def columns_to_read(self, names: list[str]) -> list[str] | None:
        return None

    def roles_of(self, fields: Mapping[str, Any]) -> list[str]:
        return [role for role in super().roles_of(fields) if role != "answer" or _graded(fields) is not None]

    def check(self, record: Any) -> None:
        if isinstance(record, dict) and _is_off(record):
            raise ValueError("it has the weight 0")
        # Without the empty text that replaces a missing reply.
        messages = self.read(record).messages
        refuse_placeholders(messages, (*record, *self.heads))
        self.seen.messages([message for message in messages if message["content"] != "" or message["role"] == "user"])

    def read(self, record: Any) -> Example:
        fields = record if isinstance(record, dict) else {}
        answer = _graded(fields)
        begun = begun_reply(question_of(fields)) if _listed(record) is None else []
        if _listed(record) is not None or (isinstance(answer, str) and not begun):
            messages = conversation_of(record)
        elif self.is_known(fields):
            question = with_system(fields, question_of(fields))
            messages = checked(question[:-1] if begun else question)
        else:
            names = ", ".join((*NAMES["messages"], *NAMES["question"], "input"))
            raise UnknownForm(f": there is no {names}; {ADVICE}")
        # An empty text replaces a missing reference reply.
        if messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": answer if isinstance(answer, str) else ""})
        messages = self.chosen_thoughts(messages)
        return Example([*messages[:-1], *begun, messages[-1]], answer, tools=tools_of(record))


def _graded(fields: Mapping[str, Any]) -> Any:
    """The reference reply of a prompt. A "solution" and the like are for rewards that know what to do with them."""
    name = first_name(fields, "answer")
    return fields[name] if name in ("output", "completion", "response", "answer") else None


class Seen:
    """What of some records is read and what is not, for a few lines when a run begins."""

    def __init__(self):
        self.heads: dict[Any, None] = {}  # of all records, in order
        self.forms: dict[tuple[Any, ...], dict[str, str]] = {}  # what is read in records of a form: name -> role
        self.read: dict[str, Counter[str]] = {}  # role -> the heads under which it is read
        self.unread: Counter[str] = Counter()  # heads of columns with a value
        # head -> the heads that are read in its place, each with its records
        self.passed_over: dict[str, Counter[str]] = {}
        self.keys: Counter[str] = Counter()  # of messages
        self.reply_count = 0
        self.thought_count = 0
        self.continued = 0  # completions that begin with a space
        self.masked = 0  # replies that are marked as not to be learned
        self.questions = 0  # at the end of a conversation
        self.zeros = 0  # labels that may say that a reply is bad
        self.empty = 0  # messages without a text
        self.weighted = 0  # rows with a weight between 0 and 1, or above
        self.lost = 0  # messages with a character that a conversion has lost
        self.marks: Counter[str] = Counter()  # messages that spell a mark of a chat template

    def columns(self, record: Any, fields: Any, task: Conversations) -> None:
        """Count the columns of a record, and the unread keys of its messages; `fields` is the record, tidied."""
        if not isinstance(record, dict):
            self.keys += unread_keys(record)
            return
        self.heads.update(dict.fromkeys(record))
        self.zeros += label_of(record) in ("0", "0.0")
        heads = origins(record, task.columns)
        # What is read follows from which columns a record has, and of which type they are: as a rule it is as before.
        form = (*record, *map(type, fields.values()))
        if form not in self.forms:
            self.forms[form] = names_read(fields, task.roles_of(fields))
        names = self.forms[form]
        for name, role in names.items():
            self.read.setdefault(role, Counter())[str(heads[name]).strip()] += 1
            value = fields[name]
            if role in ("messages", "question", "answer", "chosen", "rejected"):
                self.keys += unread_keys(as_messages(value_of(role, value), ""))
            if name == "completion" and names.get("prompt") == "question" and str(value)[:1].isspace():
                self.continued += 1
            has_more = isinstance(value, list) and len(value) > 1 and isinstance(value[0], str)
            is_pair = role == "answer" and "chosen" in task.roles
            if role in ("answer", "chosen", "rejected") and has_more and not is_pair:
                self.unread[f"{heads[name]}[1:]"] += 1
            own = systems_in(_listed(fields) or []) if role == "system" and value else []
            if own and value not in own:
                self.unread[str(heads[name])] += 1
        read = {heads[name] for name in names}
        for head, value in record.items():
            # NaN is not equal to itself.
            is_empty = value is None or value == "" or value != value or is_off(head, value)
            is_weight = is_mark(head) and head not in LABELS and not is_empty
            self.weighted += is_weight and weight_of(value) not in (0, 1)
            if head not in read and not is_empty:
                self.unread[str(head)] += 1
                role = ROLES.get(known_name(head))
                chosen = [str(heads[name]).strip() for name, its_role in names.items() if its_role == role]
                if chosen:
                    self.passed_over.setdefault(str(head), Counter())[" and ".join(chosen)] += 1

    def messages(self, messages: Sequence[Message]) -> None:
        """Count what is remarkable in the messages of a conversation."""
        for message in messages:
            text = text_of(message["content"])
            self.lost += LOST.search(text) is not None
            self.marks.update(set(spelled_marks(text)))
        replies = [message for message in messages if message["role"] == "assistant"]
        self.reply_count += len(replies)
        self.thought_count += thoughts_in(replies)
        self.masked += sum(message.get("train") is False for message in replies)
        for message in messages:
            is_empty = text_of(message["content"]).strip() == "" and not message.get("tool_calls")
            self.empty += is_empty and message["role"] != "tool"

    def report(self, path: str, task: Conversations) -> None:
        """Print what is read, and warn of what would be easy to miss."""
        roles = []
        for role, heads in self.read.items():
            names = " and ".join(heads)
            roles.append(role if names == role else f"{role} from {names}")
        read = {head for heads in self.read.values() for head in heads}
        unread = list(dict.fromkeys([*self.unread, *(head for head in sorted(task.heads) if head.strip() not in read)]))
        # A column that is read in some rows may still be none of the columns of others.
        counted = [f"{head} (in {self.unread[head]:,})" if head.strip() in read else head for head in unread]
        rest = f"; {task.rest} {', '.join(counted)}" if unread else ""
        if roles:
            print0(f"{path} reads {', '.join(roles)}{rest}")
        doubts: list[str] = []
        for head in unread:
            role = ROLES.get(known_name(head), "")
            instead: Iterable[str] = self.passed_over.get(head, ())
            if not instead and head not in self.heads:  # of a .parquet only one of the columns with one name is read
                instead = self.read.get(role, ())
            if instead and role not in task.columns:
                count = self.passed_over[head].total() if head.strip() in read else 0
                where = f"in {count:,} row{'' if count == 1 else 's'} " if count else ""
                problem = f"{where}the {role} is {' or '.join(instead)}, so {head} is not read"
                doubts.append(f"{problem}: --columns {role}={head} reads it")
            if head.lower() in MEDIA:
                doubts.append(f"the column {head} is not read, because models here read only text")
        if self.keys:
            keys = ", ".join(f"{key} (in {count:,})" for key, count in self.keys.most_common(20))
            doubts.append(f"nothing reads these keys of its messages: {keys}")
        if self.thought_count:
            kept = "kept (--thoughts drop leaves them out)" if task.thoughts == "keep" else "left out (--thoughts drop)"
            print0(f"{path}: {self.thought_count:,} of {self.reply_count:,} replies have a thought, which is {kept}")
        if self.empty:
            problem = f"{self.empty:,} messages are empty or only white space"
            doubts.append(f"{problem}: nothing is learned from an empty reply")
        if self.continued:
            rows = f"in {self.continued:,} rows the completion begins with white space"
            rest = "mid_train --data learns texts as they are, without roles"
            doubts.append(f"{rows}, as where TRL continues a plain text: it is learned as a reply; {rest}")
        if self.zeros:
            problem = f"{self.zeros:,} rows have the label 0, and their replies are learned"
            doubts.append(f"{problem}: leave them out of the file if it means a bad reply")
        if self.questions:
            doubts.append(f"the last message of {self.questions:,} chats is a question: it is dropped")
        if self.weighted:
            doubts.append(f"{self.weighted:,} rows have a weight other than 0 and 1: they are learned like the others")
        if self.lost:
            what = "a character that a conversion has lost (U+FFFD, NUL, half of a surrogate pair)"
            doubts.append(f"{self.lost:,} messages have {what}, which is learned: write the file again from its source")
        if self.marks:
            marks = ", ".join(f"{mark} (in {count:,})" for mark, count in self.marks.most_common(8))
            hint = "; a column of chats with a template's marks is named by --columns rendered=COLUMN"
            doubts.append(f"its messages spell {marks}, learned as letters{hint * ('rendered' in task.roles)}")
        for problem in doubts:
            doubt(f"--tasks {path}: {problem}", task.strict_data)
        if task.unlearned:
            print0(f"{path}: {task.unlearned:,} rows are left out: all their replies are empty or marked")
        if self.masked:
            counts = f"{self.masked:,} of {self.reply_count:,} replies"
            print0(f"{path}: {counts} are read and not learned: marked so, or before the one that is")


def absent_columns(heads: Iterable[Any], columns: Mapping[str, str]) -> list[str]:
    """The columns of --columns that are not among these."""
    found = origins(heads, columns)
    return [column for role, column in columns.items() if NAMES[role][0] not in found]


def names_read(fields: Mapping[str, Any], roles: Iterable[str]) -> dict[str, str]:
    """The names of a tidied record that are read, with the role of each."""
    found = {name: role for role in roles if (name := first_name(fields, role)) is not None}
    if found.get("input") == "input" and "question" not in found.values():
        found["input"] = "question"
    if "answer" in found.values() and _is_blossom(fields):
        found["answer"] = "answer"
    return found


def _is_off(fields: Mapping[str, Any]) -> bool:
    """Whether a column says that the row is not learned."""
    return any(is_off(head, value) for head, value in fields.items())


def is_learned_reply(message: Message) -> bool:
    is_empty = not text_of(message["content"]).strip() and not message.get("tool_calls")
    return message["role"] == "assistant" and message.get("train", True) and not is_empty


def rendered_chat(record: Any) -> str:
    """The text of a record that a chat template wrote. Raises ValueError: when it is not a text."""
    text = first_of(record, "rendered") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise UnknownForm("; its column of --columns rendered=COLUMN is not a text")
    return text


def refuse_labels(fields: Any) -> None:
    """Raises LabelledReply: for a record with a label that is true or false."""
    label = label_of(fields)
    if label in ("true", "false"):
        raise LabelledReply(
            f"its reply has a label ({label}), as for KTO, which chat_dpo does not have: keep the good replies, "
            "without the label, or make pairs of chosen and rejected"
        )


def refuse_whole_columns(fields: Mapping[str, Any]) -> None:
    """Raises ValueError: for a file that is one object of columns, and for a row whose messages are null."""
    question = first_of(fields, "question")
    are_texts = isinstance(question, list) and any(isinstance(one, str) for one in question)
    if are_texts or (isinstance(question, dict) and "0" in question):  # {"0": ..., "1": ...} is by pandas
        raise ValueError(
            'it holds whole columns: write one row a line (in pandas to_json(FILE, orient="records", lines=True))'
        )
    if has(fields, "messages") and question is None and "input" not in fields:
        raise ValueError("its messages are null")


def refuse_media(fields: Any) -> None:
    """Raises ValueError: for a record with an image, sound or video."""
    for name in MEDIA:
        if isinstance(fields, dict) and fields.get(name):
            raise ValueError(f'it has "{name}": models here read only text')


def messages_of(record: Any) -> list[Message]:
    """The messages of a record in any of the forms above, checked; the last one is the assistant's.

    Raises ValueError: with the problem.
    """
    return answered(conversation_of(tidied(record, {})))


def answered(messages: list[Message]) -> list[Message]:
    """A conversation without an unanswered last question. Raises ValueError: when nothing is left of it."""
    replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise ValueError("the assistant has no message")
    return messages[: replies[-1] + 1]


def conversation_of(record: Any) -> list[Message]:
    """All messages of a tidied record in any of the forms above, checked. Raises ValueError: with the problem."""
    fields = record if isinstance(record, dict) else {}
    messages = _listed(record)
    items = record if isinstance(record, list) else []
    if items and all(isinstance(item, dict) and Conversations.is_known(tidied(item, {})) for item in items):
        raise UnknownForm("; it is a list of rows: such a file has a name that ends in .json")
    if messages is None:
        if not Conversations.is_known(fields):
            hint = "; pairs of replies are for chat_dpo" if has(fields, "chosen", "rejected") else ""
            if "text" in fields:
                hint = "; texts are for mid_train --data, and chats with a template's marks for --columns rendered=text"
            raise UnknownForm(f"; known forms: {KNOWN}{hint}; {ADVICE}")
        refuse_whole_columns(fields)
        question = question_of(fields)
        last = plain(question[-1]) if question else None
        if isinstance(last, dict) and last.get("role") == "assistant" and not last.get("tool_calls"):
            raise ValueError("its question ends with words of the assistant: move them to the answer")
        messages = question + answer_of(fields)
    messages = checked(with_system(fields, messages))
    if _is_off(fields):
        messages = [{**one, "train": False} if one["role"] == "assistant" else one for one in messages]
    return messages


def checked(messages: Any) -> list[Message]:
    """Messages of a record as this project has them. Raises ValueError: with the problem."""
    messages = plain_messages(messages)
    if len(messages) == 1 and is_reply(messages):
        raise ValueError("it has only words of the assistant: texts to pretrain on are for mid_train --data")
    check_messages(messages)
    return messages


def is_reply(messages: Sequence[Any]) -> bool:
    """Whether messages are only a reply, and not a whole conversation."""
    return bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") == "assistant"


def _listed(record: Any) -> list[Any] | None:
    """The list of messages of a record, which may be JSON in a text; None where it has none."""
    if isinstance(record, list):
        return record
    value = first_of(record, "messages") if isinstance(record, dict) else None
    return value if isinstance(value, list) else None


def question_of(fields: Mapping[str, Any]) -> list[Any]:
    """The messages before the reply, for a record with a separate column for the question."""
    question = first_of(fields, "question")
    more = first_of(fields, "input")
    if question is None:
        question = value_of("question", fields.get("input"))
    elif isinstance(question, str) and more not in (None, "", [], {}):
        if not isinstance(more, str):
            raise ValueError(f'its "{first_name(fields, "input")}" is not a text: write it as one, or leave it out')
        question = f"{question}\n{more}" if question else more  # one line end, as in ms-swift and LLaMA-Factory
    # Replies in a prompt are context, as in TRL: only the completion is learned.
    return (first_of(fields, "history") or []) + given(as_messages(question, "user"))


def answer_of(fields: Mapping[str, Any]) -> list[Any]:
    """The reply of a record with a separate column for it."""
    answer = first_of(fields, "answer")
    if _is_blossom(fields):
        answer = f"{fields['output']}\n\nAnswer: {fields['answer']}"  # as ms-swift writes it
    messages = as_messages(answer, "assistant")
    thought = first_of(fields, "thought")  # "thinking" may also say only whether there is one
    return with_thought(messages, thought) if isinstance(thought, str) and thought else messages


def _is_blossom(fields: Mapping[str, Any]) -> bool:
    """Whether a record has a worked solution as "output" and its result as "answer", as blossom-math has."""
    is_alone = first_of(fields, "question") is None and fields.get("response") is None
    return is_alone and all(fields.get(name) for name in ("input", "output", "answer"))


def with_system(fields: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """The messages, after the record's system message if it has one and they have none, as in ms-swift."""
    system = first_of(fields, "system")
    if not system or systems_in(messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def as_messages(value: Any, role: str) -> list[Any]:
    """A text, a message or a list of messages as messages, still unchecked."""
    if isinstance(value, list):
        return value
    return [value if isinstance(value, dict) else {"role": role, "content": value}]


def contents(record: Any) -> str:
    """The fields of a record, for messages."""
    if isinstance(record, dict):
        return f"with {', '.join(map(str, record))[:400] or 'nothing'}"
    return f"but {type(record).__name__}"


def tools_of(record: Any) -> list[dict[str, Any]] | None:
    """The functions that a record offers. Raises ValueError: when it has something else under that name."""
    fields = record if isinstance(record, dict) else {}
    outer = fields.get("input")  # OpenAI's preferences
    tools = first_of(outer if isinstance(outer, dict) and not fields.get("tools") else fields, "tools")
    if not tools:
        return None
    found = []
    for tool in tools if isinstance(tools, list) else [tools]:
        if isinstance(tool, str) and tool.startswith("{"):  # ms-swift's data may have each of them as a text
            tool = parsed(tool, "tools")
        if not isinstance(tools, list) or not isinstance(tool, dict):
            raise ValueError('its "tools" are not a list of objects')
        # LLaMA-Factory's data have only the function. Templates, and the servers of models, have it in OpenAI's form.
        is_bare = isinstance(tool.get("name"), str) and "function" not in tool
        found.append(without_nulls({"type": "function", "function": tool} if is_bare else tool))
    return found
