"""Masks of guided texts beside brute force: a token may come exactly if some text that is allowed goes on with it."""

import itertools
import json
import random
import re

import numpy as np
import pytest

from tinygpt import SamplingParams
from tinygpt.engine.grammar_process import Matchers
from tinygpt.engine.guided import Guidance
from tinygpt.engine.sequence import Sample

ALPHABET = ["a", "b", "é", '"']
# All bytes, some strings of them that end within a character, two tokens of the same bytes, one of none, special ones.
TEXTS = [text.encode("latin-1") for text in ["ab", "ab", "aab", "ba", "bb", "Ã©", "aÃ©", "aÃ", "©b"]]
TEXTS += [b"", b'"a', b'a"']
SPECIAL = [b"<|endoftext|>", b"ab"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *TEXTS, *SPECIAL]
V = len(TOKENS)
EOS, OTHER_SPECIAL = V - 2, V - 1
A, B = ord("a"), ord("b")


class SmallTokenizer:
    special_ids = frozenset((EOS, OTHER_SPECIAL))

    def token_bytes(self, token_id):
        return TOKENS[token_id]


@pytest.fixture(scope="module")
def guidance():
    return Guidance(SmallTokenizer(), V)


def guide_of(guidance, **fields):
    params = SamplingParams(**fields)
    return guidance.guide(params.guidance, Sample([], params, 0, frozenset((EOS,))).end_token_ids)


def allowed(guide) -> set[int]:
    mask = guide.mask()
    assert guide.error is None
    assert (mask.added.shape, mask.added.dtype) == ((V,), np.float32)
    assert {*mask.added.tolist()} <= {0.0, -np.inf}
    ids = {*np.flatnonzero(mask.added == 0).tolist()}
    assert mask.count == len(ids)
    return ids


def expected(language: set[bytes], written: bytes) -> set[int]:
    """By brute force: the tokens that some text of the language goes on with, and EOS where one ends."""
    prefixes = {text[:end] for text in language for end in range(len(text) + 1)}
    ids = {i for i in range(EOS) if TOKENS[i] and written + TOKENS[i] in prefixes}
    return ids | {EOS} if written in language else ids


def check_by_brute_force(guidance, language: set[bytes], seed: int, **fields):
    chosen = random.Random(seed)
    for _ in range(6):
        guide = guide_of(guidance, **fields)
        written = b""
        while len(written) < 30:
            ids = allowed(guide)
            assert ids == expected(language, written), (fields, written)
            assert guide.is_over == (ids == {EOS} and written != b"")
            token_id = chosen.choice(sorted(ids))
            if token_id == EOS:
                break
            guide.take(token_id)
            written += TOKENS[token_id]


def random_pattern(chosen: random.Random, depth: int) -> str:
    kind = chosen.choice(["letter", "letter", "class", "sequence", "either", "repeat"]) if depth else "letter"
    if kind == "letter":
        return chosen.choice(ALPHABET)
    if kind == "class":
        return f"[{''.join(chosen.sample(ALPHABET, 2))}]"
    if kind == "repeat":
        low = chosen.randrange(2)
        return f"(?:{random_pattern(chosen, depth - 1)}){{{low},{low + chosen.randrange(2)}}}"
    parts = [random_pattern(chosen, depth - 1) for _ in range(2)]
    return f"(?:{'|'.join(parts)})" if kind == "either" else "".join(parts)


WORDS = ["".join(letters) for length in range(6) for letters in itertools.product(ALPHABET, repeat=length)]


@pytest.mark.parametrize("seed", range(40))
def test_a_regex_lets_come_what_some_match_goes_on_with(guidance, seed):
    chosen = random.Random(seed)
    while True:  # one whose matches are all among the words that are tried
        pattern = random_pattern(chosen, 3)
        language = {word for word in WORDS if re.fullmatch(pattern, word)}
        if language - {""} and not any(len(word) == 5 for word in language):
            break
    check_by_brute_force(guidance, {word.encode() for word in language}, seed, guided_regex=pattern)


@pytest.mark.parametrize(
    "choices", [["a", "ab", "abba"], ["é", 'é"', "aé"], ["ab"], ["a" * 9, "b"], ['"', "\\", "/a\n"]]
)
def test_a_choice_lets_come_one_of_its_texts(guidance, choices):
    check_by_brute_force(guidance, {choice.encode() for choice in choices}, 0, guided_choice=choices)


