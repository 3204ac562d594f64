"""/v1/completions compared with the library: the same tokens, texts and log probabilities, whole and in streams."""

import threading

import pytest

from support.engines import SAMPLED, STREAMED, WAYS
from support.gate import noting
from support.paths import DEMO, VOCAB_SIZE
from support.tables import fields, rows
from tinygpt.engine.input_processor import InputProcessor
from tinygpt.server.replies import TokenNames
from tinygpt.text.tokenizer import Tokenizer

PROMPT = "Once upon a time"


@pytest.mark.parametrize("name", WAYS)
def test_a_reply_is_what_generate_gives(server, llm, name):
    [output] = llm.generate(PROMPT, **WAYS[name])
    reply = server.complete(prompt=PROMPT, return_token_ids=True, **WAYS[name])
    assert reply.status == 200
    for choice, sample in zip(reply.choices, output.outputs, strict=True):
        for name in ("index", "text", "finish_reason", "stop_reason", "token_ids"):
            assert choice[name] == getattr(sample, name)
    assert all(choice["prompt_token_ids"] == output.prompt_token_ids for choice in reply.choices)


def uncached(usage):
    """What two equal requests have both: the second finds more in the cache."""
    return usage | {"prompt_tokens_details": None}


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_is_the_reply_in_pieces(server, name):
    asked = {"prompt": PROMPT, "logprobs": 2, "return_token_ids": True, **WAYS[name]}
    whole = server.complete(**asked)
    stream = server.complete(**asked, stream=True, stream_options={"include_usage": True})
    assert stream.events[-1]["choices"] == []
    assert uncached(stream.events[-1]["usage"]) == uncached(whole.json["usage"])
    for choice in whole.choices:
        parts = [part for part in stream.parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        assert not any("stop_reason" in part for part in parts[:-1])
        for field, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][field]] == values


def test_a_plain_stream_has_an_event_for_each_text(server):
    asked = {"prompt": PROMPT, **SAMPLED}
    stream = server.complete(**asked, stream=True)
    events, parts = stream.events, stream.parts
    assert "".join(part["text"] for part in parts) == server.complete(**asked).choices[0]["text"]
    assert {(event["id"], event["object"], len(event["choices"])) for event in events} == {
        (events[0]["id"], "text_completion", 1)
    }
    assert {tuple(part) for part in parts[:-1]} == {("index", "text", "logprobs", "finish_reason")}


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echo_is_what_score_gives(server, llm, max_tokens):
    """Of the whole text if BOS is sent in front of it; else its first token alone follows BOS."""
    bos = llm.config.bos_token_id
    ids = llm.tokenizer.encode(PROMPT)
    asked = {"echo": True, "logprobs": 0, "max_tokens": max_tokens}
    [whole, first, rest] = [*llm.score("", [PROMPT, ids[:1]]), *llm.score(ids[:1], [ids[1:]])]
    echoed = server.complete(prompt=[bos, *ids], **asked).choices[0]["logprobs"]["token_logprobs"]
    assert echoed[1 : 1 + len(ids)] == whole.logprobs
    echoed = server.complete(prompt=PROMPT, **asked).choices[0]["logprobs"]["token_logprobs"]
    assert echoed[: len(ids)] == first.logprobs + rest.logprobs


def test_log_probabilities_are_the_engines(server, llm):
    [output] = llm.generate(PROMPT, **SAMPLED, logprobs=3, prompt_logprobs=3)
    found = server.complete(prompt=PROMPT, logprobs=3, echo=True, **SAMPLED).choices[0]["logprobs"]
    [sample] = output.outputs
    ids = output.prompt_token_ids + sample.token_ids
    entries = [*output.prompt_logprobs[1:], *sample.logprobs]
    assert found["tokens"] == [server.api.names.name(i) for i in ids]
    assert found["token_logprobs"][1:] == [entry[i] for i, entry in zip(ids[1:], entries, strict=True)]
    names = [[server.api.names.name(i) for i in entry] for entry in entries]
    assert [list(top) for top in found["top_logprobs"][1:]] == names
    assert [list(top.values()) for top in found["top_logprobs"][1:]] == [
        list(entry.values()) for entry in entries
    ]
    # Nothing comes before the first token but BOS.
    bos = llm.config.bos_token_id
    [output] = llm.generate([[bos, ids[0]]], max_tokens=1, prompt_logprobs=0)
    assert found["token_logprobs"][0] == output.prompt_logprobs[1][ids[0]]


def test_offsets_count_the_characters_of_the_text(server):
    choice = server.complete(prompt="A café", echo=True, logprobs=0, **WAYS["greedy"]).choices[0]
    found = choice["logprobs"]
    for offset, name in zip(found["text_offset"], found["tokens"], strict=True):
        shown = choice["text"][offset:].lstrip(
            "\ufffd"
        )  # of half a character, known as such by what follows it
        assert name.startswith("bytes:") or shown.startswith(name)


