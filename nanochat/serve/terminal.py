"""The terminal of a chat: a line editor, and a notice while something is loading."""

from collections.abc import Sequence
from typing import Any

from nanochat.ground.log import warn
from nanochat.ground.paths import base_dir


def notice(text: str) -> Any:
    """Show a text on the terminal while the block runs."""
    from rich.console import Console

    return Console(stderr=True).status(text)


def line_editor(commands: Sequence[str]) -> Any:
    """A prompt that edits what is typed.

    It takes a paste of several lines as one message, completes `commands` with Tab, and remembers the messages of
    earlier sessions.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.shortcuts import CompleteStyle
    from prompt_toolkit.styles import Style

    file = base_dir() / "chat_history"
    history = FileHistory(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)  # messages are private: only their author may read the file
    except OSError as error:
        warn(f"messages are not remembered after this session: {error}")
        history = InMemoryHistory()
    return PromptSession(
        history=history,
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,  # the other styles reserve lines for a menu
        style=Style.from_dict({"": "ansicyan"}),  # colours the user's text; the model's text has the terminal's colour
    )
