"""OPT and BLOOM over HTTP: the replies are the library's outputs."""

import pytest

from support.family_models import write_characters, write_family
from support.serving import served
from tinygpt import LLM, SamplingParams

PROMPTS = ["Once upon a time", "t", "the old king said"]


@pytest.mark.parametrize("name", ["opt", "bloom-6"])
def test_a_reply_is_what_generate_gives(name, tmp_path):
    asked = {"max_tokens": 6, "temperature": 0.8, "seed": 3}
    folder = write_characters(write_family(tmp_path, name))
    with LLM(str(folder), device="reference") as llm, served(llm) as server:
        expected = [output.outputs[0] for output in llm.generate(PROMPTS, SamplingParams(**asked))]
        choices = server.complete(prompt=PROMPTS, return_token_ids=True, **asked).json["choices"]
        events = server.complete(prompt=PROMPTS[0], stream=True, **asked).events
    assert [choice["token_ids"] for choice in choices] == [sample.token_ids for sample in expected]
    assert [choice["text"] for choice in choices] == [sample.text for sample in expected]
    assert "".join(event["choices"][0]["text"] for event in events) == expected[0].text
