"""P7. The page is a pleasure.

The chat page in real Chromium, against a small server with scripted replies: streaming, stop, regenerate, edit, copy,
sliders, dark mode, safe Markdown, conversations kept over a reload, 360 px, keyboard, English and Chinese, no request
to another host; and a conversation with the real server. It needs Debian's chromium (or CHROMIUM=path) and `playwright`
(extra `dev`); without them all but the first tests skip and say so.
"""

import codecs
import gzip
import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from bodies import KEY
from fake_server import FakeScheduler, make_app, serving

from nanochat.demo.plots import lexicon
from nanochat.demo.stories import orders
from nanochat.ground import rooms
from nanochat.serve.page import PAGE, VENDOR, content_policy
from nanochat.tasks.conversations import Conversations
from nanochat.tasks.preferences import Preferences

pytestmark = pytest.mark.slow  # a server and a browser

ROOT = Path(__file__).resolve().parents[2]
SOURCE = PAGE.read_text(encoding="utf-8")
SCRIPT = re.findall(r"<script>(.*?)</script>", SOURCE, re.DOTALL)
STYLE = re.findall(r"<style>(.*?)</style>", SOURCE, re.DOTALL)
FILES = {f"/vendor/{file.relative_to(VENDOR).as_posix()}": file for file in VENDOR.glob("*/*")} | {"/": PAGE}
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css",
    ".woff2": "font/woff2",
}
CALL = [{"type": "python", "text": "2+3"}, {"type": "python_output", "text": "5"}]  # the reply to `sum`

RICH = """# Heading

A *soft* and **strong** line with `code`, ~~old~~ and [a link](https://example.com/a_b?c=1).
Second line, snake_case_name and 2 * 3 * 4.

- one
- two
  1. inner
  2. more

> quoted

| n | square |
|---|---|
| 2 | 4 |

```python
print("<b>not bold</b>")
```

Last \\*plain\\* line."""

# The tokens of a reply, each with its alternatives and their probabilities. One character is spread over two tokens.
ODDS: list[tuple[bytes, dict[bytes, float]]] = [
    (b"The", {b"The": 0.95, b"A": 0.03}),
    (b" dragon", {b" fox": 0.6, b" dragon": 0.3, b"<img src=x>": 0.1}),
    (b" caf\xc3", {b" caf\xc3": 0.5, b"\xc3": 0.4}),
    (b"\xa9", {b"\xa9": 0.4}),
    (b"!", {b".": 0.9, b"!": 0.0001}),
]

ECHOED: dict[str, Any] = {
    "tokens": ["The", " dragon", "bytes:\\x20\\x63\\x61\\x66\\xc3", "bytes:\\xa9", "!"],
    "token_logprobs": [None, *(math.log(one) for one in (0.3, 0.5, 0.4, 0.0001))],
    "top_logprobs": [None, {" fox": math.log(0.6), " dragon": math.log(0.3)}, {}, {}, {".": math.log(0.9)}],
}


def logprob_of(token: bytes, probability: float) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "bytes": list(token), "logprob": math.log(probability)}


class Script(ThreadingHTTPServer):
    """Its reply depends on the first word of the question; it records every request."""

    daemon_threads = True

    def __init__(self, policy: str | None = content_policy(SOURCE)):
        super().__init__(("127.0.0.1", 0), Answer)
        self.policy, self.key, self.bodies, self.left, self.errors = policy, "", [], threading.Event(), []
        self.models: list[dict[str, Any]] = [{"id": "sft-demo"}]
        self.facts: dict[str, Any] = {}  # what the last event of a reply says in its field `nanochat`
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves is no error."""


class Answer(BaseHTTPRequestHandler):
    server: Script

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def respond(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        self.respond(status, json.dumps({"error": {"message": message, "code": code}}).encode(), **headers)

    def allowed(self) -> bool:
        return not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}"

    def do_GET(self) -> None:
        file = FILES.get(self.path.split("?")[0])
        if file is not None:
            policy = {"Content_Security_Policy": self.server.policy} if self.server.policy else {}
            self.respond(200, file.read_bytes(), MEDIA_TYPES.get(file.suffix, "text/plain"), **policy)
        elif self.path == "/v1/models" and self.allowed():
            self.respond(200, json.dumps({"data": self.server.models}).encode())
        else:
            self.refuse(401 if self.path == "/v1/models" else 404, "no")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if not self.allowed():
            return self.refuse(401, "the key is missing")
        if self.server.errors:
            status, message, headers = self.server.errors.pop(0)
            return self.refuse(status, message, **headers)
        if body.get("echo"):
            return self.respond(200, json.dumps({"choices": [{"logprobs": ECHOED}]}).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.stream(body) if "messages" in body else self.continue_text("slow" in body["prompt"])
        except OSError:
            self.server.left.set()
        return None

    def raw(self, data: Any) -> None:
        data = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def event(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> None:
        self.raw({"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]})

    def continue_text(self, is_slow: bool) -> None:
        for number in range(400 if is_slow else 3):
            self.raw({"choices": [{"index": 0, "text": f" word{number}", "finish_reason": None}]})
            time.sleep(0.025)
        self.raw("[DONE]")

    def stream(self, body: dict[str, Any]) -> None:
        final = body["messages"][-1]
        question = "more" if final["role"] == "assistant" else final["content"]  # a reply to continue
        word, _, rest = question.partition(" ")
        code, output = ({"nanochat": {**part, "kind": part["type"]}} for part in CALL)
        replies: dict[str, list[dict[str, Any]]] = {
            "sum": [code, output, {"content": "2+3 = 5."}],
            "evil": [
                {"content": rest},
                *({"nanochat": {"kind": kind, "text": rest}} for kind in ("python", "python_output")),
            ],
            "more": [{"content": " and more"}],
            "break": [{"content": "half an"}],
            "fail": [{"content": "half"}],
        }
        self.event({"role": "assistant", "content": ""})
        if word == "slow":
            for number in range(400):
                self.event({"content": f"word{number} "})
                time.sleep(0.025)
        elif word == "say":  # cut anywhere, also inside a character's bytes
            pieces = (rest[place : place + 3] for place in range(0, len(rest), 3))
            events = ({"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces)
            data = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n" for event in events).encode()
            for place in range(0, len(data), 97):
                self.wfile.write(data[place : place + 97])
                self.wfile.flush()
        elif word == "odds":
            decoder = codecs.getincrementaldecoder("utf-8")()
            for token, likely in ODDS:
                others = [logprob_of(*other) for other in likely.items()]
                logprobs = {"content": [{**logprob_of(token, likely[token]), "top_logprobs": others}]}
                text = decoder.decode(token)
                self.event({"content": text} if text else {}, logprobs=logprobs if body.get("logprobs") else None)
        for delta in replies.get(word, []):
            self.event(delta)
        if word == "fail":
            self.raw({"error": {"message": "the device is gone"}})
        if word in ("break", "fail"):
            return
        if word not in ("slow", "say", "odds", *replies):
            self.event({"content": f"seed {body['seed']}: {question}"})
        self.event({"nanochat": self.server.facts} if self.server.facts else {}, "length" if word == "long" else "stop")
        self.raw({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 3}})
        self.raw("[DONE]")


# ---------------------------------------------------------------------- the file


def test_one_small_file_that_asks_no_other_host():
    # P7: ready within a second on a phone: what is sent before the first paint, and before the first Markdown.
    compressed = {
        name: len(gzip.compress(file.read_bytes())) for name, file in FILES.items() if file.suffix in MEDIA_TYPES
    }
    assert compressed["/"] < 40_000 and sum(size for name, size in compressed.items() if "temml" not in name) < 90_000
    assert len(SCRIPT) == len(STYLE) == 1
    markup = SOURCE.replace(SCRIPT[0], "").replace(STYLE[0], "")
    assert not re.findall(r"""\s(?:on[a-z]+|style)=|(?:src|action)=|href="(?!#|data:image/)""", markup)
    assert not re.findall(
        r"https?://|//[a-z]",
        re.sub(
            r"https\?:|//www\.w3\.org/2000/svg|//\[|//-+ | // .*|^// .*", "", SOURCE.replace("http:", ":"), flags=re.M
        ),
    )
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", SOURCE
    )
    assert not re.findall(r"url\(|@import|@font-face", STYLE[0])


