"""Tokenizers of sentencepiece against its own package, and transformers' classes that run it."""

# ruff: noqa: RUF001

import io
import json
import random
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from support.recorded import MISSING
from support.tiny_checkpoint import random_tensors, write_checkpoint
from tinygpt import LLM, SamplingParams
from tinygpt.errors import CheckpointError, NoTokenizerError, RequestError
from tinygpt.text.tokenizer import Tokenizer

spm = pytest.importorskip("sentencepiece", reason="sentencepiece, the extra of this name, is not installed")

SCRIPTS = """
Once upon a time there was a little girl who lived near the old forest . One day she found 12 stones ! CLS
Жили-были старик со старухой у самого синего моря тридцать лет и три года
كان يا ما كان في قديم الزمان ملك عادل يحكم بلادا بعيدة
吾輩は猫である。 名前はまだ無い。 どこで生れたか とんと見当がつかぬ。 何でも 薄暗い所で ニャーニャー泣いていた
"""
WORDS = SCRIPTS.split()
ODD = (
    *("  ", "\n", "\t", " \r\n ", "\u3000", "\u00a0", "\x00", "\x1c", "\u200b", "\ufeff", "\ufffd", "▁"),
    *("😀", "👩‍👩‍👧‍👦🏽", "🇨🇭", "❤️", "ﬃ", "½", "①", "ｶﾞ", "１２３", "e\u0301", "\u0301", "ΑΣ", "İ", "ß"),
    *("[SYM]", "<mask"),
)
NAMES = ("</s>", "<s>", "<unk>", "<pad>", "[CLS]", "<extra_id_0>", "<extra_id_99>", "<|endoftext|>")
MODELS = {
    "unigram": {"model_type": "unigram", "user_defined_symbols": ["[SYM]"], "control_symbols": ["[CLS]"]},
    "bpe": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "bytes": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False},
    "lower": {
        "model_type": "unigram",
        "normalization_rule_name": "nmt_nfkc_cf",
        "treat_whitespace_as_suffix": True,
    },
}
MANY = pytest.param(10_000, marks=pytest.mark.slow)
generator = random.Random(1)


def text_of(words: list[str]) -> str:
    kind = generator.random()
    parts = [generator.choice(ODD if generator.random() < kind / 3 else words) for _ in range(8)]
    return generator.choice(("", " ")).join(parts[: generator.randrange(9)])


TEXTS = [text_of(WORDS) for _ in range(10_000)]
NAMING_TEXTS = [text_of([*WORDS, *NAMES * 4]) for _ in range(10_000)]