def test_halves_of_a_character_have_names_of_their_own(server, llm):
    halves = [i for i in range(llm.config.vocab_size) if "\ufffd" in llm.tokenizer.decode([i])]
    assert len(halves) > 100
    names = {server.api.names.name(i) for i in halves}
    assert len(names) == len(halves)
    others = [i for i in range(llm.config.vocab_size) if i not in halves]
    assert [*map(server.api.names.name, others)] == [llm.tokenizer.decode([i]) for i in others]
    assert all(name.startswith("bytes:\\x") for name in names)
    [choice] = server.complete(prompt=[halves[0]], echo=True, logprobs=0, max_tokens=0).choices
    assert choice["logprobs"]["tokens"] == [server.api.names.name(halves[0])]
    asked = {"prompt": "Once", "max_tokens": 3, "logprobs": 0, "seed": 1, "allowed_token_ids": halves}
    whole = server.complete(**asked).choices[0]["logprobs"]["tokens"]
    parts = server.complete(**asked, stream=True).parts  # also of a token without a text
    assert [name for part in parts for name in part["logprobs"]["tokens"]] == whole


def test_several_prompts_of_every_kind(server, llm):
    texts = ["Once", "The king"]
    ids = [[46, 1364], [262]]
    asked = {"temperature": 0.7, "seed": 3, "n": 2, "max_tokens": 4}
    for prompts in (texts, ids):
        outputs = llm.generate(prompts, **asked)
        expected = [sample.text for output in outputs for sample in output.outputs]
        choices = server.complete(prompt=prompts, **asked).choices
        assert [(choice["index"], choice["text"]) for choice in choices] == [*enumerate(expected)]
        found = [""] * 4
        for part in server.complete(prompt=prompts, **asked, stream=True).parts:
            found[part["index"]] += part["text"]
        assert found == expected


def test_no_prompt_begins_at_bos(server, llm):
    [output] = llm.generate("", max_tokens=4)
    for prompt in (None, ""):
        reply = server.complete(prompt=prompt, max_tokens=4, temperature=0, echo=True, logprobs=0).json
        assert reply["choices"][0]["text"] == output.outputs[0].text
        assert len(reply["choices"][0]["logprobs"]["tokens"]) == 4
        assert reply["usage"]["prompt_tokens"] == 1


def test_special_tokens_in_texts_are_text_unless_the_client_says_so(server, llm):
    text = "The end.<|endoftext|>Once"
    split, whole = (llm.read_prompt(text, is_split).token_ids for is_split in (True, False))
    assert len(split) > len(whole)
    for asked, ids in (({}, split), ({"split_special_tokens": False}, whole)):
        choice = server.complete(prompt=text, max_tokens=1, return_token_ids=True, **asked).choices[0]
        assert choice["prompt_token_ids"] == ids


@pytest.mark.parametrize("text", [PROMPT, "O"])
def test_max_tokens_0_says_what_the_model_thinks_of_the_prompt(server, text):
    more = server.complete(prompt=text, echo=True, logprobs=2, max_tokens=1, temperature=0).choices[0]
    choice = server.complete(prompt=text, echo=True, logprobs=2, max_tokens=0).choices[0]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    for field, values in choice["logprobs"].items():
        assert values == more["logprobs"][field][: len(values)]
    assert len(choice["logprobs"]["tokens"]) == len(more["logprobs"]["tokens"]) - 1
    [event] = server.complete(prompt=text, echo=True, logprobs=2, max_tokens=0, stream=True).events
    assert event["choices"] == [choice]


def test_max_tokens_0_takes_as_many_tokens_as_there_are_positions(server, llm):
    ids = [262] * llm.max_model_len
    found = server.complete(prompt=ids, echo=True, logprobs=0, max_tokens=0).choices[0]["logprobs"]
    assert len(found["token_logprobs"]) == len(ids)
    assert server.complete(prompt=ids, max_tokens=1).error["code"] == "context_length_exceeded"


def test_by_default_16_tokens_or_what_fits(server, llm):
    ids = [262] * (llm.max_model_len - 5)
    assert server.complete(prompt="Once", ignore_eos=True).json["usage"]["completion_tokens"] == 16
    assert server.complete(prompt=ids, ignore_eos=True).json["usage"]["completion_tokens"] == 5


# What a request may ask for in other words than SamplingParams.
IN_OTHER_WORDS = rows("""
{"use_beam_search": true, "n": 3} | {"num_beams": 3, "n": 3}
{"temperature": 0.9, "seed": 7, "n": 2, "best_of": 0} | {"temperature": 0.9, "seed": 7, "n": 2}
{"seed": -2} | {"temperature": 1, "seed": 18446744073709551614}
{"seed": 9223372036854775808} | {"temperature": 1, "seed": 9223372036854775808}
{"seed": 5.0} | {"temperature": 1, "seed": 5}
{"temperature": 0, "logit_bias": {"262": 100}} | {"allowed_token_ids": [262]}
{"temperature": 0, "logit_bias": {" the": 100}} | {"allowed_token_ids": [262]}
{"n_predict": 3, "repeat_penalty": 1.3, "random_seed": 1, "topk": 5} | {"max_tokens": 3, "repetition_penalty": 1.3,
  "seed": 1, "top_k": 5, "temperature": 1}
{"do_sample": false} | {"temperature": 0}
""")