def test_the_libraries_are_the_published_files():
    """As `sha256sum` prints them in their README, each with a licence next to it, and part of an installed package."""
    listed = dict(
        reversed(line.split()) for line in re.findall(r"^[0-9a-f]{64}  .+$", (VENDOR / "README.md").read_text(), re.M)
    )
    files = {path.relative_to(VENDOR).as_posix(): path for path in VENDOR.glob("*/*") if "LICENSE" not in path.name}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == listed
    assert all(any(path.parent.glob("LICENSE*")) for path in files.values())
    used = set(re.findall(r"[\w.-]+-\d+\.\d+\.\d+/[\w.-]+\.(?:js|css)", SOURCE))
    assert used == {name for name in files if not name.endswith(".woff2")}
    assert '"vendor/*/*"' in (ROOT / "pyproject.toml").read_text()


def test_both_languages_say_the_same_things():
    words = SCRIPT[0][SCRIPT[0].index("const WORDS") :].partition("\n};")[0]
    english, chinese = words.split("\n\tzh: {")
    keys = [re.findall(r'(\w+): (?:"|\[)', text) for text in (english, chinese)]
    assert keys[0] == keys[1] and len(keys[0]) > 60
    marks = [re.findall(r"\{\d\}", text) for text in (english, chinese)]
    assert sorted(marks[0]) == sorted(marks[1])
    used = set(re.findall(r'\bt\("(\w+)"', SCRIPT[0]) + re.findall(r'data-(?:t|label|hint)="(\w+)"', SOURCE))
    assert used <= set(keys[0])


# ---------------------------------------------------------------------- the browser


@pytest.fixture
def server() -> Iterator[Script]:
    server = Script()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(open_page: Any, server: Script) -> Any:
    return open_page(server)


def send(page: Any, text: str, wait: bool = True) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")
    if wait:
        done(page)


def done(page: Any) -> None:
    page.wait_for_selector("#stop", state="hidden")


def settings(page: Any, **values: str) -> None:
    page.click("#open-settings")
    for name, value in values.items():
        page.fill(f"#set-{name}", value)
    page.keyboard.press("Escape")


def last(page: Any) -> Any:
    return page.locator(".reply").last


def press(page: Any, act: str) -> None:
    """A button of the last reply."""
    last(page).locator(f"[data-act={act}]").click()
    done(page)


def prose(page: Any) -> str:
    """What the last reply shows."""
    return last(page).locator(".prose").inner_text()


def counted(page: Any) -> str:
    """Which of its variants the last reply is."""
    return last(page).locator(".count").inner_text()


def questions(page: Any) -> list[str]:
    return page.locator(".question .said").all_inner_texts()


def ready(page: Any) -> None:
    page.wait_for_selector("#dot[data-state=ready]")


def written(page: Any) -> None:
    """Once the text is no longer continued."""
    page.wait_for_selector("#write-stop", state="hidden")


def type_again(page: Any, text: str) -> None:
    """Edit the last reply."""
    press(page, "edit")
    last(page).locator("textarea").fill(text)


def see(page: Any, text: str) -> None:
    """Once the messages have this text."""
    page.wait_for_function("text => $('messages').innerText.includes(text)", arg=text)


def test_streams_with_a_caret_and_stops(server, page):
    send(page, "slow", wait=False)
    page.wait_for_selector(".reply[aria-busy=true] .caret")
    # a speed is shown once there is enough of a reply to measure it
    page.wait_for_function(r"() => /\d+ tokens · [\d.,]+ tokens\/s/.test(document.querySelector('.reply').innerText)")
    page.keyboard.press("Escape")
    done(page)
    assert server.left.wait(10), "the server continues to write to a reader who stopped"
    text = last(page).inner_text()
    assert "Stopped." in text and "word5" in text and not page.locator(".caret").count()
    send(page, "slow", wait=False)
    page.click("#stop")
    done(page)
    # Nothing came before the stop: the empty reply and its question are not sent along.
    send(page, "hello")
    contents = [message["content"] for message in server.bodies[-1]["messages"]]
    assert contents[0] == "slow" and contents[1].startswith("word0") and contents[-1] == "hello"
    assert page.locator(".reply .prose").first.inner_text() in text


def test_regenerate_edit_and_variants_outlive_a_reload(server, page):
    send(page, "tell one")
    send(page, "tell two")
    assert [m["content"].split(": ")[-1] for m in server.bodies[-1]["messages"]] == ["tell one", "tell one", "tell two"]
    before = prose(page)
    press(page, "again")
    assert counted(page) == "2/2" and before != prose(page)  # another seed
    assert server.bodies[-1]["messages"] == server.bodies[-2]["messages"]
    press(page, "previous")
    assert prose(page) == before
    # The first question, edited, begins a branch, from which one comes back.
    page.locator(".question").first.hover()
    page.locator(".question [data-act=edit]").first.click()
    page.locator(".editor textarea").fill("tell three")
    page.keyboard.press("Enter")
    done(page)
    assert [m["content"] for m in server.bodies[-1]["messages"]] == ["tell three"]
    page.reload()
    assert questions(page) == ["tell three"]
    page.locator(".question [data-act=previous]").click()
    assert questions(page) == ["tell one", "tell two"] and prose(page) == before and counted(page) == "1/2"
    assert "3 tokens" in last(page).inner_text()


