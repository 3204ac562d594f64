"""Guided texts are what was asked for, with everything else that a request may ask, alone and beside others."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.engines import opened, sample_of
from support.gate import noting
from support.paths import EOS
from support.tables import fields
from tinygpt import LLM, SamplingParams
from tinygpt.engine import grammar_process, guided
from tinygpt.engine.guided import Guidance, Mask
from tinygpt.errors import RequestError, TinyGPTError

pytest.importorskip("llguidance", reason="llguidance, the extra `guided`, is not installed")

PROMPT = "Once upon a time"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "mood": {"enum": ["glad", "sad", None]},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
SUM = """
start: term (SIGN term){0,2}
term: NUMBER | "(" NUMBER (SIGN NUMBER){0,2} ")"
SIGN: "+" | "-"
NUMBER: /[1-9][0-9]{0,2}/
"""
REGEX = r"[A-Z][a-zé]{2,9}(, [a-z]{1,7}){1,3}\."


def is_person(text: str) -> bool:
    person = json.loads(text)
    names = [person["name"], *person["friends"]]
    return (
        person.keys() - {"mood"} == {"name", "age", "friends"}
        and type(person["age"]) is int
        and 0 <= person["age"] <= 150
        and all(isinstance(name, str) for name in names)
        and len(person["name"]) <= 6
        and len(person["friends"]) <= 2
        and person.get("mood") in ("glad", "sad", None)
    )


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[0-9+()-]+", text) is not None and isinstance(eval(text), int)


# Each with what tells whether a text is what it asks for.
GUIDED = {
    "choice": (
        {"guided_choice": ["a king", "a kingdom", "nobody"]},
        lambda text: text in ("a king", "a kingdom", "nobody"),
    ),
    "regex": ({"guided_regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    "json": ({"guided_json": PERSON}, is_person),
    "grammar": ({"guided_grammar": SUM}, is_sum),
}
WAYS = fields("""
greedy:
sampled: temperature=1.0, seed=5
few tokens: temperature=1.5, seed=6, top_k=3, top_p=0.9, min_p=0.01
penalties: repetition_penalty=1.3, frequency_penalty=1.0, no_repeat_ngram_size=4
bias: logit_bias={34: 20.0, 11: -20.0}, suppress_tokens=[262]
several: temperature=1.0, seed=7, n=3
the best: temperature=1.0, seed=7, n=2, best_of=4
beams: num_beams=3, n=2
groups of beams: num_beams=4, n=2, num_beam_groups=2, diversity_penalty=1.0
past the end of text: ignore_eos=True
beams past the end of text: num_beams=3, ignore_eos=True
at least: min_tokens=4
drafts: prompt_lookup_num_tokens=4
sliding: overflow="slide"
many: temperature=2.0, seed=6, n=8
""")


llm = opened("small_demo", max_num_seqs=8)


def params_of(kind: str, **fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, **GUIDED[kind][0], **fields})


def check(kind: str, outputs) -> None:
    for output in outputs:
        assert output.finish_reason == "stop", (output.text, output.stop_reason)
        assert GUIDED[kind][1](output.text), output.text


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", GUIDED)
def test_every_text_is_what_was_asked_for(llm, kind, way):
    outputs = llm.generate(PROMPT, params_of(kind, **WAYS[way]))[0].outputs
    check(kind, outputs)
    assert len({output.text for output in outputs}) == len(outputs) or kind == "choice"


def test_a_broken_mask_is_seen(llm, monkeypatch):
    """What the tests above rely on: with the mask of another token, something else is written."""
    spread = guided._spread
    monkeypatch.setattr(guided, "_spread", lambda *a, **k: Mask(np.roll(spread(*a, **k).added, 1), 1))
    monkeypatch.setattr(llm._inputs, "_guidance", Guidance(llm.tokenizer, llm.config.vocab_size))
    with pytest.raises(TinyGPTError, match="cannot be followed at position"):
        llm.generate(PROMPT, params_of("regex"))


def key(output):
    return [(o.text, o.token_ids, o.logprobs, o.finish_reason, o.stop_reason) for o in output.outputs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neighbours_change_nothing(llm, temperature):
    fields = {"temperature": temperature, "seed": 3, "logprobs": 2}
    params = [params_of(kind, **fields) for kind in GUIDED]
    params += [SamplingParams(max_tokens=30, **fields), SamplingParams(max_tokens=30)]
    prompts = [f"Chapter {i}." for i in range(len(params))]
    alone = [llm.generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    together = llm.generate(prompts, params)
    assert [key(output) for output in together] == [key(output) for output in alone]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_the_token_is_that_of_the_masked_logits(llm, mode):
    choices = ["x", "yz", "q"]
    params = SamplingParams(guided_choice=choices, logprobs=-1, logprobs_mode=mode)
    output = sample_of(llm, PROMPT, params)
    logits = llm.logits(llm.tokenizer.encode(PROMPT))[-1].astype(np.float64)  # (V,)
    may_come = [i for i in range(EOS) if any(c.startswith(llm.tokenizer.decode([i])) for c in choices)]
    assert output.token_ids[0] == max(may_come, key=lambda i: logits[i])
    reported = output.logprobs[0]
    ids = range(len(logits)) if mode == "raw" else may_come
    assert {*reported} == {*ids}
    total = np.log(np.exp(logits[[*ids]]).sum())
    assert all(abs(reported[i] - (logits[i] - total)) < 1e-4 for i in may_come)


@pytest.mark.parametrize("kind", GUIDED)
@pytest.mark.usefixtures("single_steps")
def test_drafts_change_nothing_but_the_number_of_steps(llm, kind, monkeypatch, small_demo):
    plain = llm.generate(PROMPT, params_of(kind))[0]
    with LLM(small_demo, draft_model=small_demo) as fast:
        steps = noting(monkeypatch, fast.engine._steps, "step")
        assert key(fast.generate(PROMPT, params_of(kind))[0]) == key(plain)
    assert len(steps) <= len(plain.outputs[0].token_ids) / 3 + 3  # five tokens each: drafts are guided too


def test_a_function_brings_back_no_token(llm):
    def favour_the(prompt_token_ids, new_token_ids, scores):
        scores[:] = -1
        scores[262] = 100
        return scores

    check("regex", llm.generate(PROMPT, params_of("regex", logits_processors=favour_the))[0].outputs)


def test_a_text_that_can_only_end_ends(llm):
    """Whatever min_tokens and ignore_eos say, and with no step more."""
    for more in ({}, {"min_tokens": 20}, {"ignore_eos": True}, {"max_tokens": 1}):
        output = sample_of(llm, PROMPT, SamplingParams(**{"max_tokens": 20, **more}, guided_choice=["e"]))
        assert (output.text, len(output.token_ids)) == ("e", 1)
        assert (output.finish_reason, output.stop_reason) == ("stop", "grammar")


def test_min_tokens_holds_where_the_text_may_go_on(llm):
    favour_the_end = {"logit_bias": {llm.config.eos_token_ids[0]: 100.0}}
    for min_tokens in (0, 6):
        params = SamplingParams(guided_regex="[a-z ]*", min_tokens=min_tokens, **favour_the_end)
        output = sample_of(llm, PROMPT, params)
        assert len(output.token_ids) == min_tokens + 1
        assert output.stop_reason == llm.config.eos_token_ids[0]


def test_controls_that_leave_nothing_are_an_error(llm):
    params = SamplingParams(guided_regex="[0-9]+", allowed_token_ids=[llm.tokenizer.encode("a")[0]])
    with pytest.raises(TinyGPTError, match=r"leave no token to choose.*what guides the text"):
        llm.generate(PROMPT, params)


# Why what is given is impossible.
IMPOSSIBLE = {
    "guided_regex": {
        "(": "unclosed group",
        "a(?=b)": "look-around",
        "a" * 70_000: "70000 characters, and at most 65536",
        "(?:)": "it allows no text but the empty one",
        "(?:a{0}|(?:))": "it allows no text but the empty one",
    },
    "guided_json": {
        '{"type": "strin"}': "Invalid type: strin",
        '{"type": "string", "minLength": 3, "maxLength": 2}': "Unsatisfiable",
        '{"type": "array", "uniqueItems": true}': r'Unimplemented keys: \["uniqueItems"\]',
    },
    "guided_grammar": {
        "start: b": "line 1: unknown name: .b.",
        "root ::= (": r"Expected '\)' at line 1",
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(1500)): "more than 1000 rules",
        "start: <|nothing|>": "unknown special token",
        'start: ""': "it allows no text but the empty one",
        'start: x\nx: "" | /(?:)/': "it allows no text but the empty one",
    },
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_grammar_is_refused_before_any_work(llm, monkeypatch, name):
    monkeypatch.setattr(llm.engine, "submit", None)
    for given, why in IMPOSSIBLE[name].items():
        params = SamplingParams(**{name: given})
        says = f"^{name} is .*, which is not possible: .*{why}[^\n]*\\.$"
        with pytest.raises(RequestError, match=says) as error:
            llm.generate("a", params)
        assert (error.value.field, error.value.value, error.value.allowed) == (*params.guidance, None)
        assert len(str(error.value)) < 500


# Compiled in the process, these end it or take minutes.
MULTIPLE = {"type": "integer", "multipleOf": 99_999_999}
HOSTILE = {
    "a multiple": {"guided_json": MULTIPLE},
    "multiples together": {
        "guided_json": {"allOf": [{**MULTIPLE, "multipleOf": number} for number in (9973, 9967)]}
    },
    "a multiple in a grammar": {"guided_grammar": f"start: %json {json.dumps(MULTIPLE)}"},
    "patterns together": {
        "guided_json": {"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(1, 40)]}
    },
    "names by pattern": {"guided_json": {"patternProperties": {f"^{i:04}$": {} for i in range(300)}}},
    "empty lines": {"guided_grammar": "root ::= a" + "\n" * 60_000},
    "optional parts": {"guided_regex": "a?" * 20_000 + "a" * 20_000},
}


@pytest.fixture
def impatient(monkeypatch):
    for module in (grammar_process, guided):
        monkeypatch.setattr(module, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(grammar_process, "STEP_SECONDS", 0.05)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("impatient")
def test_a_grammar_without_end_is_refused_before_any_work(llm, name, monkeypatch):
    monkeypatch.setattr(llm.engine, "submit", None)
    limit = r"which is not possible: it takes more than 0\.05 s or 256 MiB\.$"
    with pytest.raises(RequestError, match=limit):
        llm.generate(PROMPT, **HOSTILE[name])


def test_a_step_without_end_ends_its_request_alone(llm, monkeypatch):
    good = [params_of(kind, temperature=1.0, seed=5) for kind in GUIDED] + [SamplingParams(max_tokens=40)]
    alone = [llm.generate(PROMPT, params)[0] for params in good]
    hostile = SamplingParams(max_tokens=60, guided_regex="x{30}" + "a?" * 10_000 + "a" * 10_000)
    monkeypatch.setattr(grammar_process, "STEP_SECONDS", 0.1)
    found = dict(llm.generate_as_finished([PROMPT] * 6, [hostile, *good], return_exceptions=True))
    why = r"cannot be followed at position \d+: it takes more than 0\.1 s or 256 MiB\.$"
    assert re.search(why, str(found[0]))
    assert [key(found[i + 1]) for i in range(len(good))] == [key(output) for output in alone]


def test_a_grammar_is_compiled_again_if_its_process_has_ended(llm):
    expected = key(llm.generate(PROMPT, params_of("regex"))[0])
    llm._inputs._guidance.check(*params_of("regex").guidance)._channel.shutdown(socket.SHUT_RDWR)
    with pytest.raises(TinyGPTError, match="cannot be followed at position"):
        llm.generate(PROMPT, params_of("regex"))
    assert key(llm.generate(PROMPT, params_of("regex"))[0]) == expected


def test_a_grammar_that_was_too_slow_is_tried_again(llm, monkeypatch):
    """A loaded machine, or the end of the grammar's process, says nothing of the grammar."""
    params = SamplingParams(guided_regex="(once|twice) upon", max_tokens=8)

    def killed(*args):
        raise grammar_process.LimitError("takes more than 1 s or 256 MiB")

    with monkeypatch.context() as patch:
        patch.setattr(grammar_process.Grammar, "ask", killed)
        with pytest.raises(RequestError, match="takes more than"):
            llm.generate(PROMPT, params)
    assert llm.generate(PROMPT, params)[0].outputs[0].text


