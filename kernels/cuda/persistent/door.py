"""The room's one door: several decode steps, by whichever of two ways is faster on this GPU."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np

from tinygpt.kernels.cuda.decode_steps import DecodeSteps
from tinygpt.kernels.cuda.layers.linear import FUSED_TOKENS
from tinygpt.kernels.cuda.persistent.contest import Contest
from tinygpt.kernels.cuda.persistent.kernel import can_persist, new_persistent, run_persistent
from tinygpt.kernels.cuda.sampling.sampling import is_greedy
from tinygpt.kernels.cuda.sizes import rounded_up
from tinygpt.kernels.cuda.workspace import Workspace

ENOUGH_STEPS = 8  # to time

# Of each workspace that lives, by the number of sequences, rounded up.
CONTESTS: WeakKeyDictionary[Workspace, dict[int, Contest]] = WeakKeyDictionary()


def run_faster(usual: Callable[[DecodeSteps], np.ndarray], steps: DecodeSteps) -> np.ndarray:
    """Tokens (num_steps, S), the usual way. A small greedy batch may go through the persistent kernel: the same tokens.

    Which way is faster shows where there are enough steps to time.
    """
    count = steps.batch.token_ids.size
    is_small = count <= FUSED_TOKENS and is_greedy(steps.warpers)
    if not is_small or steps.num_steps < ENOUGH_STEPS or not can_persist(steps.params):
        return usual(steps)
    contests, size = CONTESTS.setdefault(steps.workspace, {}), rounded_up(count)
    if size not in contests:
        persistent = new_persistent(steps.params)

        def at_once(s: DecodeSteps) -> np.ndarray:
            return run_persistent(persistent, s.params, s.batch, s.kv_cache, s.workspace, s.num_steps)

        contests[size] = Contest(usual, at_once)
    return contests[size].run(steps)