@pytest.fixture(scope="module")
def trained() -> dict[str, bytes]:
    """A model of 400 pieces of each kind, which takes a tenth of a second."""
    models = {}
    for name, options in MODELS.items():
        models[name] = io.BytesIO()
        sentences = (" ".join(random.Random(i).choices(WORDS, k=8)) for i in range(400))
        usual = {"vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2}
        spm.SentencePieceTrainer.train(
            sentence_iterator=sentences, model_writer=models[name], **usual, **options
        )
    return {name: written.getvalue() for name, written in models.items()}


def save(folder, model: bytes, name="spiece.model", config=None, **options):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
    stream = tokenizer.detokenizer(skip_special_tokens)
    return "".join(map(stream.push, ids)) + stream.finish()


@pytest.mark.parametrize("count", [500, MANY])
@pytest.mark.parametrize("name", MODELS)
class TestPackage:
    def test_ids_and_texts(self, trained, tmp_path, name, count):
        package = spm.SentencePieceProcessor(model_proto=trained[name])
        ours = Tokenizer.from_folder(save(tmp_path, trained[name], "tokenizer.model"))
        assert ours.get_vocab() == {package.id_to_piece(i): i for i in range(len(package))}
        for text in TEXTS[:count]:
            ids = package.encode(text)
            assert ours.encode(text) == ids
            known = [token_id for token_id in ids if token_id != package.unk_id()]
            assert ours.decode(known) == streamed(ours, known, False) == package.decode(known)
            assert ours.decode(ids, skip_special_tokens=True) == streamed(ours, ids, True)

    def test_any_ids(self, trained, tmp_path, name, count):
        package = spm.SentencePieceProcessor(model_proto=trained[name])
        ours = Tokenizer.from_folder(save(tmp_path, trained[name]))
        for seed in range(count):
            ids = random.Random(seed).choices(range(len(package)), k=seed % 12)
            known = [token_id for token_id in ids if token_id not in ours.special_ids]
            text = ours.decode([*ids, len(package), 2**40], skip_special_tokens=True)
            assert text == streamed(ours, ids, True) == package.decode(known)
            assert ours.decode(ids) == streamed(ours, ids, False)


RINNAS = {"bos_token": "<s>", "cls_token": "[CLS]", "mask_token": "<mask>", "pad_token": "<pad>"}


@pytest.mark.parametrize("count", [300, MANY])
@pytest.mark.parametrize("name", MODELS)
class TestTransformers:
    """Their classes that run the package; T5Tokenizer and LlamaTokenizer do so before version 5."""

    @pytest.mark.parametrize(
        ("class_name", "options"),
        [
            ("GPTSw3Tokenizer", {}),
            ("GPTSw3Tokenizer", {"eos_token": "</s>", "mask_token": "<mask>", "cls_token": "<cls>"}),
            ("T5Tokenizer", {}),
            ("T5Tokenizer", {**RINNAS, "extra_ids": 0, "do_lower_case": True}),
            ("LlamaTokenizer", {"add_eos_token": True}),
        ],
        ids=str,
    )
    def test_ids(self, trained, tmp_path, name, count, class_name, options):
        transformers = pytest.importorskip("transformers", reason=MISSING)
        if class_name != "GPTSw3Tokenizer" and transformers.__version__ >= "5":
            pytest.skip(f"{class_name} of transformers 5 does not run the package")
        is_llamas = class_name == "LlamaTokenizer"
        file = "tokenizer.model" if is_llamas else "spiece.model"
        save(tmp_path, trained[name], file, tokenizer_class=class_name, **options)
        theirs = getattr(transformers, class_name).from_pretrained(tmp_path)
        theirs.do_lower_case = options.get(
            "do_lower_case", False
        )  # T5Tokenizer forgets it: rinna's cards set it
        ours = Tokenizer.from_folder(tmp_path)
        assert ours.convert_ids_to_tokens(range(len(ours))) == theirs.convert_ids_to_tokens(range(len(ours)))
        for text in NAMING_TEXTS[:count]:
            assert ours.encode(text) == theirs(text).input_ids


class TestT5:
    """What its class puts around the package, by hand."""

    @pytest.fixture
    def package(self, trained):
        return spm.SentencePieceProcessor(model_proto=trained["bpe"])

    def test_an_end_is_told_once_and_can_be_left_out(self, trained, tmp_path, package, caplog):
        ours = Tokenizer.from_folder(
            save(tmp_path, trained["bpe"], config={"tokenizer_class": "T5Tokenizer"})
        )
        assert ours.encode("One day") == [*package.encode("One day"), package.eos_id()]
        assert ours.encode("One day</s>") == ours.encode("One day")
        assert [*map(ours.eos_token.__eq__, ours.tokenize("a"))] == [False, True]
        assert len(caplog.messages) == 1
        assert "ends each text with '</s>', as transformers' does" in caplog.text
        save(tmp_path, trained["bpe"], add_eos_token=False)
        assert Tokenizer.from_folder(tmp_path).encode("One day") == package.encode("One day")
        assert len(caplog.messages) == 1

    @pytest.mark.parametrize("name", ["extra_ids", "added_tokens_decoder", "legacy", "do_lower_case"])
    def test_null_asks_for_nothing(self, trained, tmp_path, name):
        encoded = []
        for number, options in enumerate(({}, {name: None})):
            folder = save(tmp_path / str(number), trained["bpe"], tokenizer_class="T5Tokenizer", **options)
            encoded.append(Tokenizer.from_folder(folder).encode("One day <extra_id_0>"))
        assert encoded[0] == encoded[1]

    def test_extra_ids_come_last_in_reverse_and_take_white_space(self, trained, tmp_path, package):
        ours = Tokenizer.from_folder(
            save(tmp_path, trained["bpe"], tokenizer_class="T5TokenizerFast", extra_ids=3)
        )
        first = len(package)
        assert ours.convert_ids_to_tokens(range(first, first + 3)) == [f"<extra_id_{i}>" for i in (2, 1, 0)]
        expected = [*package.encode("a"), first + 2, *package.encode("d"), package.eos_id()]
        assert ours.encode("a \n<extra_id_0>\u3000 d") == expected
        assert ours.decode(expected) == "a<extra_id_0>d</s>"
        assert ours.decode(expected, skip_special_tokens=True) == "a d"

    def test_lower_case_spares_special_tokens(self, trained, tmp_path):
        options = {"do_lower_case": True, "extra_ids": 0, "cls_token": "[CLS]"}
        ours = Tokenizer.from_folder(
            save(tmp_path, trained["bytes"], tokenizer_class="T5Tokenizer", **options)
        )
        package = spm.SentencePieceProcessor(model_proto=trained["bytes"])
        ids = [*package.encode("once ασ"), ours.get_vocab()["[CLS]"], package.eos_id()]
        assert ours.encode("ONCE ΑΣ[CLS]") == ids
        assert ours.encode("[CLS]", split_special_tokens=True) == [*package.encode("[cls]"), package.eos_id()]


def test_a_model_generates_streams_and_stops(trained, tmp_path):
    model = trained["bytes"]
    num_rows = len(spm.SentencePieceProcessor(model_proto=model))
    shapes = {"transformer.wte.weight": (num_rows, 8), "transformer.wpe.weight": (40, 8)}
    arrays = {
        name: np.random.default_rng(1).standard_normal(shape, np.float32) for name, shape in shapes.items()
    }
    write_checkpoint(tmp_path, random_tensors() | arrays, vocab_size=num_rows, n_positions=40)
    with LLM(save(tmp_path, model), device="reference", max_num_seqs=2) as llm:
        ids = llm.tokenizer.encode("猫 Once 😀 upon")
        allowed = {"allowed_token_ids": ids, "temperature": 50.0, "ignore_eos": True}
        params = SamplingParams(max_tokens=30, seed=1, **allowed)
        [output] = llm.generate("Once", params)
        sample = output.outputs[0]
        chunks = [chunk.text for chunk in llm.stream("Once", params)]
        assert sample.text == "".join(chunks) == llm.tokenizer.decode(sample.token_ids)
        assert sum(map(bool, chunks)) > 4
        middle = sample.text[len(sample.text) // 2 :][:3]
        [stopped] = llm.generate("Once", replace(params, stop=middle))
        assert stopped.outputs[0].text == sample.text[: sample.text.index(middle)]
        with pytest.raises(RequestError, match="are not bytes, as guided texts need them"):
            llm.generate("Once", guided_regex="a+")


def test_half_a_character_is_held_back(trained, tmp_path):
    ours = Tokenizer.from_folder(save(tmp_path, trained["bytes"]))
    ids = ours.encode("😀a")
    stream = ours.detokenizer()
    assert [stream.push(token_id) for token_id in ids] == [*[""] * (len(ids) - 1), "😀a"]
    assert [ours.decode(ids[:k]) for k in (1, 4)] == ["\ufffd", "😀"]
    assert all(second.startswith(first) for first, second in pairwise(["", "😀a", ours.decode([*ids, *ids])]))


REFUSED = (
    ({"tokenizer_class": "AlbertTokenizer"}, "its class AlbertTokenizer is not implemented"),
    ({"tokenizer_class": "T5Tokenizer", "legacy": False}, '"legacy": false in .* is not implemented'),
    ({"tokenizer_class": "T5Tokenizer", "extra_ids": 10**9}, "1000000000 extra_ids; at most 1000 are taken"),
    ({"tokenizer_class": "T5Tokenizer", "extra_ids": "3"}, "form of a tokenizer"),
)


@pytest.mark.parametrize(("options", "says"), REFUSED, ids=str)
def test_other_rules_are_refused_by_name(trained, tmp_path, options, says):
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_folder(save(tmp_path, trained["bpe"], **options))


@pytest.mark.parametrize("content", [b"", b"x", b"<|endoftext|> 0\n", b"\xff" * 50, b"\x0a\x03\x0a\x01a"])
def test_a_damaged_file(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"spiece.model cannot be read as a model of sentencepiece"):
        Tokenizer.from_folder(save(tmp_path, content))


def test_a_cut_file(trained, tmp_path):
    with pytest.raises(CheckpointError, match=r"spiece.model cannot be read"):
        Tokenizer.from_folder(save(tmp_path, trained["bpe"][:-200]))


def test_the_extra_is_named(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        NoTokenizerError, match=r'needs .* pip install "tinygpt\[sentencepiece\]"; token ids work'
    ):
        Tokenizer.from_folder(save(tmp_path, trained["bpe"]))
