"""API keys, hosts, origins, and the page's policy."""

import base64
import hashlib
import json
import re
import secrets

import pytest

from support.gate import noting
from support.serving import served
from tinygpt.server.monitoring import TextLines

KEYS = ("first-key", "schlüssel-🔑")
NEEDS_KEY = ("/v1/models", "/v1/models/demo", "/tokenizer_info", "/v1/nowhere")
OPEN = ("/", "/health", "/metrics", "/version", "/openapi.json")


@pytest.fixture(scope="module")
def locked(llm):
    with served(llm, api_keys=KEYS, allowed_origins=("https://page.example",)) as server:
        yield server


@pytest.mark.parametrize("path", NEEDS_KEY)
@pytest.mark.parametrize(
    "header", [None, "", "Bearer ", "Bearer wrong", "Basic first-key", "first-key", "Bearer \xff"]
)
def test_without_a_key_nothing_is_told(locked, path, header):
    reply = locked.ask(path, **({} if header is None else {"authorization": header}))
    assert (reply.status, reply.error["code"], reply.headers["www-authenticate"]) == (
        401,
        "invalid_api_key",
        "Bearer",
    )


@pytest.mark.parametrize("path", OPEN)
def test_what_monitors_and_browsers_ask_for_is_open(locked, path):
    assert locked.ask(path).status == 200


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(locked, key):
    header = f"bearer {key}".encode().decode("latin-1")  # as clients write UTF-8 into a header
    assert locked.ask("/v1/models", authorization=header).status == 200


def test_every_key_is_compared_in_constant_time(locked, monkeypatch):
    compared = noting(monkeypatch, secrets, "compare_digest", lambda a, b: b)
    assert locked.ask("/v1/models", authorization="Bearer first-key").status == 200
    assert compared == [key.encode() for key in KEYS]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.", "[::2]", ""]
)
def test_another_hosts_name_is_refused(server, host):
    """As a web page that has given its name this machine's address would send it."""
    for path in ("/v1/models", "/", "/metrics"):
        reply = server.ask(path, host=host)
        assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:8000", "[::1]"])
def test_this_machines_names_are_allowed(server, host):
    assert server.ask("/v1/models", host=host).status == 200


def test_other_pages_read_nothing_unless_they_are_named(server, locked):
    assert (
        "access-control-allow-origin" not in server.ask("/v1/models", origin="https://page.example").headers
    )
    headers = {"origin": "https://page.example", "access_control_request_method": "POST"}
    headers["access_control_request_headers"] = "authorization"
    asked_before = locked.ask("/v1/completions", method="OPTIONS", **headers)
    assert (asked_before.status, asked_before.headers["access-control-allow-origin"]) == (
        200,
        "https://page.example",
    )
    other = locked.ask("/v1/completions", method="OPTIONS", **headers | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_the_page_may_run_what_stands_in_it_and_nothing_else(server):
    reply = server.ask("/")
    policy = reply.headers["content-security-policy"]
    html = reply.body.decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        for text in re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL):
            assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", html)


def test_no_log_line_and_no_metric_holds_a_key_or_a_text(locked, caplog):
    with caplog.at_level("DEBUG"):
        key = {"authorization": "Bearer first-key"}
        locked.ask("/v1/completions", {"prompt": "my secret", "max_tokens": 1}, **key)
        locked.ask("/v1/completions", {"prompt": "my secret", "n": 0}, **key)
        locked.ask("/v1/secret-path", **key)
    logged = json.dumps([[record.getMessage(), getattr(record, "fields", None)] for record in caplog.records])
    assert "first-key" not in logged
    assert "my secret" not in logged
    told = locked.ask("/metrics").body
    assert b"first-key" not in told
    assert b"secret" not in told


def test_bodies_are_logged_where_that_is_asked_for(llm, caplog):
    """Each in one line, whatever it holds, under the id that its request has."""
    with served(llm, api_keys=KEYS, enable_log_requests=True) as server, caplog.at_level("INFO"):
        form = {"prompt": "my\nsecret", "max_tokens": 1}
        reply = server.ask("/v1/completions", form, authorization="Bearer first-key")
    (record,) = [record for record in caplog.records if record.getMessage() == "body"]
    assert record.fields["id"] == reply.headers["x-request-id"]
    assert json.loads(record.fields["body"]) == form
    record.fields["body"] = "a\nb"
    assert TextLines().format(record).endswith(f'INFO body id={record.fields["id"]} body="a\\nb"')
    assert "first-key" not in caplog.text + str(
        [getattr(record, "fields", None) for record in caplog.records]
    )
