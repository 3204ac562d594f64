"""The library's sentences, as the shell and JSON would have them."""

import pytest

from tinygpt import SamplingParams
from tinygpt.cli.flags.sampling import DEFAULTS, FLAG_OF
from tinygpt.cli.output.wording import for_json, for_shell
from tinygpt.errors import RequestError


def refusal(**fields) -> str:
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    return str(error.value)


def test_nobody_types_none():
    """Nor Python's quotes, lists and capitals; each field that a flag sets is tried."""
    for name in FLAG_OF:
        library = refusal(**{name: object()})
        assert library.startswith(f"{name}=")
        sentence = for_shell(library, FLAG_OF)
        assert sentence.startswith(f"{FLAG_OF[name]} ")
        assert not any(word in sentence for word in ("None", "a dict", "RepetitionDetection"))
        assert "None" not in for_json(library, DEFAULTS)


@pytest.mark.parametrize(
    ("library", "shell", "json"),
    [
        ("top_k=-2 is not possible.", "--top-k -2 is not possible.", '"top_k": -2 is not possible.'),
        ("set overflow='slide'.", "set --overflow slide.", 'set "overflow": "slide".'),
        ("stop='' is not possible", "--stop '' is not possible", '"stop": "" is not possible'),
        ("early_stopping=True, and so on", "--early-stopping true, and so on", '"early_stopping": true, and so on'),
        ("n=2: set max_tokens to 3", "--n 2: set --max-tokens to 3", '"n": 2: set max_tokens to 3'),
        ("stop_token_ids=[1, 2] is", "--stop-token-ids 1,2 is", '"stop_token_ids": [1, 2] is'),
        ("stop='a\"b'.", "--stop 'a\"b'.", '"stop": "a\\"b".'),
        ("stop='it\\'s \"a\"' is", "--stop 'it\\'s \"a\"' is", '"stop": "it\'s \\"a\\"" is'),
        ('stop="it\'s": is', '--stop "it\'s": is', '"stop": "it\'s": is'),
        ("stop=['a\"b', 3] is", "--stop 'a\"b',3 is", '"stop": ["a\\"b", 3] is'),
        ("stop=[1, ...] is", "--stop 1,... is", '"stop": [1, ...] is'),
        ("stop='a\\...b' is", "--stop 'a\\...b' is", "\"stop\": 'a\\...b' is"),
        ("stop=['a]b'] is", "--stop 'a]b' is", '"stop": ["a]b"] is'),
        ("logit_bias=[(11, 999.0), (13, -2.0)] is", "--logit-bias 11=999.0,13=-2.0 is", None),
        ("logit_bias={'11': 999.0} is", "--logit-bias 999.0 is", '"logit_bias": {"11": 999.0} is'),
        ("bad_words_ids=[[1, 2], [3]] is", "--bad-words-ids 1,2 3 is", '"bad_words_ids": [[1, 2], [3]] is'),
        ("seed is 5 and must be 6, or None.", "--seed is 5 and must be 6.", "seed is 5 and must be 6, or null."),
        ("a seed, a stop, n or more", "a seed, a stop, n or more", "a seed, a stop, n or more"),
        ("./max_tokens/x and 'top_k'", "./max_tokens/x and 'top_k'", "./max_tokens/x and 'top_k'"),
        ("max_num_seqs is 5", "max_num_seqs is 5", "max_num_seqs is 5"),
    ],
)
def test_a_sentence_in_three_languages(library, shell, json):
    assert for_shell(library, FLAG_OF) == shell
    assert json is None or for_json(library, DEFAULTS) == json


def test_without_flags_nothing_changes():
    assert for_shell("top_k=-2, or None", {}) == "top_k=-2, or None"
