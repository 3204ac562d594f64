"""How much of what threads read in a step lies on their own memory nodes, counted page by page."""

import numpy as np

from scripts.sharing.phases import Load, heads_together, tiles_of_queries
from tinygpt.config import ModelConfig
from tinygpt.kernels.cpu.packing.pack import panel_count
from tinygpt.kernels.cpu.packing.packers import takes_huge_pages
from tinygpt.kernels.cpu.packing.weights import head_dtype_of, weight_layout
from tinygpt.kernels.cpu.runtime.nodes import homes_among, share_of

PIECE = 256  # bytes, of which every array has a whole number for each panel
SMALL_PAGE, HUGE_PAGE = 4 << 10, 2 << 20
ONE_PAGE = 1 << 60  # of a whole array: as if one thread had touched it all
CPUS = 64  # of a node: any number of threads is shared evenly


def node_of_thread(threads: int, nodes: int) -> np.ndarray:
    """(threads,): as a team is put on so many nodes alike."""
    cpus = [frozenset(range(node * CPUS, (node + 1) * CPUS)) for node in range(nodes)]
    return np.array([min(home) // CPUS for home in homes_among(cpus, threads)])


def near_weights(config: ModelConfig, dtype: str, node: np.ndarray, page: int | None = None) -> float:
    """The share of the weights' bytes that threads read from their own nodes, node (threads,), each its own items.

    A page lies where the thread is that has its first byte. page: its size in bytes; None is as weights are placed.
    The calling thread may be on any node: all that it reads counts as another's.
    """
    near = total = 0
    for layers, n, k, kind in _matrices(config, dtype):
        panels = panel_count(n)
        owner = threads_of_items(panels, len(node))
        for shape, array_dtype in weight_layout(kind, layers, n, k):
            used = page or (HUGE_PAGE if takes_huge_pages(shape, array_dtype, node.max() + 1) else SMALL_PAGE)
            pieces = int(np.prod(shape)) * array_dtype.itemsize // (layers * panels * PIECE)
            reader = np.tile(np.repeat(owner, pieces), layers)  # (layers * panels * pieces,)
            first_of_page = np.arange(reader.size) // (used // PIECE) * (used // PIECE)
            near += np.count_nonzero((node[reader] == node[reader[first_of_page]]) & (reader > 0))
            total += reader.size
    return near / total


def near_cache(config: ModelConfig, load: Load, node: np.ndarray) -> float:
    """The same of the KV cache, whose pages lie where the threads are that write a head's keys and values."""
    count, together = tiles_of_queries(load), heads_together(config, load)
    writer = threads_of_items(config.n_head, len(node))  # (H,)
    reader = threads_of_items(-(-config.n_head // together) * count, len(node))
    heads = np.arange(config.n_head)[:, np.newaxis]  # (H, 1)
    items = heads // together * count + np.arange(count)  # (H, tiles)
    return np.mean((node[writer[heads]] == node[reader[items]]) & (reader[items] > 0))


def threads_of_items(items: int, threads: int) -> np.ndarray:
    """(items,): whose share each is in."""
    owner = np.empty(items, np.int64)
    for thread in range(threads):
        share = share_of(thread, threads, items)
        owner[share.start : share.stop] = thread
    return owner


def _matrices(config: ModelConfig, dtype: str) -> list[tuple[int, int, int, str]]:
    """Layers, N, K and the dtype of each kind of weight that a step reads as a whole."""
    c, f, layers = config.n_embd, config.inner_size, config.n_layer
    shapes = [(3 * c, c), (c, c), (f, c), (c, f)]
    return [*((layers, n, k, dtype) for n, k in shapes), (1, config.vocab_size, c, head_dtype_of(dtype))]
