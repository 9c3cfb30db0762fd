"""The documents and Dockerfile.npu name what exists: commands, flags, files, values, errors; in both languages.

The commands of scripts in all documents are parsed by test_readme.py.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from on_device import report

import check_npu
from nanochat import device as devices
from nanochat.ground.paths import SCRIPTS
from nanochat.kernels import accelerators
from nanochat.report.summary import further_shares

ROOT = Path(__file__).resolve().parent.parent
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("ascend.md", "ascend.zh.md")}
ENGLISH, CHINESE = PAGES.values()
DOCKERFILE = (ROOT / "Dockerfile.npu").read_text(encoding="utf-8")
each_page = pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)


def bash_lines(text: str) -> list[str]:
    """Every command line of the bash blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+", " ", re.sub(r"\s+#.*", "", line)).strip() for line in lines]


def spans(text: str) -> list[str]:
    """What stands between single backticks, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def rows(text: str) -> list[list[str]]:
    return [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]


# ---------------------------------------------------------------------- the two languages


IN_CHINESE = ["README", "docs/ascend", "docs/deploy", "docs/finetune", "docs/guide", "docs/rl"]


@pytest.mark.parametrize("page", IN_CHINESE)
def test_both_languages_have_the_same_headings_commands_and_flags(page):
    texts = [(ROOT / f"{page}{kind}.md").read_text(encoding="utf-8") for kind in ("", ".zh")]
    texts = [re.sub(r"[ \t]+# .*", "", text) for text in texts]  # comments behind commands
    levels = [re.findall(r"^#+ ", text, re.MULTILINE) for text in texts]
    assert levels[0] == levels[1]
    blocks = [re.findall(r"```\w+\n.*?```", text, re.DOTALL) for text in texts]
    assert blocks[0] == blocks[1]
    flags = [set(re.findall(r"(?<![\w-])--\w+", text)) for text in texts]
    assert flags[0] == flags[1]


def test_the_chinese_pages_are_these():
    found = [*ROOT.glob("*.zh.md"), *ROOT.glob("docs/*.zh.md")]
    assert {path.name for path in found} == {f"{Path(page).name}.zh.md" for page in IN_CHINESE}


# ---------------------------------------------------------------------- commands, flags, files, values


def help_of(*command: str) -> str:
    result = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("called", "command"),
    [
        ("python check_npu.py", (sys.executable, "check_npu.py")),
        ("bash setup_ascend.sh", ("bash", "setup_ascend.sh")),
        ("bash speedrun_npu.sh", ("bash", "speedrun_npu.sh")),
        ("python tests/simnpu/run", (sys.executable, "tests/simnpu/run")),
    ],
)
def test_flags_of_the_other_programs_exist(called, command):
    everything = [*bash_lines(ENGLISH), *spans(ENGLISH), *re.findall(r"RUN (.*)", DOCKERFILE)]
    calls = [line.removeprefix(called) for line in everything if line.startswith(called)]
    assert calls
    known = set(re.findall(r"--\w+", help_of(*command)))
    for call in calls:
        own = re.split(r" python | torchrun ", call)[0]  # what follows belongs to the command that is run
        assert set(re.findall(r"--\w+", own)) <= known, call


@pytest.mark.parametrize("script", ["tests/run.sh", "speedrun.sh", "speedrun_npu.sh", "setup_ascend.sh"])
def test_help_of_a_shell_script_does_nothing(script, tmp_path):
    """Nothing but sed is there to be run; no folder may be made."""
    (tmp_path / "sed").symlink_to(shutil.which("sed") or "/bin/sed")
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "/bin/dirname")
    bash = shutil.which("bash") or "/bin/bash"
    environment = {"PATH": str(tmp_path), "VENV": str(tmp_path / "venv")}
    result = subprocess.run([bash, script, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"bash {script}" in result.stdout or "speedrun.sh is the same script" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dirname", "sed"]


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")))
def test_files_of_the_project_exist(page):
    text = re.sub(r"```python\n# .*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    names = re.findall(r"(?<![\w./<>~-])(?:nanochat|tests|scripts)/[\w/]+\.(?:py|sh|md|jsonl|txt)\b", text)
    assert not [name for name in names if not (ROOT / name).exists()]


@each_page
def test_the_table_of_variables_is_what_device_sets(text):
    table = {row[0].strip(" `"): row[1].strip() for row in rows(text) if len(row) == 4}
    assert {name: value for name, value in table.items() if name.isupper()} == accelerators.NPU_ENVIRONMENT
    assert f"{devices.PROCESS_GROUP_TIMEOUT.total_seconds():.0f} s" in text


@each_page
def test_the_table_of_numpy_and_drivers_is_what_check_npu_asks_for(text):
    lines = [[cell.strip() for cell in row] for row in rows(text)]
    table = {row[0]: row[1:] for row in lines if len(row) == 3 and re.fullmatch(r"\d\.\d", row[0])}
    oldest = check_npu.version_key(check_npu.minimum_torch())
    releases = {
        release: release[:3]
        for release, pairs in check_npu.RELEASES.items()
        if check_npu.version_key(pairs[0][0]) >= oldest
    }
    assert set(table) == set(releases.values())
    for release, series in releases.items():
        numpy, drivers = table[series]
        assert ("2 *(D)*" in numpy and "1.19.2" not in numpy) == bool(check_npu.numpy_for(release))
        found = re.findall(r"\d\d\.\d", drivers)
        assert found[:1] == [check_npu.OLDEST_DRIVERS[release]] if release in check_npu.OLDEST_DRIVERS else not found


@each_page
def test_quoted_errors_are_ours(text):
    """The parts of every quoted `error: ...` line stand in our sources."""
    files = [*ROOT.glob("nanochat/**/*.py"), ROOT / "check_npu.py"]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts over two lines
    source = re.sub(r"\{[^{}]*\}", "...", source)
    quoted = [span.removeprefix("error: ") for span in spans(text) if span.startswith("error: ")]
    quoted = [quote for quote in quoted if quote != "..."]
    assert len(quoted) >= 5
    for quote in [*quoted, "no permission to open"]:
        for part in re.split(r"\.\.\.|\d+| npu:", quote):
            assert part.strip() in source, quote


@each_page
def test_the_torch_that_the_project_takes(text):
    (required,) = re.findall(r"`(torch>=[\d.]+,<[\d.]+)`", text)
    assert f'"{required}"' in (ROOT / "pyproject.toml").read_text()


@each_page
def test_releases_that_are_named_are_in_the_version_table(text):
    named = re.findall(r"--cann (\S+?)`", text)
    assert named and set(named) <= set(check_npu.RELEASES)


@each_page
def test_the_table_of_the_full_report_has_its_parts(text):
    section = next(part for part in text.split("\n## ") if "check_npu.py --full " in part.partition("```\n")[0])
    assert re.search(rf"\b{sum(report.PARTS.values()) / 60:g} (minutes|分钟)", section)
    assert [spans(row[0]) for row in rows(section)[2:]] == [[part] for part in report.PARTS]


# ---------------------------------------------------------------------- the container


def test_the_container_gets_what_check_npu_asks_for():
    (line,) = [line for line in bash_lines(ENGLISH) if line.startswith("docker run")]
    words = shlex.split(line)
    flags = shlex.split(check_npu.GET_DRIVER.partition("start the container with ")[2])
    assert flags and set(flags) <= set(words)
    assert [w for w in words if w.startswith("--device=/dev/davinci") and w[-1].isdigit()] == [
        f"--device=/dev/davinci{n}" for n in range(8)
    ]
    (build,) = [line for line in bash_lines(ENGLISH) if line.startswith("docker build")]
    assert "-f Dockerfile.npu" in build and build.split("-t ")[1].split()[0] == words[-1]


def test_the_image_has_what_it_copies_and_a_cann_of_the_table():
    copied = re.findall(r"^COPY --chown=nanochat (.*) \S+$", DOCKERFILE, re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert {"nanochat", "scripts", "pyproject.toml", "setup_ascend.sh", "check_npu.py"} <= set(names)
    assert all((ROOT / name).exists() for name in names)
    readme = re.search(r'^readme = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert readme and readme[1] in names  # pip reads it when it installs the project

    image = re.search(r"^ARG CANN_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert image and "FROM ${CANN_IMAGE}" in DOCKERFILE
    tag = re.fullmatch(r"quay\.io/ascend/cann:([\w.]+)-(910b|a3)-ubuntu22\.04-py(3\.\d+)", image[1])
    assert tag, image[1]
    releases = {release.lower(): pairs for release, pairs in check_npu.RELEASES.items()}
    torch, torch_npu = releases[tag[1]][0]
    assert check_npu.version_key(torch) >= check_npu.version_key(check_npu.minimum_torch())
    assert tag[3] in check_npu.pythons_for(torch_npu)


def test_the_image_is_no_root_and_finds_its_own_environment():
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


# ---------------------------------------------------------------------- several hosts


def test_the_words_that_we_print_are_explained():
    text = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    words = {row[0].strip("| ") for row in rows(text.split("\n## ")[-1])}
    shares = {label for _, label in further_shares("stories", {"order_followed": 0.5, "distinct_4grams": 0.7})}
    assert {"ChatCORE", "CORE", "KL", "MFU", "entropy", "advantage", "context", "tag"} | shares <= words
    assert ", ".join(SCRIPTS) in words


def test_what_several_hosts_are_told_is_so():
    text = (ROOT / "docs" / "multinode.md").read_text(encoding="utf-8")
    assert f"| {devices.PROCESS_GROUP_TIMEOUT.total_seconds():.0f} |" in text
    for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"):
        assert f"| {accelerators.NPU_ENVIRONMENT[name]} | `{name}` |" in text


def test_a_comment_cites_a_page_that_exists():
    cited = set()
    for folder in ("nanochat", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            cited |= set(re.findall(r"\bdocs/\w+\.md", path.read_text(encoding="utf-8")))
    assert cited and not [page for page in cited if not (ROOT / page).exists()]
