"""Write the report of a run: report.html, a page with plots, and report.md, the same as text.

python -m scripts.report --model_tag cpu

python -m scripts.report --model_tag new --against cpu
"""

from dataclasses import dataclass

from nanochat.cli import run
from nanochat.log import print0
from nanochat.paths import base_dir, safe_tag


@dataclass(frozen=True)
class Config:
    model_tag: str | None = None  # default: the tag written last
    against: str | None = None  # the tag of an earlier run to compare with: its curves, and a table of differences


def main(config: Config) -> None:
    from nanochat.report import page, summary  # here: --help stays quick

    tag = safe_tag(config.model_tag or summary.newest_tag())
    collected = summary.collect(tag)
    against = summary.collect(config.against, "--against") if config.against else None
    folder = base_dir() / "runs" / "report" / tag
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in (("report.html", page.to_html), ("report.md", page.to_markdown)):
        (folder / name).write_text(write(collected, against), encoding="utf-8")
        print0(folder / name)


if __name__ == "__main__":
    run(main, Config)