@pytest.mark.parametrize(("asked", "params"), IN_OTHER_WORDS)
def test_a_request_in_other_words_is_the_same(server, llm, asked, params):
    [output] = llm.generate(PROMPT, **{"max_tokens": 6, **params})
    most = {} if "n_predict" in asked else {"max_tokens": 6}
    choices = server.complete(prompt=PROMPT, **most, **asked).choices
    assert [choice["text"] for choice in choices] == [sample.text for sample in output.outputs]


def test_a_suffix_changes_nothing(server):
    """GPT-2 cannot write towards a given end."""
    plain = server.complete(prompt=PROMPT, **SAMPLED).choices[0]["text"]
    assert server.complete(prompt=PROMPT, **SAMPLED, suffix=" said the king.").choices[0]["text"] == plain


def test_prompt_logprobs_in_vllms_words(server, llm):
    [output] = llm.generate(PROMPT, prompt_logprobs=2, max_tokens=1)
    found = server.complete(prompt=PROMPT, prompt_logprobs=2, max_tokens=1).choices[0]["prompt_logprobs"]
    assert found[0] is None
    parts = server.complete(prompt=PROMPT, prompt_logprobs=2, max_tokens=2, n=2, stream=True).parts
    told = [part["prompt_logprobs"] for part in parts if "prompt_logprobs" in part]
    assert told == [found, found]  # of each choice
    for entry, expected in zip(found[1:], output.prompt_logprobs[1:], strict=True):
        assert {int(i): told["logprob"] for i, told in entry.items()} == expected
        assert [told["rank"] for told in entry.values()][:2] == [1, 2]
        assert all(told["decoded_token"] == llm.tokenizer.decode([int(i)]) for i, told in entry.items())


def test_candidates_have_ids_where_ids_are_asked_for(server, llm):
    """JavaScript reorders keys that are numbers, so clients look up ids by name."""
    asked = {"prompt": PROMPT, "max_tokens": 4, "seed": 1, "logprobs": 6, "echo": True}
    found = server.complete(**asked, return_token_ids=True).choices[0]["logprobs"]
    assert len(found["top_token_ids"]) == len(llm.tokenizer.encode(PROMPT)) + 4
    for names, ids in zip(found["top_logprobs"], found["top_token_ids"], strict=True):
        assert names.keys() == ids.keys()
        assert [llm.tokenizer.decode([i]) for i in ids.values()] == [*ids]
    assert "top_token_ids" not in server.complete(**asked).body.decode()


# What leaves most tokens no probability, of which the logarithm would be no number of JSON.
IMPROBABLE = fields(f"""
a low temperature: temperature=1e-30, top_k=0, top_p=1.0
allowed tokens: allowed_token_ids=[262, 263]
top-k: top_k=2
suppressed tokens: suppress_tokens=[*range(1, {VOCAB_SIZE} - 100)]
""")


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("name", IMPROBABLE)
def test_log_probabilities_end_at_minus_9999_as_in_vllm(server, llm, name, mode):
    asked = {"logprobs": 5, "logprobs_mode": mode, "prompt_logprobs": 3, **SAMPLED, **IMPROBABLE[name]}
    [sample] = llm.generate(PROMPT, **asked)[0].outputs
    expected = [[max(value, -9999.0) for value in entry.values()] for entry in sample.logprobs]
    assert any(-9999.0 in values for values in expected) == (
        (name, mode) == ("a low temperature", "processed")
    )
    for echo in (False, True):
        whole = server.complete(prompt=PROMPT, echo=echo, **asked).choices[0]
        assert [[*top.values()] for top in whole["logprobs"]["top_logprobs"][-len(expected) :]] == expected
        parts = server.complete(prompt=PROMPT, echo=echo, stream=True, **asked).parts
        for field in ("top_logprobs", "token_logprobs"):
            values = [value for part in parts for value in part["logprobs"][field]]
            assert values == whole["logprobs"][field]


def test_no_two_ids_of_a_padded_vocabulary_share_a_name():
    names = TokenNames(Tokenizer.from_folder(DEMO))
    assert len({names.name(i) for i in range(8200)}) == 8200
    assert names.name(8199) == "token_id:8199"
    assert names.bytes_of(8199) == b""


def test_vocabularies_are_decoded_outside_of_the_loop(server, monkeypatch):
    is_in_loop = lambda *_: threading.current_thread() is server.thread  # noqa: E731
    in_loop = noting(monkeypatch, InputProcessor, "_breakers", is_in_loop)
    assert server.complete(prompt="Once", max_tokens=2, dry_multiplier=1).status == 200
    assert in_loop == [False]
