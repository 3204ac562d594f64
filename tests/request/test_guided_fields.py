"""The guided fields: how they are kept, what is refused, and what is said where the package is missing."""

import subprocess
import sys

import pytest

from tinygpt import LLM, SamplingParams
from tinygpt.errors import RequestError

ALL = {"guided_choice": ["a"], "guided_regex": "a", "guided_json": {}, "guided_grammar": 'start: "a"'}


class Schema:
    """As pydantic's classes do."""

    @staticmethod
    def model_json_schema():
        return {"type": "object"}


def test_fields_are_kept_so_that_params_can_be_compared():
    assert SamplingParams(guided_choice=iter(["a", "é"])).guided_choice == ("a", "é")
    params = [
        SamplingParams(guided_json=given) for given in ({"type": "object"}, '{"type":"object"}', Schema)
    ]
    assert {hash(p) for p in params} == {hash(params[0])}
    assert params[0] == params[1] == params[2]
    assert params[0].guidance == ("guided_json", '{"type": "object"}')
    assert SamplingParams().guidance is None


NOTHING_STARTS = """
import subprocess, sys, threading
subprocess.Popen = None
from tinygpt import SamplingParams
SamplingParams(**{fields!r})
assert threading.active_count() == 1
assert "llguidance" not in sys.modules
"""


@pytest.mark.parametrize("name", ALL)
def test_params_start_no_process_and_import_no_package(name):
    code = NOTHING_STARTS.format(fields={name: ALL[name]})
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def llm(small_demo):
    with LLM(small_demo) as llm:
        yield llm


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"guided_regex": "("}, "unclosed group"),
        ({"guided_regex": "a(?=b)"}, "look-around"),
        ({"guided_regex": "a" * 70_000}, "70000 characters, and at most 65536"),
        ({"guided_json": {"type": "strin"}}, "Invalid type: strin"),
        ({"guided_json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: \\["uniqueItems"\\]'),
        ({"guided_grammar": "start: b"}, "line 1: unknown name: .b."),
        ({"guided_grammar": "root ::= ("}, "Expected '\\)' at line 1"),
        (
            {"guided_grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(1500))},
            "more than 1000 rules",
        ),
    ],
)
def test_an_impossible_grammar_is_refused_before_any_work(llm, monkeypatch, fields, why):
    pytest.importorskip("llguidance", reason="llguidance, the extra `guided`, is not installed")
    monkeypatch.setattr(llm.engine, "submit", None)
    (name,) = fields
    with pytest.raises(
        RequestError, match=f"^{name} is .*, which is not possible: .*{why}[^\n]*\\.$"
    ) as error:
        llm.generate("a", SamplingParams(**fields))
    kept = SamplingParams(**fields).guidance[1]
    assert (error.value.field, error.value.value, error.value.allowed) == (name, kept, None)
    assert len(str(error.value)) < 500


def test_a_text_is_guided_by_one_field():
    with pytest.raises(RequestError, match="guided_regex and guided_json are given together"):
        SamplingParams(guided_regex="a", guided_json={})


@pytest.mark.parametrize("name", ALL)
def test_the_missing_package_is_named_before_any_work(name, monkeypatch, small_demo):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    install = 'pip install "tinygpt[guided]"'
    sentence = f"{name} needs the package llguidance, which is not installed: {install}."
    with LLM(small_demo) as llm:
        monkeypatch.setattr(llm.engine, "submit", None)
        with pytest.raises(RequestError) as error:
            llm.generate("a", SamplingParams(**{name: ALL[name]}))
        assert str(error.value) == sentence
