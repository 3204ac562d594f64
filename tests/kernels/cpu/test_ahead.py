"""What a second process compiles ahead is what a step needs: nothing that it finds is compiled again."""

import json
import os
import subprocess
import sys

import pytest

AHEAD = "from tinygpt.cli.loading import compile_share; compile_share({!r}, None)"
STEP = """
import json
from tinygpt import LLM, SamplingParams
from tinygpt.kernels.compiling import ANNOUNCER

class Names(list):
    begin = list.append
    end = staticmethod(lambda: None)

with ANNOUNCER.told(names := Names()), LLM(dtype={!r}) as llm:
    llm.generate([[0]], SamplingParams(max_tokens=1))
print(json.dumps(names))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("float32", "float32"), ("int8", "bfloat16")])
def test_a_step_finds_attention_compiled(dtype, kv_cache_dtype, tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def python(code: str) -> str:
        return subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True).stdout

    python(AHEAD.format(kv_cache_dtype))
    compiled = json.loads(python(STEP.format(dtype)))
    assert {"take_steps", "layer_norm", "for_each_tile"} <= set(compiled)
    assert not {"attend", "write_kv"} & set(compiled)
