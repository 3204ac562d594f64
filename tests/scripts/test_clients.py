"""scripts/clients.py: a row for each call, also of a client that fails or is not installed."""

import pytest

from scripts import clients
from support.serving import served


def fails(url):
    raise ValueError(f"no client at {url}")


# Of an installed package, a client's answer and its row's end.
ANSWERS = [
    (lambda: "a text", "worked, 'a text'", 0),
    (lambda: clients.Animal(kind="fox"), "worked, Animal(kind='fox')", 0),
    (lambda: " ", "FAILED, AssertionError: ", 1),
    (lambda: fails("/v1"), "FAILED, ValueError: no client at /v1", 1),
]


@pytest.mark.parametrize(("call", "row", "code"), ANSWERS)
def test_a_row_tells_what_a_call_gave(call, row, code, monkeypatch, capsys):
    installed = {"numpy": lambda url: {"call": call}, "not-there": fails}
    monkeypatch.setattr(clients, "CLIENTS", installed)
    assert clients.main("http://127.0.0.1:1/v1") == code
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("numpy ")
    assert first.endswith(f" call: {row}")
    assert second == "not-there: not installed"


def test_openais_client_works(llm, capsys, monkeypatch):
    pytest.importorskip("openai", reason="openai, of the extra `parity`, is not installed")
    monkeypatch.setattr(clients, "CLIENTS", {"openai": clients.openai})
    with served(llm) as server:
        assert clients.main(server.url) == 0
    assert capsys.readouterr().out.count(": worked, ") == 3
