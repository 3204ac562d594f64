"""LLMArgs: the arguments of LLM, each declared on one line.

A line gives the argument's name, type, default, rule (`fields.py`), metavar and help text. The checks, `help(LLM)`,
the flags of `tinygpt/cli/flags.py`, and the models of ranks and of Ray's actors derive from it. To add one: a line
here, the place that acts on it, and a test.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from .errors import RequestError
from .fields import PIPELINE_SIZE, TENSOR_SIZE, FieldRule, as_integer, need, own_names, read_field
from .hardware import THREADS
from .weights.config import DTYPES, ModelConfig, dtype_name

if TYPE_CHECKING:
    from .ranks.mpi import Layout

# Rows whose logits are computed together if all are wanted: 64 x 50257 x 4 bytes are 13 MB.
LOGIT_ROWS = 64

Fields = ParamSpec("Fields")
Record = TypeVar("Record")
PathOrId = str | os.PathLike[str]

CHECKPOINT = (
    '"demo" (embedded), a local folder or file, or a Hub id, also as id@revision, id/file.gguf or id:q8_0'
)
WEIGHTS = f"precision of the weights: {', '.join(DTYPES)}"
SOFT_PROMPT = "a soft prompt in PEFT's layout"


def argument(
    default: Any, rule: FieldRule, metavar: str | None, text: str, more: str = "", flag: str | None = ""
) -> Any:
    """Return a dataclass field. more: for `help(LLM)` alone; flag: another name of the flag, None for none."""
    metadata = {"rule": rule, "metavar": metavar, "help": text, "more": more, "flag": flag}
    return field(default=default, metadata=metadata)


def named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    need(bool(name and path))
    return name, path


def _count(least: int) -> FieldRule:
    return FieldRule(
        f"a whole number, {least} or more", lambda value: as_integer(value, least, 2**63 - 1), int
    )


def _named_paths(allowed: str) -> FieldRule:
    def read(value: Any) -> dict[str, PathOrId]:
        need(isinstance(value, Mapping) and all(isinstance(name, str) and name for name in value))
        return dict(value)

    return FieldRule(f"a dict from names to {allowed}", read, named_path, repeats=True)


def _unchecked(parse: Callable[[str], Any] | None = str) -> FieldRule:
    """Return the rule of an argument that is checked when it is used."""
    return FieldRule("", lambda value: value, parse)


UNCHECKED = _unchecked()
DTYPE = FieldRule("the name of a dtype", dtype_name, dtype_name)
FROM_ONE = _count(1)
FROM_ZERO = _count(0)


@dataclass(frozen=True)
class LLMArgs:
    """The arguments of LLM, checked. Raise RequestError for an impossible one."""

    model: PathOrId = argument(
        "demo", UNCHECKED, None, CHECKPOINT, 'id/folder, a URL, or "random:124M" (355M, 774M, 1.5B)'
    )
    dtype: str = argument(
        "auto",
        DTYPE,
        None,
        f"{WEIGHTS}; auto: a converted checkpoint's, otherwise float32",
        "int8 and int4 quantize as they load",
    )
    device: str = argument(
        "cpu",
        _unchecked(str.lower),
        None,
        '"cpu"; "cuda": an NVIDIA GPU; "reference": NumPy in float64, slow',
    )
    threads: int | None = argument(
        None, THREADS, "N", "threads that compute (default: one for each fast physical core)"
    )
    max_num_seqs: int = argument(32, FROM_ONE, "N", "samples that run at once; others wait")
    max_model_len: int | None = argument(
        None,
        FROM_ONE,
        "N",
        "positions reserved for each sample, prompt included (default: all that the model has)",
        "a model with ALiBi can have more",
    )
    kv_cache_dtype: str = argument(
        "auto",
        DTYPE,
        "DTYPE",
        "precision of the KV cache: float32, bfloat16 or int8; "
        "auto is float32 for float32 and float16 weights, otherwise bfloat16; "
        "on a GPU, float16 weights have float16, and float32 weights no other",
    )
    max_num_batched_tokens: int | None = argument(
        None,
        FROM_ONE,
        "N",
        "new tokens in a step, prompt tokens included (default: 512, or --max-num-seqs if that is more)",
        "2048 on a GPU; fewer shorten other requests' wait for a prompt, more read prompts faster",
    )
    prefix_cache_seqs: int = argument(
        4,
        FROM_ZERO,
        "N",
        "finished samples kept in the KV cache, for prompts that begin alike",
        "each takes a running sample's memory; with 0 finished requests share nothing",
    )
    max_queue: int | None = argument(
        None, FROM_ZERO, "N", "submitted samples that may wait; None is any number", flag=None
    )
    draft_model: PathOrId | None = argument(
        None,
        UNCHECKED,
        "MODEL",
        "a smaller model with the same tokens that drafts: fewer steps, the same text",
    )
    num_speculative_tokens: int = argument(4, FROM_ONE, "N", "tokens of a draft")
    lora: PathOrId | None = argument(
        None, UNCHECKED, "PATH", "a LoRA adapter in PEFT's layout to merge", "a folder"
    )
    lora_modules: Mapping[str, PathOrId] | None = argument(
        None,
        _named_paths("folders"),
        "NAME=PATH",
        "a LoRA adapter that requests may choose, as --lora-request",
        "{name: folder}: a request's lora_request names one, and a batch mixes them; "
        "float32 or float16, cpu or reference",
    )
    soft_prompts: Mapping[str, PathOrId] | None = argument(
        None,
        _named_paths("folders or files"),
        "NAME=PATH",
        f"{SOFT_PROMPT} in front of every prompt; with --input, several may be given: a line's field soft_prompt names "
        "one, and the default is the first",
        "{name: folder, or file}: prompt tuning, p-tuning or prefix tuning, for requests' soft_prompt",
        flag="soft_prompt",
    )
    split_special_tokens: bool = argument(
        False,
        _unchecked(None),
        None,
        "read a special token in a text, such as <|endoftext|>, as plain text: for texts of strangers "
        "(default: it is that token)",
    )
    chat_template: PathOrId | None = argument(
        None,
        UNCHECKED,
        "FILE",
        "a file of Jinja's for `chat`, or \"plain\": the messages' texts, a line each, which the model continues; "
        "None is the checkpoint's",
        flag=None,
    )
    open_schemas: bool = argument(
        False,
        _unchecked(None),
        None,
        "let JSON of a schema have keys that an object's schema does not name (default: none, unless the schema has "
        "additionalProperties)",
    )
    tensor_parallel_size: int = argument(
        1,
        TENSOR_SIZE,
        "N",
        "processes that share each layer, up to 4; mpiexec starts them",
        'extra "mpi": `mpiexec -n` starts the product of both sizes; LLM returns in rank 0 alone, and the other ranks '
        "serve it until it ends; threads are each rank's",
    )
    pipeline_parallel_size: int = argument(
        1, PIPELINE_SIZE, "N", "stages that share the layers, each of as many processes"
    )
    revision: str | None = argument(
        None, UNCHECKED, "NAME", "a commit, branch or tag of a Hub --model, as in id@NAME"
    )
    max_capture_bytes: int = argument(
        2**30, FROM_ONE, "N", "of the activations that a request captures; more are refused", flag=None
    )

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not f.default:
                object.__setattr__(self, f.name, read_field(f.name, value, f.metadata["rule"]))
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise RequestError(
                f"is {self.max_num_batched_tokens} and max_num_seqs is {self.max_num_seqs}: each running sample needs "
                "a token of every step, so raise the one or lower the other.",
                "max_num_batched_tokens",
            )
        if self.num_ranks > 1 and self.lora_modules:
            raise RequestError(
                "is given with ranks that share the model: merge one with lora.", "lora_modules"
            )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def layout(self) -> "Layout":
        from .ranks.mpi import Layout  # not needed for one rank

        return Layout(self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def checkpoint(self) -> PathOrId:
        """The model at its revision. Raise CheckpointError if it has none."""
        from .weights.open import with_revision  # not needed for --help

        return self.model if self.revision is None else with_revision(self.model, self.revision)

    def sizes(self, config: ModelConfig, max_step_tokens: int) -> "EngineConfig":
        """Return the sizes for a model. max_step_tokens: of the backend."""
        n_positions = config.n_positions  # with ALiBi, the length of training, which is no limit
        if not config.has_alibi and self.max_model_len is not None and self.max_model_len > n_positions:
            raise RequestError(
                f"is {self.max_model_len} and this model has {n_positions} positions.", "max_model_len"
            )
        sizes = {f.name: getattr(self, f.name) for f in fields(EngineConfig)}
        sizes["max_model_len"] = self.max_model_len or n_positions
        sizes["max_num_batched_tokens"] = self.max_num_batched_tokens or max(
            max_step_tokens, self.max_num_seqs
        )
        return EngineConfig(**sizes)


@dataclass(frozen=True)
class EngineConfig:
    """The sizes of a loaded model: LLMArgs' fields of these names, without None."""

    max_num_seqs: int
    prefix_cache_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_queue: int | None
    num_speculative_tokens: int
    max_capture_bytes: int

    @property
    def num_slots(self) -> int:
        """Slots of the KV cache: of running sequences and of finished ones."""
        return self.max_num_seqs + self.prefix_cache_seqs

    @property
    def max_num_logits(self) -> int:
        """Rows of logits in a step: one for each sequence, and LOGIT_ROWS for prompts and drafts."""
        return LOGIT_ROWS + self.max_num_seqs


def takes_fields_of(
    record: Callable[Fields, Record],
) -> Callable[[Callable[[Any, Record], None]], Callable[Concatenate[Any, Fields], None]]:
    """Decorate an __init__ that is given a record: callers give its fields, also under other programs' names."""

    def decorate(init: Callable[[Any, Record], None]) -> Callable[Concatenate[Any, Fields], None]:
        known = {f.name: f.metadata for f in fields(record)}
        record.__init__.__qualname__ = init.__qualname__  # which TypeError names

        @functools.wraps(init)
        def __init__(self, *args: Any, **keywords: Any) -> None:
            init(self, record(*args, **own_names(keywords, known)))

        __init__.__signature__ = inspect.signature(record.__init__)
        __init__.__doc__ = "\n".join(
            f"{name}: {'; '.join(filter(None, (metadata['help'], metadata['more'])))}."
            for name, metadata in known.items()
        )
        return __init__

    return decorate
