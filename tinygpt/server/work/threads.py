"""Work in another thread, while the event loop goes on."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

LARGE = 8192  # bytes or characters: more keeps the loop waiting for milliseconds

Result = TypeVar("Result")


async def beside(size: float, work: Callable[..., Result], *arguments: Any) -> Result:
    """Do the work at once where there is little of it, and else in another thread. size: bytes or characters."""
    return work(*arguments) if size <= LARGE else await in_thread(work, *arguments)


async def in_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    """asyncio.to_thread, which a cancelled task leaves behind it running. This one's task ends when its work does."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        working.exception()  # or asyncio would complain that nobody has asked for it
        raise
