"""The same bits for any number of ranks: logits, hidden states, keys and values, text.

Ranks are threads here (support/thread_world.py); test_mpi.py has processes. The measure is an LLM of one process, which
shares no code with what is tried but the kernels.
"""

from dataclasses import replace

import numpy as np
import pytest

from support.examples import are_all
from support.family_models import family
from support.family_models import write_model as write_fields
from support.golden_models import SOFT_PROMPTS, golden_array, write_lora, write_model, write_soft_prompt
from support.tables import rows
from support.thread_world import OPTIONS, digest, on_ranks, sized
from tinygpt import LLM, SamplingParams
from tinygpt.errors import CheckpointError, RequestError, TinyGPTError
from tinygpt.kernels import cpu
from tinygpt.ranks.mpi import Layout
from tinygpt.ranks.rank import RankModel, share_of_rank

# Heads that no number of ranks divides, a vocabulary that is no multiple of anything.
MODELS = dict(
    rows("""
five     | {"n_embd": 320, "n_head": 5, "n_layer": 4, "vocab_size": 101, "n_positions": 90}
odd      | {"n_embd": 35, "n_head": 7, "n_layer": 4, "vocab_size": 97, "n_positions": 90, "n_inner": 83}
small-xl | {"n_embd": 200, "n_head": 25, "n_layer": 4, "vocab_size": 131, "n_positions": 90}
xl       | {"n_embd": 1600, "n_head": 25, "n_layer": 4, "vocab_size": 211, "n_positions": 90}
""")
)
FIVE_HEADS = MODELS["five"]
MODELS["untied"] = FIVE_HEADS | {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}
# ALiBi and a norm behind the embeddings; ALiBi alone; norms behind the blocks, and none before the head; embeddings
# that are multiplied.
FAMILIES = {
    name: family(kind, **fields)
    for name, kind, fields in rows("""
bloom | bloom      | {"hidden_size": 320, "n_head": 5, "seq_length": 90}
mpt   | mpt        | {"d_model": 48, "n_heads": 6, "max_seq_len": 90}
gpt-1 | openai-gpt | {"n_embd": 35, "n_head": 5, "n_positions": 90}
neo   | gpt_neo    | {"hidden_size": 320, "num_heads": 5, "max_position_embeddings": 90, "window_size": 9}
xglm  | xglm       | {"d_model": 320, "attention_heads": 5, "max_position_embeddings": 90}
""")
}
DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
# Each dtype and family on ranks compiles steps of its own, for 10 to 30 s: every day float32, and int8, whose cuts
# differ most (it sums whole groups of inputs), here in stages and below with its cache. What ranks hold of the others
# is tried in test_cut.py. A row is a model, a dtype, the ranks that share a layer, and the stages.
FEW = """
five      float32   2 1
untied    int8      1 2
odd       float32   3 4
small-xl  float32   4 1
xglm      float32   2 2
"""
# Of the models other than "five", which has every layout in every dtype.
REST = """
xl        bfloat16  4 2
xl        int8      2 1
xl        int4      3 1
untied    float32   3 1
untied    bfloat16  4 2
untied    int4      2 4
odd       float32   2 2
small-xl  bfloat16  2 1
small-xl  bfloat16  3 2
bloom     float32   3 1
bloom     bfloat16  4 2
bloom     int8      2 2
bloom     int4      1 2
mpt       float32   4 1
mpt       bfloat16  3 2
neo       float32   2 2
gpt-1     float32   2 2
gpt-1     bfloat16  1 2
"""


def rows_of(table: str) -> list[tuple[str, str, tuple[int, int]]]:
    rows = [line.split() for line in table.split("\n") if line]
    return [(model, dtype, (int(tensor), int(pipeline))) for model, dtype, tensor, pipeline in rows]