def test_a_thread_that_submits_asks_nothing_of_a_compiled_grammar(llm, monkeypatch):
    """Ctrl-C there, which breaks off an answer, would end the grammar of other requests."""
    expected = key(llm.generate(PROMPT, params_of("regex"))[0])
    threads = noting(monkeypatch, grammar_process.Grammar, "ask", lambda *_: threading.current_thread())
    assert key(llm.generate(PROMPT, params_of("regex"))[0]) == expected
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="a list of a process's limits is Linux's")
def test_the_memory_of_a_grammar_is_limited(llm):
    llm.generate(PROMPT, params_of("regex"))
    server = llm._inputs._guidance._server._process.pid
    limits = Path(f"/proc/{server}/limits").read_text()
    assert re.search(rf"Max address space +{grammar_process.MAX_BYTES} ", limits)


def test_without_a_guide_no_process_is_started(monkeypatch):
    monkeypatch.setattr(grammar_process.GrammarServer, "_start", None)
    with LLM("demo") as llm:
        llm.generate(PROMPT, max_tokens=2, stop=["x"], logprobs=1)


def test_thousands_of_choices(llm):
    choices = [f"text {i}" for i in range(5000)]
    for seed in range(3):
        params = SamplingParams(max_tokens=30, guided_choice=choices, temperature=2.0, seed=seed)
        assert sample_of(llm, PROMPT, params).text in choices


