"""Fields of other servers: passed over at values that ask for what happens anyway, else refused or at work."""

import json

import pytest

from support.paths import ROOT
from support.tables import rows

PEERS = json.loads((ROOT / "tests" / "data" / "peer_fields.json").read_text(encoding="utf-8"))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = {"completion": COMPLETIONS, "chat": CHAT}
TEXT = "Once upon a time there was"
ASKED = {COMPLETIONS: {"prompt": TEXT}, CHAT: {"messages": [{"role": "user", "content": TEXT}]}}
SIZE = {"max_tokens": 3}
# Fields of which each value means something: the text differs by them.
AT_WORK = {"temperature", "top_k", "top_p", "min_p", "seed", "n_predict"}
same_requests = pytest.mark.parametrize(
    ("path", "fields"),
    [
        pytest.param(path, peer["any"] | peer[kind], id=f"{name} {kind}")
        for name, peer in PEERS.items()
        for kind, path in PATHS.items()
    ],
)


def text_of(reply) -> str:
    assert reply.status == 200, reply.body
    [choice] = reply.choices
    return choice["text"] if "text" in choice else choice["message"]["content"]


@same_requests
def test_a_peers_request_is_served(server, path, fields):
    """With all of its fields at their defaults, and all at null, it is the request without them."""
    asked = ASKED[path] | SIZE | {"temperature": 0}
    idle = {name: value for name, value in fields.items() if name not in AT_WORK}
    expected = text_of(server.ask(path, asked))
    assert text_of(server.ask(path, idle | asked)) == expected
    assert text_of(server.ask(path, dict.fromkeys(fields) | asked)) == expected
    whole = {name: value for name, value in fields.items() if name != "n_predict"}
    assert text_of(server.ask(path, whole | ASKED[path] | SIZE)) is not None


@same_requests
def test_each_field_of_a_peer_is_served_alone(server, path, fields):
    for name, value in fields.items():
        reply = server.ask(path, ASKED[path] | SIZE | {name: value} if name != "n_predict" else ASKED[path])
        assert reply.status == 200, (name, reply.body)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/embeddings", "/tokenize"])
def test_an_unknown_field_is_passed_over_at_null_alone(server, path):
    asked = {"/v1/responses": {"input": "a"}, "/v1/embeddings": {"input": "a"}, "/tokenize": {"prompt": "a"}}
    body = {**ASKED, **asked}[path]
    assert server.ask(path, body | {"other": None, "one_more": None}).status == 200
    reply = server.ask(path, body | {"other": None, "one_more": False})
    assert (reply.status, reply.error["param"]) == (400, "one_more")


# Values that ask for something, which is not there, and the values that do not.
ASKING = rows("""
{"mirostat": 2} | null
{"priority": 5} | null
{"n_probs": 3} | null
{"tfs": 0.9} | 1
{"cache_salt": "secret"} | ""
{"add_bos_token": false} | true
{"samplers": ["top_k", "dry"]} | ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
{"repeat_last_n": 64, "repeat_penalty": 1.1} | -1
{"continue_final_message": true} | null
{"thinking_token_budget": 5} | -1
{"logits_processors": ["x"]} | null
""")


@pytest.mark.parametrize(("fields", "usual"), ASKING, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("path", PATHS.values())
def test_a_field_that_asks_for_something_is_refused(server, path, fields, usual):
    name = next(iter(fields))
    reply = server.ask(path, ASKED[path] | SIZE | fields)
    assert (reply.status, reply.error["param"]) == (400, name)
    if usual != "":
        assert reply.error["message"].endswith(
            f"this server has no such option, and takes {json.dumps(usual)} alone."
        )
        assert server.ask(path, ASKED[path] | SIZE | fields | {name: usual}).status == 200


def test_all_tokens_are_looked_at_by_a_penalty(server):
    penalized = ASKED[COMPLETIONS] | SIZE | {"repeat_penalty": 1.1, "temperature": 0}
    assert text_of(server.complete(**penalized, repeat_last_n=-1)) == text_of(server.complete(**penalized))


def test_special_tokens_stay_in_a_text(server, llm):
    (eos,) = llm.config.eos_token_ids
    asked = {"prompt": "a", "max_tokens": 2, "logit_bias": {str(eos): 100}, "ignore_eos": True}
    assert text_of(server.complete(**asked)) == ""
    assert text_of(server.complete(**asked, skip_special_tokens=False)) == 2 * llm.tokenizer.decode([eos])


@pytest.mark.parametrize(
    ("side", "kept"), [(None, slice(-2, None)), ("left", slice(-2, None)), ("right", slice(2))]
)
@pytest.mark.parametrize("path", PATHS.values())
def test_a_prompt_is_cut_to_a_number_of_tokens(server, llm, path, side, kept):
    asked = ASKED[path] | SIZE | {"temperature": 0, "return_token_ids": True}
    cut = server.ask(path, asked | {"truncate_prompt_tokens": 2, "truncation_side": side}).json
    ids = llm.tokenizer.encode(TEXT)[kept]
    assert cut.get("prompt_token_ids", cut["choices"][0].get("prompt_token_ids")) == ids
    alone = server.complete(prompt=ids, temperature=0, **SIZE).choices[0]["text"]
    assert (cut["choices"][0].get("text") or cut["choices"][0]["message"]["content"]) == alone
    longer = server.ask(path, asked | {"truncate_prompt_tokens": 500}).json
    assert longer["usage"]["prompt_tokens"] == len(llm.tokenizer.encode(TEXT))


@pytest.mark.parametrize("path", PATHS.values())
def test_a_prompt_is_cut_to_the_models_length(server, path):
    long = " again" * 600
    asked = {"prompt": long} if path == COMPLETIONS else {"messages": [{"role": "user", "content": long}]}
    assert server.ask(path, asked | SIZE).error["code"] == "context_length_exceeded"
    usage = server.ask(path, asked | SIZE | {"truncate_prompt_tokens": -1, "ignore_eos": True}).json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (509, 3)
    assert server.ask(path, asked | {"truncate_prompt_tokens": 0}).error["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (COMPLETIONS, "n_predict"),
        (COMPLETIONS, "max_completion_tokens"),
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_tokens"),
    ],
)
def test_minus_one_fills_the_context(server, path, name):
    reply = server.ask(path, ASKED[path] | {name: -1, "ignore_eos": True, "temperature": 0})
    assert reply.json["usage"]["total_tokens"] == 512
    assert server.ask(path, ASKED[path] | {name: -2}).error["param"] == "max_tokens"
