"""What is not possible is refused before any work, in OpenAI's shape, and names the field."""

import http.client
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.demo import VOCAB_SIZE
from support.gate import Gate
from support.serving import served, until
from tinygpt import LLM, SamplingParams

# A body, to which a prompt is added, the field that the refusal names, and a part of its sentence.
BODIES = {
    "unknown field": (b'{"foo": 1}', "foo", "unrecognized request argument: foo"),
    "a field by another name": (b'{"max_new_tokens": 5}', "max_new_tokens", "(did you mean max_tokens?)"),
    "a misspelt field": (b'{"tempreature": 1}', "tempreature", "(did you mean temperature?)"),
    "a field that is not needed": (b'{"trust_remote_code": true}', "trust_remote_code", "(no code of a checkpoint"),
    "unknown field inside": (b'{"stream_options": {"x": 1}}', "stream_options", "stream_options.x"),
    "an unknown field with a long name": (b'{"' + b"a" * 5000 + b'": 1}', "a" * 100 + "...", "a..."),
    "a wrong type inside": (
        b'{"stream_options": {"include_usage": 1}}',
        "stream_options",
        "stream_options.include_usage is 1 and must be true or false.",
    ),
    "a wrong type far inside": (
        b'{"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}}',
        "response_format",
        "response_format.json_schema.schema is 1 and must be an object.",
    ),
    "nothing inside": (
        b'{"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}',
        "response_format",
        "response_format.json_schema.schema is missing: give an object.",
    ),
    "an unknown kind": (
        b'{"response_format": {"type": "xml"}}',
        "response_format",
        'response_format.type is "xml" and must be "text", "json_object" or "json_schema".',
    ),
    "no object of any kind": (
        b'{"response_format": 5}',
        "response_format",
        'response_format is 5 and must be an object whose type is "json_object", "json_schema" or "text".',
    ),
    "no object inside": (
        b'{"stream_options": []}',
        "stream_options",
        "is an empty list and must be an object with include_usage, continuous_usage_stats and include_obfuscation.",
    ),
    "a bias that is none": (
        b'{"logit_bias": {"7": "a"}}',
        "logit_bias",
        'logit_bias.7 is "a" and must be a number from -100 to 100.',
    ),
    "text for a number": (b'{"n": "3"}', "n", 'n is "3" and must be a whole number from 1 to 128.'),
    "true for a number": (b'{"n": true}', "n", "n is true and must be a whole number from 1 to 128."),
    "a broken number": (b'{"n": 1.5}', "n", "n is 1.5 and must be a whole number from 1 to 128."),
    "NaN": (b'{"temperature": NaN}', "temperature", "temperature is NaN and must be a number from 0 to 100."),
    "infinity": (b'{"top_p": Infinity}', "top_p", "is Infinity and must be a number above 0 and of at most 1."),
    "too hot": (b'{"temperature": 1e9}', "temperature", "is 1000000000.0 and must be a number from 0 to 100."),
    "no name of a rule": (b'{"top_p_rule": "x"}', "top_p_rule", 'must be "hf", "openai" or "fastertransformer".'),
    "one of a list": (b'{"stop": ["a", 5]}', "stop", "stop.1 is 5 and must be a text that is not empty."),
    "a long text for a list": (b'{"stop_token_ids": "' + b"a" * 5000 + b'"}', "stop_token_ids", "aaa... and must be a"),
    "no prompt": (b'{"max_tokens": 1}', "prompt", "prompt is missing: give a text, a list of token ids, a list of up"),
    "a prompt by another name": (b'{"input": "a"}', "input", "input (did you mean prompt?)."),
    "a list of all kinds": (b'{"prompt": [1, "a"]}', "prompt", "prompt is a list of 2 and must be a text, a list of"),
    "an empty list": (b'{"prompt": []}', "prompt", "prompt is an empty list and must be a text, a list of token ids"),
    "a number as prompt": (b'{"prompt": 5}', "prompt", "prompt is 5 and must be a text, a list of token ids"),
    "too many prompts": (b'{"prompt": [' + b",".join([b'"a"'] * 257) + b"]}", "prompt", "256"),
    "an id outside": (b'{"prompt": [9999]}', "prompt", f"0 to {VOCAB_SIZE - 1}"),
    "a negative id": (b'{"prompt": [-1]}', "prompt", ""),
    "an empty stop": (b'{"stop": ""}', "stop", "none of them empty"),
    "an id to stop at outside": (b'{"stop_token_ids": [9999]}', "stop_token_ids", f"0 to {VOCAB_SIZE - 1}"),
    "a biased id outside": (b'{"logit_bias": {"9999": 1}}', "logit_bias", f"0 to {VOCAB_SIZE - 1}"),
    "a biased id of 5000 digits": (b'{"logit_bias": {"' + b"1" * 5000 + b'": 1}}', "logit_bias", "1000"),
    "a biased id of 1000 digits": (b'{"logit_bias": {"' + b"1" * 1000 + b'": 1}}', "logit_bias", "token ids"),
    "a large bias": (b'{"logit_bias": {"5": 101}}', "logit_bias", "100"),
    "best_of below n": (b'{"best_of": 1, "n": 2}', "best_of", "n=2"),
    "best_of in a stream": (b'{"best_of": 2, "stream": true}', "best_of", "stream"),
    "beams in a stream": (b'{"num_beams": 2, "stream": true}', "num_beams", "until it ends: leave out stream"),
    "beams in a stream of nothing": (
        b'{"num_beams": 2, "stream": true, "max_tokens": 0}',
        "num_beams",
        "until it ends: leave out stream",
    ),
    "beams by vLLM's name in a stream of nothing": (
        b'{"use_beam_search": true, "n": 2, "stream": true, "max_tokens": 0}',
        "use_beam_search",
        "use_beam_search searches with n beams, and num_beams is 2, and a search has no text until it ends",
    ),
    "more beams than slots": (
        b'{"num_beams": 5}',
        "num_beams",
        "max_num_seqs is 4: the beams of a search run at once, so lower it.",
    ),
    "beams by vLLM's name": (
        b'{"use_beam_search": true, "n": 2, "temperature": 1}',
        "use_beam_search",
        "use_beam_search searches with n beams, and num_beams=2 is not possible with temperature=1",
    ),
    "the shortest loop": (
        b'{"repetition_detection": {"max_pattern_size": 2, "min_count": 2, "min_pattern_size": 3}}',
        "repetition_detection",
        "min_pattern_size",
    ),
    "a prompt that is not read whole": (
        b'{"prompt": [' + b"1," * 600 + b'1], "overflow": "truncate", "prompt_logprobs": 0}',
        "prompt_logprobs",
        "of its 601 tokens",
    ),
    "a prompt without room behind it": (
        b'{"prompt": [' + b"1," * 600 + b'1], "overflow": "clamp"}',
        "prompt",
        "the prompt has 601 tokens",
    ),
    "many logprobs": (b'{"logprobs": 21}', "logprobs", "20"),
    "many prompt_logprobs": (b'{"prompt_logprobs": 21}', "prompt_logprobs", "20"),
    "an unknown soft prompt": (b'{"soft_prompt": "x"}', "soft_prompt", "'x' and this server has none: leave it out"),
    "no JSON": (b"{", None, "JSON"),
    "nothing": (b"", None, "JSON"),
    "no object": (b'"a"', None, "object"),
    "half a character": (b'{"n": 1, "prompt": ["a", "\\ud800"]}', "prompt", "half a character"),
    "the other half": (b'{"prompt": "\\udc00 a"}', "prompt", "half a character"),
    "half a character in a name": (b'{"\\ud800": 1}', None, "JSON"),
    "half a character behind what is no JSON": (b'{"prompt": "\\ud800", }', None, "JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', None, "JSON"),
    "deep brackets": (b"[" * 100_000, None, "JSON"),
    "a number of 5000 digits": (b'{"seed": ' + b"1" * 5000 + b"}", None, "JSON"),
    "a seed of 65 bits": (b'{"seed": 18446744073709551616}', "seed", ""),
    "a suffix that does not fit": (
        b'{"max_tokens": 500, "best_of": 2, "suffix": "a b c d e f g h i j k"}',
        "suffix",
        "512",
    ),
}

OF_PROMPTS = ("no prompt", "a prompt by another name")  # those of BODIES that are about it
# A path, a field that its form does not have, and the advice about it, if any.
HINTS = (
    ("/v1/completions", "do_sample", "did you mean temperature? 0 is greedy, and all above it draws"),
    ("/v1/completions", "greedy", "did you mean temperature? 0 is greedy, and all above it draws"),
    ("/v1/embeddings", "do_sample", None),
    ("/v1/completions", "load_in_8bit", "dtype is decided when the server starts: leave it out"),
    ("/v1/completions", "dtype", "dtype is decided when the server starts: leave it out"),
    ("/v1/completions", "n_ctx", "max_model_len is decided when the server starts: leave it out"),
    ("/v1/chat/completions", "store", "nothing is stored: leave it out"),
    ("/v1/chat/completions", "metadata", "nothing is stored: leave it out"),
    ("/v1/chat/completions", "functions", "the model calls no functions: leave it out"),
    ("/v1/chat/completions", "tool_choice", "the model calls no functions: leave it out"),
    ("/v1/chat/completions", "prediction", "the model reads and writes texts alone: leave it out"),
    ("/v1/chat/completions", "prompt", "did you mean messages?"),
    ("/v1/completions", "messages", "messages are for /v1/chat/completions"),
    ("/v1/completions", "skip_special_tokens", "special tokens have no text: leave it out"),
    ("/v1/completions", "bos_token_id", "the checkpoint says which token that is: leave it out"),
    ("/v1/completions", "safety_identifier", "did you mean user?"),
    ("/v1/completions", "n_predict", "did you mean max_tokens?"),
    ("/v1/completions", "template", None),
    ("/v1/completions", "details", None),
    ("/v1/chat/completions", "instructions", None),
)

# What the engine advises those who call it, and a client cannot do.
OF_PROGRAMS = re.compile(r"LLM\(|use generate|raise|submit")


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_a_sentence(server, llm, name):
    body, field, part = BODIES[name]
    if body.startswith(b'{"') and name not in OF_PROMPTS and b'"prompt"' not in body:
        body = b'{"prompt": "a", ' + body[1:]
    with llm.engine.wrapped(Gate) as gate:
        reply = server.ask("/v1/completions", body)
        assert gate.num_asked == 0
    assert reply.status == 400
    assert reply.error.keys() == {"message", "type", "param", "code"}
    assert (reply.error["param"], reply.error["type"]) == (field, "invalid_request_error")
    assert part in reply.error["message"]
    assert not OF_PROGRAMS.search(reply.error["message"])
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("path", "field", "hint"), HINTS)
def test_an_unknown_field_is_told_what_is_near_in_meaning_and_nothing_else(server, path, field, hint):
    error = server.ask(path, {field: "a"}).error
    expected = f"unrecognized request argument: {field}{f' ({hint})' if hint else ''}."
    assert (error["message"], error["param"]) == (expected, field)


