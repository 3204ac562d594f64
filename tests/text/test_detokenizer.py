"""Text as a stream: never half a character, never part of a stop string, always the final text in the end."""

import codecs

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.library_tokenizers import bpe, save, unigram, with_digits, word_piece
from tinygpt.text.stream import ByteDetokenizer, StopStrings, TextStream

LETTERS = "ab"
BEGINNINGS = b"\x61\x80\xbf\xc3\xe3\xed\xa0\xf0\x9f\xf4\xff"  # of characters in UTF-8, and bytes within them


@pytest.fixture(scope="module", params=["bytes", "library bytes", "unigram", "word piece"])
def tokenizer(request, tmp_path_factory):
    """One that tiktoken runs, whose tokens are mostly single bytes, and three that the library runs."""
    if "bytes" in request.param:
        library = bpe([("ã", "ģ"), ("ð", "Ł")])
        library.add_special_tokens(["<|endoftext|>"])
        library.add_tokens(["日本"])
        if request.param == "library bytes":
            library = with_digits(library)
    else:
        library = {"unigram": unigram, "word piece": word_piece}[request.param]()
    return save(library, tmp_path_factory.mktemp("tokenizer"))


def stream(tokenizer, ids) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.push, ids), detokenizer.finish()]


class TestDetokenizer:
    @given(st.data())
    def test_all_at_once_is_one_after_another(self, tokenizer, data):
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=30))
        cut = data.draw(st.integers(0, len(ids)))
        detokenizer = tokenizer.detokenizer()
        later = TextStream(tokenizer.detokenizer(), ())
        parts = [*map(detokenizer.push, ids[:cut]), detokenizer.finish(ids[cut:])]
        assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=True)
        for token_id in ids:
            later.push_later(token_id)
        assert later.finish() == later.text == "".join(parts)

    @given(text=st.text(alphabet="aé日👩\u0301 ", max_size=12))
    def test_never_half_a_character(self, tokenizer, text):
        ids = tokenizer.encode(text)
        final = tokenizer.decode(ids, skip_special_tokens=True)
        assert "\ufffd" not in final
        given = ""
        for part in stream(tokenizer, ids):
            assert "\ufffd" not in part
            given += part
            assert final.startswith(given)
        assert given == final

    @given(data=st.binary(max_size=30) | st.lists(st.sampled_from(BEGINNINGS), max_size=12).map(bytes))
    def test_bytes_that_are_no_utf8(self, data):
        detokenizer = ByteDetokenizer(lambda byte: bytes([byte]))
        text = "".join(map(detokenizer.push, data)) + detokenizer.finish()
        assert text == data.decode("utf-8", errors="replace")

    def test_a_character_comes_with_its_last_byte_and_a_special_token_is_nothing(self, tmp_path):
        library = bpe()
        library.add_special_tokens(["<|endoftext|>"])
        tokenizer = save(library, tmp_path)
        assert stream(tokenizer, tokenizer.encode("é👩")) == ["", "é", "", "", "", "👩", ""]
        assert stream(tokenizer, tokenizer.encode("a👩")[:-1]) == ["a", "", "", "", "\ufffd"]
        assert stream(tokenizer, [256, 64, 256]) == ["", "a", "", ""]

    def test_streams_do_not_meet(self, tmp_path):
        tokenizer = save(bpe(), tmp_path)
        ids = tokenizer.encode("é")
        one = tokenizer.detokenizer()
        two = tokenizer.detokenizer()
        assert [one.push(ids[0]), two.push(ids[0]), one.push(ids[1]), two.push(ids[1])] == ["", "", "é", "é"]


def whole(text: str, stop: list[str], num_early: int = 0) -> tuple[str, str | None]:
    """The same question asked of a whole text: read on until some stop string is complete, behind num_early."""
    for end in range(num_early + 1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


class TestStopStrings:
    stops = st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=4), max_size=3)

    @given(st.lists(st.text(alphabet=LETTERS, max_size=5), max_size=8), stops, st.booleans())
    @example(["xab"], ["b", "ab"], False)  # complete together: the longer
    @example(["xab"], ["ab", "b"], False)
    @example(["abcd"], ["abcd", "c"], False)  # complete first
    @example(["x日", "本"], ["日本", "本"], False)
    @example(["a E", "NE", "N", "D b", "c"], ["END"], False)
    def test_any_cuts(self, parts, stop, is_included):
        final, matched = whole("".join(parts), stop)
        final += matched or "" if is_included else ""
        stopper = StopStrings(stop, is_included=is_included)
        given = ""
        for part in parts:
            given += stopper.push(part)
            assert final.startswith(given)
        assert given + stopper.finish() == final
        assert stopper.matched == matched

    @given(st.lists(st.text(alphabet=LETTERS, max_size=5), max_size=8), stops)
    def test_holds_no_more_than_it_must(self, parts, stop):
        stopper = StopStrings(stop)
        seen = ""
        given = ""
        for part in parts:
            seen += part
            given += stopper.push(part)
            if stopper.matched is not None:
                break
            held = seen[len(given) :]
            assert held == "" or any(s.startswith(held) and s != held for s in stop)


class TestTextStream:
    # Characters of one to four bytes, cut anywhere; an id is a byte.
    texts = st.lists(st.sampled_from(["a", "b", "é", "日", "🙂", "\udcff"]), max_size=12)
    stops = st.lists(st.text(alphabet="abé日🙂", min_size=1, max_size=3), max_size=3)

    @given(texts, stops, st.booleans(), st.integers(0, 9))
    @example([*"babab"], ["ba", "ab"], False, 1)
    @example([*"babab"], ["ba", "ab"], False, 2)
    @example([*"babab"], ["ba", "ab"], False, 4)
    def test_what_is_streamed_is_always_a_prefix_of_the_final_text(
        self, characters, stop, is_included, min_tokens
    ):
        token_bytes = "".join(characters).encode(errors="surrogateescape")
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        early = decoder.decode(token_bytes[:min_tokens])
        text = early + decoder.decode(token_bytes[min_tokens:], final=True)
        final, matched = whole(text, stop, len(early))
        final += matched or "" if is_included else ""
        stream = TextStream(ByteDetokenizer(lambda i: bytes([i])), stop, is_included, min_tokens)
        given = ""
        for token_id in token_bytes:
            given += stream.push(token_id)
            assert final.startswith(given)
            assert stream.text == given
            if stream.stop is not None:
                break
        given += stream.finish()
        assert (given, stream.text, stream.stop) == (final, final, matched)

    @pytest.mark.parametrize(("min_tokens", "final", "matched"), [(1, "", "\ufffd"), (2, "\ufffd", None)])
    def test_the_last_text_of_the_first_min_tokens_completes_no_stop_string(self, min_tokens, final, matched):
        """Half a character becomes U+FFFD when no more comes, and is still of the token that brought it."""
        stream = TextStream(ByteDetokenizer(lambda i: bytes([i])), ["\ufffd"], min_tokens=min_tokens)
        given = [stream.push(token_id) for token_id in "日".encode()[:2]]
        assert ("".join(given) + stream.finish(), stream.stop) == (final, matched)
