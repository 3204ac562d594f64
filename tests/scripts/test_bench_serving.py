"""scripts/bench_serving.py --server: figures of a run, worked out by hand, and what its clients read."""

import asyncio
import json
import socket
import sys
from contextlib import closing
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn", reason="uvicorn, of the extra `serve`, is not installed")

from scripts.serving import client, newcomers
from scripts.serving.client import Exchange, exchange
from scripts.serving.compare import Plan, compare, markdown, of_clients, picture_of
from scripts.serving.figures import ServiceLevel, figures, percentiles
from scripts.serving.servers import Server, ours
from scripts.serving.workload import Run, Workload, closed_loop
from support.serving import served
from tinygpt import LLM

LEVEL = ServiceLevel(time_to_first_token=0.5, time_per_output_token=0.1)


def test_figures_of_three_requests_of_which_one_failed():
    good = Exchange(sent=1.0, status=200, token_times=[1.25, 1.3125, 1.375], num_tokens=3)
    slow = Exchange(sent=1.0, status=200, token_times=[1.25, 1.5], num_tokens=2)
    found = figures(Run([good, slow, Exchange(sent=1.0, status=429)], seconds=2.0), LEVEL)
    assert (found["requests"], found["failed"]) == (3, 1)
    assert (found["tokens_per_second"], found["requests_per_second"], found["goodput"]) == (2.5, 1.0, 0.5)
    assert found["ttft_ms"]["p50"] == 250
    assert (found["tpot_ms"]["p50"], found["itl_ms"]["p50"], found["itl_ms"]["p99"]) == (250, 62.5, 250)


def test_percentiles_are_values_that_were_met():
    assert percentiles(i / 1000 for i in range(100)) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([]) == {}


def test_every_server_is_asked_the_same():
    one, other = (Workload(name, 8, 4, seed=3).prompts() for name in ("a", "b"))
    assert [next(one) for _ in range(5)] == [next(other) for _ in range(5)]
    ids = next(Workload("a", 8, 4, vocab_size=11).prompts())
    assert len(ids) == 8
    assert set(ids) <= set(range(11))


def test_tokens_are_those_that_the_server_counts():
    """Some of them have no text of their own, so that there are fewer events."""
    found = Exchange(sent=0.0, status=200, token_times=[1.0, 3.0], num_tokens=5)
    assert found.time_per_output_token == 0.5
    assert figures(Run([found], seconds=2.0), LEVEL)["tokens_per_second"] == 2.5


