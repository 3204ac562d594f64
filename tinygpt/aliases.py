"""Names in vLLM, llama.cpp, transformers, nanoGPT and FasterTransformer for our fields, arguments and flags.

The command line, the library, JSONL and the server accept them; help shows our names alone.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import RequestError, suggest

# Our name -> other names; with a hyphen: of a flag alone. In a command with a flag of that name, it is no alias.
NAMES = {
    "model": "model_name_or_path pretrained_model_name_or_path ckpt_path hf_repo force_model out_dir -hf -hfr",
    "hf_file": "gguf_file subfolder -hff",
    "dtype": "torch_dtype data_type inference_data_type compute_type --quantization --quantize",
    "served_model_name": "--alias -a",
    "kv_cache_dtype": "cache_type_k -ctk",
    "device": "device_map",
    "threads": "n_threads",
    "max_model_len": "n_ctx max_seq_len",
    "max_num_seqs": "parallel n_parallel max_batch_size -np",
    "max_num_batched_tokens": "ubatch_size n_ubatch -ub",
    "draft_model": "model_draft speculative_model -md",
    "num_speculative_tokens": "draft_max",
    "tensor_parallel_size": "tensor_parallel tensor_para_size -tp",
    "pipeline_parallel_size": "pipeline_parallel pipeline_para_size -pp",
    "max_tokens": "max_new_tokens max_completion_tokens n_predict predict output_len --length -l",
    "min_tokens": "min_new_tokens --min-length",
    "temperature": "temp sampling_temperature",
    "top_k": "topk sampling_topk --sampling-top-k --k",
    "top_p": "topp sampling_topp --sampling-top-p --p",
    "typical_p": "typical",
    "top_n_sigma": "top_nsigma",
    "dry_sequence_breakers": "dry_sequence_breaker",
    "repetition_penalty": "repeat_penalty",
    "seed": "random_seed",
    "n": "num_return_sequences num_samples nsamples",
    "stop": "stop_strings --stop-token",
    "eos_token_id": "end_id",
    "num_beams": "beam_width beam_size",
    "length_penalty": "len_penalty",
    "guided_json": "json_schema -j",
    "guided_grammar": "grammar",
    "file": "--prompt-file",
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
SIZES = {"124M": "gpt2", "355M": "gpt2-medium", "774M": "gpt2-large", "1558M": "gpt2-xl"}  # OpenAI's folders
IS_ON = {"true": True, "1": True, "false": False, "0": False}
TEXT_LINES = ("--input-format=text",)
TEXT_FILES = ("", ".txt")
REWRITTEN: dict[str, Callable[[str], list[str]]] = {
    "--model-name": lambda text: [f"--model={SIZES.get(text, text)}"],
    "--is-fix-random-seed": lambda text: ["--seed=0"] if IS_ON.get(text.lower()) else [],
    "--init-from": lambda text: [] if text == "resume" else [f"--model={text}"],
    "--start": lambda text: [f"--file={text[5:]}" if text.startswith("FILE:") else f"--prompt={text}"],
    "--int8-mode": lambda text: [] if text == "0" else ["--dtype=int8"],
    "--grammar-file": lambda text: [f"--guided-grammar={Path(text).read_text(encoding='utf-8-sig')}"],
    # A prompt in each line, but for the token ids of start_ids.csv.
    "--sample-input-file": lambda text: [f"--input={text}", *TEXT_LINES * (Path(text).suffix in TEXT_FILES)],
    **dict.fromkeys(("-c", "--ctx-size"), lambda text: [] if text == "0" else [f"--max-model-len={text}"]),
}
# Flags of other programs that may have such a value -> the words that replace them.
SWITCHES = {
    **dict.fromkeys(("--fp16", "--half"), "--dtype=float16"),
    "--bf16": "--dtype=bfloat16",
    "--load-in-8bit": "--dtype=int8",
    "--load-in-4bit": "--dtype=int4",
}
# Our flags with another program's value, None for a missing one -> the words that replace both.
VALUES = {
    **dict.fromkeys((("-n", "-1"), ("--max-tokens", "-1")), "--max-tokens=2147483647 --overflow=clamp"),
    ("--verbose", "True"): "--verbose",
    ("--verbose", "False"): "",
    ("--color", None): "--color=auto",
}
# A flag of a program in which others of the line mean something else.
MEANINGS = {"-l": {"-n": "--n"}}
# Flags and commands whose meaning is known, and which have none here: what to do, if there is something.
HINTS = {
    "--models-dir": "--model takes a checkpoint's folder",
    "--sample-output-file": "--output takes the records of --input; > FILE takes a text",
    **dict.fromkeys(
        ("--vocab-file", "--merges-file", "--tokenizer"), "a tokenizer's files lie in the checkpoint's folder"
    ),
    "--max-length": "--max-tokens counts the new tokens alone",
    "--return-cum-log-probs": "--json --logprobs 0 prints log probabilities",
    **dict.fromkeys(("--cache-type-v", "-ctv"), "--kv-cache-dtype is of keys and values"),
    "-e": "a shell writes a new line as $'\\n'",
    **dict.fromkeys(
        ("lm_eval", "--model-args", "--tasks", "--num-fewshot"),
        "python -m tinygpt.evaluation.lm_eval_adapter run --model tinygpt takes flags of lm-evaluation-harness",
    ),
    "--schema": "--guided-json takes a JSON schema",
    "--log-file": "2> FILE takes the log",
    "--speculative-config": "--draft-model and --num-speculative-tokens are its fields",
    **dict.fromkeys(("--output-dir", "--repeat-last-n", "--numa", "--prompt-cache", "--verbose-prompt"), ""),
    **dict.fromkeys(
        ("--load-format", "--data-parallel-size", "--enable-request-id-headers", "--threads-http"), ""
    ),
    "--start-id": "a prompt that is empty starts from the model's own BOS token",
    "--input-len": "--overflow truncate keeps the last tokens of a long prompt",
    "--memory-len": "--max-model-len bounds prompt and text together",
    **dict.fromkeys(("--continue-gen", "--sparse", "--samplers"), ""),
    **dict.fromkeys(("--use-jieba-tokenizer", "--is-return-context-embeddings"), ""),
    "--prompt-learning-task-name-ids": "",
    "pull": "a model is downloaded when it is first used",
    "run-batch": "generate --input FILE --output FILE answers the prompts of a file",
    "embed": "serve answers /v1/embeddings, and LLM.embed does in Python",
    **dict.fromkeys(("ps", "collections"), ""),
    "bench serve": "python scripts/bench_serving.py measures a server",
}
# Patterns of command lines whose values are taken for another's, and what is said of them.
NOTES = {r"--int8[-_]mode[= ]1\b": "--int8-mode 1 is int8 here, which has int8 activations, too"}
# No result depends on these: they are the default here, or about other hardware.
IGNORED = (
    """enforce_eager trust_remote_code enable_prefix_caching enable_chunked_prefill disable_log_stats
