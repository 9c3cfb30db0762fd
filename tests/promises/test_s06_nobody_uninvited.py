"""S6. Nobody uninvited gets in.

The app's list of routes is walked without and with a key; a key is made where others could reach the server; Host and
Origin are checked, and every response has the strict headers. Payloads in the
model's text stay text in a real browser, also without the policy that the server sends.
"""

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bodies import CHAT, COMPLETIONS, HELLO, KEY, PROMPT
from connections import exchange
from fake_server import FakeScheduler, asking, client_of, error_of, make_app, serving
from starlette.routing import Route
from test_p07_the_page import Script, last, send
from tiny import complaint

from scripts import chat_web

PAYLOADS = json.loads(Path(__file__).with_name("payloads.json").read_text())
ALLOWED_TAGS = (
    "ARTICLE P BR EM STRONG DEL CODE PRE UL OL LI H2 H3 H4 HR A B BLOCKQUOTE TABLE THEAD TBODY TR TH TD DIV HEADER "
    "SPAN BUTTON svg path"
)


ask = pytest.fixture(asking, scope="module")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(make_app(FakeScheduler(tick=0.02))) as port:
        yield port


def test_with_a_key_every_route_but_the_probes_and_the_page_requires_it():
    app = make_app(api_key=KEY)
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    assert {"/", "/health", "/ready", "/metrics", "/v1/models", CHAT} <= paths
    wrong = ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"authorization": "Bearer "})
    with client_of(app) as ask:
        for path in (*paths, "/v1/models/tiny", "/nowhere"):
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                is_open = path in ("/", "/health", "/ready") and method in ("GET", "HEAD")
                for headers in wrong:
                    assert (ask(method, path, headers=headers).status_code != 401) == is_open, (method, path, headers)
            assert ask("GET", path, headers={"authorization": f"Bearer {KEY}"}).status_code != 401
        answer = ask("GET", "/v1/models", headers={"authorization": "Bearer \xff\xfe".encode("latin-1")})
        assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key"
        assert ask("GET", "/v1/models", params={"key": KEY}).status_code == 401  # an address may end up in a log
        assert ask("GET", "/ready").json() == {"status": "ready"}  # nothing of the model
        for path in ("/tokenize", "/detokenize"):
            assert ask("POST", path, json={}).status_code == 401


def test_the_page_and_its_libraries_are_sent_compressed_and_once():
    with client_of(make_app(api_key=KEY)) as ask:
        page = ask("GET", "/", headers={"accept-encoding": "gzip"})
        assert page.headers["content-encoding"] == "gzip" and page.num_bytes_downloaded < len(page.text) / 2
        assert ask("GET", "/", headers={"accept-encoding": "identity"}).text == page.text
        again = ask("GET", "/", headers={"if-none-match": page.headers["etag"]})
        assert again.status_code == 304 and not again.content and page.headers["cache-control"] == "no-cache"
        names = re.findall(r"[\w.-]+-\d+\.\d+\.\d+/[\w.-]+\.(?:js|css)", page.text)
        for name in names:
            library = ask("GET", f"/vendor/{name}")
            assert library.status_code == 200 and "immutable" in library.headers["cache-control"]
            assert ("javascript" if name.endswith("js") else "css") in library.headers["content-type"]
            assert ask("POST", f"/vendor/{name}").status_code == 401
        assert len(names) == 3
        for name in ("../app.py", "..%2fapp.py", "temml-0.13.5", ""):
            assert ask("GET", f"/vendor/{name}", headers={"authorization": f"Bearer {KEY}"}).status_code == 404, name
        assert ask("GET", "/health").headers["cache-control"] == "no-store"


def test_pages_elsewhere_are_refused(ask: Any, port: int):
    """By their origin; what a Host may be is in the table of the ways to start."""
    assert error_of(ask("GET", "/health", headers={"host": "evil.example"}))["code"] == "host_not_allowed"
    own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    assert ask("POST", COMPLETIONS, json=PROMPT, headers=own).status_code == 200
    for origin in ("http://evil.example", "null", "http://localhost:8001", "http://[", "file://"):
        answer = ask("POST", COMPLETIONS, json=PROMPT, headers={**own, "origin": origin})
        assert answer.status_code == 403 and error_of(answer)["type"] == "permission_error"
        assert "access-control-allow-origin" not in answer.headers
    two_hosts = exchange(port, b"GET /health HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n\r\n")
    assert two_hosts.startswith(b"HTTP/1.1 400 ")