LAYOUTS = [(tensor, pipeline) for tensor in (1, 2, 3, 4) for pipeline in (1, 2, 4)]
ALL = [("five", dtype, layout) for dtype in DTYPES for layout in LAYOUTS[1:]] + rows_of(REST)
CASES = rows_of(FEW) + [pytest.param(*row, marks=pytest.mark.slow) for row in ALL if row not in rows_of(FEW)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name: str) -> str:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            is_family = name in FAMILIES
            made[name] = (
                write_fields(path, FAMILIES[name]) if is_family else write_model(path, **MODELS[name])
            )
        return str(made[name])

    return folder


@pytest.fixture(scope="module")
def alone(folders):
    """What one process makes of a model in a dtype."""
    found = {}

    def of(model: str, dtype: str) -> dict[str, str]:
        if (model, dtype) not in found:
            with LLM(folders(model), **OPTIONS, dtype=dtype) as llm:
                found[model, dtype] = everything(llm)
        return found[model, dtype]

    return of


def everything(llm: LLM) -> dict[str, str]:
    """Hashes of what an LLM computes: prompts read in pieces beside others that decode, sampling, beams, a session.

    Steps with looks compile once more, every day in float32 alone: what they hand over is float32 in every dtype.
    """
    size = llm.config.vocab_size
    ids = [i * 7 % size for i in range(70)]
    prompts = [ids[:3], ids[5:60], [4], ids[:30], ids[9:20]]
    params = SamplingParams(max_tokens=9, temperature=0.9, top_k=20, seed=3, logprobs=2, ignore_eos=True)
    sampled = llm.generate(prompts, params)
    plain = llm.generate(prompts, [replace(params, logprobs=None, max_tokens=5 + i) for i in range(5)])
    beams = llm.generate(prompts[:2], SamplingParams(max_tokens=6, num_beams=3, n=2))
    embeds = golden_array("embeds", (3, llm.config.n_embd))
    embedded = llm.generate([ids[:4], ids[40:43]], replace(params, prompt_embeds=embeds))
    session = llm.session()
    session.extend(ids[:12])
    session.generate(params)
    fork = session.fork()
    fork.extend(ids[20:24])
    fork.generate(params)
    looks = []
    if are_all() or llm.dtype == "float32":
        looks = [llm.hidden_states(ids[:50]), llm.hidden_states(ids[:50], before_norm=True)[-1]]
        looks.append(llm.attentions(ids[:20]))
    logprobs = [np.array([*d.values()]) for output in sampled for d in output.outputs[0].logprobs]
    scores = llm.score(ids[:5], [ids[5:9], ids[9:10]])
    return {
        "logits": digest(llm.logits(ids)),
        "looks": digest(*looks),
        "tokens": digest(*tokens_of(sampled)),
        "tokens alone": digest(*tokens_of(plain)),
        "log probabilities": digest(*logprobs),
        "embeds": digest(*tokens_of(embedded)),
        "beams": digest(*tokens_of(beams)),
        "session": digest(np.array(session.token_ids), np.array(fork.token_ids)),
        "scores": digest(np.array([score.cumulative_logprob for score in scores])),
    }


def tokens_of(outputs) -> list[np.ndarray]:
    return [np.array(sample.token_ids) for output in outputs for sample in output.outputs]


@pytest.mark.parametrize(("model", "dtype", "layout"), CASES)
def test_ranks_give_the_bits_of_one_process(monkeypatch, folders, alone, model, dtype, layout):
    expected = alone(model, dtype)
    with on_ranks(monkeypatch, layout, folders(model), dtype=dtype) as (llm, _):
        assert everything(llm) == expected


