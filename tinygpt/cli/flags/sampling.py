"""The flags of sampling, and the SamplingParams they stand for."""

import argparse
import secrets
from collections.abc import Callable
from dataclasses import fields, replace
from shlex import quote
from typing import Any

from tinygpt.cli.flags.types import number, one_of, reader, utf8_text, whole_number
from tinygpt.cli.input.text import is_file_name
from tinygpt.sampling_params import SamplingParams


def _read_bias(text: str) -> tuple[int, float]:
    token_id, bias = text.split("=")
    return int(token_id), float(bias)


def _read_repetition(text: str) -> dict[str, int]:
    size, count, least = [*map(int, text.split(",")), 1][:3] if text.count(",") in (1, 2) else ()
    return {"max_pattern_size": size, "min_count": count, "min_pattern_size": least}


def _no_file(word: str) -> str:
    """A text as it is, unless it is the name of a file: what a schema or a grammar is, no file is called."""
    path = word.removeprefix("@")
    if is_file_name(path):
        raise argparse.ArgumentTypeError(f'it is {word!r}, a file: give what is in it, as "$(cat {quote(path)})".')
    return utf8_text(word)


_ids = reader(lambda text: [int(part) for part in text.split(",")], "token ids, such as 11,262")
_bias = reader(_read_bias, "a token id and a number, such as 11=-2.5")
_repetition = reader(_read_repetition, "two or three whole numbers, such as 4,10")
_early_stopping = reader(
    lambda text: {"true": True, "false": False, "never": "never"}[text.lower()], "true, false or never"
)
# Flags of one letter, which mean what they do in llama.cpp.
SHORT = {"max_tokens": "-n", "seed": "-s"}


def _flag(help: str, type: Callable[[str], Any], metavar: str, default: Any = None, action: str = "store") -> dict:
    """What add_argument takes; `default` where it is not that of SamplingParams."""
    options = {"help": help, "type": type, "metavar": metavar, "action": action}
    return options if default is None else {**options, "default": default}


def _switch(help: str) -> dict:
    return {"help": help, "action": "store_true"}