def test_a_cut_reply_names_its_limit_and_continues(server, page):
    send(page, "hello")
    server.facts = {"limit": "context", "first_message_read": 2}
    send(page, "long")
    first = prose(page)
    assert "fill all that the model can read" in last(page).locator(".note").inner_text()
    # Above the line is what the model did not read any more; it stays there over a reload.
    page.reload()
    order = "[...$('messages').children].map((node) => node.className)"
    assert page.evaluate(order) == ["question", "reply", "horizon", "question", "reply"]
    # The same reply grows: it goes along as the last message, without another question.
    server.facts = {}
    press(page, "continue")
    assert [m["role"] for m in server.bodies[-1]["messages"]] == ["user", "assistant", "user", "assistant"]
    assert server.bodies[-1]["messages"][-1]["content"] == first and prose(page) == first + " and more"
    assert "6 tokens" in last(page).inner_text() and not last(page).locator(".count, .note").count()
    # The user's limit is named with its number, and a stopped reply continues too.
    settings(page, max_tokens="3")
    send(page, "long")
    assert "Cut at 3 tokens" in last(page).inner_text()
    send(page, "slow", wait=False)
    page.wait_for_function("() => document.querySelector('.reply:last-child .prose')?.innerText.includes('word3')")
    page.click("#stop")
    done(page)
    server.errors.append((400, "no room", {}))
    press(page, "continue")
    assert "word3" in prose(page)  # a failure takes nothing away
    last(page).locator(".failure [data-act=continue]").click()
    done(page)
    assert prose(page).endswith("and more") and not page.locator("[data-act=continue], .failure").count()


def test_a_call_is_a_card_and_its_edited_reply_a_version_to_go_on_from(server, page):
    send(page, "sum")
    assert page.locator(".call").inner_text().split() == ["Calculator", "2+3", "→", "5"]
    assert "3 tokens" in last(page).locator(".stats").inner_text()
    type_again(page, "It is *five*")
    page.keyboard.press("Escape")
    assert prose(page) == "2+3 = 5."
    type_again(page, "It is *five*")
    page.keyboard.press("Control+Enter")
    assert last(page).locator(".prose em").inner_text() == "five" and counted(page) == "2/2"
    assert "Edited by you." in last(page).inner_text() and last(page).locator(".call").count() == 1
    page.reload()
    press(page, "continue")
    assert server.bodies[-1]["messages"][-1]["content"] == [*CALL, {"type": "text", "text": "It is *five*"}]
    assert prose(page) == "It is five and more"
    send(page, "hello")
    assert server.bodies[-1]["messages"][1]["content"][-1]["text"] == "It is *five* and more"
    page.locator("[data-act=previous]").click()
    assert page.locator(".reply .prose").all_inner_texts() == ["2+3 = 5."]


def test_the_list_has_dates_and_a_search(page):
    send(page, "say The dragon sleeps.")
    page.click("#new")
    send(page, "A fox in the barn")
    page.fill("#search", "dragon SLEEPS")
    assert page.locator("#list mark").first.inner_text() == "dragon sleeps" and page.locator("#list .open").count() == 1
    page.fill("#search", "seed")  # only a reply says so
    assert page.locator("#list .open").inner_text().startswith("A fox in the barn\nseed")
    page.press("#search", "Escape")
    page.evaluate(
        """() => [...talks.values()].forEach((talk, place) => {
             talk.updated = place ? Date.now() : new Date(2024, 2, 5).getTime();
             localStorage.setItem(PREFIX + talk.id, JSON.stringify(talk));
           })"""
    )
    page.reload()
    assert page.locator("#list h2").all_inner_texts() == ["Today", "March 2024"]


def test_drafts_survive_a_reload(page):
    send(page, "hello")
    page.fill("#input", "half a thought")
    page.click("#new")
    assert page.input_value("#input") == ""
    page.fill("#input", "another one")
    page.reload()
    assert page.input_value("#input") == "another one" and page.locator("#send").is_enabled()
    page.locator("#list .open").click()
    assert page.input_value("#input") == "half a thought"
    page.press("#input", "Enter")
    done(page)
    page.reload()
    assert page.input_value("#input") == ""


def levels(tokens: Any) -> list[list[str]]:
    """The classes that colour each token."""
    return [name.split()[1:] for name in tokens.evaluate_all("all => all.map((one) => one.className)")]


def test_tokens_have_the_colours_of_their_probabilities(server, page):
    page.evaluate("change('probabilities', true)")
    send(page, "odds")
    assert (server.bodies[-1]["logprobs"], server.bodies[-1]["top_logprobs"]) == (True, 5)
    page.reload()
    tokens = page.locator(".token")
    assert tokens.all_text_contents() == ["The", " dragon", " caf", "é", "!"]
    assert levels(tokens) == [["p0"], ["p2"], ["p1"], ["p2"], ["p4"]]  # 95, 30, 50, 40 and 0.01%
    tokens.nth(1).hover()
    shown = [text.split("\n") for text in page.locator("#odds > div").all_inner_texts()]
    assert shown == [["␣fox", "60%"], ["␣dragon", "30%"], ["<img␣src=x>", "10%"]]
    # One stop for Tab; the arrow keys move on. A screen reader hears the same as the others see.
    last(page).locator("[data-act=copy]").focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.ariaLabel") == "! <0.1%; . 90%"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.textContent") == "é"
    press(page, "odds")  # as Markdown again, for this reply only
    assert prose(page) == "The dragon café!"
    kept = page.evaluate(
        """() => {
             const node = shownPath(current).at(-1);
             node.parts[0].tokens = Array(9000).fill(["x", 1]);
             return cleanTalk(current).nodes[node.id].parts[0].tokens.length;
           }"""
    )
    assert kept == 4000  # a conversation keeps a bounded number of tokens


def test_conversations_become_training_data(page, tmp_path):
    page.evaluate("change('system', 'You are a fox.')")
    send(page, "sum")
    press(page, "again")
    type_again(page, "Five.")
    page.keyboard.press("Control+Enter")
    send(page, "long")  # cut: nothing to learn
    page.click("#new")
    send(page, "break")  # a failed reply does not become an example
    page.click("#training-open")
    files = {name: tmp_path / f"{name}.jsonl" for name in ("dialogues", "pairs")}
    for name, path in files.items():
        with page.expect_download() as download:
            page.click("#" + name)
        download.value.save_as(path)
    asked = [{"role": "system", "content": "You are a fox."}, {"role": "user", "content": "sum"}]
    edited = {"role": "assistant", "content": [*CALL, {"type": "text", "text": "Five."}]}
    dialogues = Conversations("train", str(files["dialogues"]))
    messages = dialogues.example(0).messages
    assert len(dialogues) == 1 and messages[:3] == [*asked, edited] and messages[3]["content"] == "long"
    assert messages[4]["train"] is False and len(messages) == 5
    # The edited version against one of the model's; its two are equal, and each is a pair.
    assert len(files["pairs"].read_text().splitlines()) == 2
    pair = Preferences("train", str(files["pairs"])).pair(0)
    assert pair.question == asked and pair.chosen == edited
    assert pair.rejected["content"] == [*CALL, {"type": "text", "text": "2+3 = 5."}]


# ---------------------------------------------------------------------- Markdown

