"""GPT-2 of other programs in torch: training checkpoints and state dicts by their own names, in Linear layers.

Sources: karpathy/nanoGPT (train.py), build-nanogpt (train_gpt2.py), minGPT, makemore and ng-video-lecture (gpt.py);
rasbt/LLMs-from-scratch (previous_chapters.py).
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..config import EMBEDDING, ModelConfig
from ..containers.torch import Stub, fields_of, read_plain_pickle
from ..errors import CheckpointError, is_bool
from ..files import TENSOR_NAMES, StoredTokenizer
from .described import Description, Model, with_head_bias
from .family import Family, Source, TensorRule, config_of_parts, renamed
from .gpt2 import BESIDE, model_config

# Settings that no shape shows in a complete file; of others, such as a vocabulary that was padded, the tensors decide.
_UNSHOWN = ("n_head", "n_layer", "n_embd")
_GPT_CONFIG = {
    "block_size",
    "vocab_size",
    "n_layer",
    "n_head",
    "n_embd",
}  # build-nanogpt's; nanoGPT's has more
# Fields of config.json that no shape shows.
_ASKED = {
    "activation_function": 'n_head and an activation_function, "gelu_new" (by tanh), "gelu" (by erf) or "relu"',
    "do_layer_norm_before": "do_layer_norm_before, true: a GPT-2 has layer norms before its blocks",
}
# Of config.json: scores are divided by the root of the model's width, as in the lecture's film, and not of a head's.
BY_WIDTH = "scale_attn_by_width"
_PLAIN_NAME = re.compile(r"\w[\w.-]*")
# minGPT's config.json may name one of its sizes instead of giving numbers: the heads of each.
_MINGPT_HEADS = {
    "gpt2": 12,
    "openai-gpt": 12,
    "gpt2-medium": 16,
    "gpt2-large": 20,
    "gpt2-xl": 25,
    "gopher-44m": 16,
    "gpt-mini": 6,
    "gpt-micro": 4,
    "gpt-nano": 3,
}
# transformers' names, in Linear layers; the masks are buffers.
_GPT2 = {"h.*.attn.bias": None, "h.*.attn.masked_bias": None}
_LLMS_FROM_SCRATCH = {
    "wte": "tok_emb",
    "wpe": "pos_emb",
    "h.*.ln_1.weight": "trf_blocks.*.norm1.scale",
    "h.*.ln_1.bias": "trf_blocks.*.norm1.shift",
    "h.*.attn.c_attn": [f"trf_blocks.*.att.W_{matrix}" for matrix in ("query", "key", "value")],
    "h.*.attn.c_proj": "trf_blocks.*.att.out_proj",
    "h.*.ln_2.weight": "trf_blocks.*.norm2.scale",
    "h.*.ln_2.bias": "trf_blocks.*.norm2.shift",
    "h.*.mlp.c_fc": "trf_blocks.*.ff.layers.0",
    "h.*.mlp.c_proj": "trf_blocks.*.ff.layers.2",
    "ln_f.weight": "final_norm.scale",
    "ln_f.bias": "final_norm.shift",
    "lm_head": "out_head",
    "trf_blocks.*.att.mask": None,
}
_LECTURE = {
    "wte": "token_embedding_table",
    "wpe": "position_embedding_table",
    "h.*.ln_1": "blocks.*.ln1",
    "h.*.attn.c_attn": [f"blocks.*.sa.heads.*.{matrix}" for matrix in ("query", "key", "value")],
    "h.*.attn.c_proj": "blocks.*.sa.proj",
    "h.*.ln_2": "blocks.*.ln2",
    "h.*.mlp.c_fc": "blocks.*.ffwd.net.0",
    "h.*.mlp.c_proj": "blocks.*.ffwd.net.2",
    "blocks.*.sa.heads.*.tril": None,
}


def _arguments(source: Source) -> dict[str, Any]:
    return fields_of(source.container.metadata.get("model_args"))


def _settings(source: Source) -> dict[str, Any]:
    """Return nanoGPT's model_args, or build-nanogpt's GPTConfig: other dictionaries hold the flags of a run."""
    metadata = source.container.metadata
    config = None if "model_args" in metadata else metadata.get("config")
    is_build_nanogpts = isinstance(config, Stub) and config.state.keys() == _GPT_CONFIG
    return config.state if is_build_nanogpts else _arguments(source)


def _ask(source: Source, beside: Mapping[str, Any], has_heads: bool) -> None:
    """Raise CheckpointError if config.json does not say what no shape shows."""
    asked = [about for name, about in _ASKED.items() if source.model_type != "gpt2" and not beside.get(name)]
    if has_heads and not is_bool(beside.get(BY_WIDTH)):
        asked.append(
            f"{BY_WIDTH}, true if scores are divided by the root of the model's width, otherwise false"
        )
    if asked:
        place = source.folder / "config.json"
        raise source.error(f"does not say all of its arithmetic: write {place} with {', and '.join(asked)}.")


def _is_by_width(source: Source) -> bool:
    return (source.config_json or {}).get(BY_WIDTH) is True


def described(
    name: str,
    names: Mapping[str, Any],
    activation: str | None,
    is_its: Callable[[Source], Any] = lambda source: True,
    is_tied: bool = False,
    **fields: Any,
) -> Family:
    """activation: of the program, which its files do not say, or None."""
    description = Description.of(names, **fields)
    model = partial(Model, description)

    def config(source: Source) -> ModelConfig:
        beside = source.config_json or {}
        seen = model(source).sizes() | ({"tie_word_embeddings": True} if is_tied else {})
        if activation is None:
            _ask(source, beside, has_heads="n_head" in seen)
            if source.model_type == "gpt2":
                config = model_config(beside, source.json("generation_config.json"))
                if (heads := seen.get("n_head", config.n_head)) != config.n_head:
                    told = f"has {heads} heads, and config.json {config.n_head}: correct that one."
                    raise source.error(told)
                return config
        sizes = fields_of(beside.get("model"))  # minGPT's
        heads = sizes.get("n_head") or _MINGPT_HEADS.get(str(sizes.get("model_type")))
        guessed = {"n_head": heads, "activation_function": activation}
        said = {name: value for name, value in _settings(source).items() if name in _UNSHOWN}
        said |= renamed(seen, {"n_head": "n_head"})  # by a matrix of each
        return config_of_parts(source, "the checkpoint", guessed, seen, said)

    def rules(source: Source, config: ModelConfig) -> dict[str, TensorRule]:
        has_biases = {**(source.config_json or {}), **_settings(source)}.get("bias")
        return model(source).rules(config, has_biases if is_bool(has_biases) else None, _is_by_width(source))

    def quirks(source: Source, config: ModelConfig) -> list[str]:
        told = f"activation_function is {config.activation_function}, which the checkpoint does not say"
        root = "model's width" if _is_by_width(source) else "size of a head"
        scale = f"scores are divided by the root of the {root}: {BY_WIDTH} in config.json changes it"
        has_scale = model(source).heads or _is_by_width(source)
        return [told] * (activation is not None) + [scale] * bool(has_scale)

    def detect(source: Source) -> bool:
        """Decide by the layout: Hugging Face has the same names as nanoGPT, and (in, out)."""
        its = model(source)
        names = its.names("h.0.attn.c_attn.weight")
        if not names or not its.tensors.keys() >= {*names}:
            return False
        if len(names) > 1:  # only names tell
            return its.has_any(EMBEDDING) and its.has_any("h.0.mlp.c_fc.weight")
        shape = its.tensors[names[0]].shape
        return len(shape) == 2 and shape[0] == 3 * shape[1]

    return Family(
        name=name,
        described_by="the checkpoint",
        detect=lambda source: is_its(source) and detect(source),
        config=config,
        rules=rules,
        named=description.named,
        ignored=(*description.left_out, f"{BESIDE}.*"),
        quirks=quirks,
        tokenizer=_tokenizer,
        finish=with_head_bias,
    )


def _tokenizer(source: Source) -> StoredTokenizer | None:
    """Read meta.pkl, next to the checkpoint or in nanoGPT's folder."""
    data_set = fields_of(source.container.metadata.get("config")).get("dataset")
    places = [source.folder / "meta.pkl"]
    if isinstance(data_set, str) and _PLAIN_NAME.fullmatch(data_set):
        places.append(source.folder.absolute().parent / "data" / data_set / "meta.pkl")
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        return None
    characters = fields_of(fields_of(read_plain_pickle(path)).get("stoi"))
    if not characters:
        raise CheckpointError(f"{path} has no characters in its 'stoi': copy it from the data set again.")
    return character_tokenizer(characters, str(path))


