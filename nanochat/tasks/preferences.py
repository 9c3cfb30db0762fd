"""Your preferences, or any data set of a hub: a pair of replies per row, in one of these forms.

    {"chosen": [messages], "rejected": [messages]}         whole conversations that differ in their last message
    {"prompt": ..., "chosen": ..., "rejected": ...}        the prompt a text or messages, a reply a text, a message or
                                                           [message]; "question" means "prompt" too
    {"conversations": [...], "chosen": ..., "rejected": ...}                          ShareGPT's names
    {"instruction": "...", "input": "...", "chosen": ..., "rejected": ...}            Alpaca's
    {"messages": [...], "rejected_response": "..."}                                   ms-swift's; the last one is chosen
    {"messages": [...], "rejected_messages": [...]}                                   the same with two lists
    {"input": {"messages": [...]}, "preferred_output": [...], "non_preferred_output": [...]}                OpenAI's
    {"instruction": "...", "output": ["...", "..."]}                                  LLaMA-Factory's, of 2023

Two trajectories of an agent are compared from where they part, if the chat template writes each in one rendering.

A text under "system" or "system_prompt" goes before the prompt. conversations.py describes the splits, the other names
of a field, and how an unusable row is handled.
"""

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from nanochat.conversation import Message
from nanochat.task import Example, Pair
from nanochat.tasks.columns import first_of, has, is_off, tidied
from nanochat.tasks.conversations import (
    TURNS,
    Conversations,
    UnknownForm,
    as_messages,
    checked,
    conversation_of,
    is_learned_reply,
    is_reply,
    question_of,
    refuse_labels,
    tools_of,
    with_system,
)
from nanochat.tasks.messages import plain_messages, refuse_placeholders

KNOWN = (
    '{"chosen": [...], "rejected": [...]}, {"prompt", "chosen", "rejected"}, {"conversations", "chosen", "rejected"}, '
    '{"instruction", "input", "chosen", "rejected"}, {"messages", "rejected_response"}'
)
ADVICE = "name yours: --columns question=COLUMN,chosen=COLUMN,rejected=COLUMN"


class Preferences(Conversations):
    """A question, and two replies to it. As a dialogue a pair is its chosen reply."""

    name = "preferences"
    roles = (*TURNS, "chosen", "rejected")

    def check(self, record: Any) -> None:
        # A resumed run must find the rejected replies as they were. An example holds only the chosen one.
        pair = pair_of(record)
        tools_of(record)
        rejected = [*pair.to_rejected, pair.rejected]
        self.rejected += hashlib.blake2b(repr(rejected).encode(), digest_size=8).digest()
        chosen = [*pair.to_chosen, pair.chosen]
        if chosen == rejected:
            raise ValueError("chosen and rejected are the same")
        if not is_learned_reply(pair.chosen) or not is_learned_reply(pair.rejected):
            raise ValueError("one of its replies is empty, or marked as not learned")
        replies = [*chosen, *rejected]
        refuse_placeholders([*pair.question, *replies], (*record, *self.heads))
        self.seen.messages([*pair.question, *replies])

    @staticmethod
    def is_known(names: Collection[str]) -> bool:
        return has(names, "rejected") and (has(names, "chosen") or Conversations.is_known(names))

    def roles_of(self, fields: Mapping[str, Any]) -> list[str]:
        if first_of(fields, "chosen") is None or first_of(fields, "rejected") is None:
            return super().roles_of(fields)
        roles = ["chosen", "rejected", "system", "tools"]
        if is_reply(plain_messages(as_messages(first_of(fields, "chosen"), "assistant"))):
            is_question = first_of(fields, "question") is not None or isinstance(fields.get("input"), str | dict)
            roles += ["question", "input", "history"] if is_question else ["messages"]
        return [role for role in self.roles if role in roles]

    def pair(self, index: int) -> Pair:
        return self.records.parse(int(self.numbers[index]), self._pair)

    def _pair(self, record: Any) -> Pair:
        pair = pair_of(self.tidy(record))
        *to_chosen, chosen = self.chosen_thoughts([*pair.to_chosen, pair.chosen])
        *to_rejected, rejected = self.chosen_thoughts([*pair.to_rejected, pair.rejected])
        return Pair(self.chosen_thoughts(pair.question), chosen, rejected, to_chosen, to_rejected)

    def read(self, record: Any) -> Example:
        pair = pair_of(record)
        messages = [*pair.question, *pair.to_chosen, pair.chosen]
        return Example(self.chosen_thoughts(messages), tools=tools_of(record))


def pair_of(record: Any) -> Pair:
    """The pair of a record in any of the forms above, checked. Raises ValueError: with the problem."""
    fields = tidied(record, {})
    replies = fields.get("output") if isinstance(fields, dict) and not has(fields, "rejected") else None
    if isinstance(replies, list) and len(replies) == 2:  # LLaMA-Factory's, of 2023
        fields = {**fields, "chosen": replies[0], "rejected": replies[1]}
    if not isinstance(fields, dict) or not Preferences.is_known(fields):
        refuse_labels(fields)
        raise UnknownForm(f"; known forms: {KNOWN}; {ADVICE}")
    if any(is_off(head, value) for head, value in fields.items()):
        raise ValueError("it has the weight 0: it is not learned")
    if has(fields, "chosen"):
        chosen = _conversation(fields, "chosen", first_of(fields, "chosen"))
        rejected = _conversation(fields, "rejected", first_of(fields, "rejected"))
    else:
        chosen = conversation_of(fields)
        if chosen[-1]["role"] != "assistant":
            raise ValueError("its messages do not end with the chosen reply")
        rejected = _conversation(fields, "rejected", first_of(fields, "rejected"), chosen[:-1])
    # The question is what both have in common; the turns after it may be an agent's, each on its own way.
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not chosen[shared]["role"] == rejected[shared]["role"] == "assistant":
        raise ValueError("chosen and rejected do not answer the same messages")
    return Pair(chosen[:shared], chosen[-1], rejected[-1], chosen[shared:-1], rejected[shared:-1])


def _conversation(
    record: dict[str, Any], side: str, value: Any, question: list[Message] | None = None
) -> list[Message]:
    """The whole conversation of one side. `question` is what it answers, where the record does not say it."""
    messages = plain_messages(as_messages(value, "assistant"))
    if is_reply(messages):
        messages = (_question(record, side) if question is None else question) + messages
    elif messages and question is None:
        messages = with_system(record, messages)
    try:
        messages = checked(messages)
    except ValueError as error:
        raise ValueError(f"of {side}, {error}") from error
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{side} does not end with the assistant's reply")
    return messages


def _question(record: dict[str, Any], side: str) -> list[Any]:
    turns = first_of(record, "messages")
    if isinstance(first_of(record, "question"), str | list) or isinstance(record.get("input"), str | dict):
        messages = question_of(record)
    elif isinstance(turns, list):
        messages = turns
    else:
        problem = "is only a reply, and the prompt (a text or a list of messages) is missing"
        raise ValueError(f"{side} {problem}; known forms: {KNOWN}")
    messages = plain_messages(with_system(record, messages))
    last = messages[-1] if messages else None
    if isinstance(last, dict) and last.get("role") == "assistant" and not last.get("tool_calls"):
        raise ValueError(f"its prompt ends with words of the assistant: begin {side} with them")
    return messages
