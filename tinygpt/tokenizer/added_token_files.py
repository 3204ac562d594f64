"""Which added tokens a checkpoint's tokenizer has: several files may each name some."""

from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from tinygpt.errors import CheckpointError
from tinygpt.tokenizer.added_tokens import AddedToken

# Looking for tokens that are longer than this takes time in the square of their length.
MAX_CHARACTERS = 1000
_NAMES = [field.name for field in fields(AddedToken)]


def read_added_tokens(spec: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Every added token, in the form that tokenizer.json lists them in, each once.

    `spec` is a tokenizer.json; `options` is tokenizer_config.json, for older checkpoints with
    special_tokens_map.json in it and, as `added_tokens`, added_tokens.json. Raises CheckpointError where a
    file gives a token another id than Hugging Face's libraries do: the model knows it by only one of them.
    """
    tokens: dict[str, AddedToken] = {}
    ids = _Ids(spec["model"].get("vocab"))
    for entry in _entries(spec, options):
        content = content_of(entry)
        if content and content not in tokens:
            tokens[content] = added_token(entry, ids.of(content))
    return [asdict(token) for token in tokens.values()]


def content_of(token: Any) -> str:
    """The text of a token that a file gives as a string or as an object. Raises CheckpointError."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise CheckpointError(f"the tokenizer's files name {token!r} as a token; it must be a string.")
    return content


def _entries(spec: dict[str, Any], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The added tokens of each file in the order of their ids, then those that options name by their use."""
    named = list(_special_tokens(options))
    special = {content_of(token) for token in named}
    decoder = {int(i): entry for i, entry in options.get("added_tokens_decoder", {}).items()}
    # Where both list a token, it has the flags that tokenizer_config.json gives it.
    listed_again = {content_of(entry): entry for entry in decoder.values()}
    for entry in spec.get("added_tokens") or ():
        yield {**listed_again.get(content_of(entry), entry), "id": entry["id"]}
    yield from ({**decoder[i], "id": i} for i in sorted(decoder))
    older = options.get("added_tokens", {})
    for content in sorted(older, key=older.get):
        yield {"content": content, "id": older[content], "special": content in special}
    yield from map(_named_entry, named)


def _named_entry(token: Any) -> dict[str, Any]:
    """A token that an option names is special. As an object it has flags of its own, which transformers keeps."""
    flags = token if isinstance(token, dict) else {}
    if "__type" in flags:  # written before the token was known to be special
        flags = {"normalized": True, **flags}
    return {**flags, "content": content_of(token), "special": True}


def _special_tokens(options: dict[str, Any]) -> Iterator[Any]:
    yield from (value for name, value in options.items() if name.endswith("_token") and _is_token(value))
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = options.get(name) or ()
        yield from more.values() if isinstance(more, dict) else more


def _is_token(value: Any) -> bool:
    return isinstance(value, (str, dict))  # add_bos_token and the like are true or false


def added_token(entry: dict[str, Any], token_id: int) -> AddedToken:
    """What an entry of a file says, for a token of this id. Raises CheckpointError."""
    if entry.get("id", token_id) != token_id:
        raise CheckpointError(
            f"the added token {entry['content']!r} has id {entry['id']!r} in the tokenizer's files, where "
            f"Hugging Face's tokenizers give it {token_id}; correct the file, or give token ids."
        )
    if len(entry["content"]) > MAX_CHARACTERS:
        raise CheckpointError(
            f"the tokenizer's files name an added token of {len(entry['content'])} characters, beginning with "
            f"{entry['content'][:40]!r}, and at most {MAX_CHARACTERS} are taken; correct the file, or give token ids."
        )
    flags = {name: entry[name] for name in _NAMES if name in entry}
    if not all(isinstance(flags[name], bool) for name in flags.keys() - {"id", "content"}):
        raise CheckpointError(f"the added token {entry!r} has flags that are not true or false.")
    return AddedToken(**{"normalized": not entry.get("special", False), **flags, "id": token_id})


class _Ids:
    """Gives ids as `tokenizers` does: a token of the vocabulary keeps its own, another gets the next one."""

    def __init__(self, vocab: Any):
        entries = vocab if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab or ())}
        self._vocab = entries
        self._next = len(entries)

    def of(self, content: str) -> int:
        token_id = self._vocab.get(content)
        if token_id is None:
            token_id = self._next
        # Counting goes on from the highest id given, where that lies past the vocabulary.
        if token_id >= self._next:
            self._next = token_id + 1
        return token_id
