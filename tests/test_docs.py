"""The documents and Dockerfile.npu name what exists: links, files, values, errors; in both languages.

Their commands and flags are in promises/test_p04_documented_commands_run.py, their figures in
promises/test_p11_published_figures.py.
"""

import re
import shlex

import pytest
from on_device import report
from runs import ROOT

import check_npu
from nanochat import device as devices
from nanochat.ground.paths import SCRIPTS
from nanochat.kernels import accelerators
from nanochat.report.summary import label_of

PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("ascend.md", "ascend.zh.md")}
ENGLISH = PAGES["ascend.md"]
DOCKERFILE = (ROOT / "Dockerfile.npu").read_text(encoding="utf-8")
DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
PYPROJECT = (ROOT / "pyproject.toml").read_text()
TIMEOUT = f"{devices.PROCESS_GROUP_TIMEOUT.total_seconds():.0f}"
each_page = pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)


def spans(text: str) -> list[str]:
    """What is between single backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]


def test_links_lead_somewhere_and_files_exist():
    for name in DOCUMENTS:
        text = re.sub(r"```python\n# .*?```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert ((ROOT / name).parent / target).exists(), f"{name}: {target}"
        if name.startswith("docs/"):
            named = re.findall(r"(?<![\w./<>~-])(?:nanochat|tests|scripts)/[\w/]+\.(?:py|sh|md|jsonl|txt)\b", text)
            assert not [file for file in named if not (ROOT / file).exists()], name
    code = "".join(path.read_text("utf-8") for room in ("nanochat", "scripts") for path in (ROOT / room).rglob("*.py"))
    assert set(re.findall(r"\bdocs/\w+\.md", code)) <= set(DOCUMENTS)


def test_both_languages_have_the_same_headings_commands_and_flags():
    chinese_names = [name for name in DOCUMENTS if name.endswith(".zh.md")]
    assert len(chinese_names) == 6
    for name in chinese_names:
        texts = [(ROOT / one).read_text(encoding="utf-8") for one in (name, name.replace(".zh", ""))]
        texts = [re.sub(r"[ \t]+# .*", "", text) for text in texts]  # comments behind commands
        for pattern in (r"(?m)^#+ ", r"(?s)```\w+\n.*?```"):
            chinese, english = (re.findall(pattern, text) for text in texts)
            assert chinese == english, name
        chinese, english = (set(re.findall(r"(?<![\w-])--\w+", text)) for text in texts)
        assert chinese == english, name


# ---------------------------------------------------------------------- values of docs/ascend.md, in both languages


@each_page
def test_the_tables_of_variables_and_of_the_full_report_are_those_of_the_code(text: str):
    table = {row[0].strip("`"): row[1] for row in rows(text) if len(row) == 4}
    assert {name: value for name, value in table.items() if name.isupper()} == accelerators.NPU_ENVIRONMENT
    assert f"{TIMEOUT} s" in text
    section = next(part for part in text.split("\n## ") if "check_npu.py --full " in part.partition("```\n")[0])
    assert re.search(rf"\b{sum(report.PARTS.values()) / 60:g} (minutes|分钟)", section)
    assert [spans(row[0]) for row in rows(section)[2:]] == [starts for starts, _ in report.doubts()]


@each_page
def test_the_versions_are_those_of_check_npu(text: str):
    (required,) = re.findall(r"`(torch>=[\d.]+,<[\d.]+)`", text)
    named = re.findall(r"--cann (\S+?)`", text)
    assert f'"{required}"' in PYPROJECT and named and set(named) <= set(check_npu.RELEASES)
    table = {row[0]: row[1:] for row in rows(text) if len(row) == 3 and re.fullmatch(r"\d\.\d", row[0])}
    oldest = check_npu.version_key(check_npu.minimum_torch())
    taken = [name for name, pairs in check_npu.RELEASES.items() if check_npu.version_key(pairs[0][0]) >= oldest]
    assert set(table) == {release[:3] for release in taken}
    for release in taken:
        numpy, drivers = table[release[:3]]
        assert ("2 *(D)*" in numpy and "1.19.2" not in numpy) == bool(check_npu.numpy_for(release))
        oldest_driver = check_npu.OLDEST_DRIVERS.get(release)
        assert re.findall(r"\d\d\.\d", drivers)[:1] == ([oldest_driver] if oldest_driver else [])


@each_page
def test_quoted_errors_are_ours(text: str):
    """The parts of every quoted `error: ...` line are in our sources."""
    files = [*ROOT.glob("nanochat/**/*.py"), ROOT / "check_npu.py"]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts over two lines
    source = re.sub(r"\{[^{}]*\}", "...", source)
    quoted = [span.removeprefix("error: ") for span in spans(text) if re.match(r"error: (?!\.\.\.$)", span)]
    assert len(quoted) >= 5
    for quote in quoted:
        assert all(part.strip() in source for part in re.split(r"\.\.\.|\d+| npu:", quote)), quote


# ---------------------------------------------------------------------- the container


def test_the_container_gets_what_check_npu_asks_for():
    (run,) = re.findall(r"^docker run ((?:.*\\\n)*.*)$", ENGLISH, re.MULTILINE)
    words = shlex.split(run.replace("\\\n", " "))
    flags = shlex.split(check_npu.GET_DRIVER.partition("start the container with ")[2])
    devices_of_npus = {f"--device=/dev/davinci{number}" for number in range(8)}
    assert flags and {*flags, *devices_of_npus} <= set(words)
    (image,) = re.findall(r"^docker build -f Dockerfile\.npu -t (\S+)", ENGLISH, re.MULTILINE)
    assert words[-1] == image


def test_the_image_has_what_it_copies_and_a_cann_of_the_table():
    copied = re.findall(r"^COPY --chown=nanochat (.*) \S+$", DOCKERFILE, re.MULTILINE)
    names = " ".join(copied).split()
    assert {"nanochat", "scripts", "pyproject.toml", "setup_ascend.sh", "check_npu.py"} <= set(names)
    assert all((ROOT / name).exists() for name in names)
    readme = re.search(r'^readme = "(.*)"', PYPROJECT, re.MULTILINE)
    assert readme and readme[1] in names  # pip reads it when it installs the project
    tag = re.search(
        r"^ARG CANN_IMAGE=quay\.io/ascend/cann:([\w.]+)-(910b|a3)-ubuntu22\.04-py(3\.\d+)$", DOCKERFILE, re.M
    )
    assert tag and "FROM ${CANN_IMAGE}" in DOCKERFILE
    releases = {release.lower(): pairs for release, pairs in check_npu.RELEASES.items()}
    torch, torch_npu = releases[tag[1]][0]
    assert check_npu.version_key(torch) >= check_npu.version_key(check_npu.minimum_torch())
    assert tag[3] in check_npu.pythons_for(torch_npu)


def test_the_image_is_no_root_and_finds_its_environment():
    """The steps in order: the user before the set-up, the set-up's .venv on the path."""
    steps = re.findall(r"^(USER|WORKDIR|RUN|ENV|CMD|COPY) ?(.*)$", DOCKERFILE, re.MULTILINE)
    names = [name for name, _ in steps]
    (user,) = [argument for name, argument in steps if name == "USER"]
    assert user != "root" and f"useradd --create-home --shell /bin/bash {user}" in DOCKERFILE
    (setup,) = [index for index, (name, text) in enumerate(steps) if name == "RUN" and "setup_ascend.sh" in text]
    assert names.index("USER") < names.index("COPY") < setup
    (folder,) = [argument for name, argument in steps if name == "WORKDIR"]
    assert f"ENV PATH={folder}/.venv/bin:${{PATH}}" in DOCKERFILE
    data = re.search(r"NANOCHAT_BASE_DIR=(\S+)", DOCKERFILE)
    assert data and f"RUN mkdir {data[1]}" in DOCKERFILE and f":{data[1]} " in ENGLISH


# ---------------------------------------------------------------------- other pages


def test_what_is_printed_is_explained_and_several_hosts_have_our_limits():
    words = {row[0].strip("| ") for row in rows((ROOT / "docs/faq.md").read_text(encoding="utf-8").split("\n## ")[-1])}
    shares = {label_of(name) for name in ("order_followed", "distinct_4grams")}
    assert {"ChatCORE", "CORE", "KL", "MFU", "entropy", "advantage", "context", "tag"} | shares <= words
    assert ", ".join(SCRIPTS) in words
    text = (ROOT / "docs/multinode.md").read_text(encoding="utf-8")
    assert f"| {TIMEOUT} |" in text
    for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"):
        assert f"| {accelerators.NPU_ENVIRONMENT[name]} | `{name}` |" in text
