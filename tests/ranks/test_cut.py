"""How models and steps are cut: each head, hidden unit, token and layer is held once, each new token computed once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.family_models import write_family
from support.golden_models import write_model
from support.tables import rows
from tinygpt.engine.model_runner import ModelSource
from tinygpt.errors import RequestError
from tinygpt.kernels import cpu
from tinygpt.kernels.backend import Batch
from tinygpt.kernels.cpu.arrays import ALL_POSITIONS, COLUMNS, INPUTS, Norm, model_arrays, params_of, to_file
from tinygpt.kernels.cpu.dtypes import DTYPES, unpack
from tinygpt.kernels.cpu.load import load_arrays
from tinygpt.llm_args import LLMArgs
from tinygpt.ranks.lead import run_groups
from tinygpt.ranks.mpi import Layout
from tinygpt.ranks.rank import check_cut, micro_batches, share_of_rank, stage_layers
from tinygpt.weights.config import ModelConfig

XL = ModelConfig(n_embd=1600, n_layer=48, n_head=25)


@given(st.integers(4, 25), st.sampled_from((101, 50257)), st.integers(1, 4), st.integers(1, 5))
def test_all_parts_together_are_the_model(heads, vocab_size, tensor_size, pipeline_size):
    config = ModelConfig(n_embd=heads * 4, n_head=heads, n_layer=5, vocab_size=vocab_size)
    layout = Layout(tensor_size, pipeline_size)
    parts = [share_of_rank(cpu, layout, rank, config, "float32") for rank in range(layout.size)]
    for stage in range(pipeline_size):
        own = parts[stage * tensor_size : (stage + 1) * tensor_size]
        assert [head for part in own for head in part.heads] == list(range(heads))
        assert [unit for part in own for unit in part.inner] == list(range(config.inner_size))
        assert [token for part in own for token in part.vocab] == list(range(vocab_size))
        assert len({part.layers for part in own}) == 1
    assert [layer for part in parts[::tensor_size] for layer in part.layers] == list(range(5))


@pytest.mark.parametrize(("size", "heads"), [(2, [13, 12]), (3, [13, 6, 6]), (4, [7, 6, 6, 6])])
def test_the_25_heads_of_xl(size, heads):
    assert [len(share_of_rank(cpu, Layout(size), rank, XL, "int8").heads) for rank in range(size)] == heads


def test_50257_tokens_are_shared_without_padding():
    assert [len(share_of_rank(cpu, Layout(2), rank, XL, "int4").vocab) for rank in range(2)] == [25129, 25128]


@pytest.mark.parametrize(
    ("config", "stages", "counts"),
    [
        (ModelConfig(), 1, [12]),
        (ModelConfig(), 2, [9, 3]),
        (XL, 2, [25, 23]),
        (ModelConfig(n_layer=4), 4, [1, 1, 1, 1]),
    ],
)
def test_stages_are_balanced_by_bytes(config, stages, counts):
    """The head of 124M weighs as much as 5.4 of its layers, that of xl as 2.6."""
    assert list(map(len, stage_layers(config, stages))) == counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_what_ranks_hold_is_what_one_process_holds(tmp_path, dtype, tied):
    """To the bit, column by column and layer by layer; and a rank of 4 holds about a quarter of it."""
    shape = {"n_embd": 320, "n_head": 5, "n_layer": 3, "vocab_size": 101, "tie_word_embeddings": tied}
    source = ModelSource.open(LLMArgs(write_model(tmp_path, **shape), dtype))
    whole = source.load_params(1)
    layout = Layout(4, 2)
    for rank in range(layout.size):
        part = share_of_rank(cpu, layout, rank, source.config, dtype)
        params = source.load_params(1, share=part)
        for name, array in model_arrays(source.config, dtype, tied).items():
            if not array.layers or array.dtype is None:
                continue
            mine = getattr(params, name)
            all_of_it = getattr(whole, name)
            for i, layer in enumerate(part.layers):
                n, k = array.shape
                expected = unpacked(dtype, all_of_it.weight, layer, n, k)
                kept = [place for run in part.runs[array.run] for place in run]
                columns = kept if array.side == COLUMNS else list(range(n))
                inputs = kept if array.side == INPUTS else list(range(k))
                found = unpacked(dtype, mine.weight, i, len(columns), len(inputs))
                np.testing.assert_array_equal(found, expected[columns][:, inputs])
                np.testing.assert_array_equal(mine.bias[i], all_of_it.bias[layer][columns])
        assert len(params.c_attn.weight.panels) == len(part.layers)
        assert (params.lm_head.weight.panels.shape[1] == 1) or part.is_last or (part.is_first and tied)


@pytest.mark.parametrize("name", ["bloom-6", "mpt-6", "opt-no-final-norm", "gpt-1", "xglm", "gpt-neo"])
def test_a_part_of_a_converted_model_is_what_is_cut_from_its_checkpoint(tmp_path, name):
    """ALiBi's slopes by heads; a norm behind the embeddings in the first stage alone; no norm before the head;
    embeddings that are multiplied; windows by layers."""
    source = ModelSource.open(LLMArgs(write_family(tmp_path, name), "float32"))
    converted = to_file(load_arrays(source.checkpoint, "float32"))
    layout = Layout(2 if source.config.n_head > 3 else 1, 2)
    has_alibi = source.config.has_alibi
    for rank in range(layout.size):
        part = share_of_rank(cpu, layout, rank, source.config, "float32")
        params = source.load_params(1, share=part)
        assert (params.distances is None) == (not has_alibi and not source.config.local_layers)
        if params.distances is not None:
            slopes = [np.float32(source.config.alibi_slopes[i]) if has_alibi else 0 for i in part.heads]
            windows = [source.config.attention(i).window or ALL_POSITIONS for i in part.layers]
            assert [*params.distances.slopes] == slopes
            assert [*params.distances.windows] == windows
        assert isinstance(params.embed_norm, Norm) == (source.config.embed_norm and part.is_first)
        assert_same(params, params_of(converted, source.config, "float32", part))


def assert_same(mine, theirs):
    assert type(mine) is type(theirs)
    if isinstance(mine, tuple):
        for pair in zip(mine, theirs, strict=True):
            assert_same(*pair)
    else:
        np.testing.assert_array_equal(mine, theirs)


def unpacked(dtype: str, weight, layer: int, n: int, k: int) -> np.ndarray:
    """(N, K) of one layer of a packed weight."""
    return unpack(dtype, tuple(array[layer] for array in weight), n, k)


# The last ones have another arithmetic than GPT-2's, unless ranks have it; a field may learn a value.
REFUSED = rows("""
2 | 1  | {} | float32 | reference | device is 'reference', tensor_parallel_size is 2
1 | 13 | {} | float32 | cpu | pipeline_parallel_size is 13 and this model has 12 layers
2 | 1  | {"n_embd": 96, "n_head": 3} | float32 | cpu | 3 heads of 32 and 384 hidden units
2 | 1  | {"n_embd": 96, "n_head": 4} | int8 | cpu | cannot be shared in int8 with the same results
4 | 1  | {"n_embd": 96, "n_head": 3} | int8 | cuda | tensor_parallel_size is 4 and this model has 3 heads: each rank
4 | 1  | {"n_inner": 2} | int8 | cuda | tensor_parallel_size is 4 and this model has 2 hidden units: each rank
4 | 1  | {"vocab_size": 3} | int8 | cpu | tensor_parallel_size is 4 and this model has 3 tokens: each rank
2 | 1  | {"embed_dim": 512, "num_experts": 4} | float32 | cpu
  | embed_dim is 512, num_experts is 4, which several ranks cannot run
