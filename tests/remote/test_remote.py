"""RemoteLLM and servers that misbehave: retries, errors, and outputs that come back to the bit."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.gate import noting
from support.paths import ROOT
from support.processes import until
from support.tables import column, fields, rows
from tinygpt import RemoteLLM, SamplingParams, remote, wire
from tinygpt.errors import QueueFullError, RequestError, ServerError
from tinygpt.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk

httpx = pytest.importorskip("httpx", reason="httpx, of the extra `remote`, is not installed")

CARD = {"data": [{"id": "demo", "owned_by": "tinygpt", "max_model_len": 512}]}
CARDS = column("""
{"id": "gpt2", "owned_by": "vllm"}
{"owned_by": "tinygpt"}
{"owned_by": "tinygpt", "id": 1, "max_model_len": 1}
""")
OUTPUT = {
    "prompt_token_ids": [1],
    "outputs": [],
    "metrics": {"scheduled": 0.1, "first_token": None, "finished": 0.2, "num_steps": 0},
    "prompt_logprobs": None,
    "prompt_cumulative_logprob": None,
    "num_cached_tokens": 0,
    "num_truncated_tokens": 0,
}
Answer = Callable[["Handler"], None]


def reply(status: int, body: object, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    def answer(handler: "Handler") -> None:
        handler.send_response(status)
        for name, value in {"content_length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def refusal(status: int, message: str, code: str | None = None, **headers: str) -> Answer:
    return reply(status, {"error": {"message": message, "code": code}}, **headers)


def hang_up(handler: "Handler", first: Answer | None = None) -> None:
    """Close without notice, as a server does with an idle connection. first: an answer before that."""
    if first is not None:
        first(handler)
        handler.wfile.flush()
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def stay_silent(handler: "Handler") -> None:
    handler.server.silence.wait(60)


CHUNK = b'data: {"chunk": {"text": "a", "token_id": 1}}\n\n'
BEGUN = partial(hang_up, first=reply(200, CHUNK, content_length="1000"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        reply(200, self.server.card)(self)

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.answers[min(len(self.server.asked), len(self.server.answers)) - 1](self)

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def serve(monkeypatch):
    """`serve(answer, ...)` gives (a RemoteLLM, what it has asked for): each POST gets the next answer, or the last."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    with ExitStack() as stack:

        def serve(*answers: Answer, card: object = CARD, **arguments: object) -> tuple[RemoteLLM, list]:
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            server.daemon_threads = True
            server.answers = answers
            server.asked = []
            server.silence = threading.Event()
            server.card = card
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            stack.callback(server.shutdown)
            stack.callback(server.silence.set)
            url = f"http://127.0.0.1:{server.server_port}"
            return stack.enter_context(RemoteLLM(url, **arguments)), server.asked

        yield serve


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_busy_server_is_asked_again(serve):
    llm, asked = serve(refusal(429, "full", retry_after="0"), refusal(503, "draining"), reply(200, OUTPUT))
    [output] = llm.generate("Once")
    assert (output.prompt, output.prompt_token_ids) == ("Once", [1])
    assert len(asked) == 3
    assert asked[0] == asked[1] == asked[2]


@pytest.mark.parametrize(("status", "kind"), [(429, QueueFullError), (503, ServerError)])
def test_a_server_that_stays_busy_is_asked_so_often(serve, status, kind):
    llm, asked = serve(refusal(status, "too much to do"), max_retries=2)
    with pytest.raises(kind, match="too much to do"):
        llm.generate("Once")
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (refusal(500, "internal error"), "refuses: internal error"),
        (refusal(400, "top_k is wrong"), "^top_k is wrong$"),
        (
            refusal(401, "no key", "invalid_api_key"),
            "wants an API key: set api_key, or the variable TINYGPT_API_KEY",
        ),
        (refusal(404, "Not Found"), "is no tinygpt server, or an older one"),
        (reply(502, b"<html>Bad gateway</html>"), "is no tinygpt server: it answers with status 502"),
        (reply(200, b"<html>Hello</html>"), "it does not speak JSON"),
        (reply(200, {"choices": []}), "none that this version reads"),
        (BEGUN, "does not answer"),
        (hang_up, "does not answer"),
        (stay_silent, "has said nothing for 0.2 s"),
    ],
)
def test_nothing_else_is_sent_twice(serve, answer, sentence):
    llm, asked = serve(answer, timeout=0.2)
    with pytest.raises((RequestError, ServerError), match=sentence):
        llm.generate("Once")
    assert len(asked) == 1


def test_a_connection_that_was_closed_meanwhile_is_opened_anew(serve):
    closing = partial(hang_up, first=reply(200, OUTPUT))
    llm, asked = serve(reply(200, OUTPUT), closing, reply(200, OUTPUT), max_retries=0)
    for _ in range(4):
        llm.generate("Once")
    assert len(asked) == 4


