"""P11. Published figures are today's.

The README's table has the figures of docs/measurements.md, in both languages. Every figure names a machine that the
page describes, and a commit that it names is in the history. The map of the code counts today's files. What `bench`
writes carries its commit, flags and machine (test_bench.py).

Not covered yet: the figures are in tables, not in records with a command and an interval each, so a change of the
recipe is not noticed. The one exception is the CPU profile of the speedrun: its time is written next to its flags.
"""

import re
import subprocess

import pytest
from runs import ROOT
from test_house import STORY
from test_house import lines as count_lines

ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
MEASURED = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
MACHINES = {*re.findall(r"\*\*(\w+)\*\*", MEASURED.partition("\n## ")[0]), "H200"}
PERCENTAGE = r"\d+(?:\.\d+)?%"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_both_languages_publish_the_same_sample_and_percentages():
    for pattern in (r"```\n> .*?```", PERCENTAGE):
        english, chinese = (re.findall(pattern, text, re.DOTALL) for text in (ENGLISH, CHINESE))
        assert english == chinese and english


def test_the_table_of_the_readme_is_measured():
    """The figures after SFT and after RL equal the table in measurements, in the same order."""
    (header,) = re.findall(r"^\| \| after SFT \| after RL \|$", MEASURED, re.MULTILINE)
    measured = cells(MEASURED.partition(header)[2].splitlines()[2])
    table = ENGLISH.partition("| right, of held-out questions")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 9
    for column in (1, 2):
        shown = [figure for row in table for figure in re.split("; ?", cells(row)[column])]
        assert shown == re.split("; ?", measured[column])


def test_every_figure_names_its_machine():
    sections = [section for section in MEASURED.split("\n## ")[1:] if "| where, when |" in section]
    assert len(sections) >= 3
    for section in sections:
        table = section.partition("| what | figure | where, when |")[2].partition("\n\n")[0]
        for line in table.splitlines()[2:]:
            *_, where = cells(line)
            assert set(re.findall(r"\b[A-Z][A-Za-z]*\d*\b", where)) & MACHINES, line
            for year in re.findall(r"\d{4}-\d\d-\d\d", where):
                assert year >= "2026"


def test_a_commit_that_is_named_is_in_the_history():
    named = re.findall(r"commit ([0-9a-f]{7,})", MEASURED)
    assert named
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("not a checkout with its history")
    for commit in named:
        known = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True)
        assert known.returncode == 0, commit


def test_the_time_of_the_speedrun_is_the_same_everywhere():
    """In the profile whose flags decide it, and in the table."""
    (profile,) = re.findall(r"^  cpu\) # (\d+ min \d\d s) .* \((\S+)\)$", (ROOT / "speedrun_npu.sh").read_text(), re.M)
    seconds, date = profile
    assert re.search(rf"\| {seconds} \| AMX, {date} \|", MEASURED)
    minutes = round(int(seconds.split()[0]) + int(seconds.split()[2]) / 60)
    assert f"{minutes} with AMX" in ENGLISH


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