def test_requests_of_one_grammar_compile_it_once(monkeypatch):
    compiled = noting(monkeypatch, Guidance, "_compile", lambda *given: given[1:])
    with LLM("demo") as llm:
        for temperature in (0.0, 1.0):
            llm.generate([PROMPT] * 3, replace(params_of("choice"), temperature=temperature))
        llm.generate(PROMPT, params_of("regex"))
    assert compiled == [params_of("choice").guidance, params_of("regex").guidance]


def test_first_requests_at_once_make_one_guidance(monkeypatch):
    make, made = guided.Guidance, []

    def slow(*given):
        made.append(given)
        time.sleep(0.2)
        return make(*given)

    monkeypatch.setattr(guided, "Guidance", slow)
    with LLM("demo") as llm, ThreadPoolExecutor(4) as pool:
        outputs = [*pool.map(lambda _: llm.generate(PROMPT, params_of("choice")), range(4))]
    assert len(outputs) == 4
    assert len(made) == 1


def test_a_request_under_way_starts_no_grammar_process_after_close(small_demo):
    with LLM(small_demo, device="reference") as llm:
        inputs = llm._inputs
    with pytest.raises(RequestError, match="this LLM has been closed"):
        inputs.request(PROMPT, SamplingParams(guided_regex="[a-z]+"))