2 | 1  | {"positions": "rotary"} | float32 | cpu | this model's positions is 'rotary', which several ranks cannot run
2 | 1  | {"norm_placement": "sandwich"} | float32 | cpu | norm_placement is 'sandwich', which several ranks cannot run
""")


@pytest.mark.parametrize(("tensor", "pipeline", "fields", "dtype", "device", "said"), REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(tensor, pipeline, fields, dtype, device, said):
    with pytest.raises(RequestError, match=said):
        check_cut(Layout(tensor, pipeline), ModelConfig(**fields), dtype, device)


@pytest.mark.parametrize(
    "fields",
    [{}, {"positions": "alibi", "embed_norm": True}, {"norm_placement": "post", "final_norm": False}],
)
def test_what_ranks_run(fields):
    check_cut(Layout(2), ModelConfig(**fields, embed_scale=7.0), "float32", "cpu")


@pytest.mark.parametrize("sizes", [(0, 1), (5, 1), (True, 2), ("2", 1), (1, -1), (1, 2.0)])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(RequestError, match="must be a whole number from 1 to"):
        Layout(*sizes)


# A step in runs: as many as are worth it.

SEQUENCES = st.lists(
    st.tuples(st.integers(1, 70), st.integers(0, 50), st.integers(0, 70)), min_size=1, max_size=12
)


@given(SEQUENCES, st.integers(1, 5))
def test_runs_are_the_step(sequences, stages):
    chunks = [[100 * i + j for j in range(count)] for i, (count, _, _) in enumerate(sequences)]
    starts = [start for _, start, _ in sequences]
    slots = [7 + 3 * i for i in range(len(sequences))]
    wanted = [min(rows, count) for count, _, rows in sequences]
    batch = Batch.of(chunks, starts, slots, wanted)
    runs = micro_batches(batch, stages)
    assert [token for run in runs for token in tokens_of(run)] == list(tokens_of(batch))
    for run in runs:
        last = run.positions[run.seq_starts[1:] - 1]
        assert run.context_lens.tolist() == (last + 1).tolist()
        arrays = [value for name, value in vars(run).items() if name not in ("embeds", "drawn_by")]
        assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
    assert max(run.token_ids.size for run in runs) - min(run.token_ids.size for run in runs) <= 1


def tokens_of(batch):
    """Of each token: its id, position, slot and whether its logits are wanted."""
    slots = np.repeat(batch.slots, np.diff(batch.seq_starts))
    is_wanted = np.isin(np.arange(batch.token_ids.size), batch.logit_rows)
    return zip(
        *(array.tolist() for array in (batch.token_ids, batch.positions, slots, is_wanted)), strict=True
    )


@pytest.mark.parametrize(
    ("tokens", "stages", "count"),
    rows("""
