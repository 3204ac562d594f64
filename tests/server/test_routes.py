"""The smaller routes: models, tokenizer, embeddings, version, and the description of all of them."""

import base64
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tinygpt
from support.engines import sample_of
from support.gate import Gate
from support.golden_models import SMALL, add_tensors, write_lora
from support.paths import ROOT
from support.serving import served, until
from support.tables import rows
from tinygpt import LLM
from tinygpt.text.chat import PlainTemplate

# A route, a body, the status of the reply, and a word of it.
CASES = rows("""
POST /v1/completions | {"prompt": "a", "max_tokens": 1} | 200 | finish_reason
POST /v1/chat/completions | {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | 200 | message
POST /v1/responses | {"input": "a", "max_output_tokens": 1} | 200 | output_text
POST /generate | {"prompt": "a", "max_tokens": 1} | 200 | cumulative_logprob
POST /v1/embeddings | {"input": "a"} | 200 | embedding
POST /v1/score | {"text_1": "a", "text_2": "b"} | 200 | score
POST /classify | {"input": "a"} | 400 | has no head that classifies
POST /lens | {"prompt": "a"} | 200 | attention
POST /score_continuations | {"prompt": "a", "continuations": ["b"]} | 200 | is_greedy
POST /tokenize | {"prompt": "a"} | 200 | max_model_len
POST /detokenize | {"tokens": [5]} | 200 | prompt
GET /v1/models | null | 200 | max_logprobs
GET /v1/models/{model:path} | null | 200 | max_logprobs
DELETE /v1/models/{model:path} | null | 403 | started with
GET /tokenizer_info | null | 200 | eos_token
GET /health | null | 200 | ok
GET /version | null | 200 | version
GET /metrics | null | 200 | vllm:num_requests_running
GET /openapi.json | null | 200 | operationId
GET / | null | 200 | <script>
""")


@pytest.fixture(scope="module")
def looking(llm):
    with served(llm, look=True) as server:
        yield server


def test_each_route_has_a_case(server):
    """A new route needs a line of CASES."""
    routes = {
        f"{method} {route.path}"
        for route in server.app.routes
        for method in route.methods
        if method != "HEAD"
    }
    assert {case[0] for case in CASES} == routes


def test_each_route_has_a_row(server):
    """A new route needs a row of Routes in tinygpt/server/README.md."""
    readme = (ROOT / "tinygpt" / "server" / "README.md").read_text(encoding="utf-8")
    [table] = re.findall("## Routes\n(.*?)\n## ", readme, re.DOTALL)
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    paths = {*re.findall("[A-Z]+ (/[^`]*)`", "".join(first_cells))}
    assert paths == {route.path.replace("{model:path}", "NAME") for route in server.app.routes}


@pytest.mark.parametrize(("route", "body", "status", "word"), CASES)
def test_each_route_answers(looking, route, body, status, word):
    method, _, path = route.partition(" ")
    reply = looking.ask(path.replace("{model:path}", "demo"), body, method)
    assert (reply.status, word in reply.body.decode()) == (status, True)


def test_models_by_each_name(server, llm):
    listed = server.ask("/v1/models").json
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["demo", "other/name"]
    for card in listed["data"]:
        assert server.ask(f"/v1/models/{card['id'].replace('/', '%2F')}").json == card
        found = card["object"], card["max_model_len"], card["max_logprobs"]
        assert found == ("model", llm.max_model_len, 20)
    for name in ("demo", "other/name"):
        assert server.complete(prompt="a", model=name, max_tokens=1).json["model"] == name
    assert server.complete(prompt="a", max_tokens=1).json["model"] == "demo"


def test_nothing_is_deleted(server):
    assert server.ask("/v1/models/demo", method="DELETE").status == 403
    reply = server.ask("/v1/models/ft:no-such:model", method="DELETE")
    assert reply.status == 200
    assert reply.json == {"id": "ft:no-such:model", "object": "model", "deleted": False}
    assert server.ask("/v1/models/demo").status == 200