def test_a_stream_that_breaks_off_says_so_after_what_had_come(serve):
    llm, _ = serve(BEGUN)
    chunks = llm.stream("Once")
    assert next(chunks).text == "a"
    with pytest.raises(ServerError, match=r"does not answer|too early"):
        next(chunks)


def test_an_error_within_a_stream_is_raised(serve):
    llm, _ = serve(reply(200, b'data: {"error": {"message": "shut down"}}\n\ndata: [DONE]\n\n'))
    with pytest.raises(ServerError, match="has ended the request: shut down"):
        list(llm.stream("Once"))


def test_a_refused_connection_is_tried_again(serve, monkeypatch):
    with pytest.raises(
        ServerError, match=r"does not answer .*: start it with `tinygpt serve`, or check the address"
    ):
        RemoteLLM(f"http://127.0.0.1:{free_port()}")  # at once: nothing is there to wait for
    llm, _ = serve(reply(200, OUTPUT), max_retries=4)
    tries = noting(monkeypatch, llm._server._client, "send")
    llm._server._client.base_url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerError, match="does not answer"):
        llm.generate("Once")
    assert len(tries) == 5


@pytest.mark.parametrize("card", [*({"data": [card]} for card in CARDS), {"data": []}, [], {"detail": "no"}])
def test_a_server_of_another_kind(serve, card):
    with pytest.raises(ServerError, match=r"is no tinygpt server|none that this version reads"):
        serve(reply(200, OUTPUT), card=card)


MALFORMED = rows("""
score | {"scores": null}
score | {"scores": 5}
score | {"scores": [5]}
score | {"scores": [{}]}
embed | {"data": [{"embedding": 5}]}
embed | {"data": [{"embedding": "%"}]}
embed | {"data": [{"embedding": "AAA="}]}
embed | {"data": [{"embedding": "\u00e9"}]}
encode | {"tokens": null}
encode | {"tokens": 5}
encode | {"tokens": ["a"]}
decode | {"prompt": [1]}
""")
DEEP = b"[" * 100_000
CALLS = {
    "generate": lambda llm: llm.generate("a"),
    "stream": lambda llm: [*llm.stream("a")],
    "score": lambda llm: llm.score("a", ["b"]),
    "embed": lambda llm: llm.embed(["a", "b"]),
    "encode": lambda llm: llm.tokenizer.encode("a"),
    "decode": lambda llm: llm.tokenizer.decode([1]),
}


@pytest.mark.parametrize(
    ("call", "answers"),
    [
        *((name, [reply(status, DEEP)]) for name in CALLS for status in (200, 400)),
        *(("generate", [reply(400, {"error": error})]) for error in (1, [], {"message": 5, "code": None})),
        *(
            ("generate", [reply(200, OUTPUT | {"metrics": OUTPUT["metrics"] | {"finished": n}})])
            for n in ("", 10**400)
        ),
        *(
            ("stream", [reply(200, b"data: {" + line + b"\n\n")])
            for line in (b"", DEEP, b'"error": 1}', b'"chunk": 1}')
        ),
        *((call, [reply(200, body)]) for call, body in MALFORMED),
        ("embed", [reply(200, {"data": [{"embedding": each}]}) for each in ("AAAAAA==", "AAAAAAAAAAA=")]),
    ],
)
def test_a_malformed_answer_is_a_server_error(serve, call, answers):
    llm, _ = serve(*answers)
    with pytest.raises(ServerError):
        CALLS[call](llm)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_makes_a_new_one(serve):
    def begin(handler: Handler) -> None:
        reply(200, CHUNK, content_length="1000")(handler)
        stay_silent(handler)

    llm, asked = serve(reply(200, OUTPUT), begin, stay_silent, reply(200, OUTPUT))
    llm.generate("Once")
    stream = llm.stream("Once")
    next(stream)
    waiting = llm.submit("Once")
    until(lambda: len(asked) == 3)  # or the child's request could get this one's answer
    new = (partial(call, "a") for call in (llm.generate, llm.stream, llm.submit))
    if not (pid := os.fork()):
        signal.alarm(20)
        try:
            for call in (waiting.result, stream.__next__, *new):
                with pytest.raises(
                    RequestError, match="this RemoteLLM belongs to the process that was forked"
                ):
                    call()
            llm.close()
            with RemoteLLM(llm._server.url) as new:
                new.generate("Once")
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert llm.generate("Once")


