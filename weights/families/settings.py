"""What no tensor shows: settings in the files of weights, in config.json and of programs, as one ModelConfig."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ..config import ACTIVATIONS, ModelConfig
from ..containers.torch import Stub, fields_of
from ..errors import is_whole, shown, truth_of
from ..files import read_json
from .family import NONE, Source, checked_config

# Fields that no tensor shows, and that a config.json next to the file may give.
_SCALES = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx")
UNSEEN = ("n_head", "activation_function", "layer_norm_epsilon", *_SCALES, "bos_token_id", "eos_token_id")
GPT2_END = 50256  # the id of <|endoftext|>, which begins and ends texts
# Spellings of sizes in programs, without case and underscores.
_SPELLINGS = {
    "n_head": "nhead nheads numhead numheads heads numattentionheads attentionheads nattentionheads",
    "n_embd": "nembd nembed embd embdim embeddim embeddingdim dmodel dim modeldim hiddensize hiddendim embsize "
    "embedsize embeddingsize width",
    "n_layer": "nlayer nlayers numlayer numlayers layers depth numhiddenlayers nblock nblocks numblocks",
}
_OURS = {spelling: ours for ours, spellings in _SPELLINGS.items() for spelling in spellings.split()}


def config_of_parts(
    source: Source,
    described_by: str,
    guessed: Mapping[str, Any] = NONE,
    seen: Mapping[str, Any] = NONE,
    said: Mapping[str, Any] = NONE,
    structure: Mapping[str, Any] = NONE,
) -> ModelConfig:
    """Return ModelConfig: `said` wins over `seen`, UNSEEN fields of the files, and `guessed`.

    Raise CheckpointError for impossible fields, without a number of heads, or with two.
    """
    shown_or_said = {**seen, **said}
    V = shown_or_said.get("vocab_size")
    end = GPT2_END if isinstance(V, int) and V > GPT2_END else None
    beside = _unseen_in(source.beside)
    stated = stated_fields(source, shown_or_said)
    values = {
        "bos_token_id": end,
        "eos_token_id": end,
        **guessed,
        **beside,
        **stated,
        **shown_or_said,
    }
    n_head = checked_heads(source, values.get("n_head"))
    described_by += " or config.json" * bool(beside)
    generation = None if "eos_token_id" in shown_or_said else source.generation_json
    return checked_config({**values, "n_head": n_head}, generation, NONE, described_by, structure)


def checked_heads(source: Source, n_head: Any) -> Any:
    """Raise CheckpointError if no file says the number of heads, or config.json another: shapes fit either."""
    if n_head is None:
        place = source.folder / "config.json"
        raise source.error(f"does not say how many heads its model has: write {place} with n_head.")
    if (beside := _unseen_in(source.beside).get("n_head")) not in (None, n_head):
        raise source.error(
            f"has n_head {shown(n_head)}, and config.json beside it {shown(beside)}: correct that one."
        )
    return n_head


def stated_fields(source: Source, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return UNSEEN fields of the file's own settings; what these leave out, of settings without sizes.

    Raise CheckpointError if two of them, or config.json, state different values.
    """
    stated = _agreed(source, settings_of(source, sizes))
    stated |= _agreed(source, _without_sizes(source), but=stated)
    beside = _unseen_in(source.beside)
    for name in stated.keys() & beside.keys():
        if beside[name] is not None and _meaning(beside[name]) != _meaning(stated[name]):
            both = f"{shown(stated[name])}, and config.json beside it {shown(beside[name])}"
            raise source.error(f"has {name} {both}: correct that one.")
    return stated