@pytest.mark.parametrize(
    ("dtype", "layout"), [("int8", (3, 1)), pytest.param("float32", (2, 2), marks=pytest.mark.slow)]
)
def test_an_int8_cache_is_cut_with_its_scales(monkeypatch, folders, tmp_path, dtype, layout):
    """Keys and values of a session's file, too, and of a prefix, which are float32 there."""
    soft = {"prefix": write_soft_prompt(tmp_path / "soft", "prefix", 5, **FIVE_HEADS)}
    options = {"dtype": dtype, "kv_cache_dtype": "int8", "soft_prompts": soft}
    params = SamplingParams(max_tokens=9, temperature=0.9, seed=3, ignore_eos=True)

    def behind_a_prefix(llm: LLM) -> list[int]:
        return llm.generate([[5, 6, 7]], replace(params, soft_prompt="prefix"))[0].outputs[0].token_ids

    with LLM(folders("five"), **OPTIONS, **options) as llm:
        expected = everything(llm)
        behind = behind_a_prefix(llm)
    with on_ranks(monkeypatch, layout, folders("five"), **options) as (llm, _):
        assert everything(llm) == expected
        assert behind_a_prefix(llm) == behind


@pytest.mark.parametrize(("model", "layout"), [("small-xl", (2, 1)), ("five", (3, 2))])
def test_adapters_and_soft_prompts_know_nothing_of_ranks(monkeypatch, folders, tmp_path, model, layout):
    """25 heads are 13 + 12 with an adapter's weights, too. The keys and values of a prefix are cut by heads."""
    fields = MODELS[model]
    adapter = write_lora(tmp_path / "lora", 3, ["c_attn", "c_proj", "c_fc"], has_head=False, **fields)
    soft = {kind: write_soft_prompt(tmp_path / kind, kind, 5, **fields) for kind in SOFT_PROMPTS}
    options = {"lora": adapter, "soft_prompts": soft}

    def texts(llm: LLM) -> list[str]:
        params = [
            SamplingParams(max_tokens=9, soft_prompt=kind, seed=3, ignore_eos=True) for kind in (*soft, None)
        ]
        found = llm.generate([[5, 6, 7]] * len(params), params)
        scores = [llm.score([5, 6], [[7, 8, 9]], soft_prompt=kind)[0].cumulative_logprob for kind in soft]
        return [
            digest(llm.logits([5, 6, 7])),
            str([o.outputs[0].token_ids for o in found]),
            digest(np.array(scores)),
        ]

    with LLM(folders(model), **OPTIONS) as llm:
        plain = digest(llm.logits([5, 6, 7]))
    with LLM(folders(model), **OPTIONS, **options) as llm:
        expected = texts(llm)
    assert expected[0] != plain
    with on_ranks(monkeypatch, layout, folders(model), **options) as (llm, _):
        assert texts(llm) == expected


@pytest.mark.parametrize(("order", "is_same"), [((0, 1, 2, 3), True), ((0, 2, 1, 3), False)])
def test_a_wrong_order_of_sums_is_seen(monkeypatch, folders, order, is_same):
    """(s0 + s2) + (s1 + s3), as a library's reduction might choose to add them: near, and not the same."""
    ids = list(range(5, 40))
    exchanges = 1 + 2 * FIVE_HEADS["n_layer"]

    def delivered(call: int) -> tuple[int, ...]:
        return (
            (0, 1, 2, 3) if call % exchanges == 0 else order
        )  # the first are rows of the embedding, and no sums

    with LLM(folders("five"), **OPTIONS) as llm:
        expected = llm.logits(ids)
    with on_ranks(monkeypatch, (4, 1), folders("five"), delivered=delivered) as (llm, _):
        found = llm.logits(ids)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.array_equal(found, expected) == is_same


def test_a_draft_model_is_rank_0s_alone(monkeypatch, folders):
    """The model drafts for itself: every draft is right, so that nine tokens take a few steps."""
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    with LLM(folders("five"), **OPTIONS) as llm:
        expected = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    with on_ranks(monkeypatch, (2, 1), folders("five"), draft_model=folders("five")) as (llm, threads):
        before = threads.num_broadcasts
        assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == expected
        assert threads.num_broadcasts - before < 5