def told_by(*events: dict) -> Exchange:
    """What a client makes of a stream of these, of at most 9 tokens."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"

    async def answer(reader, writer):
        await reader.readuntil(b'"max_tokens": 9}')
        writer.write((head + body).encode())
        writer.close()

    async def ask() -> Exchange:
        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            return await exchange(urlsplit(f"http://127.0.0.1:{port}"), "/v1/completions", {"max_tokens": 9})

    return asyncio.run(ask())


def choice(text: str, finish_reason: str | None = None) -> dict:
    return {"choices": [{"text": text, "finish_reason": finish_reason}]}


@pytest.mark.parametrize(
    ("ending", "num_tokens"),
    [
        ([choice("", "length"), {"choices": [], "usage": {"completion_tokens": 7}}], 7),
        ([choice("", "length")], 9),
        ([choice("", "stop"), {"choices": [], "usage": {"completion_tokens": 7}}], 7),
        ([choice("", "stop")], 2),
    ],
)
def test_a_client_counts_what_a_server_says_or_else_its_events(ending, num_tokens):
    found = told_by(choice("a"), choice(""), choice("b"), *ending)
    assert (found.text, len(found.token_times), found.num_tokens, found.is_complete) == ("ab", 2, num_tokens, True)


def in_chunks(*events: dict, head: str = "") -> bytes:
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n{head}\r\n"
    return head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


REFUSED = b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\n{}"
TOLD = in_chunks(choice("a"), choice("b", "length"))
HEAD = TOLD[: TOLD.index(b"\r\n\r\n") + 4]
PING = b": ping 10\r\n\r\n"  # a comment, which ends as some bodies do
RESET = bytes([1, *[0] * 7])  # of SO_LINGER: a connection that is closed is reset


@pytest.mark.parametrize(
    ("reply", "num_connections", "text"),
    [
        ([TOLD], 2, "ab"),
        ([TOLD[:150], TOLD[150:-3], TOLD[-3:]], 2, "ab"),
        ([HEAD, b"%x\r\n%b" % (len(PING), PING), b"\r\n" + TOLD[len(HEAD) :]], 2, "ab"),
        ([in_chunks(choice("a", "length"), head="Connection: close\r\n")], 6, "a"),
        ([REFUSED[:-1], REFUSED[-1:]], 2, ""),
    ],
    ids=["a stream", "in pieces", "what looks like an end", "closed by the server", "refused"],
)
def test_a_client_keeps_its_connection(reply, num_connections, text):
    """Where the server keeps it: two clients ask six times."""
    made = []

    async def answer(reader, writer):
        made.append(writer)
        while await reader.read(2**16):
            for part in reply:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)

    async def ask() -> Run:
        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            work = Workload("", 3, 9)
            run = await asyncio.wait_for(closed_loop(urlsplit(f"http://127.0.0.1:{port}"), work, 2, 6), 20)
            for writer in made:
                writer.close()
            return run

    run = asyncio.run(ask())
    assert len(made) == num_connections
    assert [found.text for found in run.exchanges] == [text] * 6
    assert [found.status for found in run.exchanges] == [429 if reply[-1] == b"}" else 200] * 6


@pytest.mark.parametrize("way", ["while nobody asks", "by a reset", "when it is asked", "amid the answer"])
def test_a_client_asks_once_more_where_nothing_comes_by_a_connection_that_it_kept(way):
    """The server has closed it meanwhile. Of an answer that has begun, nobody knows what is missing."""
    made, is_closed = [], asyncio.Event()

    async def answer(reader, writer):
        made.append(writer)
        while await reader.read(2**16):
            writer.write(TOLD)
            if len(made) == 1:
                await writer.drain()
                if way in ("when it is asked", "amid the answer"):
                    is_closed.set()
                    await reader.read(2**16)
                    writer.write(TOLD[:-20] if way == "amid the answer" else b"")
                if way == "by a reset":
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                break
        writer.close()
        is_closed.set()

    async def ask() -> list[Exchange]:
        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            url = urlsplit(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            with client.Sockets() as sockets, closing(client.Client(url, sockets)) as asking:
                found = [await asking.record("", {"max_tokens": 9})]
                await is_closed.wait()
                await asyncio.sleep(0.05)
                found += [await asking.record("", {"max_tokens": 9}) for _ in range(2)]
            return [recording.read() for recording in found]

    exchanges = asyncio.run(asyncio.wait_for(ask(), 20))
    assert [found.is_complete for found in exchanges] == [True, way != "amid the answer", True]
    texts = [found.text for found in exchanges]
    assert texts == ["ab", "a" if way == "amid the answer" else "ab", "ab"]
    assert len(made) == 2


def test_a_client_does_not_ask_a_new_connection_twice():
    made = []

    async def answer(reader, writer):
        made.append(await reader.read(2**16))
        writer.close()

    async def ask() -> Exchange:
        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            return await exchange(urlsplit(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), "", {})

    assert not asyncio.run(asyncio.wait_for(ask(), 20)).is_complete
    assert len(made) == 1


@pytest.mark.parametrize(("count", "read_at_once"), [(1, 1), (2, 0)])
def test_sockets_rest_before_they_read_where_there_are_several(count, read_at_once):
    read, rests = [], []

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def reading() -> list[int]:
        loop, found = asyncio.get_running_loop(), []
        pairs = [socket.socketpair() for _ in range(count)]
        with client.Sockets() as sockets:
            sockets._loop = SimpleNamespace(
                add_reader=loop.add_reader,
                remove_reader=loop.remove_reader,
                call_later=lambda *call: rests.append(call),
            )
            for near, _ in pairs:
                sockets.add(near, lambda near=near: read.append(near.recv(9)))
            for _ in range(2):
                for _, far in pairs:
                    far.send(b"a")
                await turns()
                found.append(len(read))
                assert [seconds for seconds, _ in rests] == [client.REST] * (count > 1)
                for _, end in rests:
                    end()
                rests.clear()
                assert len(read) % count == 0
            for pair in pairs:
                for each in pair:
                    each.close()
            return [*found, len(read)]

    assert asyncio.run(reading()) == [read_at_once, count + read_at_once, 2 * count]


def test_newcomers_are_measured_over_http_and_in_the_library():
    """With requests of their own beside streams that end and begin again."""
    more = {"ignore_eos": True, "return_token_ids": True}
    with LLM("demo", max_num_seqs=4) as llm, served(llm) as server:
        found = newcomers.to_server(urlsplit(server.url.removesuffix("/v1")), Workload("demo", 4, 5, more), 3, 4)
        others = newcomers.to_library(llm, Workload("", 4, 5), 3, 4)
    for figure in (found, others):
        assert (figure["requests"], figure["failed"]) == (4, 0)
        assert figure["ttft_ms"]["p50"] > 0
        assert figure["itl_ms"]["p99"] > 0  # of small models, several tokens come at once


def test_every_load_goes_to_the_server_and_to_the_library():
    plan = Plan((1, 2), (50.0,), 3, 4, each=1, seconds=0.04, repeats=1, level=LEVEL, newcomers=2)
    with LLM("demo", max_num_seqs=4) as llm:
        rows = compare([ours("demo", "auto", None, max_num_seqs=4)], plan, llm)
    assert [(row["load"], row["server"], row["requests"], row["failed"]) for row in rows] == [
        ("1 clients", "tinygpt serve", 1, 0),
        ("1 clients", "LLM.generate", 1, 0),
        ("2 clients", "tinygpt serve", 2, 0),
        ("2 clients", "LLM.generate", 2, 0),
        ("50 requests/s", "tinygpt serve", 2, 0),
        ("newcomers beside 2", "tinygpt serve", 2, 0),
        ("newcomers beside 2", "LLM.submit", 2, 0),
    ]
    for row in rows[:5]:
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(row["requests"] * 4)
    table, told = markdown(rows).split("\n\n")
    assert len(table.splitlines()) == 2 + len(rows)
    assert told.startswith("A newcomer's first token comes ")
    assert [line.label for line in picture_of(rows, "").panels[0].lines] == ["tinygpt serve", "LLM.generate"]


def test_tokens_a_second_by_clients_are_medians():
    rates = {"ours": {1: [9.0, 30.4, 20.6], 8: [50.0]}, "theirs": {1: [7.2]}}
    rows = [
        {"server": name, "load": f"{clients} clients", "tokens_per_second": rate}
        for name, by_clients in rates.items()
        for clients, found in by_clients.items()
        for rate in found
    ]
    rows += [{"server": "theirs", "load": "8 clients", "error": "it has ended"}]
    rows += [{"server": "ours", "load": "2 requests/s", "tokens_per_second": 1.0}]
    told = of_clients(rows).splitlines()
    assert told[0] == "| clients at once | `ours` | `theirs` |"
    assert told[2:] == ["| 1 | 21 | 7 |", "| 8 | 50 | - |"]


def test_a_server_that_does_not_start_is_named_and_the_others_are_measured():
    plan = Plan((1,), (), 3, 4, each=1, seconds=0.0, repeats=1, level=LEVEL)
    broken = Server("another", "bench", (sys.executable, "-c", "raise SystemExit('no such model')"))
    with LLM("demo", max_num_seqs=1) as llm:
        rows = compare([broken], plan, llm)
    assert [(row["server"], row["load"]) for row in rows] == [("another", "-"), ("LLM.generate", "1 clients")]
    assert "no such model" in markdown(rows)


MORTAL = """
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        os._exit(1)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_that_ends_amid_the_loads_is_named_and_the_others_are_measured():
    plan = Plan((1,), (50.0,), 3, 4, each=2, seconds=0.02, repeats=2, level=LEVEL)
    mortal = Server("another", "bench", (sys.executable, "-c", MORTAL, "{port}"))
    with LLM("demo", max_num_seqs=1) as llm:
        rows = compare([mortal], plan, llm)
    *before, last = (row for row in rows if row["server"] == "another")
    assert last["error"].startswith("it has ended: ")
    assert not any("error" in row for row in before)
    assert [row["load"] for row in rows if row["server"] == "LLM.generate"] == ["1 clients"] * 2
    assert f"another | {last['load']} | it has ended: " in markdown(rows)
    assert [line.label for line in picture_of(rows, "").panels[0].lines] == ["LLM.generate"]


def test_how_late_a_newcomer_is_told_in_steps():
    rows = [
        {"server": name, "ttft_ms": {"p50": wait}, "itl_ms": {"p50": 4.0}}
        for name, wait in (("ours", 20.0), ("ours", 30.0), ("ours", 22.0), ("library", 12.0))
    ]
    assert newcomers.sentence(rows, "ours", "library").startswith("A newcomer's first token comes 2.5 steps of 4.0 ms")
