"""Characters as tokens: their table in a checkpoint, or in a file next to it, as programs of one lesson have it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..containers.ranks import number_of
from ..containers.torch import fields_of, read_plain_pickle
from ..errors import CheckpointError
from ..files import StoredTokenizer, read_json_object
from .family import Source
from .settings import fields_in

# stoi and itos, char2idx and idx_to_char: ids by characters, or the way back; or all characters in order.
_IDS, _TO, _CHARACTERS = "(i|ix|idx|id|int|index)", "(_?to_?|2)", "(s|c|ch|char)"
_TABLE = re.compile(rf"(?i){_CHARACTERS}{_TO}{_IDS}|{_IDS}{_TO}{_CHARACTERS}|chars")
_SPECIAL = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_PLAIN_NAME = re.compile(r"\w[\w.-]*")
_IN_JSON = ("tokenizer.json", "merges.txt")  # next to a vocab.json that is no table, or is not needed


def character_tokenizer(source: Source) -> StoredTokenizer | None:
    """Return the tokenizer of a table in the checkpoint or next to it. Raise CheckpointError if two differ."""
    places = (fields_in(source.container.metadata), fields_in(source.beside))
    tables = [table for place in places for fields in place for table in _tables_in(fields)]
    if tables:
        return _tokenizer(tables, str(source.path))
    for path in _files(source):
        content = read_json_object(path) if path.suffix == ".json" else read_plain_pickle(path)
        tables = list(_tables_in(fields_of(content)))
        if not tables and path.name != "meta.pkl":
            ids = _ids(content)
            tables = [ids] if ids and all(len(str(token)) == 1 for token in ids) else []
        if tables:
            return _tokenizer(tables, str(path))
        if path.name == "meta.pkl":
            raise CheckpointError(f"{path} has no characters in its 'stoi': copy it from the data set again.")
    return None


def _files(source: Source) -> Iterator[Path]:
    """Yield the files that may hold a table: next to the checkpoint, or in nanoGPT's folder."""
    folder = source.folder
    places = [folder / "meta.pkl", folder / "vocab.pkl"]
    data_set = fields_of(source.container.metadata.get("config")).get("dataset")
    if isinstance(data_set, str) and _PLAIN_NAME.fullmatch(data_set):
        places.append(folder.absolute().parent / "data" / data_set / "meta.pkl")
    if not any((folder / name).exists() for name in _IN_JSON):
        places.append(folder / "vocab.json")
    return filter(Path.is_file, places)


def _tables_in(fields: dict[str, Any]) -> Iterator[dict[Any, Any]]:
    named = (value for name, value in fields.items() if _TABLE.fullmatch(name))
    return filter(None, map(_ids, named))


def _ids(table: Any) -> dict[Any, Any]:
    """Return ids by characters, none of another value."""
    if not isinstance(table, dict):
        is_list = isinstance(table, list | tuple | str) and all(isinstance(token, str) for token in table)
        return {token: i for i, token in enumerate(table)} if is_list else {}
    is_itos = all(isinstance(token, str) for token in table.values())
    return {token: number_of(i) for i, token in table.items()} if is_itos else table


def _tokenizer(tables: list[dict[Any, Any]], place: str) -> StoredTokenizer:
    """Raise CheckpointError, which names `place`."""
    ids, *others = tables
    if any(other != ids for other in others):
        raise CheckpointError(f"{place} has two tables of characters that differ: correct one.")
    special = {token: True for token in ids if isinstance(token, str) and _SPECIAL.fullmatch(token)}
    if any(
        type(token_id) is not int or token_id < 0 or (len(str(token)) != 1 and token not in special)
        for token, token_id in ids.items()
    ):
        raise CheckpointError(f"{place} must give each character a whole number from 0.")
    return StoredTokenizer("characters", ids, added_tokens=special)