def test_what_cannot_be_asked_is_refused_before_it_is_sent(serve):
    llm, asked = serve(reply(200, OUTPUT))
    for wrong in ([1.5], {"text": "Once"}, b"Once", None):
        with pytest.raises(RequestError):
            llm.generate(wrong)
    with pytest.raises(RequestError, match="2 prompts were given with 1 SamplingParams"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(RequestError, match="on_chunk is 3"):
        llm.submit("Once", on_chunk=3)
    assert asked == []


def test_a_closed_one_answers_nobody(serve):
    llm, _ = serve(stay_silent)
    future = llm.submit("Once")
    llm.close()
    for call in (
        future.result,
        lambda: llm.generate("Once"),
        lambda: llm.stream("Once"),
        lambda: llm.submit("Once"),
    ):
        with pytest.raises(RequestError, match="has been closed"):
            call()


def test_an_error_in_on_chunk_ends_the_request(serve):
    llm, _ = serve(reply(200, CHUNK))
    with pytest.raises(ZeroDivisionError):
        llm.submit("Once", on_chunk=lambda chunk: 1 / 0).result(20)


def test_nothing_that_computes_is_imported():
    code = (
        "import sys, tinygpt; tinygpt.RemoteLLM, tinygpt.AsyncLLM, tinygpt.SamplingParams\n"
        "print(*{'numpy', 'numba', 'tiktoken', 'safetensors', 'huggingface_hub'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


NUMBERS = st.floats(max_value=0, allow_nan=False)  # minus infinity and the smallest ones too
LOGPROBS = st.none() | st.lists(st.none() | st.dictionaries(st.integers(0), NUMBERS, min_size=1, max_size=3))
SUMS = st.none() | NUMBERS
SAMPLES = st.builds(CompletionOutput, logprobs=LOGPROBS, cumulative_logprob=SUMS, score=SUMS)
TIMES = st.builds(RequestMetrics, *[st.just(0.0)] * 2, st.none() | st.floats(0, 1e9), st.floats(0, 1e9))
OUTPUTS = st.builds(
    RequestOutput,
    outputs=st.lists(SAMPLES, max_size=2),
    metrics=TIMES,
    prompt_logprobs=LOGPROBS,
    prompt_cumulative_logprob=SUMS,
)
LOGPROBS_OF_ONE = st.none() | st.dictionaries(st.integers(0), NUMBERS)
CHUNKS = st.builds(
    StreamChunk,
    finish_reason=...,
    index=...,
    logprobs=LOGPROBS_OF_ONE,
    prompt_logprobs=LOGPROBS,
    stop_reason=...,
    activations=st.none(),
)
[EVERYTHING] = fields("""
all: max_tokens=7, temperature=0.3, top_k=9, top_p=0.5, seed=2**64 - 1, best_of=2, stride=5, stop=["a", "b"],\
     stop_token_ids=[3], eos_token_id=4, overflow="slide", prompt_logprobs=0, logit_bias={5: 1.5, 17: -100},\
     bad_words="x", bad_words_ids=[[1, 2], [3]], top_p_reset_ids=[9],\
     repetition_detection={"max_pattern_size": 3, "min_count": 2}
""").values()


def sent(value):
    return json.loads(json.dumps(value, allow_nan=False))


@given(OUTPUTS)
def test_an_output_comes_back_to_the_bit(output):
    found = wire.output_from_json(sent(wire.output_to_json(output)), output.prompt, 0.0)
    assert found == output
    assert repr(found) == repr(output)  # -0.0 and the order of dicts too


@given(CHUNKS)
@example(StreamChunk("", 1, logprobs={1: -math.inf}))  # which JSON does not have
def test_a_chunk_comes_back_to_the_bit(chunk):
    assert repr(wire.record_from_json(StreamChunk, sent(wire.chunk_to_json(chunk)))) == repr(chunk)


def test_times_are_told_by_the_callers_clock():
    output = RequestOutput(None, [1], [], RequestMetrics(100.0, 101.0, None, 104.5, 0), None, None, 0, 0)
    found = wire.output_from_json(sent(wire.output_to_json(output)), None, 7.0)
    assert found.metrics == RequestMetrics(7.0, 8.0, None, 11.5, 0)


def test_params_say_what_is_not_usual_and_what_servers_may_see_otherwise():
    found = sent(wire.params_to_json(SamplingParams(**EVERYTHING)))
    assert found.keys() == EVERYTHING.keys()
    keys = {"logit_bias": {int(key): bias for key, bias in found["logit_bias"].items()}}
    assert SamplingParams(**{**found, **keys}) == SamplingParams(**EVERYTHING)
    everything = wire.params_to_json(SamplingParams(logprobs=-1, prompt_logprobs=-1))
    assert (
        everything["logprobs"] == everything["prompt_logprobs"] == 2**31 - 1
    )  # more than any server's limit