# What it is -> text, what the node contains and how often.
CASES = {
    "link by name": ("[a] and [b][a]\n\n[a]: https://a.example", '<a href="https://a.example/"', 2),
    "title by a line below": ("Title\n=====", "<h2>Title</h2>", 1),
    "code by indentation": ("    x = 1", "<code>x = 1</code>", 1),
    "strong within emphasis": ("*a **b** c*", "<em>a <strong>b</strong> c</em>", 1),
    "a character's name": ("&copy; &#35;", "© #", 1),
    "an aligned column": ("|a|b|\n|-|-:|\n|1|2|", '<td class="right">2</td>', 1),
    "Chinese has no spaces": ("**注意：**请看**“这里”**。", "<strong>", 2),
    "formula in a line": (r"So \(x^2\) and $y_1$ and 设$z$为", "<math>", 3),
    "formula between lines": ("$$\n\\frac{a}{b}\n+ c\n$$\n\n\\[\na\n= b\n\\]\n- item", 'display="block"', 2),
    "formula in an item": ("- one\n  $$\n  x\n  $$\n- two", 'display="block"', 1),
    "dollars are money": ("$5 and $6, US$7, $8-$9, $5, or 6$ and a $ b $ c, $HOME:$PATH", "<math>", 0),
    "no formula in code": ("`$x$` and \\$x\\$\n\n    $$y$$", "<math>", 0),
    "no formula after all": (r"$\nosuch{1}$ and \(a", r"$\nosuch{1}$</span> and (a", 1),
    "nothing to load in a formula": (r"$\href{javascript:x}{a}$ $\includegraphics{//evil.example}$", "<math", 0),
}
CASES |= {"all of it": (RICH, "<strong>bold</strong>", 0)}
RICH_PARTS = """<h2>Heading</h2>|<em>soft</em> and <strong>strong</strong>|<code>code</code>, <del>old</del>
href="https://example.com/a_b?c=1"|snake_case_name and 2 * 3 * 4|<li>two<ol|<ol start="1"><li>inner</li><li>more</li>
<blockquote><p dir="auto">quoted</p></blockquote>|<th>n</th><th>square</th>|<td>2</td><td>4</td>|Last *plain* line.
print("&lt;b&gt;not bold&lt;/b&gt;")"""


def with_libraries(page: Any) -> None:
    page.wait_for_function("() => reader")
    page.evaluate("() => { markdown(document.createElement('div'), '$a$'); return typesetter; }")


def test_markdown(page):
    send(page, "say " + RICH)
    reply = last(page).locator(".prose")
    html = re.sub(r"<(?:div class=\"block|header|button)[^>]*>.*?</(?:header|button)>", "", reply.inner_html())
    assert [part for part in re.split(r"[|\n]", RICH_PARTS) if part not in html] == []
    link = reply.locator("a")
    assert "noopener" in link.get_attribute("rel") and link.get_attribute("target") == "_blank"
    send(page, "say 龙🐉 und ßtraße ✓ " + "é" * 300)  # bytes of a character in two pieces
    assert prose(page) == "龙🐉 und ßtraße ✓ " + "é" * 300


def test_markdown_cases_also_as_they_grow(page):
    """What a reply shows does not depend on the pieces in which it came."""
    with_libraries(page)
    for name, (text, part, count) in CASES.items():
        shown = page.evaluate("text => { const e = make('div'); markdown(e, text); return e.innerHTML; }", text)
        shown = shown.replace('<math class="tml-display" style="display:block math;"', '<math display="block"')
        assert re.sub(r"<math (?!display)[^>]*>", "<math>", shown).count(part) == count, (name, shown)
    texts = [*(text for text, _, _ in CASES.values()), "\n\n".join(text for text, _, _ in CASES.values())]
    differing = page.evaluate(
        """texts => texts.filter((text) => {
             const [whole, growing] = [make("div"), make("div")];
             markdown(whole, text);
             for (let end = 1; end <= text.length; end++) markdown(growing, text.slice(0, end));
             return whole.innerHTML !== growing.innerHTML;
           })""",
        texts,
    )
    assert differing == []


def test_formulas_are_loaded_when_there_is_one(server, page):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    send(page, "say It costs $5 and $6.")
    assert not any("temml" in url for url in asked)
    send(page, r"say Then \(\frac{1}{2}\).")
    assert last(page).locator("mfrac").text_content() == "12"
    assert {url.split("/")[-1] for url in asked if "/vendor/" in url} >= {"temml.min.js", "Temml-Local.css"}
    assert all(url.startswith(server.url) for url in asked)
    # Without the libraries a reply is still there to be read.
    page.route("**/vendor/**", lambda route: route.abort())
    page.reload()
    assert prose(page) == r"Then \(\frac{1}{2}\)."