def test_pages_of_named_origins_may_use_the_api():
    chosen, evil = "https://chat.example.org", "https://evil.example"
    origins = chat_web.allowed_origins(chat_web.Config(allowed_origins=f" {chosen} , http://[::1]:3000"))
    assert origins == (chosen, "http://[::1]:3000")
    allow = "access-control-allow-"
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
    }
    key = {"authorization": f"Bearer {KEY}"}
    with client_of(make_app(api_key=KEY, origins=origins)) as ask:
        for method, origin, more, status in (
            ("OPTIONS", chosen, preflight, 200),  # a browser sends no key with it
            ("POST", chosen, key, 200),
            ("POST", chosen, {}, 401),  # the page can read why
            ("OPTIONS", evil, {**preflight, **key}, 403),
            ("POST", evil, key, 403),
        ):
            answer = ask(method, CHAT, json={**HELLO, "max_tokens": 1}, headers={"origin": origin, **more})
            assert answer.status_code == status, (method, origin)
            assert answer.headers.get(allow + "origin") == (chosen if origin == chosen else None)
            assert allow + "credentials" not in answer.headers
            assert (
                "x-stainless-os" in answer.headers[allow + "headers"] if method + origin == "OPTIONS" + chosen else True
            )
    for wrong in ("*", "chat.example.org", "https://chat.example.org/", "null", "https://a b"):
        assert "--allowed_origins" in complaint(
            partial(chat_web.allowed_origins, chat_web.Config(allowed_origins=wrong))
        )


def test_every_response_carries_the_strict_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    page = tmp_path / "ui.html"
    page.write_text("<style>b{}</style><script>1</script>")
    monkeypatch.setattr("nanochat.serve.page.PAGE", page)
    with client_of(make_app()) as ask:
        for path in ("/", "/health", "/nowhere", "/v1/models"):
            headers = ask("GET", path).headers
            policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
            # sha256 of `1`, in base64: the one script that may run besides this server's files
            assert policy["script-src"] == "'self' 'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='"
            assert "unsafe" not in headers["content-security-policy"] and headers["referrer-policy"] == "no-referrer"
        assert ask("HEAD", "/").status_code == ask("HEAD", "/health").status_code == 200
        assert ask("GET", "/").text == page.read_text() and "text/html" in ask("GET", "/").headers["content-type"]


def test_the_command_makes_a_key_where_others_could_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
    config = chat_web.Config()
    assert config.host == "127.0.0.1" and chat_web.choose_key(config, open_to_others=False) is None
    made = {chat_web.choose_key(config, open_to_others=True) for _ in range(3)}
    assert len(made) == 3 and all(len(key or "") >= 32 for key in made)
    assert all(map(chat_web.is_loopback, ("127.0.0.1", "localhost", "::1", "127.8.8.8")))
    assert not any(map(chat_web.is_loopback, ("0.0.0.0", "::", "192.168.1.2", "", "localhost.example", "example.org")))
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    for setting, key in (({"api_key": "none"}, None), ({"api_key_file": file}, KEY), ({"api_key": KEY}, KEY)):
        assert chat_web.choose_key(replace(config, **setting), open_to_others=True) == key
    file.write_bytes(b"\xff\xfe\x00")
    for wrong in (file, tmp_path / "none"):
        flags = replace(config, api_key_file=wrong)
        assert f"--api_key_file {wrong}" in complaint(partial(chat_web.choose_key, flags, open_to_others=False))
    for key in ("", "short", "with spaces in it", "nicht-ünlich"):
        flags = replace(config, api_key=key)
        assert "api_key" in complaint(partial(chat_web.choose_key, flags, open_to_others=False))
    monkeypatch.setenv("NANOCHAT_API_KEY", "from-the-environment")
    assert chat_web.choose_key(config, open_to_others=False) == "from-the-environment"


