"""Record transformers' answers anew, with the extra `parity`: python tests/support/record.py [TEST FILE...]

Without files, those of all tests that ask. What an older release of transformers alone can answer (groups of beams,
before 4.57) stays as it was recorded, unless that release is the one installed.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ASKING = (
    "tests/evaluation/test_recorded_parity.py",
    "tests/evaluation/test_families.py",
    "tests/evaluation/test_experts.py",
    "tests/kernels/cuda/test_parity.py",
    "tests/sampling/test_sampling.py",
    "tests/sampling/test_processors.py",
    "tests/sampling/test_sampler.py",
    "tests/sampling/test_beam_search.py",
    "tests/sampling/test_warper_borders.py",
    "tests/engine/test_beams.py",
    "tests/engine/test_hidden_states.py",
    "tests/engine/test_spec_decode.py",
    "tests/evaluation/test_eval_command.py",
    "tests/kernels/cpu/test_trace.py",
    "tests/llm/test_lora.py",
    "tests/request/test_soft_prompts.py",
)


class Recorder:
    """Writes what the functions marked `recorded`, of all modules that were collected, have heard."""

    def __init__(self, is_whole: bool):
        self.is_whole, self.modules = is_whole, set()

    def pytest_collection_finish(self, session):
        self.modules = {item.module for item in session.items}

    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus:
            return
        for module in self.modules:
            for function in vars(module).values():
                if recordings := getattr(function, "recordings", None):
                    recordings.write(self.is_whole)
                    print(f"\n{recordings.path.name}: {len(recordings.heard)} answers", end="")


def main() -> int:
    import pytest

    from support.recorded import HAS_TRANSFORMERS, IS_RECORDING, MISSING

    if not HAS_TRANSFORMERS:
        print(f"Recording {MISSING}.", file=sys.stderr)
        return 2
    os.environ[IS_RECORDING] = "1"
    files = sys.argv[1:] or [str(ROOT / file) for file in ASKING]
    return pytest.main(["-q", "--slow", "-p", "no:cacheprovider", *files], [Recorder(not sys.argv[1:])])


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    raise SystemExit(main())
