"""scripts/bench_serving.py: figures of replies worked out by hand, and a run against our server."""

import json
import socket
import sys
from types import SimpleNamespace

import pytest

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from scripts import bench_serving
from scripts.bench_serving import LIBRARY, OURS, Reply, figures, markdown, parse


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_a_reply_is_parsed_as_it_arrived():
    usage = event(choices=[], usage={"completion_tokens": 4})
    pieces = [
        (
            1.0,
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
            + event(choices=[{"text": "a"}])[:9],
        ),
        (2.0, event(choices=[{"text": "a"}])[9:] + event(choices=[{"text": ""}])),
        (3.0, event(choices=[{"text": "b"}]) * 2 + usage + b"data: [DONE]\n\n"),
    ]
    reply = parse(0.5, pieces)
    assert (reply.status, reply.token_times, reply.num_tokens) == (200, [2.0, 3.0, 3.0], 4)
    assert (reply.ttft, reply.tpot, reply.is_complete) == (1.5, 1 / 3, True)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([], "no reply"),
        ([(1.0, b'HTTP/1.0 429 Too Many Requests\r\n\r\n{"error": 1}')], '{"error": 1}'),
        ([(1.0, b"HTTP/1.0 200 OK\r\n\r\n" + event(error={"message": "broken"}))], "{'message': 'broken'}"),
    ],
)
def test_a_failed_reply_has_an_error(pieces, error):
    reply = parse(0.0, pieces)
    assert (reply.error, reply.is_complete) == (error, False)


def test_figures_by_hand():
    """Ten requests of 5 tokens, 0.1 to 1.0 s to the first token and 10 ms for each further one; one failed."""
    replies = [Reply(0.0, 200, [0.1 * i + 0.01 * j for j in range(5)], 5) for i in range(1, 11)]
    found = figures([*replies, Reply(0.0, 500, error="x")], ttft=0.5, tpot=0.02)
    seconds = 1.0 + 0.04
    assert found["failed"] == 1
    assert found["tokens/s"] == pytest.approx(50 / seconds)
    assert found["goodput/s"] == pytest.approx(5 / seconds)
    assert (found["TTFT p50, ms"], found["TTFT p99, ms"]) == pytest.approx((600, 1000))
    assert found["TPOT p50, ms"] == pytest.approx(10)
    assert figures(replies, 0.5, tpot=0.005)["goodput/s"] == 0


def test_server_and_library_take_turns(monkeypatch, capsys, tmp_path):
    pytest.importorskip("uvicorn", reason="needs a server: pip install -e '.[serve]'")
    flags = "--clients 2 --rates 20 --seconds 0.2 --each 1 --repeats 1 --prompt-words 3 --new-tokens 4 --threads 1"
    monkeypatch.setattr(sys, "argv", ["bench_serving.py", *flags.split(), "--json", str(tmp_path / "x.json")])
    bench_serving.main()
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["load"], row["server"]) for row in rows] == [
        ("2 clients", OURS), ("2 clients", LIBRARY), ("20 requests/s", OURS)
    ]  # fmt: skip
    assert all(row["failed"] == 0 and row["tokens/s"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert markdown(rows) in printed
    assert printed.splitlines()[2].startswith(f"{OURS} serves after ")


PRETENDER = """#!{python}
import http.server, json, os, sys
assert sys.argv[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "folder"]
assert os.environ["OMP_NUM_THREADS"] == "1" and os.environ["LD_PRELOAD"].endswith("lib/libiomp5.so")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_vllm_is_started_waited_for_and_ended(tmp_path):
    """A program in place of vLLM's Python, which answers /health on the port of the flags."""
    program = tmp_path / "bin" / "python"
    for file in (program, tmp_path / "lib" / "libiomp5.so"):  # an empty library: the loader warns of it
        file.parent.mkdir()
        file.touch()
    program.write_text(PRETENDER.format(python=sys.executable))
    program.chmod(0o700)
    args = SimpleNamespace(vllm=str(program), model="folder", dtype="float32", threads=1)
    with bench_serving.vllm_served(args, 4) as url:
        assert bench_serving.answers(f"{url}/health")
        assert not bench_serving.answers(f"{url}/other")
    assert not bench_serving.answers(f"{url}/health")
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(SystemExit, match="did not start"), bench_serving.vllm_served(args, 4):
        pass


def test_a_reserved_port_is_a_servers_alone():
    with bench_serving.reserved_port() as port:
        assert not bench_serving.answers(f"http://127.0.0.1:{port}/health")
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        socket.create_server(("127.0.0.1", port)).close()  # with SO_REUSEADDR
