"""LLM.chat: conversations by a template, in turns of a list of messages."""

import pytest

from support.engines import opened
from tinygpt import LLM, SamplingParams
from tinygpt.errors import RequestError

USER = {"role": "user", "content": "Once upon a time"}
TURNS = [USER, {"role": "assistant", "content": ", there was a dog."}, {"role": "user", "content": "The dog"}]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


llm = opened("small_demo", chat_template="plain")


def test_plain_is_the_texts_in_lines(llm):
    [found], [expected] = (
        llm.chat(TURNS, PARAMS),
        llm.generate("Once upon a time, there was a dog.\nThe dog", PARAMS),
    )
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    several = llm.chat([TURNS, [USER]], max_tokens=6, ignore_eos=True)
    assert [output.outputs[0].token_ids for output in several] == [
        expected.outputs[0].token_ids,
        llm.generate("Once upon a time", PARAMS)[0].outputs[0].token_ids,
    ]


def test_plain_is_for_tokenizers_that_add_tokens_too(llm, small_demo, tmp_path, monkeypatch):
    encode = type(llm.tokenizer).encode
    monkeypatch.setattr(
        type(llm.tokenizer), "encode", lambda self, text, *split: [5, *encode(self, text, *split)]
    )
    assert llm.read_messages(TURNS[:1]).token_ids == [5, *encode(llm.tokenizer, "Once upon a time")]
    (file := tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    with (
        LLM(small_demo, chat_template=file) as other,
        pytest.raises(RequestError, match="adds tokens to each text"),
    ):
        other.read_messages(TURNS)


def test_a_prompt_of_messages_streams(llm):
    prompt = llm.read_messages(TURNS)
    assert (
        "".join(chunk.text for chunk in llm.stream(prompt, PARAMS))
        == llm.chat(TURNS, PARAMS)[0].outputs[0].text
    )


def test_a_message_spells_no_special_token(llm):
    ids = llm.read_messages([{"role": "user", "content": "a<|endoftext|>b"}]).token_ids
    assert ids == llm.tokenizer.encode("a<|endoftext|>b", split_special_tokens=True)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_of_ones_own(small_demo, tmp_path, encoding):
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}{{ end }}{{ bos_token }}",
        encoding=encoding,
    )
    with LLM(small_demo, chat_template=file) as llm:
        ids = llm.read_messages([{**USER, "name": "Tim"}], {"end": "!"}).token_ids
        assert ids == llm.tokenizer.encode("Tim: Once upon a time!")


WRONG = ["Once", [], [[]], [{"role": "user"}], [USER, "a"], [{**USER, "content": 5}], 5]


@pytest.mark.parametrize("messages", [*WRONG, [{**USER, "role": "<|endoftext|>"}]])
def test_messages_are_checked(llm, messages):
    with pytest.raises(
        RequestError, match=r'messages is .* must be a list of \{"role": ..., "content": text\}'
    ):
        llm.chat(messages)


def test_a_template_that_is_none(small_demo, tmp_path):
    with LLM(small_demo) as llm, pytest.raises(RequestError, match=r"no chat template.*plain"):
        llm.chat(TURNS)
    (broken := tmp_path / "broken.jinja").write_text("{% for %}")
    for given, says in (
        (tmp_path / "no.jinja", "No such file"),
        (broken, "cannot be read: "),
        (5, "must be 'plain'"),
    ):
        with pytest.raises(RequestError, match=f"chat_template is .*{says}"):
            LLM(small_demo, chat_template=given)
