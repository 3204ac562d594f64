"""Live parity with transformers (torch, CPU, float32): logits to 1e-4 and the same greedy tokens."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from support.factory import DTYPES, FORMS, PREFIXES, Case, Greedy, Recipe, greedy, make_case, prompt_of
from support.paths import DEMO
from tinygpt import LLM, SamplingParams
from tinygpt.config import ACTIVATIONS
from tinygpt.weights.architectures.config_fields import BOOLEANS

TOLERANCE = 1e-4  # absolute, on logits whose std is a few units
LEAD = 2 * TOLERANCE  # a best logit that leads by less may rightly differ: such a recipe needs another seed
DEVICES = ("cpu", "reference")
NEW_TOKENS = 64  # of a greedy run
PROMPT_TOKENS = 5  # of prompt_of(case)
SIZES = ("n_embd", "n_head", "n_layer", "vocab_size", "n_positions")


def recipe(name: str, sizes: tuple[int, int, int, int, int], **rest) -> Recipe:
    """`sizes` are SIZES' in their order; `rest` are fields of Recipe or of config.json."""
    own = {key: rest.pop(key) for key in list(rest) if key in Recipe.__dataclass_fields__}
    return Recipe(name, {**dict(zip(SIZES, sizes, strict=True)), **rest}, **own)


RECIPES = (
    recipe("plain", (64, 4, 2, 257, 96)),
    recipe("one-layer", (32, 2, 1, 97, 70), prefix=""),
    recipe("one-head", (48, 1, 2, 101, 73), prefix="model."),
    recipe("head-size-1", (6, 6, 2, 97, 70), seed=26, dtype="float16"),
    recipe("head-size-5", (35, 7, 3, 97, 131), seed=2, form="bin"),
    recipe("head-size-7", (21, 3, 2, 131, 77), seed=3, form="safetensors-sharded", dtype="bfloat16"),
    recipe("head-size-20", (60, 3, 2, 257, 90), form="bin-legacy", prefix=""),
    recipe("head-size-64", (128, 2, 2, 503, 150), form="bin-sharded"),
    recipe("head-size-80", (160, 2, 2, 211, 75), prefix="module.transformer."),
    recipe("head-size-128", (256, 2, 1, 509, 81), seed=1, dtype="bfloat16", form="bin"),
    recipe("head-size-300", (300, 1, 1, 97, 69), form="bin-legacy", dtype="bfloat16"),
    recipe("odd-width", (17, 1, 2, 97, 71), seed=3, n_ctx=True),
    recipe("one-token-wider", (65, 5, 2, 129, 129), seed=1, dtype="float16", form="safetensors-sharded"),
    recipe("vocab-50304", (16, 4, 1, 50304, 70), eos="one"),
    recipe("vocab-3", (16, 2, 2, 3, 74), seed=1),
    recipe("short", (20, 4, 2, 113, 16), seed=1, eos="several"),
    recipe(
        "inner-wide",
        (40, 5, 2, 149, 80),
        activation_function="gelu_python_tanh",
        n_inner=333,
        form="bin",
        dtype="float16",
    ),
    recipe("inner-narrow", (40, 5, 2, 149, 80), seed=1, n_inner=7, prefix="_orig_mod.transformer."),
    recipe("gelu", (36, 3, 2, 181, 72), activation_function="gelu", buffers=True, n_ctx=True),
    recipe("gelu-tanh", (36, 3, 2, 181, 72), activation_function="gelu_pytorch_tanh", prefix="_orig_mod."),
    recipe("gelu-fast", (36, 3, 2, 181, 72), activation_function="gelu_fast", eos="several"),
    recipe(
        "quick-gelu",
        (36, 3, 2, 181, 72),
        seed=1,
        activation_function="quick_gelu",
        prefix="model.transformer.",
    ),
    recipe("relu", (36, 3, 2, 181, 72), seed=1, activation_function="relu", form="bin", buffers=True),
    recipe("silu", (36, 3, 2, 181, 72), seed=1, activation_function="silu", eos="one"),
    recipe("swish", (36, 3, 2, 181, 72), seed=1, activation_function="swish", prefix="module."),
    recipe("tanh", (36, 3, 2, 181, 72), activation_function="tanh", form="bin-legacy", buffers=True),
    recipe("scores-unscaled", (48, 4, 2, 193, 85), scale_attn_weights=False),
    recipe(
        "scores-by-layer",
        (48, 4, 3, 193, 85),
        seed=2,
        scale_attn_by_inverse_layer_idx=True,
        form="bin-sharded",
        dtype="float16",
        buffers=True,
    ),
    recipe(
        "scores-both",
        (48, 4, 3, 193, 85),
        seed=2,
        scale_attn_weights=False,
        eos="several",
        scale_attn_by_inverse_layer_idx=True,
    ),
    recipe("upcast", (48, 4, 2, 193, 85), reorder_and_upcast_attn=True, buffers=True, n_ctx=True),
    recipe(
        "mistral-like",
        (80, 4, 3, 211, 100),
        reorder_and_upcast_attn=True,
        eos="one",
        scale_attn_by_inverse_layer_idx=True,
    ),
    recipe("epsilon-large", (32, 4, 2, 157, 78), layer_norm_epsilon=0.1, dtype="bfloat16"),
    recipe("epsilon-small", (32, 4, 2, 157, 78), activation_function="gelu_python", layer_norm_epsilon=1e-12),
    recipe("untied", (44, 4, 2, 223, 90), activation_function="gelu_accurate", tie_word_embeddings=False),
    recipe(
        "untied-bin",
        (44, 4, 2, 223, 90),
        tie_word_embeddings=False,
        form="bin-sharded",
        dtype="bfloat16",
        prefix="module.transformer.",
        eos="several",
    ),
)


