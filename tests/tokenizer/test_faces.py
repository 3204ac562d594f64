"""What Hugging Face's tokenizers have beside encode and decode, and the bytes of each token, for both kinds."""

import pytest
import tokenizers

from support.paths import DEMO
from tinygpt.errors import RequestError
from tinygpt.tokenizer.tokenizer import Tokenizer


def saved(library, folder) -> Tokenizer:
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def test_a_token_has_the_bytes_that_it_adds_to_a_text():
    tokenizer = Tokenizer.from_folder(DEMO)
    text = "Ça va?\n\t🇨🇭 <|endoftext|>"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(len(tokenizer) + 5) == b""


def test_another_byte_level_tokenizer_has_bytes_too(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "Ġ": 1, "Ġa": 2, "Ã": 3}, [("Ġ", "a")]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Digits()  # unlike GPT-2's
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    tokenizer = saved(library, tmp_path)
    assert [tokenizer.token_bytes(i) for i in range(6)] == [b"a", b" ", b" a", b"\xc3", b"<|endoftext|>", b""]
    assert (len(tokenizer), tokenizer.eos_token_id) == (5, 4)


def test_tokens_that_are_no_bytes_cannot_guide(tmp_path):
    tokenizer = saved(tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)), tmp_path)
    assert (len(tokenizer), tokenizer.eos_token_id) == (2, None)
    with pytest.raises(RequestError, match="are not bytes, as guided texts need them"):
        tokenizer.token_bytes(1)


@pytest.mark.parametrize(("name", "expected"), [("<end>", 3), ("<|endoftext|>", None)])
def test_the_end_of_text_token_is_the_one_that_the_files_name(tmp_path, name, expected):
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    if expected:
        (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": "{name}"}}', encoding="utf-8")
    assert saved(library, tmp_path).eos_token_id == expected
