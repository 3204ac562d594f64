"""Requests drawn at random: every field of SamplingParams, alone and together, and every way to ask."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

ENTRIES = ("generate", "stream", "submit", "async", "async-stream", "session", "score", "embed", "look")
TEXTS = ["", "the", "the theme of 12", " then", "Ångström's 日本", "\n\n", "there the theme re the", "<|endoftext|>"]
WRONG = [None, -1, 0, 2**31, 2**64, 1.5, float("nan"), float("inf"), "x", "", b"x", True, [], {}, [-1], ["x"], object]
IMPOSSIBLE = 0.01  # of the values, and of the prompts


@dataclass(frozen=True)
class World:
    """What requests may refer to: the model's sizes, and the names of soft prompts."""

    vocab_size: int
    max_model_len: int
    n_embd: int
    soft_prompts: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """One request: by which entry, of what, with which fields, and what its entry needs to know besides."""

    entry: str
    prompt: Any
    fields: dict[str, Any]
    more: Any


def request_of(seed: int, index: int, world: World) -> Asked:
    """Request number `index` of a seed."""
    rng = Random(f"{seed}:{index}")
    entry = rng.choices(ENTRIES, [6, 3, 4, 2, 2, 3, 2, 1, 1])[0]
    draw = {"score": _continuations, "embed": _pooling, "session": _turns}.get(entry, lambda rng, world: rng.random())
    return Asked(entry, _prompt(rng, world), _fields(rng, world), draw(rng, world))


def _prompt(rng: Random, world: World) -> Any:
    """Many begin alike, because what prompts share is computed once."""
    if rng.random() < IMPOSSIBLE:
        return rng.choice([*WRONG, [world.vocab_size], [1] * (world.max_model_len + 1), "\ud800", ["the"] * 3])
    if rng.random() < 0.1:  # a tenant's: it shares what is computed with its like alone
        return {"prompt": _prompt(rng, world), "cache_salt": rng.choice(["one", "two", "two", ""])}
    if rng.random() < 0.3:
        return rng.choice(TEXTS)
    common = Random(rng.randrange(4))
    shared = [common.randrange(world.vocab_size) for _ in range(rng.choice([0, 3, 8, 17, 30]))]
    return shared + [rng.randrange(world.vocab_size) for _ in range(rng.choice([0, 1, 1, 2, 5, 12]))]


def _continuations(rng: Random, world: World) -> Any:
    return [rng.choice([_prompt(rng, world), _ids(rng, world)]) for _ in range(rng.choice([1, 1, 2, 4]))]


def _pooling(rng: Random, world: World) -> Any:
    return rng.choice(["last", "mean", "sum", "last", "mean", "max"])


def _turns(rng: Random, world: World) -> Any:
    """What a session does after its first turn."""
    kinds = ("extend", "generate", "stream", "rewind", "fork")
    return [(rng.choice(kinds), _ids(rng, world), rng.random()) for _ in range(rng.randrange(4))]


def _ids(rng: Random, world: World) -> list[int]:
    return [rng.randrange(world.vocab_size) for _ in range(rng.choice([1, 1, 2, 5]))]


def _fields(rng: Random, world: World) -> dict[str, Any]:
    """A handful of fields, with a seed always: without one the engine draws it."""
    names = rng.sample([*FIELDS], rng.choice([0, 1, 2, 4, 8, 16]))
    kind = rng.choices(["sample", "greedy", "beams", "any"], [5, 3, 1, 1])[0]
    if kind == "beams":
        names = [*{*names, *BEAMS} - NOT_BEAMS]
    elif kind != "any":
        names = [name for name in names if name not in BEAMS]
    fields = {"max_tokens": rng.choice([1, 2, 5, 9, 16]), "seed": rng.randrange(1000)}
    for name in names:
        fields[name] = rng.choice(WRONG) if rng.random() < IMPOSSIBLE else FIELDS[name](rng, world)
    if kind == "sample":
        fields.setdefault("temperature", 1.0)
    elif kind == "beams" and rng.random() < 0.9:
        fields["n"] = rng.randint(1, 2)
    if "soft_prompt" in fields and rng.random() < 0.9:
        fields.pop("prompt_embeds", None)
    if fields.get("overflow") != "slide" and rng.random() < 0.9:
        fields.pop("stride", None)
    if rng.random() < IMPOSSIBLE:
        fields["temprature"] = 1.0
    return fields


Draw = Callable[[Random, World], Any]


def one_of(*values: Any) -> Draw:
    return lambda rng, world: rng.choice(values)


def _bias(rng: Random, world: World) -> dict[int, float]:
    return {
        rng.randrange(world.vocab_size): rng.choice([-100, -3.5, 0, 2, 100.0]) for _ in range(rng.choice([1, 3, 20]))
    }