500 | 1 | 1
63  | 2 | 1
64  | 2 | 2
512 | 2 | 5
32  | 4 | 2
512 | 4 | 9
"""),
)
def test_a_stage_that_reads_its_weights_again_gains_more_than_that(tokens, stages, count):
    assert len(micro_batches(Batch.of([list(range(tokens))], [0], [0]), stages)) == count


# Groups of sequences in flight: each stage has one, and all get the tokens of single steps.


class Pipeline:
    """Logits that say which token comes: one that depends on the sequence's slot, position and last token."""

    def __init__(self):
        self.events = []

    def begin(self, batch, first_row):
        self.events.append(("begin", first_row, batch.positions[0]))
        assert batch.context_lens.tolist() == (batch.positions + 1).tolist()
        assert (
            batch.logit_rows.tolist() == batch.seq_starts[:-1].tolist() == list(range(batch.token_ids.size))
        )
        return lambda: following(batch.token_ids, batch.positions, batch.slots)

    def choose(self, logits, rows, step):
        self.events.append(("choose", rows.start, step))
        return logits


def following(token_ids, positions, slots):
    """Below 0 now and then: nothing could be chosen."""
    return (token_ids * 31 + positions * 7 + slots * 13) % 50 - 5


@pytest.mark.parametrize("count", [2, 5, 9])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_tokens_are_those_of_single_steps(count, stages):
    batch = Batch.of([[7 * i] for i in range(count)], [3 * i for i in range(count)], list(range(count)))
    pipeline = Pipeline()
    token_ids = batch.token_ids
    expected = []
    for step in range(6):
        expected.append(following(np.maximum(token_ids, 0), batch.positions + step, batch.slots))
        token_ids = expected[-1]
    found = run_groups(batch, min(stages, count), 6, pipeline.begin, pipeline.choose)
    np.testing.assert_array_equal(found, expected)


def test_a_stage_begins_with_another_group_before_a_step_is_through():
    batch = Batch.of([[1], [2], [3]], [0, 0, 0], [0, 1, 2])
    pipeline = Pipeline()
    run_groups(batch, 2, 2, pipeline.begin, pipeline.choose)
    a, b = 0, 1  # the groups' first rows
    assert pipeline.events == [
        *[("begin", a, 0), ("begin", b, 0)],
        *[("choose", a, 0), ("begin", a, 1), ("choose", b, 0), ("begin", b, 1)],
        *[("choose", a, 1), ("choose", b, 1)],
    ]
