"""The flags of sampling, and the SamplingParams they stand for."""

import argparse
import secrets
from dataclasses import replace

from tinygpt.sampling_params import SamplingParams

FIELDS = ("max_tokens", "temperature", "top_k", "top_p", "seed", "n", "stop", "ignore_eos")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens to generate at most (default: %(default)s)"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0 is greedy, 1 the model's own distribution (default: %(default)s)",
    )
    group.add_argument(
        "--top-k",
        type=int,
        default=40,
        metavar="N",
        help="keep the N most probable tokens; 0 is off (default: %(default)s)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="of those, keep the most probable that reach probability P; 1 is off (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="the same seed gives the same text (default: drawn, and reported)"
    )
    group.add_argument("--n", type=int, default=1, metavar="N", help="samples for each prompt (default: %(default)s)")
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end a sample at this text, which is left out; may be given several times (default: none)",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-text token (default: off)")


def params_of(args: argparse.Namespace) -> SamplingParams:
    """RequestError names every flag with an impossible value."""
    return SamplingParams(**{name: getattr(args, name) for name in FIELDS})


def with_seed(params: SamplingParams) -> SamplingParams:
    """The same parameters, with a seed drawn where there is none.

    32 bits: short enough to type, and exact for JSON readers that keep numbers as float64.
    """
    return params if params.seed is not None else replace(params, seed=secrets.randbelow(2**32))