def _many_ids(rng: Random, world: World) -> list[int]:
    return rng.sample(range(world.vocab_size), rng.choice([1, 2, 10, world.vocab_size // 2]))


def _processor(rng: Random, world: World) -> Callable:
    token_id = rng.randrange(world.vocab_size)

    def favour(prompt_token_ids: list[int], new_token_ids: list[int], scores: Any) -> Any:
        scores[(token_id + len(new_token_ids)) % len(scores)] += 2.0
        return scores

    return favour


def _embeds(rng: Random, world: World) -> Any:
    width = world.n_embd + (rng.random() < 0.05)
    return np.random.default_rng(rng.randrange(3)).standard_normal((rng.choice([1, 3]), width), np.float32)


# Each field of SamplingParams but those that every request has.
FIELDS: dict[str, Draw] = {
    "max_tokens": one_of(1, 2, 3, 8, 20, 60),
    "temperature": one_of(0.0, 1e-30, 0.3, 0.8, 1.0, 1.5, 30.0),
    "top_k": one_of(0, 1, 2, 5, 40, 10_000),
    "top_p": one_of(1.0, 0.95, 0.5, 0.1, 1e-9),
    "n": one_of(1, 1, 2, 3, 9),
    "stop": one_of("e", ["th", "re"], " ", "\n", ["zzz"], "the theme"),
    "stop_token_ids": _many_ids,
    "ignore_eos": one_of(True, False),
    "logprobs": one_of(0, 1, 3, 10_000, None),
    "logit_bias": _bias,
    "repetition_penalty": one_of(1.0, 1.2, 0.8, 1000.0, 1e-3),
    "frequency_penalty": one_of(0.0, 0.5, 2, -2),
    "presence_penalty": one_of(0.0, 0.5, 2, -2),
    "no_repeat_ngram_size": one_of(0, 1, 2, 3, 100),
    "bad_words": one_of("the", ["th", " of"], "<|endoftext|>"),
    "bad_words_ids": lambda rng, world: [_ids(rng, world) for _ in range(rng.choice([1, 2, 30]))],
    "min_tokens": one_of(0, 1, 3, 16),
    "allowed_token_ids": _many_ids,
    "suppress_tokens": _many_ids,
    "logits_processors": _processor,
    "top_p_rule": one_of("hf", "openai", "fastertransformer"),
    "top_p_decay": one_of(1.0, 0.9, 0.1),
    "top_p_min": one_of(1e-6, 0.3, 1.0),
    "top_p_reset_ids": _many_ids,
    "min_p": one_of(0.0, 0.05, 0.9, 1),
    "typical_p": one_of(1.0, 0.9, 0.2),
    "epsilon_cutoff": one_of(0.0, 1e-3, 0.5),
    "eta_cutoff": one_of(0.0, 1e-3, 0.5),
    "best_of": one_of(None, 1, 3, 5),
    "num_beams": one_of(2, 3, 4, 8),
    "length_penalty": one_of(1.0, 0.0, -2.0, 2),
    "early_stopping": one_of(True, False, "never"),
    "num_beam_groups": one_of(1, 1, 2),
    "diversity_penalty": one_of(0.0, 0.0, 1.0),
    "prompt_lookup_num_tokens": one_of(0, 1, 4, 40),
    "max_matching_ngram_size": one_of(1, 2, 5),
    "eos_token_id": _many_ids,
    "include_stop_str_in_output": one_of(True, False),
    "max_time": one_of(1e6, 3600, None),  # never reached: what a shorter one cuts off depends on the clock
    "repetition_detection": one_of(
        {"max_pattern_size": 3, "min_count": 2}, {"max_pattern_size": 1, "min_count": 4}, None
    ),
    "prompt_logprobs": one_of(0, 1, 5, None),
    "logprobs_mode": one_of("raw", "processed"),
    "overflow": one_of("refuse", "clamp", "truncate", "slide", "slide"),
    "stride": one_of(1, 7, 30, 1000),
    "soft_prompt": lambda rng, world: rng.choice(
        [*world.soft_prompts, "unknown"] if world.soft_prompts else ["unknown"]
    ),
    "prompt_embeds": _embeds,
    "guided_choice": one_of(["the", "then"], [" of"], ["x", "the theme"], []),
    "guided_regex": one_of("[a-z ]{1,9}", "(the ){2}", "th+e", "("),
    "guided_json": one_of({"type": "integer"}, {"type": "object"}, {"enum": ["the", 1]}, '{"type": "bool'),
    "guided_grammar": one_of('start: "the" | "of"', "start: /[a-z]+/", "start: nothing"),
}
BEAMS = ("num_beams", "num_beam_groups", "diversity_penalty", "early_stopping", "length_penalty")
NOT_BEAMS = {"temperature", "best_of"}