@pytest.mark.parametrize(
    "grammar", ['start: "a" start "b" | "é"', 'root ::= "a" root "b" | "é"'], ids=["Lark", "GBNF"]
)
def test_a_grammar_counts_what_no_regex_can(guidance, grammar):
    language = {("a" * count + "é" + "b" * count).encode() for count in range(40)}
    check_by_brute_force(guidance, language, 0, guided_grammar=grammar)


def test_json_is_one_space_at_most_between_its_parts(guidance):
    schema = {"type": "array", "items": {"enum": ["a", "ab"]}, "maxItems": 2}
    rows = [items for count in range(3) for items in itertools.product(('"a"', '"ab"'), repeat=count)]
    texts = {"[ ]", *(_spaced(row) for row in rows)} - {"[]"}
    language = {"".join(gaps) for text in texts | {"[ ]"} for gaps in _with_gaps(text)}
    for text in sorted(language)[::7]:
        assert isinstance(json.loads(text), list)
        guide = guide_of(guidance, guided_json=schema)
        for byte in text.encode():
            assert byte in allowed(guide), text
            guide.take(byte)
        assert guide.is_over
    check_by_brute_force(guidance, {text.encode() for text in language}, 1, guided_json=schema)


def _spaced(items) -> str:
    return f"[ {' , '.join(items)} ]" if items else "[ ]"


def _with_gaps(text: str):
    parts = re.split("( )", text)
    return itertools.product(*[("", " ") if part == " " else (part,) for part in parts])


def test_stop_tokens_come_where_the_text_may_end_and_nowhere_else(guidance):
    for fields, ends in (({}, {EOS}), ({"stop_token_ids": [B]}, {EOS, B}), ({"ignore_eos": True}, set())):
        guide = guide_of(guidance, guided_regex="(ab){1,2}", **fields)
        assert allowed(guide).isdisjoint({EOS, B})
        guide.take(A)
        assert (B in allowed(guide)) == ("stop_token_ids" not in fields)  # it is no text any more
        guide.take(TOKENS.index(b"ba"))
        assert (B in allowed(guide)) == ("stop_token_ids" not in fields)
        guide.restart()
        guide.take(TOKENS.index(b"ab"))
        assert allowed(guide) & {EOS, B} == ends
        assert not guide.is_over


def test_special_tokens_come_where_a_grammar_names_them(guidance):
    grammar = 'start: "a" <|endoftext|> "b"'
    guide = guide_of(guidance, guided_grammar=grammar, ignore_eos=True)
    assert allowed(guide) == {A}
    guide.take(A)
    assert allowed(guide) == {EOS}
    guide.take(EOS)
    assert allowed(guide) == {B}


@pytest.mark.parametrize(
    ("grammar", "ends"),
    [
        ('start: "a" <|endoftext|> "b"', set()),
        ('start: "a" (<|endoftext|> "b")?', {EOS}),
        ('start: "a" "b"?', {B, EOS}),
    ],
)
def test_eos_within_a_grammar_is_no_end(guidance, grammar, ends):
    guide = guide_of(guidance, guided_grammar=grammar)
    guide.take(A)
    assert allowed(guide) == ends


def test_a_grammar_that_the_vocabulary_cannot_write_is_an_error():
    class WithoutB(SmallTokenizer):
        def token_bytes(self, token_id):
            return b"" if b"b" in TOKENS[token_id] else TOKENS[token_id]

    guide = guide_of(Guidance(WithoutB(), V), guided_regex="ab")
    guide.take(A)
    assert guide.mask() is None
    assert guide.error == "no token of the vocabulary goes on with the text"


def test_limits_that_others_have_used_up_are_no_error():
    """Matchers of one grammar share what they find out, and the package limits how much that may be."""
    matchers = Matchers([*TOKENS, b""], [EOS, OTHER_SPECIAL])
    assert matchers.read("guided_regex", "a{3}") == matchers.compile() == ""
    matchers.add(0, None)
    assert not matchers.take(0, A)
    state = matchers._samples[0]
    state.matcher.consume_token(B)  # its matcher is of no use any more
    assert state.matcher.is_error()
    packed, error = matchers.mask(0)
    assert {i for i in range(V) if packed[i // 8] >> i % 8 & 1} == {A, *_starts_of("aa")}
    assert not error
    assert [matchers.take(0, A) for _ in range(2)] == [False, True]


def _starts_of(text: str) -> set[int]:
    return {i for i, token in enumerate(TOKENS[:EOS]) if token and text.encode().startswith(token)}