LONG = 50_000
HOSTILE = {
    "fence and spaces": "~~~" + " " * LONG + "`",
    "heading that ends oddly": "# " + " " * LONG + "\u2028",
    "dots after a link": "http://a" + "." * LONG + "a",
    "stars": "*" * LONG,
    "open emphasis": "**a _b " * (LONG // 7),
    "brackets": "[" * LONG,
    "open links": "[a](" * (LONG // 4),
    "addresses": "<http:" * (LONG // 6),
    "backticks": " ".join("`" * count for count in range(1, 440)),
    "quotes": "> " * (LONG // 2) + "x",
    "list in list": "- " * (LONG // 2),
    "two lists": "- a\n1. b\n" * 8_000,
    "paragraphs": "a\n\n" * (LONG // 3),
    "wide table": "|-" * (LONG // 2) + "|\n|-|",
    "open formulas": r"\(\[" * (LONG // 4),
    "deep formula": "$" + "{" * 400 + "}" * 400 + "$",
    "formulas": "$x$ " * (LONG // 4),
    "everything": "*_~~`[](<\n" * (LONG // 10),
}


def test_hostile_markdown_takes_linear_work_and_few_elements(page):
    """Quadratic work on 50,000 characters takes minutes; a browser cannot lay out 50,000 elements either."""
    with_libraries(page)
    measured = page.evaluate(
        """texts => texts.map((text) => {
             const element = document.createElement("div"), start = performance.now();
             markdown(element, text);
             return [performance.now() - start, element.querySelectorAll("*").length];
           })""",
        list(HOSTILE.values()),
    )
    for name, (milliseconds, elements) in zip(HOSTILE, measured, strict=True):
        assert milliseconds < 10_000 and elements <= 5000, name


# ---------------------------------------------------------------------- what is kept and sent


def test_copies_message_and_code(server, open_page):
    page = open_page(server, permissions=["clipboard-read", "clipboard-write"])
    send(page, "say " + RICH)
    page.locator("[data-act=copy-code]").click()
    page.wait_for_selector("[data-act=copy-code] svg[data-name=check]")
    assert page.evaluate("navigator.clipboard.readText()") == 'print("<b>not bold</b>")'
    last(page).locator(".acts [data-act=copy]").click()
    page.wait_for_selector(".reply .acts svg[data-name=check]")
    assert page.evaluate("navigator.clipboard.readText()") == RICH
    # Without the clipboard interface, as on a page over plain http from another machine.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.locator("[data-act=copy-code]").click()
    page.wait_for_selector("[data-act=copy-code] svg[data-name=check]")


def test_settings_are_sent_and_kept(server, open_page):
    sent = {"temperature": 0.3, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "max_tokens": 12, "seed": 40}
    names = set(sent) - {"seed"}
    server.models[0]["nanochat"] = {"sampling": {"temperature": 0.7, "top_k": 0, "top_p": 1, "min_p": 0.05}}
    page = open_page(server)
    send(page, "hello")
    assert not names & set(server.bodies[-1])  # the server's defaults apply, and the page shows them
    page.click("#open-settings")
    shown = page.locator("#settings output").all_inner_texts()
    assert [text.split(" · ")[0] for text in shown] == ["0.7", "off", "off", "0.05"]
    page.keyboard.press("Escape")
    settings(page, system="You are a fox.", **{name: str(value) for name, value in sent.items()})
    page.reload()
    page.click("#new")
    send(page, "hello")
    body = server.bodies[-1]
    assert {name: body[name] for name in sent} == sent
    assert body["messages"][0] == {"role": "system", "content": "You are a fox."}
    press(page, "again")
    assert server.bodies[-1]["seed"] == 41  # another try with the same seed would be the same reply
    page.click("#open-settings")
    page.fill("#set-max_tokens", "-3")
    page.click("#reset")
    page.click("#close-settings")
    send(page, "hello")
    assert not names & set(server.bodies[-1])


def test_conversations_are_kept_renamed_deleted_exported_imported(page, tmp_path):
    titles = page.locator("#list .open")

    def delete() -> None:
        page.locator("#list li").nth(0).hover()
        page.locator("[data-act=delete]").nth(0).click()

    def load(content: str, toast: str) -> None:
        (tmp_path / "file.json").write_text(content)
        page.set_input_files("#file", tmp_path / "file.json")
        page.wait_for_selector(f"#toast:has-text('{toast}')")

    send(page, "first one")
    page.click("#new")
    send(page, "second one")
    page.locator("#list li").nth(1).hover()
    page.locator("[data-act=rename]").nth(1).click()
    page.keyboard.type("A better name")
    page.keyboard.press("Enter")
    page.reload()
    both = ["second one", "A better name"]
    assert titles.all_inner_texts() == both and questions(page) == ["second one"]
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "all.json")
    exported = (tmp_path / "all.json").read_text()
    delete()
    assert titles.all_inner_texts() == both[1:]
    page.click("#toast button")
    assert titles.all_inner_texts() == both
    delete()
    delete()
    page.reload()
    assert titles.count() == 0 and page.locator("#empty").is_visible()
    load(exported, "imported: 2; already here: 0")
    assert titles.all_inner_texts() == both
    titles.nth(1).click()
    assert questions(page) == ["first one"] and "first one" in last(page).inner_text()
    # Imported again it does not come twice; another text under the same id does.
    load(exported, "imported: 0; already here: 2")
    load(exported.replace("first one", "another one"), "imported: 1; already here: 1")
    start = '{"format":"nanochat-conversations","conversations":[{"id":"a","nodes":{"root":{"children":['
    for wrong in ("no json", start + '"root"]}}}]}', start.replace('"a"', '"__proto__"') + "]}}}]}"):
        load(wrong, "no conversations")
        page.reload()
        assert titles.count() == 3


# ---------------------------------------------------------------------- failures


def test_errors_are_shown_and_tried_again(server, page):
    for error, words in (
        ((429, "full", {"Retry_After": "7"}), "Try again in about 7 s"),
        ((503, "loading", {}), "still being loaded"),
        ((500, "a bug in layer 3", {}), "a bug in layer 3"),
    ):
        page.click("#new")
        server.errors.append(error)
        send(page, "hello")
        assert words in page.locator(".failure[role=alert]").inner_text()
        page.reload()
        page.locator("#list .open").first.click()
        page.click("[data-act=retry]")
        done(page)
        assert "hello" in prose(page) and not page.locator(".failure").count()
        assert not last(page).locator(".count").count()  # a failed try leaves no variant
    server.errors.append((400, "the prompt has 900 tokens, the context 512", {}))
    send(page, "hello")  # the same request would be refused again: the question can be edited
    assert "the context 512" in page.locator(".failure").inner_text() and not page.locator("[data-act=retry]").count()
    assert page.locator(".question [data-act=edit]").last.is_enabled()
    for question, words in (("break", "connection was lost"), ("fail", "the device is gone")):
        page.click("#new")
        send(page, question)
        assert words in page.locator(".failure").inner_text() and "half" in prose(page)
    page.click("#new")
    send(page, "slow", wait=False)
    see(page, "word9")
    page.reload()
    assert "word9" in last(page).inner_text() and "closed before the reply was complete" in last(page).inner_text()


def test_offline_and_a_server_that_is_gone(server, page):
    ready(page)
    page.context.set_offline(True)
    page.wait_for_selector("#dot[data-state=away]")
    send(page, "hello")
    assert "You are offline" in page.locator(".failure").inner_text()
    page.context.set_offline(False)
    ready(page)
    page.click("[data-act=retry]")
    done(page)
    server.shutdown()
    server.server_close()
    send(page, "hello again")
    assert "does not answer" in page.locator(".failure").inner_text()


def test_the_key_leaves_the_address_and_goes_with_each_request(server, open_page):
    server.key = "secret-1"
    page = open_page(server, "#key=secret-1")
    assert page.url == server.url
    send(page, "hello")
    page.reload()
    send(page, "again")
    assert "again" in prose(page) and "secret-1" not in page.evaluate("JSON.stringify(localStorage)")
    stranger = open_page(server)
    stranger.wait_for_selector("#dot[data-state=locked]")
    send(stranger, "hello")
    assert "API key" in stranger.locator(".failure").inner_text()
    assert not stranger.locator("[data-act=retry]").count()  # not before the key is there
    stranger.click("[data-act=key]")
    stranger.keyboard.type("secret-1")
    stranger.keyboard.press("Tab")
    ready(stranger)
    stranger.keyboard.press("Escape")
    stranger.click("[data-act=retry]")
    done(stranger)
    assert "hello" in prose(stranger)


# ---------------------------------------------------------------------- everybody can use it


def test_by_keyboard_only(server, page):
    keys = page.keyboard
    focused = "document.activeElement."

    def reach(selector: str, by: str = "Shift+Tab") -> None:
        for _ in range(40):
            keys.press(by)
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                break
        else:
            raise AssertionError(f"{selector} is not reached by {by}")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", f"{selector} does not show its focus"

    assert page.evaluate(focused + "id") == "input"
    keys.type("one")
    keys.press("Shift+Enter")
    keys.type("two")
    keys.press("Enter")
    done(page)
    assert server.bodies[-1]["messages"][-1]["content"] == "one\ntwo"
    for act in ("again", "previous"):
        reach(f".reply [data-act={act}]")
        keys.press("Enter")
        done(page)
    assert counted(page) == "1/2" and page.evaluate(focused + "dataset.act") == "next"
    reach(".question [data-act=edit]")
    keys.press("Enter")
    keys.type(" three")
    keys.press("Escape")
    assert questions(page) == ["one\ntwo"] and page.evaluate(focused + "dataset.act") == "edit"
    reach("#open-settings")
    keys.press("Enter")
    reach("#set-temperature", "Tab")
    keys.press("Home")
    keys.press("Escape")
    assert page.evaluate(focused + "id") == "open-settings"
    reach("#list [data-act=rename]")
    reach("#new")
    keys.press("Enter")
    keys.type("slow")
    keys.press("Enter")
    page.wait_for_selector(".caret")
    assert server.bodies[-1]["temperature"] == 0
    page.focus("#model")
    keys.press("Enter")
    keys.press("Escape")
    assert not page.locator("#about").is_visible() and page.locator(".caret").is_visible()
    keys.press("Escape")
    done(page)
    assert page.locator("#live").inner_text() == "Stopped."
    page.fill("#input", "ni hao")  # an input method takes Enter for itself
    enter = "new KeyboardEvent('keydown', { key: 'Enter', isComposing: true, bubbles: true })"
    page.evaluate(f"$('input').dispatchEvent({enter})")
    assert len(server.bodies) == 3 and page.input_value("#input") == "ni hao"


def test_a_phone(server, open_page):
    page = open_page(server, width=360, height=720, has_touch=True, is_mobile=True)
    assert not page.locator("#side").is_visible()
    page.locator("#ideas button").first.tap()
    done(page)
    wide_table = "| " + "a | " * 30 + "\n" + "|---" * 30 + "|"
    send(page, "say " + "unbreakable" * 40 + "\n\n```\n" + "x" * 300 + "\n```\n\n" + wide_table)
    send(page, "evil " + "9" * 200)
    wide = "document.documentElement.scrollWidth > innerWidth || $('scroll').scrollWidth > $('scroll').clientWidth"
    assert not page.evaluate(wide)
    buttons = "[...document.querySelectorAll('#bar button, #foot button')]"
    assert page.evaluate(f"{buttons}.filter((b) => b.offsetWidth && b.offsetWidth < 36)") == []
    page.tap("#show")
    page.evaluate("$('input').focus()")
    assert page.evaluate("$('side').contains(document.activeElement)")  # not below what covers it
    page.mouse.click(340, 300)
    assert not page.locator("#side").is_visible()
    page.tap("#open-settings")
    assert page.evaluate("$('settings').getBoundingClientRect().left >= 0") and not page.evaluate(wide)


def test_dark_light_and_two_languages(server, open_page):
    ground = "getComputedStyle(document.body).backgroundColor"
    dark, light = "rgb(25, 25, 24)", "rgb(255, 255, 255)"
    page = open_page(server, color_scheme="dark", locale="zh-CN")
    assert page.evaluate(ground) == dark
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == light
    assert page.locator("html").get_attribute("lang") == "zh-CN"
    assert page.locator("#send").get_attribute("aria-label") == "发送"
    server.errors.append((429, "full", {"Retry_After": "4"}))
    send(page, "你好")
    assert "请在约 4 秒后重试" in page.locator(".failure").inner_text()
    page.click("#open-settings")
    page.get_by_text("English", exact=True).click()
    assert "in about 4 s" in page.locator(".failure").inner_text()
    page.get_by_text("Dark", exact=True).click()
    page.reload()
    assert page.evaluate(ground) == dark and page.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize(("locale", "width"), [("en-GB", 1200), ("zh-CN", 360)])
def test_all_can_use_the_page(server, open_page, axe_violations, locale, width):
    """axe-core's rules, contrast among them, in each part of the page, light and dark."""
    facts = {"context": 512, "tasks": ["addition"], "sampling": {"min_p": 0.05}}
    server.models = [{"id": "sft-demo", "nanochat": facts}]
    page = open_page(server, width=width, locale=locale)
    ready(page)

    def check(part: str) -> None:
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            assert axe_violations(page) == [], (part, theme)

    page.click("#model")
    check("no message yet, and what the model is")
    page.keyboard.press("Escape")
    send(page, "say " + RICH + "\n\n$x^2$")
    send(page, "sum 2+3")
    press(page, "again")
    page.click("#open-settings")
    page.set_checked("#set-probabilities", True)
    check("settings")
    page.keyboard.press("Escape")
    send(page, "odds")
    page.locator(".token").nth(1).focus()
    server.errors.append((429, "full", {"Retry_After": "4"}))
    send(page, "hello")
    page.locator(".question").first.hover()
    page.locator(".question [data-act=edit]").first.click()
    check("replies, a failure, and a question that is edited")
    page.keyboard.press("Escape")
    if width < 800:
        page.click("#show")
    page.fill("#search", "heading")
    page.click("#training-open")
    check("conversations and training data")
    page.keyboard.press("Escape")
    server.models = [{"id": "base-demo", "nanochat": {"chats": False, "context": 512}}]
    page.reload()
    page.fill("#text", "The dragon café!")
    page.click("#write-odds")
    page.locator("#written .token").nth(1).hover()
    check("a text and its probabilities")
    served_models(server)
    page.reload()
    ready(page)
    pick(page, "全部模型并排" if locale == "zh-CN" else "All, side by side")
    send(page, "odds")
    page.locator(".round [data-act=odds]").last.click()
    page.locator("[data-act=better]").first.click()
    page.click("#model")
    check("all models side by side, and the models to pick")
    page.keyboard.press("Escape")
    page.evaluate("$('input').after(make('button'), make('h4', {}, 'Deep'))")  # what it must find
    assert {line.split()[0] for line in axe_violations(page)} == {"button-name", "heading-order"}


# ---------------------------------------------------------------------- several conversations, tabs and models


def test_two_conversations_at_once(page):
    send(page, "slow one", wait=False)
    page.wait_for_selector(".caret")
    page.click("#new")
    send(page, "hello")
    assert questions(page) == ["hello"]
    page.locator("#list .open", has_text="slow one").click()
    page.wait_for_selector(".caret")
    before = last(page).inner_text()
    page.wait_for_function("length => document.querySelector('.reply').innerText.length > length", arg=len(before))
    page.click("#stop")
    done(page)


def second_tab(one: Any, server: Any) -> Any:
    """Another tab with the only conversation of the first."""
    two = one.context.new_page()
    two.goto(server.url)
    two.locator("#list .open").click()
    return two


def test_two_tabs_with_one_conversation(server, open_page):
    one = open_page(server)
    send(one, "hello")
    two = second_tab(one, server)
    send(one, "slow", wait=False)
    two.wait_for_function("() => /word9[^]*Being written in another tab/.test($('messages').innerText)")
    send(two, "from two")  # and a new name
    two.locator("#list li").first.hover()
    two.locator("[data-act=rename]").first.click()
    two.keyboard.type("Renamed")
    two.keyboard.press("Enter")
    see(one, "from two")
    see(two, "word60")  # the first tab has kept its reply more than once since
    one.keyboard.press("Escape")
    done(one)
    see(two, "Stopped.")
    for page in (one, two):
        page.reload()
        assert questions(page) == ["hello", "slow", "from two"]
        assert page.locator("#list .open").inner_text() == "Renamed"
        assert "word9" in page.locator(".reply").nth(1).inner_text() and "from two" in last(page).inner_text()
    # A tab that is closed says so; a deleted conversation goes from both, also where a reply is on its way.
    send(one, "slow", wait=False)
    two.wait_for_selector(".reply .caret")
    one.evaluate("dispatchEvent(new Event('pagehide'))")
    see(two, "closed before the reply was complete")
    send(one, "slow", wait=False)
    two.wait_for_selector(".reply .caret")
    two.locator("#list li").first.hover()
    two.locator("[data-act=delete]").first.click()
    one.wait_for_selector("#empty", state="visible")
    for page in (one, two):
        page.reload()
        assert page.locator("#list li").count() == 0


def test_tabs_that_write_at_the_same_moment_lose_nothing(server, open_page):
    """Each tab's write may be the one that the other never saw: the storage event brings it back."""
    one = open_page(server)
    send(one, "hello")
    two = second_tab(one, server)
    for turn in range(4):
        for page in (one, two):
            page.fill("#input", f"from {page is one} {turn}")
        for page in (one, two):
            page.evaluate("() => setTimeout(() => $('send').click(), 50 - Date.now() % 50)")
        for page in (one, two):
            page.wait_for_function("() => !$('input').value")
            done(page)
    count = "() => Object.values(JSON.parse(localStorage.getItem(PREFIX + current.id)).nodes).length"
    for page in (one, two):
        page.wait_for_function(f"() => ({count})() === 1 + 2 * 9")
        page.reload()
        assert page.evaluate("Object.keys(current.nodes).length") == 1 + 2 * 9


def test_a_base_model_continues_a_text(server, open_page):
    """In place, with stop, undo, another try and probabilities; it is not offered a chat."""
    server.models = [{"id": "base-demo", "nanochat": {"chats": False, "context": 512}}]
    page = open_page(server, width=360, height=720)

    def write(by: str) -> dict[str, Any]:
        page.click(by)
        written(page)
        return server.bodies[-1]

    page.fill("#text", "Once")
    assert not page.locator("#input").is_visible() and not page.locator("#ideas").is_visible()
    assert write("#write")["prompt"] == "Once" and page.input_value("#text") == "Once word0 word1 word2"
    first, second = write("#write"), write("#write-again")
    assert first["prompt"] == second["prompt"] == "Once word0 word1 word2" and first["seed"] != second["seed"]
    for _ in range(2):
        page.click("#write-undo")
    assert page.input_value("#text") == "Once" and page.locator("#write-undo").is_disabled()
    page.fill("#text", "slow")
    page.click("#write")
    page.wait_for_function("() => $('text').value.includes('word5')")
    page.keyboard.press("Escape")
    written(page)
    assert server.left.wait(10)
    server.errors.append((400, "the prompt has 900 tokens, the context 512", {}))
    page.click("#write")
    page.wait_for_selector("#write-note [role=alert]:has-text('the context 512')")
    page.reload()
    assert page.input_value("#text").startswith("slow word0")
    # The probabilities also of the words that a person wrote; writing goes on in the text, and shows it again.
    page.fill("#text", "The dragon café!")
    page.click("#write-odds")
    tokens = page.locator("#written .token")
    tokens.first.wait_for()
    sent = {name: server.bodies[-1][name] for name in ("prompt", "max_tokens", "echo", "logprobs")}
    assert sent == {"prompt": "The dragon café!", "max_tokens": 0, "echo": True, "logprobs": 5}
    assert levels(tokens) == [[], ["p2"], ["p1"], ["p2"], ["p4"]]  # the first has no probability
    page.click("#write")
    page.wait_for_function("() => !writing && !$('written').hidden")
    assert page.input_value("#text") == "The dragon café! word0 word1 word2" == server.bodies[-1]["prompt"]


def test_ideas_and_what_the_model_is(server, open_page):
    """Ideas come with the tasks; in Chinese an English model is still sent English."""
    about = {"chats": True, "context": 512, "parameters": 5_100_000, "data": "demo", "stage": "sft", "step": 1200}
    about |= {"trained_at": time.time() - 3 * 3600 - 60, "sampling": {"min_p": 0.05}}
    server.models = [{"id": "sft-demo", "nanochat": about}]
    for locale, tasks, pattern, facts in (
        (
            "en-GB",
            "addition",
            r"What is \d+ \+ \d+\?",
            ("5.1M", "512 tokens", "demo", "1,200", "3 hours", "min_p 0.05"),
        ),
        ("zh-CN", "addition", r"What is \d+ \+ \d+\?", ("3小时前", "510万")),
        ("zh-CN", "smoltalk_zh", "[\u4e00-\u9fff]", ("3小时前", "510万")),
    ):
        about["tasks"] = [tasks]
        page = open_page(server, locale=locale, width=360, height=720)
        ready(page)
        page.click("#model")
        words = page.locator("#about").inner_text()
        assert all(part in words for part in facts), words
        assert page.evaluate("$('about').getBoundingClientRect().right <= innerWidth")
        page.keyboard.press("Escape")
        ideas = page.locator("#ideas button").all_inner_texts()
        page.click("#more-ideas")
        assert len(set(ideas)) == 4 and ideas != page.locator("#ideas button").all_inner_texts()
        shown = page.locator("#ideas button").first.inner_text()
        page.locator("#ideas button").first.click()
        done(page)
        sent = server.bodies[-1]["messages"][-1]["content"]
        assert (
            re.match(pattern, sent) and sent in shown and bool(re.search(r"[\u4e00-\u9fff]", shown)) == ("z" in locale)
        )


def test_the_ideas_are_what_the_tasks_teach(page):
    """Kinds and names are in the lexicon of the corpus, and the orders are among those that the task draws."""
    words = lexicon()
    shapes = set()
    for order in page.evaluate("Array.from({ length: 300 }, () => IDEAS.stories()[0])"):
        kind = next(kind for kind in words["kind"] if re.search(rf"\b{kind}\b", order))
        name = next((name for name in words["hero"] if re.search(rf"\b{name}\b", order)), "")
        shape = order.replace(kind, "{kind}")
        shapes.add(shape.replace(name, "{hero}") if name else shape)
    assert len(shapes) == 3 and shapes <= set(orders("usual"))
    assert set(page.evaluate("Object.keys(IDEAS)")) <= set(rooms.names("tasks"))


WORDS_OF = dict(re.findall(r'(is_\w+): "([^"]+)"', SCRIPT[0].partition("\n\tzh: {")[0]))


def served_models(server: Any) -> None:
    """Three stages of a model, the default first."""
    settings = {"sampling": {"temperature": 0.8}, "context": 512, "tasks": ["addition"]}
    server.models = [
        {"id": f"demo-{stage}", "nanochat": {**settings, "stage": stage, "chats": stage != "base"}}
        for stage in ("rl", "sft", "base")
    ]


def pick(page: Any, label: str) -> None:
    page.click("#model")
    page.get_by_label(label, exact=True).check()
    page.keyboard.press("Escape")


def test_a_model_is_picked_and_kept(server, open_page):
    served_models(server)
    page = open_page(server)
    ready(page)
    send(page, "hello")
    assert server.bodies[-1]["model"] == "demo-rl" and "demo-rl · " in last(page).inner_text()
    page.click("#model")
    assert page.locator(".models label").all_inner_texts()[:3] == ["demo-base", "demo-sft", "demo-rl"]
    page.keyboard.press("Escape")
    pick(page, "demo-sft")
    press(page, "again")
    assert server.bodies[-1]["model"] == "demo-sft" and counted(page) == "2/2"
    page.reload()
    page.wait_for_selector("#model-name:has-text('demo-sft')")
    pick(page, "demo-base")
    assert page.locator("#text").is_visible() and not page.locator("#input").is_visible()
    pick(page, "demo-rl")
    assert page.locator("#input").is_visible() and "demo-sft · " in last(page).inner_text()
    # A server with other models: the reply says so, and the next try goes to what is there.
    server.errors.append((404, "the model does not exist", {"code": "model_not_found"}))
    server.models = [{"id": "new-sft", "nanochat": {"stage": "sft"}}]
    send(page, "hello again")
    page.wait_for_selector("#model-name:has-text('new-sft')")


def test_one_question_is_answered_by_all_models_side_by_side(server, open_page):
    served_models(server)
    page = open_page(server)
    ready(page)
    pick(page, "All, side by side")
    send(page, "odds")
    asked = {body["model"]: body for body in server.bodies}
    assert set(asked) == {"demo-base", "demo-sft", "demo-rl"} and asked["demo-base"]["prompt"] == "odds"
    assert asked["demo-sft"]["messages"] == asked["demo-rl"]["messages"] == [{"role": "user", "content": "odds"}]
    columns = page.locator(".round > .reply")
    assert columns.locator(".by").all_inner_texts() == ["demo-base", "demo-sft", "demo-rl"]
    assert columns.locator(".prose").all_inner_texts() == ["word0 word1 word2", *["The dragon café!"] * 2]
    # All again are one version; the conversation goes on from the last model's reply; a reload shows the same.
    page.locator(".round > .acts [data-act=again]").click()
    done(page)
    assert page.locator(".round > .acts .count").inner_text() == "2/2" and columns.count() == 3
    page.locator("[data-act=previous]").click()
    send(page, "second")
    second = [body["messages"] for body in server.bodies[-3:] if "messages" in body]
    assert second[0][1] == {"role": "assistant", "content": "The dragon café!"} and len(second) == 2
    page.reload()
    ready(page)
    assert page.locator(".round").count() == 2 and columns.count() == 6
    # One that is better makes pairs with the others, outlives a reload, and the next message follows it.
    assert page.evaluate("pairRows(current)") == [] and not page.locator("[data-act=pairs]").count()
    assert columns.locator("small").all_inner_texts()[:2] == [WORDS_OF["is_base"], WORDS_OF["is_sft"]]
    assert asked["demo-base"]["max_tokens"] == 256  # half of the context
    better = page.locator(".round").last.locator("[data-act=better]")
    better.nth(1).focus()
    page.keyboard.press("Enter")
    page.reload()
    assert [one.get_attribute("aria-pressed") for one in better.all()] == ["false", "true", "false"]
    texts = page.locator(".round").last.locator(".prose").all_inner_texts()
    pairs = json.loads(page.evaluate("JSON.stringify(pairRows(current))"))
    assert [pair["chosen"][-1]["content"] for pair in pairs] == [texts[1]] * 2
    assert [pair["rejected"][-1]["content"].strip() for pair in pairs] == [texts[0], texts[2]]
    assert all(pair["rejected"][:-1] == pair["chosen"][:-1] == second[0] for pair in pairs)
    assert page.evaluate("roundOf(current, shownPath(current).at(-1)).indexOf(shownPath(current).at(-1))") == 1
    page.locator("[data-act=pairs]").click()
    assert page.locator("#pairs").is_enabled() and page.locator("#training").is_visible()
    page.keyboard.press("Escape")
    better.nth(1).click()
    assert page.evaluate("pairRows(current)") == []
    # One column fails, and only it is tried again. Escape stops all. On a phone they are below each other.
    page.click("#new")
    server.errors.append((429, "full", {}))
    send(page, "third")
    assert columns.count() == 3 and page.locator(".failure").count() == 1
    count = len(server.bodies)
    page.click("[data-act=retry]")
    done(page)
    assert len(server.bodies) == count + 1 and not page.locator(".failure").count() and columns.count() == 3
    send(page, "slow", wait=False)
    page.wait_for_function("() => document.querySelectorAll('.caret').length === 3")
    page.keyboard.press("Escape")
    done(page)
    assert not page.locator(".caret").count()
    page.set_viewport_size({"width": 360, "height": 720})
    boxes = [columns.nth(place).bounding_box() for place in range(3)]
    assert len({round(box["x"]) for box in boxes}) == 1 and not page.evaluate("document.body.scrollWidth > innerWidth")


def test_the_page_is_ready_before_anything_else_has_come(open_page, server):
    """P7: ready within a second on a phone. Text box and ideas wait for one file, whose size another test bounds."""
    page = open_page(None)
    requests, held = [], []
    page.on("request", lambda request: requests.append(request.url.removeprefix(server.url)))
    page.route(re.compile("/v"), lambda route: held.append(route))  # unanswered for now
    page.goto(server.url, wait_until="domcontentloaded")
    assert page.locator("#ideas button").count() == 4
    page.keyboard.type("say *hello*")
    page.keyboard.press("Enter")
    page.wait_for_selector(".question .said")
    for _ in range(500):  # the last one leaves after the question is on the page
        if len(requests) < 4:
            page.wait_for_timeout(20)
    assert [name.split("/")[0] for name in requests] == ["", "vendor", "v1", "v1"]
    for route in held:
        route.continue_()
    done(page)
    assert last(page).locator(".prose em").inner_text() == "hello"


# ---------------------------------------------------------------------- the real server


def test_with_the_real_server(open_page):
    """A conversation with the app as it is: stopped and tried again, under the policy that it sends."""
    with serving(make_app(FakeScheduler(tick=0.02), api_key=KEY)) as port:
        page = open_page(None)
        page.goto(f"http://127.0.0.1:{port}/#key={KEY}")
        ready(page)
        send(page, "Tell me a story about a dragon named Ravi.", wait=False)
        page.wait_for_function("() => document.querySelector('.reply .prose')?.innerText.length > 20")
        page.keyboard.press("Escape")
        done(page)
        stopped = prose(page)
        settings(page, max_tokens="16")
        press(page, "again")
        assert counted(page) == "2/2" and "Cut at 16 tokens" in last(page).inner_text()
        press(page, "previous")
        assert prose(page) == stopped and "Stopped." in last(page).inner_text()
