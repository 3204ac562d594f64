"""The LLM of files that need no other."""

import pytest

from tinygpt import LLM


@pytest.fixture(scope="module")
def llm(small_demo):
    with LLM(small_demo, max_num_seqs=4) as llm:
        yield llm
