"""Work in another thread, while the event loop goes on."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    """asyncio.to_thread, which a cancelled task leaves behind it running. This one's task ends when its work does."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        working.exception()  # or asyncio would complain that nobody has asked for it
        raise
