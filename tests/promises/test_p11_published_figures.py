"""P11. Published figures are today's.

Every figure of the README, in both languages, and of docs/measurements.md is a record in docs/figures.toml, and the
pages are written from the records. A record whose recipe (flags, defaults, model, data) has changed since is found. The
map of the code counts today's files. What `bench` writes carries its commit, flags and machine (test_bench.py).

Not covered: figures in prose elsewhere, and records without a recipe, which are counted.
"""

import json
import re
import subprocess

import figures
import pytest
from runs import ROOT
from test_house import STORY
from test_house import lines as count_lines

ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
MEASURED = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
MACHINES = {*re.findall(r"\*\*(\w+)\*\*", MEASURED.partition("\n## ")[0]), "H200"}
PUBLISHED = figures.read()
HASHED = {name: run for name, run in PUBLISHED["runs"].items() if re.fullmatch("[0-9a-f]{8}", run.get("recipe", ""))}
FIELDS = ("command", "commit", "seed", "n", "interval", "machine", "date", "recipe")
MOST_WITHOUT_RECIPE = 32  # it only falls


def test_both_languages_publish_the_same_sample_and_percentages():
    for pattern in (r"```\n> .*?```", r"\d+(?:\.\d+)?%"):
        english, chinese = (re.findall(pattern, text, re.DOTALL) for text in (ENGLISH, CHINESE))
        assert english == chinese and english


def test_the_pages_are_written_from_the_records():
    for page, text in figures.pages(PUBLISHED).items():
        there = (ROOT / page).read_text(encoding="utf-8")
        differ = {*there.splitlines()} ^ {*text.splitlines()}
        assert text == there, f"{page} and docs/figures.toml differ: PYTHONPATH=. python tests/figures.py\n{differ}"


def test_every_record_is_complete():
    """A field is stated or listed as unknown, the machine is one of the page's, a commit is in the history."""
    names = {table["rows"] for table in PUBLISHED["tables"]} | {"sentences"}
    records = [record for name in names for record in figures.records(PUBLISHED, name)]
    for record in records:
        assert {*FIELDS} - record.keys() == {*record.get("unknown", ())}, record
        assert {*re.split("; | and ", record.get("machine", "NPU"))} <= MACHINES, record
        assert re.fullmatch(r"(by )?2026-\d\d-\d\d", record["date"]), record
        is_checked = record["recipe"] in {run["recipe"] for run in HASHED.values()}
        assert is_checked or re.match(r"none: \w|\S+ says ", record["recipe"]), record
        file, says, text = record["recipe"].partition(" says ")
        assert not says or text in (ROOT / file).read_text(encoding="utf-8"), f"{file} no longer says {text}: {record}"
        if "minutes" in record:
            minutes, seconds = map(int, re.findall(r"\d+", record["figure"]))
            assert record["minutes"] == str(round(minutes + seconds / 60))
    assert sum(record["recipe"].startswith("none: ") for record in records) <= MOST_WITHOUT_RECIPE
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("not a checkout with its history")
    for commit in {record["commit"] for record in records if "commit" in record}:
        known = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True)
        assert known.returncode == 0, commit


@pytest.mark.slow
@pytest.mark.parametrize("name", HASHED)
def test_no_recipe_has_changed(name: str, tmp_path):
    run = HASHED[name]
    measured = json.loads(figures.RECIPES.read_text(encoding="utf-8"))[run["recipe"]]
    assert figures.digest(measured) == run["recipe"]
    now = figures.recipe_of(run["command"], tmp_path)
    differ = sorted(one for one in measured.keys() | now.keys() if measured.get(one) != now.get(one))
    changes = [f"{one} {measured.get(one, 'absent')} -> {now.get(one, 'absent')}" for one in differ]
    assert not changes, (
        f"run {name} of docs/figures.toml was measured before: {'; '.join(changes)}. Measure again ({run['command']}), "
        f'write its figures and recipe = "today", then: PYTHONPATH=. python tests/figures.py'
    )


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_the_map_of_the_code_is_complete_and_true(text: str):
    """The reading list is the story, with the lines of each row and of all, and every folder is named."""
    (reading_list,) = re.findall(r"```\n(device\.py.*?)```", text, re.DOTALL)
    names = re.findall(r"\b\w+\.py\b", reading_list)
    assert sorted(names) == sorted(f"{name}.py" for name in STORY.split())
    lines = 0
    for row in reading_list.splitlines():
        there = sum(count_lines(f"nanochat/{name}") for name in re.findall(r"\b\w+\.py\b", row))
        (stated,) = re.findall(r"\.py +(\d+)  ", row)
        assert abs(there - int(stated)) <= there / 10, row
        lines += there
    (thousands, hundreds) = re.search(r"(\d),(\d00) (?:lines|行)", text).groups()
    assert abs(lines - int(thousands + hundreds)) <= 150, lines
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("nanochat/*/__init__.py")}
    assert folders | {"scripts", "tests"} == set(re.findall(r"`((?:nanochat/\w+)|scripts|tests)`", text))