def test_a_stream_that_is_given_is_refused_and_the_ranks_go_on(monkeypatch, folders, alone):
    expected = alone("five", "float32")["logits"]
    with on_ranks(monkeypatch, (2, 1), folders("five")) as (llm, _):
        with pytest.raises(RequestError, match="edits need an LLM of one process"):
            llm.logit_lens(np.zeros((1, llm.config.n_embd)))
        assert digest(llm.logits([i * 7 % 101 for i in range(70)])) == expected


def test_a_model_of_another_layout_and_size_follows(monkeypatch, folders, alone):
    """The plan of a step has another length then, and the ranks stand otherwise to one another."""
    expected = {dtype: alone("five", dtype)["logits"] for dtype in ("float32", "int8")}
    with on_ranks(monkeypatch, (2, 2), folders("five")) as (llm, _):
        llm.close()
        for layout, num_seqs, dtype in [((4, 1), 9, "float32"), ((1, 4), 2, "int8"), ((2, 2), 4, "float32")]:
            sizes = {**sized(Layout(*layout)), "max_num_seqs": num_seqs}
            with LLM(folders("five"), dtype, **sizes) as other:
                assert digest(other.logits([i * 7 % 101 for i in range(70)])) == expected[dtype]


def test_a_model_that_cannot_be_shared_leaves_the_ranks_waiting_for_the_next(monkeypatch, folders):
    sizes = sized(Layout(2))
    with on_ranks(monkeypatch, (2, 1), folders("five")) as (llm, _):
        llm.close()
        with pytest.raises(RequestError, match="cannot be shared in int8 with the same results"):
            LLM(folders("odd"), **sizes, dtype="int8")
        with LLM(folders("five"), **sizes) as second:
            second.generate([[5]], max_tokens=3)


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), CheckpointError("no room"), RequestError("no room")]
)
def test_what_fails_on_one_rank_is_told_by_rank_0_as_what_it_is(monkeypatch, folders, error):
    """A rank without memory has refused nothing."""

    load = RankModel.__init__

    def load_here(self, world, *arguments):
        if world.rank == 1:
            raise error
        load(self, world, *arguments)

    kind = type(error) if isinstance(error, TinyGPTError) else TinyGPTError
    sizes = sized(Layout(2))
    with on_ranks(monkeypatch, (2, 1), folders("five")) as (llm, _):
        llm.close()
        monkeypatch.setattr(RankModel, "__init__", load_here)
        with pytest.raises(TinyGPTError, match=r"rank 1 of 2, on .*no room") as raised:
            LLM(folders("five"), **sizes)
    assert raised.type is kind


def floats_sent(config, layout, rows):
    """Between all ranks, in a step of so many tokens: exchanges within stages, hops between them, and the logits."""
    tensor = layout.tensor_size
    width = rows * config.n_embd
    own = 0 if layout.pipeline_size > 1 else len(share_of_rank(cpu, layout, 0, config, "float32").vocab)
    exchanges = (2 * config.n_layer + 1) * tensor * (tensor - 1)
    return (exchanges + (layout.pipeline_size - 1) * tensor) * width + rows * (config.vocab_size - own)


@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (3, 1), (2, 2), (4, 2)])
def test_a_step_is_one_broadcast_and_sends_what_the_formula_says(monkeypatch, folders, layout):
    """2 L + 1 exchanges of x among the ranks of a stage, one hop from stage to stage, the logits to rank 0. 40 tokens,
    which a pipeline cuts into runs: that sends nothing more."""
    ids = [i * 7 % 101 for i in range(40)]
    with on_ranks(monkeypatch, layout, folders("five"), dtype="float32") as (llm, threads):
        llm.logits(ids)
        broadcasts = threads.num_broadcasts
        sent = threads.num_sent
        llm.logits(ids)
        assert threads.num_broadcasts - broadcasts == 1
        assert threads.num_sent - sent == floats_sent(llm.config, Layout(*layout), len(ids))
