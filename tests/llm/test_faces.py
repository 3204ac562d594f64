"""What a user meets at the prompt: keywords as SamplingParams, prompt dicts, a bar, reprs, the tokenizer."""

import asyncio
import copy
import inspect
import io
import pickle
import sys
from dataclasses import fields

import numpy as np
import pytest

from support.engines import sample_of
from support.paths import EOS, VOCAB_SIZE
from tinygpt import LLM, AsyncLLM, RemoteLLM, SamplingParams
from tinygpt.llm_args import LLMArgs
from tinygpt.outputs import ranked

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def ids(llm):
    return llm.tokenizer.encode(PROMPT)


def text_of(output) -> str:
    return output.outputs[0].text


def test_keywords_are_one_sampling_params(llm):
    fields = {"max_tokens": 5, "temperature": 1.0, "seed": 3}
    expected = text_of(llm.generate(PROMPT, SamplingParams(**fields))[0])
    assert [text_of(output) for output in llm.generate([PROMPT, PROMPT], **fields)] == [expected] * 2
    assert "".join(chunk.text for chunk in llm.stream(PROMPT, **fields)) == expected
    assert text_of(llm.submit(PROMPT, **fields).result()) == expected
    session = llm.session()
    session.extend(PROMPT)
    other = session.fork()
    assert text_of(session.generate(**fields)) == expected
    assert "".join(chunk.text for chunk in other.stream(**fields)) == expected

    async def both():
        front = AsyncLLM(llm)
        chunks = [chunk.text async for chunk in front.stream(PROMPT, **fields)]
        return text_of(await front.generate(PROMPT, **fields)), "".join(chunks)

    assert asyncio.run(both()) == (expected, expected)


def test_help_explains_each_argument():
    lines = LLM.__init__.__doc__.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [field.name for field in fields(LLMArgs)]
    assert [*inspect.signature(LLM).parameters] == [field.name for field in fields(LLMArgs)]
    assert lines[4] == "max_num_seqs: samples that run at once; others wait."


def test_other_programs_names_of_arguments(llm):
    params = SamplingParams(max_tokens=3)
    expected = text_of(llm.generate(PROMPT, params)[0])
    assert text_of(llm.generate(PROMPT, sampling_params=params)[0]) == expected
    assert text_of(llm.generate(PROMPT, max_new_tokens=3, do_sample=False)[0]) == expected
    with LLM(
        model_name_or_path="random:tiny",
        n_ctx=32,
        torch_dtype="torch.bfloat16",
        device_map="auto",
        enforce_eager=True,
    ) as other:
        assert (other.max_model_len, other.dtype) == (32, "bfloat16")


def test_prompt_dicts_stand_for_prompts_everywhere(llm, ids):
    for given in ({"prompt": PROMPT}, {"prompt_token_ids": ids}):
        assert text_of(llm.generate(given, max_tokens=3)[0]) == text_of(llm.generate(PROMPT, max_tokens=3)[0])
        assert np.array_equal(llm.embed([given]), llm.embed([ids]))
        assert np.array_equal(llm.logits(given), llm.logits(ids))
        assert np.array_equal(llm.hidden_states(given), llm.hidden_states(ids))
    session = llm.session()
    session.extend({"prompt": PROMPT})
    session.extend({"prompt_token_ids": ids})
    assert session.token_ids == ids + ids


def test_a_bar_counts_finished_prompts_where_it_is_wanted(llm, monkeypatch):
    llm.generate([PROMPT] * 2, max_tokens=1)  # compiles, and says so on stderr
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)

    def shown(prompts, **options) -> str:
        before = len(terminal.getvalue())
        llm.generate(prompts, max_tokens=1, **options)
        return terminal.getvalue()[before:]

    assert "2/2" in shown([PROMPT] * 2)
    assert shown(PROMPT) == ""  # a single one is soon there
    assert "1/1" in shown(PROMPT, use_tqdm=True)
    assert shown([PROMPT] * 2, use_tqdm=False) == ""
    terminal.isatty = lambda: False
    assert shown([PROMPT] * 2) == ""
    assert "2/2" in shown([PROMPT] * 2, use_tqdm=True)


