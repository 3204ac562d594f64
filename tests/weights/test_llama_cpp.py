"""GGUF beside llama.cpp itself, where the package llama-cpp-python is installed: either reads what the other writes."""

import json

import numpy as np
import pytest

from support.family_models import CHARACTERS, write_family
from support.paths import DEMO
from support.tiny_checkpoint import convert
from tinygpt import LLM
from tinygpt.text.files import spec_of
from tinygpt.weights.config import parameter_shapes
from tinygpt.weights.files import StoredTokenizer
from tinygpt.weights.open import open_checkpoint

llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama.cpp: pip install llama-cpp-python")

PROMPTS = ("Once upon a time", "The old man said", "Chapter 12.\n\n", "naïve café — “so”")
LENGTH = 40
# llama.cpp's types of files, by what the tensors of one are called here.
FILE_TYPES = {"float32": 0, "float16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The demo in float32, as convert writes it."""
    return convert(DEMO, tmp_path_factory.mktemp("gguf") / "demo", "--to", "gguf") / "model.gguf"


@pytest.fixture(scope="module")
def theirs(ours, tmp_path_factory):
    """What llama.cpp makes of that, in any of its types of files."""
    folder = tmp_path_factory.mktemp("theirs")

    def quantised(kind):
        path = folder / f"{kind}.gguf"
        if not path.exists():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype = FILE_TYPES[kind]
            params.nthread = 1
            assert llama_cpp.llama_model_quantize(str(ours).encode(), str(path).encode(), params) == 0
        return path

    return quantised


@pytest.fixture(autouse=True)
def without_packing(monkeypatch):
    """Packed for AMX, quantised weights end the process within llama.cpp (0.3.36 of the package)."""
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def changed():
        params = defaults()
        params.use_extra_bufts = False
        return params

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", changed)


def load(path):
    return llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, logits_all=True, verbose=False)


def greedy(llama, ids, length=LENGTH):
    """llama.cpp's most probable continuation, as ids, and the logits at the prompt's last position."""
    llama.reset()
    found = llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
    tokens = [next(found)]
    logits = np.array(llama.scores[len(ids) - 1])
    tokens += [next(found) for _ in range(length - 1)]
    return tokens, logits


@pytest.mark.parametrize("writer", ["tinygpt", "llama.cpp"])
def test_the_greedy_text_of_a_file_is_the_same(ours, theirs, writer):
    """In float32; llama.cpp rounds gelu to float16, so logits are near and no more."""
    path = ours if writer == "tinygpt" else theirs("float32")
    llama = load(path)
    with LLM(path) as llm:
        for prompt in PROMPTS:
            ids = llm.tokenizer.encode(prompt)
            assert llama.tokenize(prompt.encode(), add_bos=True, special=True) == ids
            tokens, logits = greedy(llama, ids)
            (found,) = llm.generate([ids], max_tokens=LENGTH, ignore_eos=True)[0].outputs
            assert llm.tokenizer.decode(tokens, skip_special_tokens=True) == found.text
            assert tokens == found.token_ids
            np.testing.assert_allclose(llm.logits(ids)[-1], logits, rtol=0, atol=1e-2)


@pytest.mark.parametrize("kind", ["float16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"])
def test_what_llama_cpp_quantises_is_computed_alike(theirs, kind):
    """It rounds activations to 8 bits beside quantised weights, which are expanded here."""
    llama = load(theirs(kind))
    stored = [
        getattr(tensor, "sources", (tensor,)) for tensor in open_checkpoint(theirs(kind)).stored.values()
    ]
    assert kind in {
        getattr(tensor, "dtype", "") for sources in stored for tensor in sources
    }  # as they lie in the file
    with LLM(theirs(kind)) as llm:
        ids = llm.tokenizer.encode(PROMPTS[0])
        _, logits = greedy(llama, ids)
        wrong = llm.logits(ids)[-1] - logits
        assert np.sqrt(np.mean(wrong**2)) < 0.03 * np.std(logits)


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "float16"), ("int8", "Q8_0"), ("int4", "Q4_0")])
def test_both_round_to_the_same_weights(theirs, tmp_path, dtype, kind):
    ours = open_checkpoint(convert(DEMO, tmp_path / "x", "--to", "gguf", "--dtype", dtype))
    theirs = open_checkpoint(theirs(kind))
    for name in parameter_shapes(ours.config):
        if name not in (
            "wte.weight",
            "lm_head.weight",
        ):  # for which llama.cpp chooses a better type than was asked
            np.testing.assert_array_equal(ours.tensor(name), theirs.tensor(name), err_msg=name)


@pytest.mark.parametrize("words", ["gpt-2", "bloom"])
@pytest.mark.parametrize("name", ["bloom-4", "bloom-6"])
def test_a_bloom_as_convert_writes_it(tmp_path, name, words):
    """With as many heads as a power of two and otherwise, and a tokenizer of bytes alone that cuts texts either way."""
    folder = write_family(tmp_path / "source", name)
    vocab = {"Ġ" if character == " " else character: i for i, character in enumerate(CHARACTERS)}
    spec = spec_of(StoredTokenizer(words, vocab))
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    path = convert(folder, tmp_path / "there", "--to", "gguf") / "model.gguf"
    llama = load(path)
    text = "the cat and a  wolf2go"
    with LLM(path, device="reference") as llm:
        ids = llm.tokenizer.encode(text)
        assert llama.tokenize(text.encode(), add_bos=False, special=True) == ids
        tokens, logits = greedy(llama, ids, 16)
        assert tokens == llm.generate([ids], max_tokens=16, ignore_eos=True)[0].outputs[0].token_ids
        np.testing.assert_allclose(llm.logits(ids)[-1], logits, rtol=0, atol=1e-2)