@pytest.fixture(scope="module", params=RECIPES, ids=lambda recipe: recipe.name)
def case(request, tmp_path_factory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param.name))


def test_recipes_cover_every_field():
    fields = [recipe.fields for recipe in RECIPES]
    assert sum(f["n_positions"] >= PROMPT_TOKENS + NEW_TOKENS for f in fields) >= 25
    assert {f.get("activation_function", "gelu_new") for f in fields} == set(ACTIVATIONS)
    for name in BOOLEANS:
        default = name in ("scale_attn_weights", "tie_word_embeddings")
        assert {f.get(name, default) for f in fields} == {True, False}, name
    assert {recipe.form for recipe in RECIPES} == set(FORMS)
    assert {recipe.dtype for recipe in RECIPES} == set(DTYPES)
    assert {recipe.prefix for recipe in RECIPES} == set(PREFIXES)
    assert {recipe.eos for recipe in RECIPES} == {"none", "one", "several"}
    assert any(f["n_embd"] % 16 for f in fields)
    assert any(f["n_embd"] // f["n_head"] == 64 for f in fields)


@pytest.mark.parametrize("device", DEVICES)
def test_logits(case, device):
    ids = case.random_ids(case.model.config.n_positions)
    with LLM(str(case.folder), device=device) as llm:
        assert_same_logits(llm, case.model, ids)


@pytest.fixture(scope="module")
def greedy_runs(case) -> dict[SamplingParams, Greedy]:
    """transformers' tokens, past any EOS; of a recipe with EOS ids, also up to the first."""
    prompt = prompt_of(case)
    assert len(prompt) == PROMPT_TOKENS
    count = min(NEW_TOKENS, case.model.config.n_positions - PROMPT_TOKENS)
    with without_eos(case.model):
        runs = {SamplingParams(max_tokens=count, ignore_eos=True): greedy(case.model, prompt, count)}
    if case.recipe.eos != "none":
        runs[SamplingParams(max_tokens=count)] = greedy(case.model, prompt, count)
    return runs


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_tokens(case, device, greedy_runs):
    with LLM(str(case.folder), device=device) as llm:
        for params, expected in greedy_runs.items():
            assert_same_greedy(llm, expected, prompt_of(case), params)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_file_form_and_dtype(tmp_path, form, dtype, tied):
    check_files(tmp_path, form=form, dtype=dtype, tie_word_embeddings=tied)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda prefix: prefix or "no-prefix")
