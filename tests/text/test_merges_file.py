"""merges.txt beside a whole vocab.json: refused where it was cut short, and read where no merge is missing."""

import json
from pathlib import Path

import pytest

from support.library_tokenizers import ALPHABET, bpe, save, write, write_pair
from support.paths import DEMO
from support.tiny_checkpoint import copy_tokenizer
from tinygpt.errors import CheckpointError, NoTokenizerError
from tinygpt.text.files import FEW
from tinygpt.text.gpt2_bpe import write_prepared
from tinygpt.text.tokenizer import Tokenizer

WHOLE = (DEMO / "merges.txt").read_bytes()
NUM_MERGES = WHOLE.count(b"\n") - 1
WORDS = [f"{first}{second}" for first in "abcdefgh" for second in "ijklmnop"]  # 64, each of two tokens
PAIRS = [(first, second) for first, second in WORDS]


@pytest.fixture
def folder(tmp_path) -> Path:
    return copy_tokenizer(tmp_path)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        Tokenizer.from_folder(folder)
    assert type(raised.value) is CheckpointError
    return str(raised.value)


class TestCutShort:
    def test_at_the_end_of_a_line(self, folder):
        kept = NUM_MERGES - FEW - 1
        lines = WHOLE.splitlines(keepends=True)
        (folder / "merges.txt").write_bytes(b"".join(lines[: 1 + kept]))
        first = lines[1 + kept].decode().replace(" ", "").strip()
        assert refusal(folder) == (
            f"{folder / 'merges.txt'} seems to have been cut short: none of its {kept} merges makes {first!r}, nor "
            f"{FEW} more tokens of the vocabulary; download it again, or give token ids. If it is whole, save "
            "the tokenizer with transformers' save_pretrained, which writes a tokenizer.json."
        )

    @pytest.mark.parametrize("size", [*range(0, 20), *range(20, len(WHOLE) - 200, 1999)])
    def test_at_any_byte(self, folder, size):
        (folder / "merges.txt").write_bytes(WHOLE[:size])
        assert "cut short" in refusal(folder) or b"\xc4" in WHOLE[size - 1 : size]  # half a character

    @pytest.mark.parametrize("missing", [2, 3])
    def test_within_the_last_line(self, folder, missing):
        """`and a`: the token that `an a` would make is none, and half a pair is no pair."""
        assert WHOLE.endswith(b"\nand a\n")
        (folder / "merges.txt").write_bytes(WHOLE[:-missing])
        last = "and" if missing == 3 else "and "
        said = refusal(folder)
        assert (
            f"merges.txt was cut short: it ends in {last!r}, which is no whole merge; download it again"
            in said
        )

    def test_a_merge_of_gpt_1(self, tmp_path):
        merges = [(first, f"{second}</w>") for first, second in PAIRS]
        letters = [*"abcdefgh", *(f"{letter}</w>" for letter in "ijklmnop")]
        write_pair(bpe(merges, alphabet=["<unk>", *letters]), tmp_path)
        assert len(Tokenizer.from_folder(tmp_path)) == 1 + len(letters) + len(merges)
        write(tmp_path, "merges.txt", "#version: 0.2\na i</w>\n")
        assert "none of its 1 merges makes 'aj</w>', nor 62 more tokens" in refusal(tmp_path)

    def test_in_a_converted_folder_is_converted_again(self, folder):
        write_prepared(folder)
        assert Tokenizer.from_folder(folder)
        (folder / "merges.txt").write_bytes(WHOLE[: len(WHOLE) // 2])
        said = refusal(folder)
        assert "; convert the original checkpoint again, or give token ids" in said
        assert "download" not in said

    def test_beside_a_tokenizer_json_is_not_read(self, tmp_path):
        write_pair(bpe(PAIRS), tmp_path)
        write(tmp_path, "merges.txt", "a i\n")
        assert "cut short" in refusal(tmp_path)
        assert save(bpe(PAIRS), tmp_path).encode("aj") == [len(ALPHABET) + 1]


class TestWhole:
    """Vocabularies hold tokens of which no merge is missing."""

    def test_all_of_the_alphabet_and_no_merge(self, tmp_path):
        write_pair(bpe(tokens=["<|endoftext|>"]), tmp_path)
        assert len(Tokenizer.from_folder(tmp_path).encode("no merge")) == len("no merge")

    def test_added_tokens(self, tmp_path):
        """Which a file lists, whatever they look like."""
        added = {word: len(ALPHABET) + 1 + i for i, word in enumerate(WORDS)}
        write_pair(bpe([("a", "b")], WORDS), tmp_path, added_tokens=added)
        assert Tokenizer.from_folder(tmp_path).encode("ai") == [added["ai"]]

    def test_special_tokens_that_no_file_lists(self, tmp_path):
        """As OPT's vocabulary has some, and others have hundreds."""
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *(f"madeupword{i:04}" for i in range(300))]
        write_pair(bpe(PAIRS, special), tmp_path)
        assert Tokenizer.from_folder(tmp_path).encode("ai") == [len(ALPHABET)]

    def test_a_few_words_that_somebody_has_written_into_it(self, tmp_path):
        write_pair(bpe(PAIRS[FEW:], WORDS[:FEW]), tmp_path)
        assert len(Tokenizer.from_folder(tmp_path).encode(WORDS[0])) == 2
        assert len(Tokenizer.from_folder(tmp_path).encode(WORDS[-1])) == 1

    def test_many_words_that_no_merge_has_made(self, tmp_path):
        """Of a few of them there are both halves, as chance has it."""
        words = [f"{word}xyz" for word in WORDS]
        write_pair(bpe([("a", "b")], [*words, *WORDS[: FEW + 4]]), tmp_path)
        assert len(Tokenizer.from_folder(tmp_path).encode(words[0])) == 5


def test_biogpts_merges_have_a_third_column(tmp_path):
    """Its tokenizer is not implemented, and not damaged."""
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", "t", "h</w>", "th</w>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("t h</w> 123\n")
    with pytest.raises(NoTokenizerError, match="as BioGPT's"):
        Tokenizer.from_folder(tmp_path)