def character_tokenizer(ids: Mapping[str, Any], place: str) -> StoredTokenizer:
    """Raise CheckpointError, which names `place`."""
    if any(
        len(character) != 1 or type(token_id) is not int or token_id < 0
        for character, token_id in ids.items()
    ):
        raise CheckpointError(f"{place} must give each character a whole number from 0.")
    return StoredTokenizer("characters", ids)


def of_user(source: Source, names: Mapping[str, Any]) -> Family:
    """Raise CheckpointError for wrong names, or another model_type."""
    if source.model_type not in (None, "gpt2"):
        raise source.error(
            f"has a {TENSOR_NAMES} by GPT-2's parameters and the model_type {source.model_type!r}: give "
            '{"its name": "the name of that model"}.'
        )
    try:
        return described(f"GPT-2 of {TENSOR_NAMES}", names, None, is_users=True)
    except ValueError as error:
        wanted = 'a name, a list of names, {"names": [...], "axis": 0, "transpose": true} or null'
        raise source.error(f"has a {TENSOR_NAMES} that gives {error}: it must give {wanted}.") from None


_OF_GPT2 = partial(described, names=_GPT2, unlike=())
_OF_THREE = partial(described, unlike=("attn.c_attn",))
NANOGPT = _OF_GPT2("nanoGPT", activation="gelu", is_its=_arguments, is_tied=True)
BUILD_NANOGPT = _OF_GPT2("build-nanogpt", activation="gelu_new", is_its=_settings, is_tied=True)
MINGPT = _OF_GPT2("minGPT", activation="gelu_new")
LLMS_FROM_SCRATCH = _OF_THREE("LLMs-from-scratch", _LLMS_FROM_SCRATCH, "gelu_new")
LECTURE = _OF_THREE("Karpathy's lecture", _LECTURE, "relu")
