"""Names matched as `re` matches them, and in work that is bounded."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygpt.weights.adapters import name_pattern
from tinygpt.weights.adapters.name_pattern import NamePatterns, TooMuchWork

NAMES = (
    "transformer.h.0.attn.c_attn",
    "transformer.h.11.mlp.c_proj",
    "h.1.attn.c_proj",
    "transformer.wte",
    "lm_head",
    "model.decoder.block.0.layer.0.SelfAttention.q",
    "model.layers.31.self_attn.q_proj",
    "model.language_model.layers.2.mlp.gate_proj",
)
# As PEFT's documentation, its tests and published adapters have them; the last as PEFT composes one.
EXPRESSIONS = (
    r".*\.(q|v)_proj",
    r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
    r"^(?!.*lm_head).*$",
    r".*\.h\.\d+\.(attn|mlp)\.c_(attn|proj)",
    r"^transformer\.h\.([0-9]|1[01])\.attn\.c_attn$",
    r"[a-z.]+\d{1,2}\.[^.]*\.c_proj",
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp).*?(?:q_proj|gate_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))",
    r"model\.layers\.(?:[0-9]|[12]\d|3[01])\.self_attn\.(?:q|k|v|o)_proj",
    r".*(?<!lm)_head",
    r"(.*\.)?(c_attn|c_proj)$",
    r"(^|.*\.)wte($|\..*)",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_expressions_that_adapters_have(expression, name):
    assert NamePatterns().fullmatch(expression, name) == (re.fullmatch(expression, name) is not None)
    assert NamePatterns().match(expression, name) == (re.match(expression, name) is not None)


CHARACTERS = st.sampled_from(
    ["a", "b", ".", r"\.", "1", r"\d", r"\w", r"\W", r"\D", r"\s", "_", "[ab]", "[^a.]", "[a-z_]", r"[\d.]"]
)
ATOMS = CHARACTERS | st.sampled_from(["^", "$", r"\b", r"\A", r"\Z", "", "(?=a)", "(?!b)", "(?<=a)", "(?<!1)"])


def larger(inner):
    quantifiers = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?", "{,2}", "{2,}"])
    groups = inner.map("({})".format) | inner.map("(?:{})".format)
    return (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda branches: f"(?:{'|'.join(branches)})")
        | st.builds("{}{}".format, groups | CHARACTERS, quantifiers)
        | inner.map("(?={})".format)
        | inner.map("(?!{})".format)
    )


@given(expression=st.recursive(ATOMS, larger, max_leaves=6), text=st.text("ab.1_\n", min_size=1, max_size=8))
def test_any_expression_matches_as_re_does(expression, text):
    patterns = NamePatterns()
    assert patterns.fullmatch(expression, text) == (re.fullmatch(expression, text) is not None)
    assert patterns.match(expression, text) == (re.match(expression, text) is not None)


CATASTROPHIC = (
    r"(a+)+b",
    r"(a|a)*b",
    r"(a*)*b",
    r"(.*a){20}b",
    r"((a?){30}){30}b",
    r"(?:a{1,1000}){1,1000}b",
    r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)b",
    r"(?=(a+)+b)a*",
    r"(?!(a+)+b)(a|aa)+",
    "(" * 60 + "a" + ")*" * 60 + "b",
)


@pytest.mark.parametrize("expression", CATASTROPHIC)
def test_no_expression_takes_more_than_its_share_of_work(expression):
    """Steps are counted: a budget that sixty names of forty characters share is not spent by any of them."""
    patterns = NamePatterns()
    for length in range(40, 100):
        assert not patterns.fullmatch(expression, "a" * length + "c")
    assert patterns._work.left > 0


def test_work_beyond_the_budget_is_refused():
    patterns = NamePatterns(max_steps=100)
    assert not patterns.fullmatch("a*b", "a" * 40)
    with pytest.raises(TooMuchWork):
        patterns.fullmatch("(?:a?b?)*" * 100 + "c", "ab" * 20)
    with pytest.raises(TooMuchWork):
        NamePatterns().parse("a" * 200_000)


@pytest.mark.parametrize("expression", ["(?:){500}" * 20, ".*" + "(?=)" * 50])
def test_going_through_nothing_again_and_again_is_work(expression):
    with pytest.raises(TooMuchWork):
        NamePatterns(max_steps=5000).fullmatch(expression, "a" * 490)


def test_the_words_of_a_name_are_looked_for_once(monkeypatch):
    looked_at = []
    monkeypatch.setattr(name_pattern, "_is_word", lambda character: looked_at.append(character) or character != ".")
    assert NamePatterns().fullmatch(r"(?:(?:\b){20}){20}ab(?:\b|\B)\.c", "ab.c")
    assert len(looked_at) == len("ab.c")


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        (r"(a)\1", "GROUPREF"),
        (r"(a)?(?(1)b|c)", "GROUPREF_EXISTS"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("(?x) a", "flags"),
        ("(", "missing"),
        ("*a", "nothing to repeat"),
        ("(" * 90_000, "recursion"),
        ("a{99999999999999999999}", "repetition"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(expression, named):
    with pytest.raises(ValueError, match=named):
        NamePatterns().fullmatch(expression, "a")
