"""Write the report of a run: one page to look at, report.html, and the same to read, report.md.

python -m scripts.report --model_tag cpu
"""

from dataclasses import dataclass

from nanochat.shell.cli import run
from nanochat.shell.log import print0
from nanochat.shell.paths import base_dir, safe_tag


@dataclass(frozen=True)
class Config:
    model_tag: str | None = None  # default: the tag written last


def main(config: Config) -> None:
    from nanochat.report import page, summary  # here: --help stays quick

    tag = safe_tag(config.model_tag or summary.newest_tag())
    collected = summary.collect(tag)
    folder = base_dir() / "runs" / "report" / tag
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("report.html", page.to_html(collected)), ("report.md", page.to_markdown(collected))):
        (folder / name).write_text(text, encoding="utf-8")
        print0(folder / name)


if __name__ == "__main__":
    run(main, Config)