def test_a_prompt_of_nothing_starts_at_the_beginning_where_it_is_said(server, llm):
    """And only there: one that was forgotten is refused, as OpenAI's description of its API has it."""
    texts = [server.complete(prompt=p, max_tokens=3, temperature=0).json["choices"][0]["text"] for p in (None, "")]
    assert texts == [llm.generate("", SamplingParams(max_tokens=3))[0].outputs[0].text] * 2
    for path, body in (("/generate", {"max_tokens": 1}), ("/score_continuations", {"continuations": ["a"]})):
        error = server.ask(path, body).error
        assert (error["param"], error["message"][:19]) == ("prompt", "prompt is missing: ")
    schemas = server.ask("/openapi.json").json["components"]["schemas"]
    forms = ("CompletionRequest", "GenerateRequest", "ContinuationsRequest")
    assert all("prompt" in schemas[form]["required"] for form in forms)


def test_a_refusal_allows_the_numbers_that_the_description_does(server):
    """True, which is no number anywhere, is refused in a sentence with the bounds of /openapi.json, and no others."""
    document, checked = server.ask("/openapi.json").json, set()
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        if "requestBody" not in methods.get("post", {}):
            continue
        content = methods["post"]["requestBody"]["content"]["application/json"]
        example, form = content["examples"]["usual"]["value"], schemas[content["schema"]["$ref"].rpartition("/")[2]]
        for field, schema in form["properties"].items():
            for value, bounds in no_numbers(schema, schemas):
                sentence = server.ask(path, example | {field: value}).error["message"]
                allowed = sentence.partition(" and must be ")[2].rstrip(".")
                found = re.findall(r"(?<![\w.])-?\d[\d.e+]*", allowed)
                assert "is true and must be a" in sentence, (path, field)
                assert [*map(float, found)] == [*map(float, bounds)], (path, field, sentence)
                checked.add(field)
    assert {"n", "seed", "logit_bias", "logprobs", "top_logprobs", "stop_token_ids", "bad_words_ids"} <= checked
    assert {"tokens", "max_tokens", "top_p", "max_time", "repetition_detection", "dimensions"} <= checked


