"""What a step reads: the tokens of its chunks, virtual ones replaced."""

from collections.abc import Sequence as Seq

import numpy as np

from tinygpt.engine.scheduler import Chunk
from tinygpt.execution.batch import NO_EMBEDS


def replace_virtual(chunks: Seq[Chunk], token_ids: list[list[int]]) -> np.ndarray:
    """Let the virtual tokens among token_ids[i], those of chunks[i], be -1-j: row j of the embeddings returned (E, C).

    A prefix's keys and values are in the cache before its sequence's first step, so it has none here.
    """
    parts, num_rows = [], 0
    for i, chunk in enumerate(chunks):
        virtual, start = chunk.sequence.soft_prompt, chunk.sequence.num_cached
        if virtual is None or start >= len(virtual):
            continue
        embeds = virtual.prompt.embeds[start : start + chunk.count]
        token_ids[i] = [-1 - j for j in range(num_rows, num_rows + len(embeds))] + token_ids[i][len(embeds) :]
        parts.append(embeds)
        num_rows += len(embeds)
    return np.concatenate(parts) if parts else NO_EMBEDS