disable_log_requests low_cpu_mem_usage use_cache no_display_prompt no_conversation -no-cnv jinja mlock no_mmap no_warmup
log_disable enable_lora cont_batching -cb simple_io use_cpu time -st --single-turn --enable-random-seed""",
    """gpu_memory_utilization swap_space cpu_offload_gb block_size attention_backend attn_implementation max_loras
max_lora_rank model_impl n_gpu_layers gpu_layers -ngl flash_attn -fa n_batch compile model_type lib_path
pad_token_id --shared-contexts-ratio --session-len --weights-data-type --head-num --layer-num --size-per-head
--vocab-size --batch-size""",
)
WITHOUT_VALUE, WITH_VALUE = ({*names.split()} for names in IGNORED)

logger = logging.getLogger(__name__)


def renamed(
    given: Mapping[str, Any], names: Collection[str], ignored=WITHOUT_VALUE | WITH_VALUE
) -> dict[str, Any]:
    """Return keywords under our `names`, without `ignored` ones; unknown ones stay.

    Raise RequestError if two name one thing.
    """
    values, spelled = {}, {}
    for name, value in given.items():
        if name not in names and name in ignored:
            logger.info("nothing here depends on %s", name)
            continue
        ours = OURS[name] if name not in names and OURS.get(name) in names else name
        if ours in spelled:
            raise RequestError(f"and {name} name one thing: give one of them.", spelled[ours])
        values[ours], spelled[ours] = value, name
    if "temperature" in names and type(samples := values.get("do_sample")) is bool:
        del values["do_sample"]
        values["temperature"] = values.get("temperature", 1.0) if samples else 0.0
    if spelled.get("device") == "device_map" and values["device"] == "auto":
        values["device"] = "cpu"
    return values


@dataclass(frozen=True)
class Spelling:
    """Our words for a flag and its value, none if nothing depends on it. num_taken: of the words after the flag."""

    words: list[str]
    num_taken: int = 0

    def fits(self, flags: Collection[str]) -> bool:
        return all(word.partition("=")[0] in flags for word in self.words)


def revalued(word: str, rest: Sequence[str], flags: Collection[str]) -> Spelling:
    """Apply VALUES to a flag of ours. rest: the words after it."""
    name, equals, value = word.partition("=")
    has_next = not equals and bool(rest)
    text = rest[0] if has_next else value if equals else None
    if (ours := VALUES.get((name, text))) is not None:
        spelling = Spelling(ours.split(), int(has_next))
    elif has_next and rest[0].startswith("-"):  # the next flag: this one lacks its value
        spelling = Spelling(VALUES.get((name, None), word).split())
    else:
        return Spelling([word])
    return spelling if spelling.fits(flags) else Spelling([word])


def as_meant(words: Sequence[str]) -> list[str]:
    end = words.index("--") if "--" in words else len(words)  # words after it are text
    meant = [*words[:end]]
    for flag, changes in MEANINGS.items():
        if any(re.fullmatch(rf"{flag}(=?\d+)?", word) for word in meant):
            for name, ours in changes.items():
                meant = [ours if w == name else re.sub(rf"^{name}=?(?=\d+$)", f"{ours}=", w) for w in meant]
    return [*meant, *words[end:]]


def hint(name: str, known: Collection[str]) -> str:
    if name not in HINTS:
        return suggest(name, known)
    return f"; {HINTS[name]}" if HINTS[name] else ""


def translated(word: str, rest: Sequence[str], flags: Collection[str]) -> Spelling | None:
    """Return our words for a flag of another program, or None if it is unknown.

    rest: the words after it. flags: of the command. Raise OSError for an unreadable file.
    """
    name, equals, value = word.partition("=")
    if name in REWRITTEN and (equals or rest):
        spelling = Spelling(REWRITTEN[name](value if equals else rest[0]), int(not equals))
        return spelling if spelling.fits(flags) else None
    if name in SWITCHES:
        has_next = not equals and bool(rest) and rest[0].lower() in ("true", "false")
        is_on = IS_ON.get((value if equals else rest[0] if has_next else "true").lower())
        words = [SWITCHES[name]] if is_on else []
        return Spelling(words, int(has_next)) if "--dtype" in flags and is_on is not None else None
    key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else name
    for ours, others in NAMES.items():
        flag = f"--{ours.replace('_', '-')}"
        if flag in flags and {name, key} & {*others.split()}:
            return Spelling([flag + equals + value])
    if {name, key} & WITH_VALUE:
        is_switch = key in ("flash_attn", "-fa", "compile")  # their values may be missing
        value_is = r"(?i)(on|off|auto|true|false|-?\d+)$" if is_switch else r"-?\d|[^-]"
        has_next = not equals and bool(rest) and re.match(value_is, rest[0]) is not None
        return Spelling([], int(has_next))
    return Spelling([]) if {name, key} & WITHOUT_VALUE else None