def test_reprs_say_what_matters():
    llm = LLM("demo", max_num_seqs=2)
    assert repr(llm) == "LLM('demo', dtype='float32', device='cpu', max_num_seqs=2, max_model_len=512)"
    (output,) = llm.generate(PROMPT, max_tokens=4, stop="e")
    sample = output.outputs[0]
    assert repr(sample) == (
        f"CompletionOutput(index=0, text={sample.text!r}, token_ids=<{len(sample.token_ids)} tokens>, "
        "finish_reason='stop', stop_reason='e')"
    )
    count = len(output.prompt_token_ids)
    assert (
        repr(output)
        == f"RequestOutput(prompt='{PROMPT}', prompt_token_ids=<{count} tokens>, outputs=[{sample!r}])"
    )
    (long,) = llm.generate(PROMPT * 20, max_tokens=1)
    assert f"prompt={(PROMPT * 20)[:80] + '...'!r}" in repr(long)
    session = llm.session()
    session.extend(PROMPT)
    assert repr(session) == f"Session({count} tokens)"
    session.close()
    assert repr(session) == "Session(closed)"
    assert repr(llm.tokenizer) == f"Tokenizer({VOCAB_SIZE} tokens, eos_token_id={EOS})"
    llm.close()
    assert repr(llm) == "LLM('demo', dtype='float32', device='cpu', max_num_seqs=2, closed)"
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(max_tokens=3, stop=["a"])) == "SamplingParams(max_tokens=3, stop=('a',))"


@pytest.mark.parametrize("send", [pickle.dumps, copy.deepcopy])
def test_what_belongs_to_a_process_is_not_pickled_or_copied(llm, send):
    make = "make one in each process: "
    for what, instead in (
        (llm, rf"{make}LLM\(...\)"),
        (llm.generate, rf"{make}LLM\(...\)"),
        (AsyncLLM(llm), rf"{make}AsyncLLM\(...\)"),
        (object.__new__(RemoteLLM), rf"{make}RemoteLLM\(...\)"),  # without a server
        (llm.session(), r"call fork\(\), or extend a session of another process by its token_ids"),
        (llm.submit("Once", max_tokens=1), r"send its result\(\)"),
    ):
        with pytest.raises(
            TypeError, match=f"cannot pickle or copy this .*, which .* its process: {instead}\\.$"
        ):
            send(what)


def test_an_output_with_activations_is_pickled(llm):
    names = ["blocks.0.hook_resid_pre", "blocks.0.attn.hook_result"]  # of which one is computed from weights
    (output,) = llm.generate(PROMPT, max_tokens=2, capture=names)
    activations = output.outputs[0].activations
    sent = pickle.loads(pickle.dumps(output)).outputs[0].activations
    assert [*sent] == names
    for name in names:
        np.testing.assert_array_equal(sent[name], activations[name])


def test_the_tokenizer_is_called_as_hugging_faces(llm, ids):
    tokenizer = llm.tokenizer
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.eos_token_id == EOS
    assert tokenizer(PROMPT) == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert tokenizer([PROMPT, ""]) == {"input_ids": [ids, []], "attention_mask": [[1] * len(ids), []]}
    split = tokenizer("<|endoftext|>", split_special_tokens=True)["input_ids"]
    assert split == tokenizer.encode("<|endoftext|>", split_special_tokens=True) != [EOS]


@pytest.mark.parametrize("count", [0, 1, 3, -1])
def test_log_probabilities_with_rank_and_text_as_vllms(llm, ids, count):
    params = {"max_tokens": 4, "temperature": 1.0, "seed": 3}
    sample = sample_of(llm, ids, logprobs=count, **params)
    [everything] = llm.generate(ids, logprobs=-1, **params)
    entries = zip(sample.logprobs, everything.outputs[0].logprobs, strict=True)
    for entry, whole in entries:
        found = ranked(entry, count, llm.tokenizer.decode)
        assert {i: each.logprob for i, each in found.items()} == entry
        assert all(each.decoded_token == llm.tokenizer.decode([i]) for i, each in found.items())
        before = {i: sum((value, -j) > (entry[i], -i) for j, value in whole.items()) for i in [*entry][:20]}
        expected = {i: 1 + n if n < count or count < 0 else None for i, n in before.items()}
        assert {i: found[i].rank for i in expected} == expected
