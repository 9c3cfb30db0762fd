"""One torch thread and one seed for every test, and no test writes where the user's runs live; pages in Chromium."""

import gc
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from whole_files import longest_first, pytest_xdist_make_scheduler  # noqa: F401 (the second is a hook)

from nanochat.gpt import GPTConfig
from nanochat.ground import host
from nanochat.ground.paths import checkpoint_dir
from nanochat.tokenizer import Tokenizer


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A soak runs where `-m` names it, and nowhere else: `-m "not slow"` does not. The longest files come first."""
    longest_first(items)
    if "soak" not in config.option.markexpr:
        soaks = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=soaks)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


def pytest_collection_finish() -> None:
    """The garbage collector skips what the imports have left, to the end: a run freezes more and would thaw it all."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


@pytest.fixture(scope="session", autouse=True)
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs, checkpoints and downloads of all tests go to a temporary folder."""
    patch = pytest.MonkeyPatch()
    patch.setenv("NANOCHAT_BASE_DIR", os.fspath(tmp_path_factory.mktemp("base")))
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def saved_without_waiting_for_the_disk() -> Iterator[None]:
    """Thousands of saves need not outlive a loss of power; what is synchronized, tests of the storage count."""
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", lambda handle: None)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def fp32_unless_asked() -> Iterator[None]:
    """The CPU chooses fp32 here, as one without bf16 instructions: what a test compares is the same on all of them.
    Commands that a test starts as processes of their own choose as they do for users."""
    patch = pytest.MonkeyPatch()
    real = host.cpu_info
    patch.setattr(host, "cpu_info", lambda field: "" if field in ("flags", "Features") else real(field))
    yield
    patch.undo()


@pytest.fixture
def base_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty base folder for one test."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def folder(base_folder: Path) -> Path:
    """Where a run saves its checkpoints."""
    return checkpoint_dir("base", "tiny")


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C as at a terminal: a shell's background job ignores it, and so would what the tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def can_be_ended() -> Iterator[None]:
    """SIGTERM as at the start. A run that leaves by a signal ignores it from then on, and a package may have its own
    handler; what later tests fork or start would inherit either."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


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


@pytest.fixture(scope="session")
def family_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers of other model families, in folders of Hugging Face's form."""
    from tiny_families import FAMILIES, save_family  # here, because few tests need the tokenizers library

    root = tmp_path_factory.mktemp("families")
    return {family: save_family(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def family_tokenizers(family_folders: dict[str, Path]) -> dict[str, Any]:
    return {family: Tokenizer.load(folder) for family, folder in family_folders.items()}


# ---------------------------------------------------------------------- pages in a browser

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
NO_BROWSER = "THE PAGES ARE NOT TESTED: `apt install chromium` and `pip install playwright` (extra dev) are needed"
NO_AXE = "WHETHER ALL CAN USE THE PAGES IS NOT TESTED: `pip install axe-playwright-python` (extra dev) is needed"

# axe-core's rules of WCAG 2.0 to 2.2, levels A and AA, and its best practices, such as the order of headings. Only
# short lines leave the browser: the whole result of a run takes seconds to hand over.
AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
AXE_RUN = """async (tags) => {
    const { violations } = await axe.run({ runOnly: tags, preload: false, resultTypes: ["violations"] });
    return violations.flatMap(({ id, help, nodes }) => nodes.map(({ html }) => `${id} (${help}): ${html}`));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium, or CHROMIUM=path, driven by playwright. One for a module: playwright keeps an event loop
    running, and other modules start their own."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip(NO_BROWSER)
    if CHROMIUM is None:
        pytest.skip(NO_BROWSER)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a server's page (None: an empty one) in a fresh profile; at the end no script may have failed or been
    refused."""
    contexts, problems = [], []

    def opened(server: Any, path: str = "", width: int = 1200, height: int = 800, **options: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, **{"locale": "en-GB", "color_scheme": "light", **options}
        )
        context.set_default_timeout(30_000)  # a page on a busy machine
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append("dialog " + dialog.message), dialog.dismiss()))
        page.on("console", lambda message: problems.append(message.text) if "Security Policy" in message.text else None)
        if server is not None:
            page.goto(server.url + path)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="session")
def axe_violations() -> Callable[[Any], list[str]]:
    """A function from a page, as it is shown now, to the accessibility rules that it breaks, an element a line."""
    try:
        from axe_playwright_python.base import AXE_SCRIPT
    except ImportError:
        pytest.skip(NO_AXE)

    def violations(page: Any) -> list[str]:
        if not page.evaluate("'axe' in window"):
            page.evaluate(AXE_SCRIPT)
        return page.evaluate(AXE_RUN, AXE_TAGS)

    return violations
