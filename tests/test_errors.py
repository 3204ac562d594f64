"""RequestError: a sentence, and the field, value and allowed values that it is made of."""

import pickle

import pytest

from tinygpt.errors import MAX_WORD, RequestError, invalid, suggest


def test_an_error_says_field_value_and_allowed():
    error = invalid("temperature", -1, "at least 0")
    assert str(error) == "temperature is -1 and must be at least 0."
    assert (error.field, error.value, error.allowed) == ("temperature", -1, "at least 0")
    assert str(RequestError("the prompt is empty.")) == "the prompt is empty."
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("name", "sentence"), [("--top-k", "--top-k is 0 and must be"), (None, "is 0 and must be")]
)
def test_another_name_keeps_the_rest(name, sentence):
    error = invalid("top_k", 0, "at least 1")
    error.work_started = True
    renamed = error.named(name)
    assert (str(renamed), renamed.field) == (f"{sentence} at least 1.", name)
    assert (renamed.value, renamed.allowed, renamed.work_started) == (0, "at least 1", True)


def test_an_error_crosses_processes():
    error = pickle.loads(pickle.dumps(invalid("top_k", 0, "at least 1")))
    assert (str(error), error.field, error.value) == ("top_k is 0 and must be at least 1.", "top_k", 0)


@pytest.mark.parametrize(("size", "is_compared"), [(MAX_WORD, True), (MAX_WORD + 1, False)])
def test_a_name_longer_than_any_word_is_not_compared(size, is_compared):
    assert bool(suggest("a" * size, ["a" * (size + 1)])) == is_compared
