"""GPT-2 of other programs in torch: training checkpoints and state dicts by their own names, in Linear layers.

Sources: karpathy/nanoGPT (train.py), build-nanogpt (train_gpt2.py), minGPT, makemore and ng-video-lecture (gpt.py);
rasbt/LLMs-from-scratch (previous_chapters.py).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..config import EMBEDDING, HEAD, ModelConfig
from ..containers.torch import Stub, fields_of
from ..errors import truth_of
from ..files import TENSOR_NAMES
from ..tensor import have_equal_values
from .characters import character_tokenizer
from .described import Description, Model, with_head_bias
from .family import MODULES, Family, Source, TensorRule, renamed
from .gpt2 import BESIDE, config_beside
from .settings import config_of_parts, norms_come_first, settings_of, stated_fields

logger = logging.getLogger(__name__)

# Settings that no shape shows in a complete file; of others, such as a vocabulary that was padded, the tensors decide.
_UNSHOWN = ("n_head", "n_layer", "n_embd")
_GPT_CONFIG = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd"}  # build-nanogpt's
_NANOGPTS = {"dropout", "bias"}  # more fields of nanoGPT's, in any place
_MINGPTS = "embd_pdrop"
_NORMS = "do_layer_norm_before"
# Fields of config.json that no shape shows.
_ASKED = {
    "activation_function": 'an activation_function, "gelu_new" (by tanh), "gelu" (by erf) or "relu"',
    _NORMS: f"{_NORMS}, true: a GPT-2 has layer norms before its blocks",
}
# Of config.json: scores are divided by the root of the model's width, as in the lecture's film, and not of a head's.
BY_WIDTH = "scale_attn_by_width"
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
    """Return nanoGPT's model_args, or a GPTConfig: other dictionaries hold the flags of a run."""
    metadata = source.container.metadata
    config = None if "model_args" in metadata else metadata.get("config")
    is_gpt_config = isinstance(config, Stub) and config.state.keys() >= _GPT_CONFIG
    return config.state if is_gpt_config else _arguments(source)


def _gpt_config(model: Model) -> dict[str, Any]:
    """Return the settings, which may be a dictionary in any place if its sizes are the tensors'."""
    sizes = (
        {"n_embd": model.shape(EMBEDDING)[1], "n_layer": model.n_layer} if model.has_any(EMBEDDING) else {}
    )
    fitting = (fields for fields in settings_of(model.source, sizes) if fields.keys() >= _GPT_CONFIG)
    return _settings(model.source) or next(fitting, {})


def _is_nanogpts(model: Model) -> bool:
    """Decide by settings; without, by matrices without biases, and no masks or no head of its own."""
    if settings := _gpt_config(model):
        return settings.keys() >= _NANOGPTS or "model_args" in model.source.container.metadata
    matrices = (f"h.0.{module}.bias" for module in MODULES if "ln_" not in module)
    return not any(map(model.has_any, matrices)) and not _has_mingpts_tensors(model)


def _is_mingpts(model: Model) -> bool:
    if settings := _gpt_config(model):
        return _MINGPTS in settings
    is_in_config_json = isinstance(model.source.beside.get("model"), Mapping)
    return is_in_config_json or _has_mingpts_tensors(model)


def _has_mingpts_tensors(model: Model) -> bool:
    """Return whether there are masks, which newer nanoGPTs lack, and a head that is not the embedding."""
    head = model.tensors.get(HEAD)
    embedding = model.tensors.get(EMBEDDING)
    if "h.0.attn.bias" not in model.tensors or head is None or embedding is None:
        return False
    is_copy = head == embedding or (head.shape == embedding.shape and have_equal_values(head, embedding))
    return not is_copy


def _ask(source: Source, asks: tuple[str, ...], sizes: Mapping[str, Any]) -> None:
    """Raise CheckpointError if no file says what no shape shows, or one that norms come after blocks."""
    is_first = {_NORMS: True} if norms_come_first(source) else {}
    stated = {**source.beside, **stated_fields(source, sizes), **is_first}
    stated[_NORMS] = truth_of(stated.get(_NORMS))
    asked = [
        sentence
        for name, sentence in _ASKED.items()
        if name in asks and source.model_type != "gpt2" and not stated.get(name)
    ]
    if asked and not {**sizes, **stated}.get("n_head"):
        asked.insert(0, "n_head")
    if "n_head" in sizes and truth_of(source.beside.get(BY_WIDTH)) is None:
        asked.append(
            f"{BY_WIDTH}, true if scores are divided by the root of the model's width, otherwise false"
        )
    if asked:
        place = source.folder / "config.json"
        raise source.error(f"does not say all of its arithmetic: write {place} with {', and '.join(asked)}.")


def _is_by_width(source: Source) -> bool:
    return truth_of(source.beside.get(BY_WIDTH)) is True