def no_numbers(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[Any, list[float]]]:
    """Values with true in place of a number, and the bounds that this number has. A description stands for its field's
    bounds where there is one."""
    if "description" in schema:
        return
    if "$ref" in schema:
        yield from no_numbers(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    for option in schema.get("anyOf", ()):
        yield from no_numbers(option, schemas)
    if schema.get("type") in ("integer", "number"):
        names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        yield True, [schema[name] for name in names if name in schema]
    inside = [*schema.get("properties", {}).items(), ("7", schema.get("additionalProperties"))]
    for name, inner in inside:
        if isinstance(inner, dict):
            yield from (({name: value}, bounds) for value, bounds in no_numbers(inner, schemas))
    if "items" in schema:
        yield from (([value], bounds) for value, bounds in no_numbers(schema["items"], schemas))


@pytest.mark.parametrize(
    ("body", "param", "numbers", "ways"),
    [
        ({"prompt": [1] * 600}, "prompt", (601, 600, 1), "Shorten the prompt to at most 511 tokens, or set overflow"),
        (
            {"prompt": [1] * 600, "prompt_logprobs": 0},
            "prompt",
            (601, 600, 1),
            "Shorten the prompt to at most 511 tokens.",
        ),
        ({"prompt": [1] * 600, "max_tokens": 0}, "prompt", (600, 600, 0), "Shorten the prompt to at most 512 tokens."),
        (
            {"prompt": [1] * 500, "max_tokens": 13},
            "max_tokens",
            (513, 500, 13),
            "Shorten the prompt to at most 499 tokens, or set max_tokens to at most 12, or set overflow to truncate.",
        ),
        (
            {"prompt": "", "max_tokens": 2**31 - 1},
            "max_tokens",
            (2**31, 1, 2**31 - 1),
            "Set max_tokens to at most 511, or set overflow to clamp.",
        ),
        (
            {"prompt": [1] * 600, "max_tokens": 600},
            "prompt",
            (1200, 600, 600),
            "Set overflow to slide.",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_the_numbers(server, body, param, numbers, ways):
    error = server.complete(**body).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    said = "has 512 tokens, and {} were asked for: {} in the prompt and {} to generate."
    assert f"{said.format(*numbers)} {ways}" in error["message"]


def test_a_soft_prompt_takes_positions_too(small_demo, tmp_path):
    """In what is refused, and in what fits where nobody says how much is wanted."""
    with LLM(small_demo) as plain:
        vectors = np.zeros((7, plain.config.n_embd), np.float32)
    save_file({"prompt_embeddings": vectors}, tmp_path / "tale.safetensors")
    body = {"prompt": [1] * 500, "soft_prompt": "tale", "ignore_eos": True}
    with LLM(small_demo, soft_prompts={"tale": tmp_path / "tale.safetensors"}) as llm, served(llm) as server:
        assert server.complete(**body).json["usage"]["completion_tokens"] == 512 - 507
        error = server.complete(**body, max_tokens=6).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    ways = "at most 499 tokens beside the soft prompt's, or set max_tokens to at most 5, or set overflow to truncate."
    assert error["message"] == (
        "this model's context has 512 tokens, and 513 were asked for: 507 in the prompt (7 of them a soft prompt's) "
        f"and 6 to generate. Shorten the prompt to {ways}"
    )


def test_what_overflow_allows_is_served(server):
    reply = server.complete(prompt=[262] * 600, max_tokens=2, overflow="truncate", ignore_eos=True)
    assert reply.json["usage"]["completion_tokens"] == 2


def test_a_model_that_is_not_there(server):
    for reply in (server.complete(prompt="a", model="gpt-5"), server.ask("/v1/models/gpt-5")):
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert "demo, other/name" in reply.error["message"]


def test_paths_and_methods_that_are_not_there(server):
    for path, said in (
        ("/completions", "did you mean /v1/completions?"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/models", "did you mean /v1/models?"),
        ("/v1/completion", "did you mean /v1/completions?"),
        ("/frobnicate", "/openapi.json lists all paths."),
    ):
        reply = server.ask(path)
        assert (reply.status, reply.error["message"]) == (404, f"there is no path {path}: {said}")
    for path, allowed, advice in (
        ("/v1/completions", "POST", "use POST."),
        ("/health", "GET, HEAD", "use GET."),
        ("/v1/models/x", "DELETE, GET, HEAD", "use DELETE or GET."),
    ):
        reply = server.ask(path, method="PUT")
        assert reply.status == 405
        assert ", ".join(sorted(reply.headers["allow"].split(", "))) == allowed
        assert reply.error["message"] == f"PUT is not possible here: {advice}"


def test_a_body_that_is_no_json(server):
    reply = server.ask("/v1/completions", b"{}", content_type="text/plain")
    assert (reply.status, reply.error["type"]) == (415, "invalid_request_error")


def test_too_large_a_body_is_refused_before_it_is_read(server):
    """Of the nine gigabytes that are announced none is sent, and one of a few parts is stopped on its way."""
    announced = server.ask("/v1/completions", b"{", content_length="9000000000")
    assert announced.status == 413


def test_too_large_a_body_in_parts(llm):
    with served(llm, max_body_bytes=100) as server:
        assert server.complete(prompt="a" * 50, max_tokens=1).status == 200
        assert server.complete(prompt="a" * 101).status == 413
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", iter([b"[" * 60] * 2), {"content-type": "application/json"})
        assert connection.getresponse().status == 413
        connection.close()


def test_a_full_queue_says_when_to_come_again():
    with LLM("demo", max_num_seqs=1, max_queue=1) as llm, served(llm) as server, llm.engine.wrapped(Gate) as gate:
        futures = [llm.submit([1], SamplingParams(max_tokens=1)) for _ in range(2)]
        reply = server.complete(prompt="a")
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        assert "x-should-retry" not in reply.headers
        assert (reply.error["type"], reply.error["code"]) == ("rate_limit_error", "queue_full")
        full = "max_queue is 1 and the queue holds 1, so there is no room for 1 more: ask again later."
        assert reply.error["message"] == full
        assert server.complete(prompt=["a", "b"]).status == 429
        for max_tokens in (0, 1):
            reply = server.complete(prompt="a", max_tokens=max_tokens, stream=True)
            assert (reply.status, reply.headers.get("retry-after")) == (429, "1")
        gate.allow(100)
        assert [future.result(60).outputs[0].finish_reason for future in futures] == ["length", "length"]
        until(lambda: not llm.engine.scheduler.running)
        # What never fits must not be tried again.
        assert server.complete(prompt=["a", "b", "c"], max_tokens=1).status == 400


def test_prompts_of_one_request_run_all_or_none():
    """Where the second finds no room, the first does not stay behind."""
    with LLM("demo", max_num_seqs=1, max_queue=1) as llm, served(llm) as server, llm.engine.wrapped(Gate) as gate:
        future = llm.submit([1], SamplingParams(max_tokens=1))
        assert server.complete(prompt=["a", "b"]).status == 429
        assert server.complete(prompt=["a", "b"]).status == 429
        gate.allow(1)
        future.result(60)
        until(lambda: not llm.engine.scheduler.running)
        assert not llm.engine.scheduler.waiting


def test_a_bug_is_an_internal_error_and_tells_nothing(llm, monkeypatch):
    with served(llm) as server:
        monkeypatch.setattr(llm, "submit", lambda *_: 1 / 0)
        reply = server.complete(prompt="secret", max_tokens=1)
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        assert b"ZeroDivision" not in reply.body
        assert server.ended()["status"] == 500
