"""Write the report of a run: report.html, a page with plots, and report.md, the same as text.

python -m scripts.report --model_tag cpu

python -m scripts.report --model_tag new --against cpu

python -m scripts.report --watch
"""

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.cli import UserError, run
from nanochat.log import print0
from nanochat.paths import base_dir, safe_tag

WATCH_SECONDS = 20  # drawing takes a second or two of one core, which the run needs


@dataclass(frozen=True)
class Config:
    model_tag: str | None = None  # default: the tag written last
    against: str | None = None  # the tag of an earlier run to compare with: its curves, and a table of differences
    watch: bool = False  # while a run trains, until Ctrl-C: write the page again and again; the browser reloads it


def main(config: Config) -> None:
    if not config.watch:
        write(*collect(config))
        return

    # ------------------------------------------------------------------ a page that follows the run
    # Only a run that has not begun is waited for. An impossible tag or a missing run to compare with is an error.
    if config.model_tag:
        safe_tag(config.model_tag)
    collect_earlier(config)
    print0(f"watching, every {WATCH_SECONDS} s; Ctrl-C ends it and writes the last report")
    latest = None
    announced = ""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the last page must not reload
    try:
        while True:
            try:
                found = collect(config)
            except UserError as error:  # the run may begin later
                news = f"waiting: {error}"
            else:
                news = f"open {folder_of(found[0].tag) / 'report.html'}"
                if found != latest:
                    write(*found, refresh=WATCH_SECONDS)
                    latest = found
            if news != announced:
                print0(news)
                announced = news
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        write(*collect(config))
    finally:
        signal.signal(signal.SIGTERM, before)


def collect(config: Config) -> tuple[Any, Any]:
    """The run as it is now, and the run to compare it with, if any.

    Raises UserError: when there is no such run.
    """
    from nanochat.report import summary  # here: --help stays quick

    run_now = summary.collect(safe_tag(config.model_tag or summary.newest_tag()))
    return run_now, collect_earlier(config)


def collect_earlier(config: Config) -> Any:
    """The run to compare with; None without --against. Raises UserError: when there is no such run."""
    from nanochat.report import summary

    return summary.collect(safe_tag(config.against, "--against"), "--against") if config.against else None


def folder_of(tag: str) -> Path:
    return base_dir() / "runs" / "report" / tag


def write(collected: Any, against: Any, refresh: int = 0) -> None:
    """Write both files; with `refresh` the browser loads the page again after this many seconds."""
    from nanochat.report import page

    folder = folder_of(collected.tag)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("report.html", page.to_html(collected, against, refresh)),
        ("report.md", page.to_markdown(collected, against)),
    ):
        replace(folder / name, text)
        if not refresh:
            print0(folder / name)


def replace(path: Path, text: str) -> None:
    """Write a file at once: a browser that loads it meanwhile finds the old page or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


if __name__ == "__main__":
    run(main, Config)
