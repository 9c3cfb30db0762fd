"""docs/tour.ipynb: its cells run, and print what is stored in it.

`python tests/test_notebook.py` runs them and stores what they print.
"""

import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

PATH = Path(__file__).resolve().parent.parent / "docs" / "tour.ipynb"


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the code cells in one namespace, without a kernel, and set their outputs. Returns the namespace."""
    namespace: dict[str, Any] = {}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            text = printed.getvalue().splitlines(keepends=True)
            outputs.append({"name": "stdout", "output_type": "stream", "text": text})
        for number in plt.get_fignums():
            picture = io.BytesIO()
            plt.figure(number).savefig(picture, format="png", metadata={"Software": None})
            data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close("all")
        cell["outputs"] = outputs
        cell["execution_count"] = count
    return namespace


def read() -> dict[str, Any]:
    return json.loads(PATH.read_text(encoding="utf-8"))


def stored(notebook: dict[str, Any]) -> list[tuple[str, bool, list[str]]]:
    """The text that each code cell prints, whether it varies, and the kinds of its outputs."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            kinds = [output["output_type"] for output in cell["outputs"]]
            found.append((text, "varies" in cell["metadata"].get("tags", []), kinds))
    return found


NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?")


@pytest.mark.slow
def test_the_cells_run_and_print_what_is_stored() -> None:
    notebook = read()
    before = stored(notebook)
    names = execute(notebook)
    after = stored(notebook)
    assert len(before) >= 8
    for (text, varies, kinds), (now, _, kinds_now) in zip(before, after, strict=True):
        assert kinds == kinds_now and kinds
        if varies:  # samples: on another processor another token may be drawn
            assert len(text) > 40
            continue
        assert NUMBER.sub("0", text) == NUMBER.sub("0", now)
        for old, new in zip(NUMBER.findall(text), NUMBER.findall(now), strict=True):
            assert float(new.replace(",", "")) == pytest.approx(float(old.replace(",", "")), rel=0.1, abs=0.3)

    # What the text around them says.
    assert names["losses"][0] == pytest.approx(6.24, abs=0.05) and names["losses"][-1] < 2.6
    shuffled = "A was there cat Lily named time a upon Once."
    sentences = (names["sentence"], shuffled, "The committee approved the annual budget.")
    in_order, shuffled, other = map(names["bits_per_byte"], sentences)
    assert 2 * in_order < shuffled < other
    assert names["change"][names["advantages"] > 0].mean() > 0 > names["change"][names["advantages"] < 0].mean()
    assert names["rewards_after"].mean() > 1.2 * names["reward_before"]


def test_the_notebook_is_whole_and_from_no_machine() -> None:
    text = PATH.read_text(encoding="utf-8")
    notebook = json.loads(text)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not re.search(r"/(home|root|work|tmp|Users)/|Error|Warning", text) and len(text) < 60_000
    assert "image/png" in text
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (PATH.parent / target).exists(), target


if __name__ == "__main__":
    sys.path.insert(0, str(PATH.parent.parent))
    executed = read()
    execute(executed)
    PATH.write_text(json.dumps(executed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