def test_texts_and_tokens(server, llm):
    text = "Once upon<|endoftext|> a time"
    reply = server.ask(
        "/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    ).json
    ids = llm.tokenizer.encode(text, split_special_tokens=False)
    assert llm.config.eos_token_ids[0] in ids
    assert (reply["tokens"], reply["count"], reply["max_model_len"]) == (ids, len(ids), llm.max_model_len)
    assert "".join(reply["token_strs"]) == text
    assert server.ask("/detokenize", {"tokens": ids}).json == {"prompt": text}
    shown = server.ask("/detokenize", {"tokens": ids, "skip_special_tokens": True}).json["prompt"]
    assert shown == "Once upon a time"
    split = server.ask("/tokenize", {"prompt": text, "split_special_tokens": True}).json["tokens"]
    assert split == llm.tokenizer.encode(text, split_special_tokens=True)
    assert server.ask("/tokenize", {"prompt": "a" * 10_000}).json["count"] > 100  # encoded in another thread


def test_harnesses_learn_the_end_of_text(server, llm):
    info = server.ask("/tokenizer_info").json
    assert info["eos_token"] == info["bos_token"] == "<|endoftext|>"
    assert info["chat_template"] == PlainTemplate.source
    assert server.ask("/tokenize", {"prompt": info["eos_token"]}).json["tokens"] == list(
        llm.config.eos_token_ids
    )


@pytest.mark.parametrize(
    ("inputs", "pooling"),
    rows("""
a wolf | last
["a wolf", "kings"] | mean
[5, 6, 7] | sum
[[5], [6, 7]] | last
"""),
)
def test_embeddings_are_the_librarys(server, llm, pooling, inputs):
    expected = llm.embed(inputs, pooling)  # (n, C)
    plain = server.ask("/v1/embeddings", {"input": inputs, "pooling": pooling}).json
    assert [row["index"] for row in plain["data"]] == list(range(len(expected)))
    np.testing.assert_array_equal(np.array([row["embedding"] for row in plain["data"]], np.float32), expected)
    coded = server.ask(
        "/v1/embeddings", {"input": inputs, "pooling": pooling, "encoding_format": "base64"}
    ).json
    rows = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in coded["data"]]
    np.testing.assert_array_equal(np.stack(rows), expected)
    assert plain["usage"]["prompt_tokens"] == plain["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("head", ["score.weight", "classifier.weight"])
def test_labels_are_the_librarys(small_demo, tmp_path, head):
    folder = add_tensors(shutil.copytree(small_demo, tmp_path / "model"), {head: (3, SMALL["n_embd"])})
    with LLM(folder, device="reference", split_special_tokens=True) as llm, served(llm) as server:
        reply = server.ask("/classify", {"input": ["a wolf", "the king"]}).json
        expected = llm.classify(["a wolf", "the king"])
    shown = [
        {"index": i, "label": e.label, "probs": e.probs, "num_classes": 3} for i, e in enumerate(expected)
    ]
    assert (reply["object"], reply["data"]) == ("list", shown)
    assert reply["usage"]["prompt_tokens"] == sum(len(each.prompt_token_ids) for each in expected)


def test_an_adapter_is_a_model(small_demo, tmp_path):
    adapter = write_lora(tmp_path / "adapter", rank=2, targets=["c_attn"], has_head=False)
    body = {"prompt": "a wolf", "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    with LLM(small_demo, device="reference", lora_modules={"a": adapter}) as llm, served(llm) as server:
        found = {name: server.complete(**body, model=name).json for name in ("demo", "a")}
        for name, lora_request in (("demo", None), ("a", "a")):
            expected = sample_of(llm, "a wolf", max_tokens=6, lora_request=lora_request)
            [choice] = found[name]["choices"]
            assert (found[name]["model"], choice["token_ids"]) == (name, expected.token_ids)
        assert found["a"]["choices"][0]["text"] != found["demo"]["choices"][0]["text"]
        cards = server.ask("/v1/models").json["data"]
        assert [card["parent"] for card in cards if card["id"] == "a"] == [cards[0]["id"]]
        for path, more in (
            ("/v1/embeddings", {"input": "a"}),
            ("/score_continuations", {"prompt": "a", "continuations": ["b"]}),
        ):
            assert (
                "the adapter 'a' only generates" in server.ask(path, {"model": "a", **more}).error["message"]
            )


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_scores_are_cosines_of_embeddings(server, llm, pooling):
    firsts = ["a wolf", "Once upon a time"]
    seconds = ["a fox in the wood", "a wolf"]
    for given, pairs in (
        ("a wolf", [(firsts[0], second) for second in seconds]),
        (firsts, [*zip(firsts, seconds, strict=True)]),
    ):
        reply = server.ask("/v1/score", {"text_1": given, "text_2": seconds, "pooling": pooling}).json
        vectors = [llm.embed([*pair], pooling).astype(np.float64) for pair in pairs]  # (2, C) each
        cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in vectors]
        assert [row["score"] for row in reply["data"]] == pytest.approx(cosines, abs=1e-12)
        assert [(row["index"], row["object"]) for row in reply["data"]] == [(0, "score"), (1, "score")]
    assert min(cosines) < 0.999  # or all would be alike
    same = server.ask("/v1/score", {"text_1": "a wolf", "text_2": "a wolf", "pooling": pooling}).json
    assert same["data"][0]["score"] == pytest.approx(1, abs=1e-12)
    assert same["usage"]["prompt_tokens"] == 2 * len(llm.tokenizer.encode("a wolf"))


def test_too_many_wait(server, llm):
    """4 run and 3 wait; a body of more texts than run together has room for the first of them, and keeps it."""
    with ThreadPoolExecutor() as clients, llm.engine.wrapped(Gate) as gate:
        asked = [clients.submit(server.ask, "/v1/embeddings", {"input": ["a"] * n}) for n in (9, 1, 1, 1)]
        until(lambda: len(llm.engine._queued) == 7)
        for path, body in (("/v1/score", {"text_1": "a", "text_2": "b"}), ("/v1/embeddings", {"input": "a"})):
            reply = server.ask(path, body)
            assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        gate.allow(float("inf"))
        replies = [reply.result() for reply in asked]
    assert [reply.status for reply in replies] == [200] * 4
    assert [len(reply.json["data"]) for reply in replies] == [9, 1, 1, 1]


def test_a_client_that_leaves_ends_its_embeddings(server, llm):
    with llm.engine.wrapped(Gate) as gate:
        client = server.begin("/v1/embeddings", input=["Once upon a time"] * 50)
        gate.wait_until_asked(1)
        client.close()
        until(lambda: not llm.engine._queued)
        gate.allow(float("inf"))
    assert gate.num_taken <= 1


def test_the_description_holds_the_limits_of_this_model(server, llm):
    """A checker of requests is told to expect refusals, which would hide a bound that got lost."""
    document = server.ask("/openapi.json").json
    schemas = document["components"]["schemas"]
    assert (schemas["TokenId"]["minimum"], schemas["TokenId"]["maximum"]) == (0, llm.config.vocab_size - 1)
    assert schemas["ModelName"]["enum"] == ["demo", "other/name"]
    assert schemas["NumLogprobs"]["maximum"] == 20
    completion = schemas["CompletionRequest"]
    assert completion["additionalProperties"] is False
    fields = completion["properties"]
    for name, low, high in (("n", 1, 128), ("best_of", 0, 128)):
        [bounded] = [part for part in fields[name]["anyOf"] if part["type"] != "null"]
        assert (bounded["minimum"], bounded["maximum"]) == (low, high)
    assert "from -2 to 2" in fields["presence_penalty"]["description"]
    assert {"$ref": "#/components/schemas/TokenId"} in [
        part["items"] for part in fields["prompt"]["anyOf"] if part.get("type") == "array"
    ]


def test_the_description_names_every_route(server):
    document = server.ask("/openapi.json").json
    served = {route.path.replace(":path", "") for route in server.app.routes} - {"/", "/openapi.json"}
    assert set(document["paths"]) == served
    assert document["openapi"] == "3.1.0"
    assert server.ask("/version").json == {"version": tinygpt.__version__}
