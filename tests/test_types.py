"""Type checkers see the public names: right uses pass, and each wrong one is an error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from record import KEYWORDS, PARAMS, annotated

import tinygpt
from support.paths import HOW_TO_RECORD, ROOT

USES = """
from collections.abc import Iterator
from pathlib import Path
import numpy as np
from typing_extensions import assert_type
import tinygpt
from tinygpt import LLM, AsyncLLM, PromptType, RemoteLLM, SamplingParams
from tinygpt import LM  # wrong
from tinygpt.outputs import RequestOutput, StreamChunk
from tinygpt.text.tokenizer import Tokenizer

llm = LLM(Path("demo"), max_num_seqs=2)
assert_type(llm, LLM)
assert_type(llm.generate("x"), list[RequestOutput])
assert_type(llm.generate("x")[0].outputs[0].text, str)
assert_type(llm.stream("x", SamplingParams(max_tokens=3)), Iterator[StreamChunk])
assert_type(llm.submit("x").result(), RequestOutput)
assert_type(llm.tokenizer, Tokenizer)
assert_type(llm.get_tokenizer().encode("x"), list[int])
assert_type(RemoteLLM().generate(["x"]), list[RequestOutput])
assert_type(tinygpt.warmup(), int)
ids, dicts = [[1, 2], [3]], [{"prompt": "x"}, {"prompt": "y"}]
llm.generate(ids)
llm.generate(dicts, [SamplingParams(), SamplingParams(stop="x")])
llm.generate(np.array([1, 2]))
llm.generate(llm.read_prompt("x"), max_tokens=3)
prompt: PromptType = {"prompt_token_ids": [1]}
class Pet:
    @classmethod
    def model_json_schema(cls) -> dict[str, object]: return {}
SamplingParams(guided_json=Pet, logit_bias={5: 1}, stop_token_ids={3, 4}, bad_words_ids=[[1, 2]])
llm.generate(3)  # wrong
llm.generate([3.5])  # wrong
llm.generate("x", 7)  # wrong
llm.generate("x", max_tokens=8, stop=["a"], guided_json=Pet)
llm.generate("x", max_tokenz=8)  # wrong
llm.generate("x", max_tokens="8")  # wrong
llm.stream("x", tempreature=1.0)  # wrong
llm.submit("x", nonsense=3)  # wrong
RemoteLLM().generate("x", nonsense=3)  # wrong
LLM(nonsense=3)  # wrong
LLM(max_num_seqs="two")  # wrong
SamplingParams(nonsense=3)  # wrong
SamplingParams(max_tokens="seven")  # wrong
SamplingParams().nonsense  # wrong
tinygpt.nonsense  # wrong

async def main() -> None:
    assert_type(await AsyncLLM(llm).generate("x"), RequestOutput)
"""


def mypy(file: Path) -> set[int]:
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent", str(file)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    result = subprocess.run(command, cwd=file.parent, env=environment, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stderr
    return {int(line.split(":")[1]) for line in result.stdout.splitlines() if ": error:" in line}


def basedpyright(file: Path) -> set[int]:
    config = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)], "include": [file.name]}
    file.with_name("pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(file.parent)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}


@pytest.mark.parametrize("checker", [mypy, basedpyright])
def test_a_type_checker_sees_the_public_names(checker, tmp_path):
    pytest.importorskip(checker.__name__)
    file = tmp_path / "uses.py"
    file.write_text(USES)
    assert checker(file) == {i for i, line in enumerate(USES.splitlines(), 1) if line.endswith("# wrong")}


def test_the_keywords_are_the_fields():
    keywords = annotated(KEYWORDS, "SamplingKeywords")
    assert keywords == annotated(PARAMS, "SamplingParams"), HOW_TO_RECORD


def test_tab_completes_the_public_names():
    assert dir(tinygpt) == sorted(tinygpt.__all__)
    assert all(getattr(tinygpt, name) is not None for name in dir(tinygpt))
    with pytest.raises(AttributeError, match="no attribute 'LM'"):
        _ = tinygpt.LM
