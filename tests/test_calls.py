"""Calls of the library that take no step, and command lines as they are read, as `tests/data/calls.txt` has them.

After a deliberate change, `python tests/record.py` records the answers again.
"""

import argparse
import pickle
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.gate import Gate
from support.golden_models import write_small_demo
from support.paths import HOW_TO_RECORD, ROOT, VOCAB_SIZE
from support.sampling import halve, sequence_of
from support.tiny_checkpoint import write_checkpoint
from tinygpt import LLM, Edit, RemoteLLM, SamplingParams, wire
from tinygpt.bench.report import significant
from tinygpt.cli import main as cli
from tinygpt.cli.flags import params_of
from tinygpt.engine import prompts
from tinygpt.engine.prompts import Fitted, Prompt, VirtualTokens, check_vocabulary
from tinygpt.engine.sampler import Sampler
from tinygpt.engine.sequence import common_prefix, is_looping
from tinygpt.engine.words import resolve_bad_words
from tinygpt.errors import TinyGPTError
from tinygpt.hardware import thread_count
from tinygpt.kernels import reference
from tinygpt.outputs import ContinuationScore, StreamChunk
from tinygpt.sampling_params import SAMPLING_FIELDS, RepetitionDetection

RECORD = ROOT / "tests" / "data" / "calls.txt"
VARYING = {  # what differs between folders and releases of NumPy, and its stand-in
    r"\S*[/\\](?=tiny\b)": "/here/",
    r"\bnp\.\w+\(([^()]*)\)": r"\1",
    r"[\w.]+\.(?=NoSchema)": "",
}


class Schema:
    """As pydantic's classes do."""

    @staticmethod
    def model_json_schema():
        return {"type": "object"}


class NoSchema:
    """As pydantic's classes do whose fields no schema can describe, with an error of pydantic's own."""

    @staticmethod
    def model_json_schema():
        raise LookupError("no schema")


def kept(**fields: Any) -> Any:
    """Return what params hold of the last of these fields."""
    return getattr(SamplingParams(**fields), [*fields][-1])


def parse(words: str | list[str]) -> argparse.Namespace:
    return cli.parse(words.split() if isinstance(words, str) else words)


def flags(text: str) -> SamplingParams:
    return params_of(parse(f"generate {text}"))


def fit(token_ids: list[int], *limits: Any) -> Fitted:
    """Fit a prompt whose ids below 0, at its beginning, are of a soft prompt."""
    virtual = [token_id for token_id in token_ids if token_id < 0]
    prompt = Prompt(None, token_ids[len(virtual) :])
    return prompts.fit(prompt, VirtualTokens(virtual, None), *limits)


OWN = (kept, parse, flags, fit, Schema, NoSchema)
TYPES = (LLM, RemoteLLM, SamplingParams, RepetitionDetection, Edit, ContinuationScore, StreamChunk, Sampler)
FUNCTIONS = (
    check_vocabulary,
    resolve_bad_words,
    is_looping,
    thread_count,
    significant,
    common_prefix,
    sequence_of,
    halve,
)
NAMES = {each.__name__: each for each in (*OWN, *TYPES, *FUNCTIONS)}
NAMES |= {
    "np": np,
    "reference": reference,
    "wire": wire,
    "pickle": pickle,
    "V": VOCAB_SIZE,
    "NAN": float("nan"),
    "INF": float("inf"),
}
# A function and an array have no place on a command line; --soft-prompt loads a soft prompt and selects it.
NO_FLAGS = {"logits_processors", "prompt_embeds", "soft_prompt", "capture", "edits", "skip_special_tokens"}


def calls() -> Iterator[tuple[str, str]]:
    """Yield each expression of RECORD, and its answer. A line after `> ` has a gap for those that follow."""
    lines = iter(RECORD.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith("> "):
            whole = line[2:]
        elif line and not line.startswith("#"):
            yield whole.replace("{}", line), next(lines).strip()


@contextmanager
def prepared(folder: Path) -> Iterator[dict[str, Any]]:
    """The names of the expressions. No model takes a step."""
    demo = str(write_small_demo(folder))
    with ExitStack() as stack:
        plain = stack.enter_context(LLM(demo, max_num_seqs=8))
        vectors = np.zeros((7, plain.config.n_embd), np.float32)
        save_file({"prompt_embeddings": vectors}, folder / "tale.safetensors")
        soft = LLM(demo, soft_prompts={"tale": folder / "tale.safetensors"})
        tiny = LLM(str(write_checkpoint(folder / "tiny")), max_model_len=4)
        llms = {"plain": plain, "soft": stack.enter_context(soft), "tiny": stack.enter_context(tiny)}
        gates = [stack.enter_context(llm.engine.wrapped(Gate)) for llm in llms.values()]
        yield {**NAMES, **llms, "C": plain.config.n_embd}
        assert [gate.num_asked for gate in gates] == [0, 0, 0]


def answer_of(call: str, names: dict[str, Any]) -> str:
    try:
        value = eval(call, names)
        told = f"{type(value).__name__} {value!r}"
    except (TinyGPTError, TypeError) as error:
        told = f"{type(error).__name__} {getattr(error, 'field', None) or '-'}: {error}"
    for pattern, shown in VARYING.items():
        told = re.sub(pattern, shown, told)
    return told


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    with prepared(tmp_path_factory.mktemp("calls")) as names:
        yield names


CALLS = dict(calls())


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[:60])
def test_an_answer_is_the_one_on_record(names, call):
    assert answer_of(call, names) == CALLS[call], HOW_TO_RECORD


@pytest.mark.parametrize("way", ["SamplingParams", "kept"])
def test_every_field_is_tried(way):
    tried = re.findall(rf"(?m)^{way}\((?:num_beams=2, )?(\w+)=", "\n".join(CALLS))
    assert {*SAMPLING_FIELDS} <= {*tried}


def test_every_field_has_a_flag_that_is_tried():
    told = " ".join(answer for call, answer in CALLS.items() if call.startswith("flags("))
    assert {*SAMPLING_FIELDS} - {*re.findall(r"(\w+)=", told)} == NO_FLAGS


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder, prepared(Path(folder)) as names:
        answers = [answer_of(call, names) for call in CALLS]
    parts = re.sub(r"(?m)^    .*$", lambda _: f"    {answers.pop(0)}", RECORD.read_text(encoding="utf-8"))
    RECORD.write_text(parts, encoding="utf-8")
