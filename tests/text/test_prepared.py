"""What `convert` prepares of a tokenizer: the same one, or its own files where anything is amiss."""

import json
import os
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from support.library_tokenizers import ALPHABET, assert_equal, bpe, save, with_digits, write, write_pair
from support.tables import rows
from tinygpt.errors import CheckpointError
from tinygpt.text import gpt2_bpe
from tinygpt.text.gpt2_bpe import PREPARED_FILE, write_prepared
from tinygpt.text.tokenizer import Tokenizer
from tinygpt.weights.files import TOKENIZER_FILES

TEXT = "abab c<|endoftext|> abcab\n <m>é"


def library(*more):
    """Merges whose numbers are not those of the tokens, a token that none makes, and two that are added."""
    made = bpe([("a", "b"), ("Ġ", "ab"), ("ab", "c"), *more], ["<|endoftext|>", "Ġ日"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.add_special_tokens(["<|endoftext|>", "<m>"])
    return made


@pytest.fixture
def folder(tmp_path):
    save(library(), tmp_path)
    write_prepared(tmp_path)
    return tmp_path


def rewrite(folder, change) -> None:
    """Put `change` of what the file holds in its place, with a digest as it should be."""
    payload = (folder / PREPARED_FILE).read_bytes().partition(b"\n")[2]
    content = json.loads(payload)
    change(content)
    payload = json.dumps(content).encode()
    (folder / PREPARED_FILE).write_bytes(gpt2_bpe._digest(folder, payload) + b"\n" + payload)


def numbers(*values: int) -> str:
    return b"".join(value.to_bytes(4, "little") for value in values).hex()


def put(path: str, value, content) -> None:
    *parents, last = path.split()
    for name in parents:
        content = content[name]
    (content[0] if isinstance(content, list) else content)[last] = value


# To what the file holds.
CHANGES = {
    "a rank twice": lambda content: content.update(ranks=numbers(300, 300)),
    "ranks of each other": lambda content: content.update(
        ranks=content["ranks"][8:16] + content["ranks"][:8] + content["ranks"][16:]
    ),
    "an id twice": lambda content: content.update(ids=content["ids"][:8] + content["ids"][:-8]),
    "an id too few": lambda content: content.update(ids=content["ids"][:-8]),
    "ranks of no token": lambda content: content.update(ranks=content["ranks"] + numbers(*range(9000, 9500))),
    "a token that is too long": lambda content: content.update(
        lengths=numbers(2**32 - 1) + content["lengths"][8:]
    ),
    "half a number": lambda content: content.update(ids=content["ids"] + "00"),
    "no tokens": lambda content: content.pop("tokens"),
    "no spec": lambda content: content.pop("spec"),
    "an added token without end": lambda content: content["spec"]["added_tokens"][0].update(
        content="a" * 10**6
    ),
}
CHANGES |= {
    f"{path} {value}": partial(put, path, value)
    for path, value in rows("""
tokens | "xyz"
lengths | 5
spec | {"model": {"type": "BPE"}}
spec normalizer | {"type": "NFC"}
spec added_tokens id | -5
spec added_tokens id | "5"
spec added_tokens lstrip | "no"
""")
}


class TestWhatIsPrepared:
    def test_is_the_same_tokenizer(self, folder, monkeypatch):
        monkeypatch.setattr(gpt2_bpe, "read_tokenizer", None)
        monkeypatch.delattr("tinygpt.text.tokenizer.read_tokenizer")  # the files are not read
        ours = Tokenizer.from_folder(folder)
        assert_equal(ours, library(), TEXT)
        assert (len(ours), ours.vocab_size) == (library().get_vocab_size(),) * 2
        assert ours.eos_token_id == library().token_to_id("<|endoftext|>")
        assert ours.special_ids == {library().token_to_id(token) for token in ("<|endoftext|>", "<m>")}

    @given(st.data())
    def test_of_any_vocabulary(self, tmp_path_factory, data):
        pairs = []
        folder = tmp_path_factory.mktemp("any")
        for _ in range(data.draw(st.integers(0, 8))):
            pairs.append(data.draw(st.tuples(*[st.sampled_from([*"ab", *map("".join, pairs)])] * 2)))
        alphabet = data.draw(st.sampled_from([ALPHABET, "abĠ"]))
        save(made := bpe(pairs, alphabet=alphabet), folder)
        write_prepared(folder)
        assert (gpt2_bpe.read_prepared(folder) is not None) == (folder / PREPARED_FILE).exists()
        ours = Tokenizer.from_folder(folder)
        for word in data.draw(st.lists(st.text("ab", max_size=12), max_size=8)):
            assert_equal(ours, made, word)

    def test_is_nothing_of_another_kind(self, tmp_path):
        save(with_digits(bpe([("a", "b")])), tmp_path)
        write_prepared(tmp_path)
        assert not (tmp_path / PREPARED_FILE).exists()

    @pytest.mark.parametrize("vocab", ["{", {"a": 0, "b": 0}, {"a": 2**40}, [1]], ids=str)
    def test_is_nothing_of_files_that_are_damaged(self, tmp_path, vocab):
        write(tmp_path, "vocab.json", vocab)
        write(tmp_path, "merges.txt", "")
        write_prepared(tmp_path)
        assert not (tmp_path / PREPARED_FILE).exists()


class TestOtherFiles:
    """What was prepared of other files than those that are there now is not used."""

    def test_a_vocabulary_with_other_ids(self, folder):
        spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = spec["model"]["vocab"]
        vocab["ab"], vocab["abc"] = vocab["abc"], vocab["ab"]
        assert gpt2_bpe.read_prepared(folder) is not None
        *_, before = Tokenizer.from_folder(folder).encode("cab")
        write(folder, "tokenizer.json", spec)
        *_, after = Tokenizer.from_folder(folder).encode("cab")
        assert after == vocab["ab"] != before

    @pytest.mark.parametrize("name", sorted({*TOKENIZER_FILES} - {"tokenizer.json"}))
    def test_a_file_that_has_come(self, folder, name, monkeypatch):
        assert Tokenizer.from_folder(folder).encode("a")
        write(folder, name, "")
        monkeypatch.delattr("tinygpt.text.tokenizer.read_tokenizer")
        with pytest.raises(NameError):
            Tokenizer.from_folder(folder)

    def test_files_that_have_gone(self, folder):
        (folder / "tokenizer.json").unlink()
        with pytest.raises(CheckpointError, match="no tokenizer that can be used"):
            Tokenizer.from_folder(folder)

    def test_a_file_that_counts_more(self, tmp_path):
        write_pair(bpe([("a", "b")]), tmp_path)
        write_prepared(tmp_path)
        assert_equal(save(library(), tmp_path), library(), TEXT)


class TestDamage:
    @pytest.mark.parametrize(
        "step", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(97, id="some")]
    )
    def test_a_byte_is_another_one(self, folder, step):
        content = (folder / PREPARED_FILE).read_bytes()
        for place in range(0, len(content), step):
            damaged = bytearray(content)
            damaged[place] ^= 1
            (folder / PREPARED_FILE).write_bytes(damaged)
            assert gpt2_bpe.read_prepared(folder) is None
        assert_equal(Tokenizer.from_folder(folder), library(), TEXT)

    def test_what_is_written_again_as_it_was_is_whole(self, folder):
        rewrite(folder, lambda content: None)
        assert gpt2_bpe.read_prepared(folder) is not None

    @pytest.mark.parametrize("change", CHANGES)
    def test_what_somebody_has_written(self, folder, change):
        rewrite(folder, CHANGES[change])
        assert gpt2_bpe.read_prepared(folder) is None
        assert_equal(Tokenizer.from_folder(folder), library(), TEXT)

    def test_json_that_is_deep(self, folder):
        payload = b"[" * 10**6
        (folder / PREPARED_FILE).write_bytes(gpt2_bpe._digest(folder, payload) + b"\n" + payload)
        assert_equal(Tokenizer.from_folder(folder), library(), TEXT)

    def test_a_pipe_is_not_waited_for(self, folder):
        (folder / PREPARED_FILE).unlink()
        os.mkfifo(folder / PREPARED_FILE)
        assert_equal(Tokenizer.from_folder(folder), library(), TEXT)
