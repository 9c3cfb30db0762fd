"""One torch thread and one seed for every test, and no test writes where the user's runs live."""

import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import tiny
import torch

from nanochat.gpt import GPTConfig
from nanochat.tokenizer import Tokenizer


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A soak runs where `-m` names it, and nowhere else: `-m "not slow"` does not. The files with the most slow tests
    come first: two workers that take file after file then end at about the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
    if "soak" not in config.option.markexpr:
        soaks = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=soaks)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


@pytest.fixture(scope="session", autouse=True)
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs, checkpoints and downloads of all tests go to a temporary folder."""
    patch = pytest.MonkeyPatch()
    patch.setenv("NANOCHAT_BASE_DIR", os.fspath(tmp_path_factory.mktemp("base")))
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C as at a terminal: a shell's background job ignores it, and so would what the tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread_and_seed() -> None:
    """The same numbers at every run, and no second thread to wait for where cores are shared."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_is_piped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is at its end: chat_cli reads it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())


@pytest.fixture
def tiny_config() -> GPTConfig:
    return tiny.tiny_config()


@pytest.fixture
def tiny_tokenizer() -> Tokenizer:
    return tiny.tiny_tokenizer()
