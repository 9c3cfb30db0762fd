"""The child process in which an unknown chat template renders for the first time (chat_template.try_out).

Its exit status says whether the template stayed within the limits. Complaints of the template, such as "roles must
alternate", are harmless here: the parent meets them at the first rendering that matters.
"""

import json
import resource
import signal
import sys
from typing import Any

from nanochat.families.chat_template import ChatTemplate, TemplateError, TooMuchWork

CPU_SECONDS = 1.0  # the slowest template that is in use takes 0.1
MEMORY_BYTES = 400 << 20  # address space, including 150 MB of the interpreter

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
QUESTION = {"role": "user", "content": "2+3?"}
REPLY = {"role": "assistant", "content": "<think>\nA sum.\n</think>\n\n5."}
FUNCTION = {"name": "weather", "description": "The weather of a city", "parameters": {"type": "object"}}
CALL = {"id": "000000000", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
# Conversations of every kind that the rest of the code renders.
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [QUESTION],
    [{"role": "system", "content": "Be brief."}, QUESTION, REPLY, QUESTION],
    [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "tool_call_id": "000000000", "content": '{"sun": true}'},
        REPLY,
    ],
    [{"role": "user", "content": "A long text. " * 2000}, REPLY] * 10,
]


def main() -> None:
    sources = json.load(sys.stdin)
    # The timer counts time of computing, so a busy machine refuses nothing. Its signal ends the process, also in the
    # middle of an operation in C, such as 9**9**9.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        template = ChatTemplate(sources, NAMES, NAMES.values())
    except TemplateError as error:
        sys.exit(is_runaway(error))
    except ModuleNotFoundError:  # the parent says which package is missing
        return
    for messages in CONVERSATIONS:
        for tools in (None, [{"type": "function", "function": FUNCTION}]):
            for is_prompt in (True, False):
                try:
                    template.render(messages, tools, add_generation_prompt=is_prompt)
                except TemplateError as error:
                    if is_runaway(error):
                        sys.exit(1)


def is_runaway(error: TemplateError) -> bool:
    """Whether a limit ended the template, and not a complaint."""
    return isinstance(error.__cause__, MemoryError | TooMuchWork)


if __name__ == "__main__":
    main()
