"""Names in vLLM, llama.cpp, transformers, nanoGPT and FasterTransformer for our fields, arguments and flags.

The command line, the library, JSONL and the server accept them; help shows our names alone.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from .errors import RequestError

# Our name -> other names; with a hyphen: of a flag alone. In a command with a flag of that name, it is no alias.
NAMES = {
    "model": "model_name_or_path pretrained_model_name_or_path ckpt_path hf_repo force_model out_dir -hf -hfr",
    "hf_file": "gguf_file subfolder -hff",
    "dtype": "torch_dtype data_type",
    "device": "device_map",
    "threads": "n_threads",
    "max_model_len": "n_ctx max_seq_len",
    "max_num_seqs": "parallel n_parallel max_batch_size -np",
    "max_num_batched_tokens": "ubatch_size n_ubatch -ub",
    "draft_model": "model_draft speculative_model -md",
    "num_speculative_tokens": "draft_max",
    "tensor_parallel_size": "tensor_parallel tensor_para_size -tp",
    "pipeline_parallel_size": "pipeline_parallel pipeline_para_size -pp",
    "max_tokens": "max_new_tokens n_predict predict output_len --length",
    "min_tokens": "min_new_tokens",
    "temperature": "temp",
    "top_k": "topk --k",
    "top_p": "topp --p",
    "typical_p": "typical",
    "top_n_sigma": "top_nsigma",
    "dry_sequence_breakers": "dry_sequence_breaker",
    "repetition_penalty": "repeat_penalty",
    "seed": "random_seed",
    "n": "num_return_sequences num_samples",
    "stop": "stop_strings --stop-token",
    "eos_token_id": "end_id",
    "num_beams": "beam_width",
    "length_penalty": "len_penalty",
    "guided_json": "json_schema -j",
    "guided_grammar": "grammar",
    "steer": "--control-vector --control-vector-scaled",
    "prompt": "--quick",
    "system": "--system-prompt -sys",
    "batch_sizes": "--batch-size",
    "prompt_lengths": "--n-prompt --input-len -p",
    "new_tokens": "--n-gen --output-len -n",
    "repetitions": "--num-iters -r",
    "format": "-o",
    "log_level": "--uvicorn-log-level",
    "no_special_tokens": "--split-special-tokens",
}
OURS = {other: ours for ours, others in NAMES.items() for other in others.split() if other[0] != "-"}
# Flags whose value is another one here -> the words that replace both.
REWRITTEN: dict[str, Callable[[str], list[str]]] = {
    "--init-from": lambda text: [] if text == "resume" else [f"--model={text}"],
    "--start": lambda text: [f"--file={text[5:]}" if text.startswith("FILE:") else f"--prompt={text}"],
    "--int8-mode": lambda text: [] if text == "0" else ["--dtype=int8"],
    "--grammar-file": lambda text: [f"--guided-grammar={Path(text).read_text(encoding='utf-8')}"],
    **dict.fromkeys(("-c", "--ctx-size"), lambda text: [] if text == "0" else [f"--max-model-len={text}"]),
}
# No result depends on these: they are the default here, or about other hardware.
IGNORED = (
    """enforce_eager trust_remote_code enable_prefix_caching enable_chunked_prefill disable_log_stats
disable_log_requests low_cpu_mem_usage use_cache no_display_prompt no_conversation -no-cnv jinja mlock no_mmap no_warmup
log_disable cont_batching -cb simple_io use_cpu time""",
    """gpu_memory_utilization swap_space cpu_offload_gb block_size attention_backend attn_implementation
model_impl n_gpu_layers gpu_layers -ngl flash_attn -fa n_batch compile model_type lib_path pad_token_id""",
)
WITHOUT_VALUE, WITH_VALUE = ({*names.split()} for names in IGNORED)

logger = logging.getLogger(__name__)


def renamed(
    given: Mapping[str, Any], names: Collection[str], ignored=WITHOUT_VALUE | WITH_VALUE
) -> dict[str, Any]:
    """Return keywords under our `names`, without `ignored` ones; unknown ones stay.

    Raise RequestError if two name one thing.
    """
    found, spelled = {}, {}
    for name, value in given.items():
        if name not in names and name in ignored:
            logger.info("nothing here depends on %s", name)
            continue
        ours = OURS[name] if name not in names and OURS.get(name) in names else name
        if ours in spelled:
            raise RequestError(f"and {name} name one thing: give one of them.", spelled[ours])
        found[ours], spelled[ours] = value, name
    if "temperature" in names and type(samples := found.get("do_sample")) is bool:
        del found["do_sample"]
        found["temperature"] = found.get("temperature", 1.0) if samples else 0.0
    if spelled.get("device") == "device_map" and found["device"] == "auto":
        found["device"] = "cpu"
    return found


def translated(word: str, rest: list[str], flags: Collection[str]) -> list[str] | None:
    """Return our words for a flag of another program, [] if nothing depends on it, None if it is unknown.

    rest: the words after it; a value is taken from them. flags: of the command. Raise OSError for an unreadable file.
    """
    name, equals, value = word.partition("=")
    if name in REWRITTEN and (equals or rest):
        words = REWRITTEN[name](value if equals else rest.pop(0))
        return words if all(each.partition("=")[0] in flags for each in words) else None
    key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else name
    is_switch = key in ("flash_attn", "-fa", "compile")  # their values may be missing
    value_is = r"(?i)(on|off|auto|true|false|-?\d+)$" if is_switch else r"-?\d|[^-]"
    if key in WITH_VALUE and not equals and rest and re.match(value_is, rest[0]):
        del rest[0]
    if key in WITHOUT_VALUE or key in WITH_VALUE:
        return []
    for ours, others in NAMES.items():
        flag = f"--{ours.replace('_', '-')}"
        if flag in flags and {name, key} & {*others.split()}:
            return [flag + equals + value]
    return None
