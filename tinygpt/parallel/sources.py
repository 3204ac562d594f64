"""A checkpoint in each of several dtypes, as commands compare them: all that can be refused, before any is measured."""

from collections.abc import Sequence

from tinygpt.engine.model_source import ModelSource
from tinygpt.parallel.layout import Layout


def open_sources(
    model: str,
    dtypes: Sequence[str],
    ranks: tuple[int, int] = (1, 1),
    device: str = "cpu",
    kv_cache_dtype: str = "auto",
) -> list[ModelSource]:
    """The checkpoint, opened once, in each dtype. LLM's docstring says what the arguments are.

    ranks: tensor_parallel_size and pipeline_parallel_size.
    Raises CheckpointError if it cannot be opened, RequestError for what is impossible in any of the dtypes.
    """
    sources = ModelSource.open_all(model, dtypes, device, kv_cache_dtype)
    if ranks != (1, 1):
        from tinygpt.parallel.cut import check_cut  # with it come the CPU's kernels

        for source in sources:
            check_cut(Layout.of(*ranks), source.config, source.dtype, device)
    return sources
