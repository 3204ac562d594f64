"""From an LLM's arguments to a runner on several ranks: who leads, who follows, and what is refused."""

import sys
from dataclasses import dataclass
from typing import Any

from tinygpt.config import EngineConfig
from tinygpt.engine.model_source import ModelSource
from tinygpt.hardware import thread_count
from tinygpt.parallel.cut import check_cut
from tinygpt.parallel.follower import Opening, follow_as_process, rank_threads
from tinygpt.parallel.layout import Layout
from tinygpt.parallel.lead import Lead, lead_of
from tinygpt.parallel.runner import ParallelRunner
from tinygpt.parallel.world import World


@dataclass(frozen=True)
class Ranks:
    """The ranks of this program, seen from rank 0."""

    lead: Lead
    layout: Layout

    def threads(self, threads: Any) -> int:
        """How many threads rank 0 computes with: `threads` checked, or its share of the cores."""
        return rank_threads(None if threads is None else thread_count(threads), self.lead.world)

    def new_runner(
        self, source: ModelSource, arguments: tuple, sizes: EngineConfig, threads: int | None
    ) -> ParallelRunner:
        """A runner of all ranks. arguments: what ModelSource.open was given, for the others; threads: as asked for."""
        check_cut(self.layout, source.config, source.dtype, arguments[2])
        return ParallelRunner(self.lead, source, Opening(arguments, self.layout, sizes, threads))


def join(layout: Layout, world: World) -> Ranks:
    """The ranks of a world of the layout's size, on rank 0. The others do not return: they follow until rank 0's
    program ends, and exit."""
    if world.rank:
        follow_as_process(world)
        sys.exit(0)
    return Ranks(lead_of(world), layout)
