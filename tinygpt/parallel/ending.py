"""How all ranks end when one fails."""

import logging
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from tinygpt.errors import TinyGPTError
from tinygpt.parallel.world import World

FAILED, TERMINATED = 1, 143  # 128 + SIGTERM, as a shell reports it

logger = logging.getLogger(__name__)


def end_all(world: World, error: BaseException) -> NoReturn:
    """Say on stderr what has failed on this rank, and end all: nobody knows where the others are now."""
    logger.debug("a step over several ranks has failed", exc_info=error)
    what = str(error) if isinstance(error, TinyGPTError) else repr(error)
    with suppress(OSError, ValueError):  # closed, or a disk that is full
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        where = f"rank {world.rank} of {world.size}, on {world.host}"
        print(f"tinygpt: error: {where}: {what}", file=sys.stderr, flush=True)
    world.abort(FAILED)


@dataclass(frozen=True)
class EndAtOnce:
    """A handler of SIGTERM that ends all ranks, whatever they are doing."""

    world: World

    def __call__(self, *_: Any) -> NoReturn:
        self.world.abort(TERMINATED)