@dataclass(frozen=True)
class Program:
    """A program's GPT-2: its names of parameters, and all that its files do not say.

    activation: None if a config.json has to say it. asks: what it has to say then. is_its: whether settings or tensors
    are the program's. is_guess: whether they may be another's. is_tied: whether the head is the embedding.
    has_all_biases_or_none: of norms and matrices.
    """

    name: str
    description: Description
    activation: str | None
    is_its: Callable[[Model], Any] = lambda model: True
    is_guess: Callable[[Model], bool] = lambda model: False
    asks: tuple[str, ...] = tuple(_ASKED)
    is_tied: bool = False
    has_all_biases_or_none: bool = False

    @property
    def family(self) -> Family:
        return Family(
            name=self.name,
            described_by="the checkpoint",
            detect=self.detect,
            config=self.config,
            rules=self.rules,
            named=self.description.named,
            ignored=(*self.description.left_out, f"{BESIDE}.*"),
            quirks=self.quirks,
            tokenizer=character_tokenizer,
            finish=with_head_bias,
        )

    def detect(self, source: Source) -> bool:
        """Decide by the layout: Hugging Face has the same names as nanoGPT, and (in, out)."""
        model = Model(self.description, source)
        names = model.names("h.0.attn.c_attn.weight")
        if not names or not model.tensors.keys() >= {*names}:
            return False
        if len(names) > 1:  # only names tell
            return model.has_any(EMBEDDING) and model.has_any("h.0.mlp.c_fc.weight")
        shape = model.tensors[names[0]].shape
        return len(shape) == 2 and shape[0] == 3 * shape[1] and self.is_its(model)

    def config(self, source: Source) -> ModelConfig:
        model = Model(self.description, source)
        sizes = model.sizes()
        if self.is_tied:
            sizes["tie_word_embeddings"] = True
        if self.activation is None:
            _ask(source, self.asks, sizes)
            if source.model_type == "gpt2":
                return _config_of_transformers(source, sizes)
        mingpts = fields_of(source.beside.get("model"))
        heads = mingpts.get("n_head") or _MINGPT_HEADS.get(str(mingpts.get("model_type")))
        guessed = {"n_head": heads, "activation_function": self.activation}
        said = {name: value for name, value in _settings(source).items() if name in _UNSHOWN}
        said |= renamed(sizes, {"n_head": "n_head"})  # by a matrix of each
        config = config_of_parts(source, "the checkpoint", guessed, sizes, said)
        told = {**source.beside, **stated_fields(source, sizes), **_gpt_config(model)}
        is_said = any(told.get(name) is not None for name in ("activation_function", _MINGPTS))
        if not is_said and self.is_guess(model):
            logger.warning(
                f"{source.path} does not say its activation_function, which is {self.activation} as in {self.name}: "
                'write config.json with "gelu" if it is by erf, as nanoGPT\'s is'
            )
        return config

    def rules(self, source: Source, config: ModelConfig) -> dict[str, TensorRule]:
        model = Model(self.description, source)
        has_biases = truth_of({**source.beside, **_settings(source)}.get("bias"))
        if has_biases is None:
            has_none = self.has_all_biases_or_none and not model.has_biases(config)
            has_biases = False if has_none else None
        return model.rules(config, has_biases, _is_by_width(source))

    def quirks(self, source: Source, config: ModelConfig) -> list[str]:
        quirks = []
        sizes = {"n_embd": config.n_embd, "n_layer": config.n_layer}
        if self.activation is not None and "activation_function" not in stated_fields(source, sizes):
            quirks.append(
                f"activation_function is {config.activation_function}, which the checkpoint does not say"
            )
        if Model(self.description, source).heads or _is_by_width(source):
            root = "model's width" if _is_by_width(source) else "size of a head"
            quirks.append(
                f"scores are divided by the root of the {root}: {BY_WIDTH} in config.json changes it"
            )
        return quirks


def _config_of_transformers(source: Source, sizes: Mapping[str, Any]) -> ModelConfig:
    """Raise CheckpointError if a matrix of each head shows another number of them."""
    shown = {name: size for name, size in sizes.items() if name not in ("n_head", "tie_word_embeddings")}
    config = config_beside(source, shown)
    heads = sizes.get("n_head", config.n_head)
    if heads != config.n_head:
        raise source.error(f"has {heads} heads, and config.json {config.n_head}: correct that one.")
    return config


def of_user(source: Source, names: Mapping[str, Any]) -> Family:
    """Raise CheckpointError for wrong names, or another model_type."""
    if source.model_type not in (None, "gpt2"):
        raise source.error(
            f"has a {TENSOR_NAMES} by GPT-2's parameters and the model_type {source.model_type!r}: give "
            '{"its name": "the name of that model"}.'
        )
    try:
        return Program(f"GPT-2 of {TENSOR_NAMES}", Description.of(names, is_users=True), None).family
    except ValueError as error:
        wanted = 'a name, a list of names, {"names": [...], "axis": 0, "transpose": true} or null'
        raise source.error(f"has a {TENSOR_NAMES} that gives {error}: it must give {wanted}.") from None


_LINEAR_GPT2 = Description.of(_GPT2, unlike=())
NANOGPT = Program(
    "nanoGPT", _LINEAR_GPT2, "gelu", is_its=_is_nanogpts, is_tied=True, has_all_biases_or_none=True
).family
BUILD_NANOGPT = Program(
    "build-nanogpt",
    _LINEAR_GPT2,
    "gelu_new",
    is_its=lambda model: _gpt_config(model).keys() == _GPT_CONFIG,
    is_guess=lambda model: not _settings(model.source),  # of a dictionary
    is_tied=True,
).family
MINGPT = Program("minGPT", _LINEAR_GPT2, "gelu_new", is_its=_is_mingpts, is_guess=lambda model: True).family
UNDECIDED = Program(
    "GPT-2 of nanoGPT's names",
    _LINEAR_GPT2,
    None,
    asks=("activation_function",),
    is_tied=True,
    has_all_biases_or_none=True,
).family
LLMS_FROM_SCRATCH = Program(
    "LLMs-from-scratch", Description.of(_LLMS_FROM_SCRATCH, unlike=("attn.c_attn",)), "gelu_new"
).family
LECTURE = Program("Karpathy's lecture", Description.of(_LECTURE, unlike=("attn.c_attn",)), "relu").family
