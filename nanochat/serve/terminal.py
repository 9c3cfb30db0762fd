"""The terminal of a chat: a line editor, and text that wraps between words."""

import shutil
import sys
from typing import Any

from nanochat.ground.log import warn
from nanochat.ground.paths import base_dir


def notice(text: str) -> Any:
    """Show a text on the terminal while the block runs."""
    from rich.console import Console

    return Console(stderr=True).status(text)


def line_editor(commands: list[str]) -> Any:
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
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,  # the other styles reserve lines for a menu
        style=Style.from_dict({"": "ansicyan"}),  # colours the user's text; the model's text has the terminal's colour
    )


class WordWrap:
    """Writes to a terminal and breaks lines between words: a word is held back until it is complete."""

    def __init__(self) -> None:
        from prompt_toolkit.utils import get_cwidth

        self.width_of = get_cwidth  # columns: 2 for a Chinese character, 0 for a combining accent
        self.column = 0  # where the next character goes
        self.word = ""  # the word held back, with its colour codes
        self.word_width = 0

    def write(self, text: str, before: str = "", after: str = "") -> None:
        """Write a text of any length; `before` and `after` switch its colour on and off."""
        columns = shutil.get_terminal_size().columns
        for character in text:
            coloured = f"{before}{character}{after}"
            if character in " \t\n":
                self.end_word(columns)
                if character == "\n":
                    self.column = 0
                else:
                    self.column += 1 if character == " " else 8 - self.column % 8
                if self.column <= columns:  # a space that does not fit is skipped
                    sys.stdout.write(coloured)
                continue
            width = self.width_of(character)
            self.word = f"{self.word}{coloured}".replace(f"{after}{before}", "")  # off and on again cancel out
            self.word_width += width
            # Chinese has no spaces: a line may end after any of its characters. A word that fills a line is broken.
            if width == 2 or self.word_width >= columns:
                self.end_word(columns)
        sys.stdout.flush()

    def end_word(self, columns: int) -> None:
        """Write the word that was held back, on the next line if it does not fit on this one."""
        if self.column > 0 and self.column + self.word_width > columns:
            sys.stdout.write("\n")
            self.column = 0
        sys.stdout.write(self.word)
        self.column += self.word_width
        self.word = ""
        self.word_width = 0