def test_without_a_key_only_names_that_no_other_site_can_own_are_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A page at evil.example may let that name point to this machine; its requests then carry it as their Host.

    Only a key that is made here is printed, in the part of the address that a browser does not send."""
    monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "Lab-7")
    served: list[chat_web.Config] = []
    monkeypatch.setattr(chat_web, "check", lambda config: [])
    monkeypatch.setattr(chat_web, "serve", lambda config, listener: served.append(config))
    everywhere = chat_web.Config(host="0.0.0.0", port=0, api_key="none")
    local = ("localhost", "localhost:8000", "127.0.0.1:80", "[::1]:80")
    own = (*local, "lab-7:8000", "LAB-7", "192.168.1.5", "[fe80::1]:8000", "[::2]")
    foreign = ("evil.example", "lab-7.evil.example", "192.168.1.5.evil.example", "2130706433.evil", "", "[evil]",
               "localhost.evil.example", "127.0.0.1.evil", "[::1].evil.com", "[::1]evil.com:80", "localhost:1@evil.com",
               "localhost@evil.com", "localhost:evil.com")  # fmt: skip
    for config, accepted, refused, printed in (
        (everywhere, own, foreign, "any address"),
        (replace(everywhere, allowed_hosts="chat.example.org"), (*own, "chat.example.org"), foreign, "chat.example"),
        (replace(everywhere, allowed_hosts="*"), (*own, *foreign), (), "any host name"),
        (replace(everywhere, api_key=KEY), (*own, *foreign), (), ""),
        (replace(everywhere, api_key=None), (*own, *foreign), (), ""),
        (chat_web.Config(port=0), local, (*own[len(local) :], *foreign), ""),
    ):
        chat_web.main(config)
        address, *warning = capsys.readouterr().out.splitlines()
        assert len(warning) == bool(printed) and printed in "".join(warning)
        key = served.pop().api_key
        is_made = config.host == "0.0.0.0" and config.api_key is None
        assert address.endswith(f"/#key={key}" if is_made else "/") and "?" not in address
        assert is_made or key == (None if config.api_key in (None, "none") else config.api_key)
        with client_of(make_app(api_key=key, hosts=chat_web.allowed_hosts(config, key))) as ask:
            for host in accepted:
                assert ask("GET", "/health", headers={"host": host}).status_code == 200, (config, host)
            for host in refused:
                answer = ask("GET", "/health", headers={"host": host})
                assert error_of(answer)["code"] == "host_not_allowed", (config, host)


def test_under_gunicorn_a_server_without_a_key_refuses_foreign_names_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(chat_web, "check", lambda config: [])
    monkeypatch.setattr(chat_web, "make_app", lambda config, give_up: config)
    for key, flags, printed, foreign in (
        ("none", "", "no API key", False),
        ("none", "--allowed_hosts=*", "any host name", True),
        (KEY, "", "", True),
        (None, "", "/#key=", True),
    ):
        monkeypatch.setenv("NANOCHAT_CHAT_WEB", flags)
        monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
        if key is not None:
            monkeypatch.setenv("NANOCHAT_API_KEY", key)
        config = chat_web.__getattr__("app")
        monkeypatch.delattr(chat_web, "app")
        out = capsys.readouterr().out
        assert printed in out and len(out.splitlines()) == bool(printed)
        assert (chat_web.allowed_hosts(config, config.api_key) == ()) == foreign


@pytest.mark.slow
def test_thirty_payloads_stay_text(browser, open_page):
    """Without the policy of the server, so that the page has only itself."""
    server = Script(policy=None)
    server.models = [{"id": "<img src=x onerror=window.hurt=1>"}]
    page = open_page(server)
    outside: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(server.url) else outside.append(request.url))
    allowed = set(ALLOWED_TAGS.split())
    assert len(PAYLOADS) >= 30
    for number, payload in enumerate(PAYLOADS):
        if number % 8 == 0:
            page.click("#new")
        send(page, "evil " + payload)
        found = page.evaluate(
            """() => [...document.querySelectorAll("#messages *")].flatMap((node) => [node.tagName,
               ...[...node.attributes].map(({name}) => "@" + name).filter((name) => /^@(on|style$|src)/.test(name))])"""
        )
        assert set(found) <= allowed, payload
        links = page.evaluate("[...document.querySelectorAll('#messages a')].map((a) => a.protocol)")
        assert set(links) <= {"https:", "http:", "mailto:"}, payload
        assert payload.split("\n")[0].replace("\t", " ")[:12].strip() in last(page).locator(".call").inner_text()
    page.locator(".reply a, .said").last.hover()
    server.errors.append((500, "<img src=x onerror=window.hurt=1>", {}))
    send(page, "<svg onload=window.hurt=1>")
    assert "<img src=x onerror=window.hurt=1>" in page.locator(".failure").inner_text()
    page.reload()
    page.wait_for_function("() => document.getElementById('model-name').textContent.includes('<img')")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hurt") is None and outside == []
    assert (
        page.evaluate(
            "document.querySelectorAll('img, iframe, script:not(body > script:last-of-type, [src^=vendor])').length"
        )
        == 0
    )
    server.shutdown()
