"""The room's one door: several decode steps, as graphs or in one kernel."""

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import numpy as np

from tinygpt.kernels.cuda.decode_steps import DecodeSteps
from tinygpt.kernels.cuda.layers.linear import FUSED_TOKENS
from tinygpt.kernels.cuda.persistent.kernel import Persistent, can_persist, new_persistent, run_persistent
from tinygpt.kernels.cuda.sampling.sampling import is_greedy
from tinygpt.kernels.cuda.workspace import Workspace

IN_ONE_KERNEL = False  # until scripts/gpu/first_contact.py has timed both ways on a GPU

STATES: WeakKeyDictionary[Workspace, Persistent] = WeakKeyDictionary()  # of each workspace that lives


def run_faster(usual: Callable[[DecodeSteps], Iterable[np.ndarray]], steps: DecodeSteps) -> Iterable[np.ndarray]:
    """Tokens (S,) of each step, the usual way; IN_ONE_KERNEL: a small greedy batch's by the persistent kernel."""
    is_small = steps.batch.token_ids.size <= FUSED_TOKENS and is_greedy(steps.warpers)
    if not (IN_ONE_KERNEL and is_small and can_persist(steps.params)):
        return usual(steps)
    s = steps
    if s.workspace not in STATES:
        STATES[s.workspace] = new_persistent(s.params)
    return run_persistent(STATES[s.workspace], s.params, s.batch, s.kv_cache, s.workspace, s.num_steps)