def _agreed(
    source: Source, settings: Iterable[Mapping[str, Any]], but: Mapping[str, Any] = NONE
) -> dict[str, Any]:
    """Raise CheckpointError if two settings have different values of a field."""
    agreed: dict[str, Any] = {}
    for fields in settings:
        values = [("n_head", heads) for heads in _numbers_in(fields).get("n_head", ())]
        values += [(name, value) for name, value in _unseen_in(fields).items() if value is not None]
        for name, value in values:
            if name in but:
                continue
            if _meaning(agreed.setdefault(name, value)) != _meaning(value):
                both = f"{shown(agreed[name])} and {shown(value)}"
                raise source.error(f"states the {name} {both}: save it with one of them.")
    return agreed


def norms_come_first(source: Source) -> bool:
    """Return whether files have the norm_first of torch's layers. Raise CheckpointError if it is not true."""
    settings = [*fields_in(source.container.metadata), source.beside]
    values = [fields["norm_first"] for fields in settings if fields.get("norm_first") is not None]
    if strange := [value for value in values if truth_of(value) is None]:
        raise source.error(f"has norm_first {shown(strange[0])}, which must be true or false.")
    if not all(map(truth_of, values)):
        raise source.error("has norm_first false: its layer norms come after its blocks, and it is no GPT-2.")
    return bool(values)


def settings_of(source: Source, sizes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of the file's dictionaries and objects that state a width or layers, which are in `sizes`.

    Next to nanoGPT's model_args, others hold the flags of a run, some of which a resumed model ignores.
    """
    metadata = source.container.metadata
    for fields in fields_in(metadata.get("model_args", metadata)):
        numbers = _numbers_in(fields)
        fits = [sizes.get(name) in numbers[name] for name in ("n_embd", "n_layer") if name in numbers]
        if fits and all(fits):
            yield fields


def _without_sizes(source: Source) -> Iterator[dict[str, Any]]:
    """Yield the fields of dictionaries and objects that state heads, activation or scales, and no width or layers."""
    for fields in fields_in(source.container.metadata):
        numbers = _numbers_in(fields)
        is_stated = "n_head" in numbers or fields.keys() & {"activation_function", *_SCALES}
        if is_stated and not numbers.keys() & {"n_embd", "n_layer"}:
            yield fields


def fields_in(metadata: Any) -> Iterator[dict[str, Any]]:
    """Yield the fields of each dictionary and object, in lists too, once: a pickle may contain itself."""
    left = [metadata]
    taken: dict[int, Any] = {}  # by id, which is an object's own as long as it lives
    while left:
        value = left.pop()
        if isinstance(value, str) and value.startswith("{"):  # in a header of texts
            with suppress(ValueError):
                value = read_json(value)
        if id(value) not in taken:
            taken[id(value)] = value
            fields = fields_of(value)
            yield fields
            is_list = isinstance(value, list | tuple)
            left += [one for one in value if isinstance(one, dict | Stub)] if is_list else fields.values()


def _numbers_in(fields: Mapping[str, Any]) -> Mapping[str, list[int]]:
    """Return all numbers by n_head, n_embd and n_layer: fields may have two spellings of one."""
    numbers = defaultdict(list)
    for name, value in fields.items():
        ours = _OURS.get(name.lower().replace("_", ""))
        is_number_in_text = isinstance(value, str) and value.isdecimal() and len(value) < 10  # in a header
        if is_number_in_text or (isinstance(value, float) and value.is_integer()):
            value = int(value)
        if ours and is_whole(value):
            numbers[ours].append(value)
    return numbers


def _unseen_in(fields: Mapping[str, Any]) -> dict[str, Any]:
    unseen = {
        name: fields[name]
        for name in UNSEEN
        if name in fields
        and (fields[name] is not None or name.endswith("_token_id"))  # of which null is none
    }
    scales = {name: truth_of(unseen[name]) for name in _SCALES if name in unseen}
    unseen |= {name: scale for name, scale in scales.items() if scale is not None}
    heads = _numbers_in(fields).get("n_head")
    return {**unseen, "n_head": heads[0]} if heads else unseen


def _meaning(value: Any) -> Any:
    return ACTIVATIONS.get(value, value) if isinstance(value, str) else value
