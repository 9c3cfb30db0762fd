"""Write the report of a run: report.html, a page with plots.

python -m scripts.report --model_tag cpu
"""

from dataclasses import dataclass

from nanochat.ground.cli import run
from nanochat.ground.log import print0
from nanochat.ground.paths import base_dir, safe_tag


@dataclass(frozen=True)
class Config:
    model_tag: str | None = None  # default: the tag written last


def main(config: Config) -> None:
    from nanochat.report import report_page, summary  # here: --help stays quick

    tag = safe_tag(config.model_tag or summary.newest_tag())
    html = report_page.to_html(summary.collect(tag))
    path = base_dir() / "runs" / "report" / tag / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    print0(path)


if __name__ == "__main__":
    run(main, Config)