# Groups of --help, and in each the fields of SamplingParams that are its flags.
FLAGS: dict[str, dict[str, dict]] = {
    "sampling": {
        "max_tokens": _flag("largest number of new tokens", whole_number, "N", 128),
        "temperature": _flag("0 is greedy, 1 the model's own distribution", number, "X", 0.8),
        "top_k": _flag("keep the N most probable tokens; 0 is off", whole_number, "N", 40),
        "top_p": _flag("of those, keep the most probable that reach probability P; 1 is off", number, "P", 0.95),
        "seed": _flag("the same seed gives the same text (default: drawn, and reported)", whole_number, "N"),
        "n": _flag("samples for each prompt, which --json tells apart in a file", whole_number, "N"),
        "best_of": _flag(
            "samples to make, of which the --n most probable per token are returned (default: as many as --n)",
            whole_number,
            "N",
        ),
    },
    "where a sample ends": {
        "stop": _flag(
            "a text to end at, which is left out; may be given several times", utf8_text, "TEXT", action="append"
        ),
        "include_stop_str_in_output": _switch("keep that text, or that of the stop token"),
        "stop_token_ids": _flag("tokens to end at", _ids, "ID,ID"),
        "eos_token_id": _flag("end-of-text tokens in place of the model's (default: the model's)", _ids, "ID,ID"),
        "ignore_eos": _switch("go on past the end-of-text token"),
        "min_tokens": _flag("not before N tokens", whole_number, "N"),
        "max_time": _flag("after this many seconds", number, "SECONDS"),
        "repetition_detection": _flag(
            "when its last tokens are one pattern of at most SIZE tokens (and MIN or more), COUNT times in a row",
            _repetition,
            "SIZE,COUNT[,MIN]",
        ),
    },
    "tokens to favour or avoid, sampling or not": {
        "logit_bias": _flag("add X to a token's score; may be given several times", _bias, "ID=X", action="append"),
        "repetition_penalty": _flag("divide the scores of tokens in the prompt or text by X; 1 is off", number, "X"),
        "frequency_penalty": _flag("subtract X each time a token occurs in the text", number, "X"),
        "presence_penalty": _flag("subtract X if a token occurs in the text", number, "X"),
        "no_repeat_ngram_size": _flag("no run of N tokens occurs twice; 0 is off", whole_number, "N"),
        "bad_words": _flag("a text that may not occur; may be given several times", utf8_text, "TEXT", action="append"),
        "bad_words_ids": _flag(
            "tokens that may not occur in a row; also several times", _ids, "ID,ID", action="append"
        ),
        "allowed_token_ids": _flag("only these tokens may occur", _ids, "ID,ID"),
        "suppress_tokens": _flag("these tokens may not occur", _ids, "ID,ID"),
    },
    "what the text has to be (one of these; pip install '.[guided]')": {
        "guided_choice": _flag("this text; given several times, one of them", utf8_text, "TEXT", action="append"),
        "guided_regex": _flag("what the whole of this regular expression matches", utf8_text, "REGEX"),
        "guided_json": _flag(
            'JSON by this schema, such as \'{"type": "object"}\' or "$(cat schema.json)"', _no_file, "SCHEMA"
        ),
        "guided_grammar": _flag("by this grammar, in Lark's syntax or llama.cpp's", _no_file, "GRAMMAR"),
    },
    "more ways to leave tokens out, with --temperature above 0": {
        "top_p_rule": _flag(
            "what happens to the token that reaches --top-p: hf, openai, fastertransformer",
            one_of("hf", "openai", "fastertransformer"),
            "RULE",
        ),
        "top_p_decay": _flag("multiply --top-p by X after each token; 1 is off", number, "X"),
        "top_p_min": _flag("but not below P", number, "P"),
        "top_p_reset_ids": _flag("one of these tokens resets --top-p to its first value", _ids, "ID,ID"),
        "min_p": _flag("leave out what is less than P times as probable as the most probable token", number, "P"),
        "typical_p": _flag("keep the most typical tokens that reach probability P; 1 is off", number, "P"),
        "epsilon_cutoff": _flag("leave out what is less probable than P; 0 is off", number, "P"),
        "eta_cutoff": _flag("as --epsilon-cutoff, lower where the distribution is flat; 0 is off", number, "P"),
    },
    "beam search": {
        "num_beams": _flag("beams; 1 is off, and more need --temperature 0", whole_number, "N"),
        "length_penalty": _flag("above 0 favours long texts, below 0 short ones", number, "X"),
        "early_stopping": _flag("when to end: true, false or never (default: false)", _early_stopping, "WHEN"),
        "num_beam_groups": _flag("groups that avoid one another's tokens", whole_number, "N"),
        "diversity_penalty": _flag("how much they do", number, "X"),
    },
    "speculative decoding, for fewer steps with the same result": {
        "prompt_lookup_num_tokens": _flag("draft N tokens found earlier in the text; 0 is off", whole_number, "N"),
        "max_matching_ngram_size": _flag("longest run of tokens before them that must match", whole_number, "N"),
    },
    "more tokens than positions": {
        "overflow": _flag(
            "what to do: refuse, clamp (fewer new tokens), truncate (the prompt's beginning) or slide (without end: "
            "the oldest tokens are dropped, and the rest is read again)",
            one_of("refuse", "clamp", "truncate", "slide"),
            "HOW",
        ),
        "stride": _flag("tokens to drop at a time (default: half the positions)", whole_number, "N"),
    },
    "probabilities, in JSON records": {
        "logprobs": _flag(
            "of each new token, and of the N most probable ones at its position; -1 is all", whole_number, "N"
        ),
        "prompt_logprobs": _flag("of each token of the prompt", whole_number, "N"),
        "logprobs_mode": _flag(
            "raw: the model's own; processed: those that tokens were drawn from", one_of("raw", "processed"), "MODE"
        ),
    },
}
DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
FLAG_OF = {name: f"--{name.replace('_', '-')}" for flags in FLAGS.values() for name in flags}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, options in flags.items():
            default = options.get("default", DEFAULTS[name])
            group.add_argument(
                *([SHORT[name]] if name in SHORT else []),
                FLAG_OF[name],
                **{**options, "default": default, "help": _help(options["help"], default)},
            )


def params_of(args: argparse.Namespace, **others: Any) -> SamplingParams:
    """RequestError names every flag with an impossible value."""
    return SamplingParams(**{name: getattr(args, name) for flags in FLAGS.values() for name in flags}, **others)


def with_seed(params: SamplingParams) -> SamplingParams:
    """The same parameters, with a seed drawn where there is none.

    32 bits: short enough to type, and exact for JSON readers that keep numbers as float64.
    """
    return params if params.seed is not None else replace(params, seed=secrets.randbelow(2**32))


def seed_note(params: SamplingParams, separator: str = ", ") -> str:
    """The seed, for the end of a line; nothing where it decides nothing."""
    return f"{separator}seed {params.seed}" if params.temperature else ""


def _help(text: str, default: Any) -> str:
    if "(default: " in text:
        return text
    shown = "none" if default is None else "off" if default is False else default
    return f"{text} (default: {shown:g})" if isinstance(shown, float) else f"{text} (default: {shown})"
