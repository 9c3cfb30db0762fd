"""Write the report of a run: report.html, a page with plots.

python -m scripts.report --model_tag cpu

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
    watch: bool = False  # while a run trains, until Ctrl-C: write the page again and again; the browser reloads it


def main(config: Config) -> None:
    if not config.watch:
        write(collect(config))
        return

    # ------------------------------------------------------------------ a page that follows the run
    # A run that has not begun is waited for. An impossible tag is an error.
    if config.model_tag:
        safe_tag(config.model_tag)
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
                news = f"open {folder_of(found.tag) / 'report.html'}"
                if found != latest:
                    write(found, refresh=WATCH_SECONDS)
                    latest = found
            if news != announced:
                print0(news)
                announced = news
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        write(collect(config))
    finally:
        signal.signal(signal.SIGTERM, before)


def collect(config: Config) -> Any:
    """The run as it is now. Raises UserError: when there is no such run."""
    from nanochat.report import summary  # here: --help stays quick

    return summary.collect(safe_tag(config.model_tag or summary.newest_tag()))


def folder_of(tag: str) -> Path:
    return base_dir() / "runs" / "report" / tag


def write(collected: Any, refresh: int = 0) -> None:
    """Write the page; with `refresh` the browser loads it again after this many seconds."""
    from nanochat.report import page

    path = folder_of(collected.tag) / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written at once: a browser that loads it meanwhile finds the old page or the new one.
    new = path.with_name(f"{path.name}.new")
    new.write_text(page.to_html(collected, refresh), encoding="utf-8")
    new.replace(path)
    if not refresh:
        print0(path)


if __name__ == "__main__":
    run(main, Config)