def test_every_prefix(tmp_path, prefix, form, tied):
    check_files(tmp_path, prefix=prefix, form=form, tie_word_embeddings=tied, buffers=True)


def check_files(folder: Path, **fields) -> None:
    made = make_case(recipe("files", (10, 2, 2, 37, 9), **fields), folder)
    with LLM(str(folder), device="reference") as llm:
        assert_same_logits(llm, made.model, made.random_ids(9))


def test_config_json_with_the_fewest_fields(tmp_path):
    """Old checkpoints lack the newer fields: transformers' defaults stand."""
    made = make_case(recipe("old", (24, 3, 2, 59, 30)), tmp_path)
    few = {key: made.recipe.fields[key] for key in ("n_embd", "n_head", "n_layer", "vocab_size", "n_positions")}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **few}))
    model = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with LLM(str(tmp_path)) as llm:
        assert_same_logits(llm, model, made.random_ids(30))


def test_config_json_with_the_general_names(tmp_path):
    """transformers also accepts hidden_size and its kind."""
    made = make_case(recipe("general", (24, 3, 2, 59, 30)), tmp_path)
    general = {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "max_position_embeddings": 30,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 59, **general}))
    with LLM(str(tmp_path)) as llm:
        assert_same_logits(llm, made.model, made.random_ids(30))


@pytest.fixture(scope="module")
def demo_model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.mark.parametrize(("device", "length"), [("cpu", 512), ("reference", 100)])
def test_demo(device, length, demo_model):
    text = "Once upon a time, in a dark forest, there lived an old woman who"
    with LLM("demo", device=device) as llm:
        prompt = llm.tokenizer.encode(text)
        expected = greedy(demo_model, prompt, NEW_TOKENS)
        assert_same_greedy(llm, expected, prompt, SamplingParams(max_tokens=NEW_TOKENS))
        story = llm.generate(text, SamplingParams(max_tokens=length - len(prompt), ignore_eos=True))[0]
        assert story.prompt_token_ids == prompt
        assert story.outputs[0].text == llm.tokenizer.decode(story.outputs[0].token_ids)
        assert_same_logits(llm, demo_model, prompt + story.outputs[0].token_ids)


def test_demo_on_ids_and_text(demo_model):
    with LLM("demo") as llm:
        for text in ("The king said: \u201cNo!\u201d", "a", " \n\n", "caf\u00e9 \U0001f600"):
            ids = llm.tokenizer.encode(text)
            by_text, by_ids = (llm.generate(p, SamplingParams(max_tokens=20))[0].outputs[0] for p in (text, [ids]))
            assert by_text.token_ids == by_ids.token_ids
            assert by_text.text == by_ids.text
            assert_same_greedy(llm, greedy(demo_model, ids, 20), ids, SamplingParams(max_tokens=20))


def assert_same_logits(llm: LLM, model: GPT2LMHeadModel, ids: list[int]) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()  # (T, V)
    logits = llm.logits(ids)  # (T, V)
    assert logits.dtype == np.float32
    assert logits.shape == expected.shape
    assert expected.std() > 1.0
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def assert_same_greedy(llm: LLM, expected: Greedy, prompt: list[int], params: SamplingParams) -> None:
    assert expected.lead > LEAD, f"two logits lie within {expected.lead:.1e}: choose another seed"
    output = llm.generate([prompt], params)[0].outputs[0]
    assert output.token_ids == expected.token_ids
    stopped = not params.ignore_eos and expected.token_ids[-1] in llm.config.eos_token_ids
    assert output.finish_reason == ("stop" if stopped else "length")
    assert stopped or len(output.token_ids) == params.max_tokens


@contextmanager
def without_eos(model: GPT2LMHeadModel) -> Iterator[None]:
    """Meanwhile the model generates past its EOS ids."""
    eos, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        yield
    finally:
        model.generation_config.eos_token_id = eos
