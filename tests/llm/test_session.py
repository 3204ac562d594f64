"""Sessions: what is written in turns is what a whole list of tokens gives, computed once."""

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from support import tiny_checkpoint
from support.demo import EOS
from support.golden_models import SMALL
from tinygpt import LLM, SamplingParams
from tinygpt.errors import CheckpointError, RequestError, TinyGPTError
from tinygpt.weights.stored.session_file import SavedSession, write_session

TEXT = np.random.default_rng(2).integers(EOS, size=60).tolist()
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1, seed=3)
SAMPLED = SamplingParams(max_tokens=4, temperature=1.0, repetition_penalty=1.2, ignore_eos=True, logprobs=0, seed=3)


@pytest.fixture(scope="module")
def llm(small_demo):
    with LLM(small_demo, max_num_seqs=2, prefix_cache_seqs=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(small_demo):
    """Keeps nothing from one call to the next."""
    with LLM(small_demo, max_num_seqs=1, prefix_cache_seqs=0) as llm:
        yield llm


@pytest.fixture
def steps(llm, monkeypatch, single_steps):
    """Will hold the number of tokens of each step that `llm` takes."""
    counts, forward = [], llm.engine.runner.forward
    monkeypatch.setattr(
        llm.engine.runner, "forward", lambda batch: counts.append(batch.token_ids.size) or forward(batch)
    )
    return counts


# --- writing in turns


def test_a_turn_computes_what_is_new(llm, alone, steps):
    session = llm.session()
    session.extend(TEXT[:40])
    first = session.generate(PARAMS)
    assert session.token_ids == TEXT[:40] + first.outputs[0].token_ids
    session.extend(TEXT[40:43])
    steps.clear()
    second = session.generate(PARAMS)
    assert sum(steps) == 1 + 3 + 5  # the last token of the first turn, the new ones, and all but the last that came
    assert second.outputs == alone.generate([TEXT[:40] + first.outputs[0].token_ids + TEXT[40:43]], PARAMS)[0].outputs


actions = st.one_of(
    st.tuples(st.just("extend"), st.lists(st.integers(0, EOS - 1), max_size=4)),
    st.tuples(st.just("generate"), st.sampled_from([PARAMS, SAMPLED])),
    st.tuples(st.just("stream"), st.sampled_from([PARAMS, SAMPLED])),
    st.tuples(st.just("rewind"), st.floats(0, 1)),
    st.tuples(st.just("fork"), st.none()),
    st.tuples(st.just("others"), st.integers(1, 3)),
)


@given(script=st.lists(st.tuples(st.integers(0, 2), actions), max_size=14))
@settings(max_examples=20)
def test_any_turns_equal_the_whole_list_again(llm, alone, script):
    """Whatever is extended, rewound, forked and pushed out of the cache by others: equal bits, nothing stale."""
    sessions, expected = [llm.session()], [[]]
    for which, (action, value) in script:
        i = which % len(sessions)
        if action == "extend":
            sessions[i].extend(value)
            expected[i] += value
        elif action == "rewind":
            position = round(value * len(expected[i]))
            sessions[i].rewind(position)
            del expected[i][position:]
        elif action == "fork":
            sessions.append(sessions[i].fork())
            expected.append(list(expected[i]))
        elif action == "others":
            llm.generate([[value] * 30] * value, PARAMS)
        else:
            (output,) = alone.generate([expected[i]], value)
            if action == "generate":
                assert sessions[i].generate(value).outputs == output.outputs
            else:
                chunks = list(sessions[i].stream(value))
                assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text
            expected[i] = output.prompt_token_ids + output.outputs[0].token_ids
        assert [session.token_ids for session in sessions] == expected


def test_a_text_is_encoded_by_itself(llm):
    session = llm.session()
    session.extend("Once upon a ti")
    session.extend("me")
    encode = llm.tokenizer.encode
    assert session.token_ids == encode("Once upon a ti") + encode("me") != encode("Once upon a time")
    assert session.text == "Once upon a time"
    session.extend("")
    session.extend([])
    assert session.text == "Once upon a time"


def test_a_stream_that_is_closed_keeps_what_it_gave(llm, alone):
    session = llm.session()
    session.extend(TEXT[:5])
    stream = session.stream(PARAMS)
    given = [next(stream).token_id for _ in range(3)]
    stream.close()
    assert session.token_ids == TEXT[:5] + given
    assert llm.engine.scheduler.running == []
    assert session.generate(PARAMS).outputs == alone.generate([TEXT[:5] + given], PARAMS)[0].outputs


def test_a_session_that_changes_while_it_streams(llm):
    session = llm.session()
    session.extend(TEXT[:5])
    stream = session.stream(PARAMS)
    next(stream)
    session.extend([1])
    with pytest.raises(RequestError, match="changed while it streamed"):
        next(stream)


@pytest.mark.parametrize("num_read", [0, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda session: (session.rewind(3), session.extend([7, 8])),
        lambda session: (session.generate(PARAMS), session.rewind(5)),
        lambda session: next(session.stream(PARAMS)),
    ],
    ids=["rewind-extend", "generate", "stream"],
)
def test_a_change_is_seen_whatever_the_length(llm, change, num_read):
    session = llm.session()
    session.extend(TEXT[: 5 - num_read])
    stream = session.stream(PARAMS)
    for _ in range(num_read):
        next(stream)
    change(session)
    after = session.token_ids
    with pytest.raises(RequestError, match="changed while it streamed"):
        next(stream)
    assert session.token_ids == after


def test_a_stop_text_and_what_ended_it_belong_to_the_session(llm):
    session = llm.session()
    session.extend(TEXT[:5])
    output = session.generate(SamplingParams(max_tokens=20, stop="e", ignore_eos=True))
    assert output.outputs[0].finish_reason == "stop"
    assert session.token_ids == TEXT[:5] + output.outputs[0].token_ids


def test_the_best_of_several_samples_joins(llm):
    session = llm.session()
    session.extend(TEXT[:5])
    for params in (SamplingParams(max_tokens=3, best_of=3, temperature=1.0), SamplingParams(max_tokens=3, num_beams=2)):
        before = session.token_ids
        best = session.generate(params).outputs[0]
        assert session.token_ids == before + best.token_ids


def test_what_is_refused_adds_nothing(llm):
    session = llm.session()
    session.extend(TEXT[:5])
    for call, message in (
        (lambda: session.generate(SamplingParams(n=2)), "n is 2 and a session goes on with one sample"),
        (lambda: session.generate(SamplingParams(max_tokens=5000)), "the prompt has 5 tokens"),
        (lambda: session.stream(SamplingParams(max_tokens=5000)), "the prompt has 5 tokens"),
        (lambda: session.extend([1, 9999]), "token id 9999 is outside the vocabulary"),
        (lambda: session.extend(7), "must be a text or a list of token ids"),
        (lambda: session.rewind(6), "position is 6 and the session has 5 tokens"),
        (lambda: session.rewind(-1), "position is -1"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
        assert session.token_ids == TEXT[:5]
    with session:
        pass
    with pytest.raises(RequestError, match="this session has been closed"):
        session.generate()


def test_a_session_that_slides_goes_on_where_it_was(small_demo):
    params = SamplingParams(max_tokens=20, ignore_eos=True, overflow="slide", stride=7, logprobs=0, seed=0)
    sizes = {"max_model_len": 24, "max_num_seqs": 1}
    with LLM(small_demo, prefix_cache_seqs=1, **sizes) as llm, LLM(small_demo, prefix_cache_seqs=0, **sizes) as alone:
        session = llm.session()
        session.extend(TEXT[:10])
        for _ in range(5):
            (expected,) = alone.generate([session.token_ids], params)
            output = session.generate(params)
            assert output.outputs == expected.outputs
        assert output.num_truncated_tokens > 0
        assert output.num_cached_tokens > 0
        assert len(session) == 110


# --- files


@pytest.mark.parametrize(
    "kinds",
    [
        ("auto", "cpu", "auto"),
        ("bfloat16", "cpu", "auto"),
        ("int8", "cpu", "auto"),
        ("int8", "cpu", "int8"),
        ("auto", "reference", "auto"),
        ("auto", "reference", "int8"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("single_steps")
def test_a_saved_session_goes_on_without_being_computed_again(tmp_path, monkeypatch, kinds, small_demo):
    dtype, device, cache = kinds
    path = tmp_path / "session.safetensors"
    options = {"kv_cache_dtype": cache, "max_num_seqs": 1, "prefix_cache_seqs": 1}
    with LLM(small_demo, dtype, device, **options) as llm:
        session = llm.session()
        session.extend(TEXT[:40])
        session.generate(PARAMS)
        session.save(path)
        session.extend([5, 6])
        expected = session.generate(PARAMS)
    with LLM(small_demo, dtype, device, **options) as llm:
        loaded = llm.load_session(path)
        counts, forward = [], llm.engine.runner.forward
        monkeypatch.setattr(llm.engine.runner, "forward", lambda b: counts.append(b.token_ids.size) or forward(b))
        loaded.extend([5, 6])
        output = loaded.generate(PARAMS)
    assert (output.prompt_token_ids, output.outputs) == (expected.prompt_token_ids, expected.outputs)
    assert sum(counts) == 1 + 2 + 5


def test_saving_computes_only_what_no_row_holds(llm, steps, tmp_path):
    session = llm.session()
    session.extend(TEXT[:40])
    session.generate(PARAMS)
    steps.clear()
    session.save(tmp_path / "a")
    assert steps == []
    session.extend(TEXT[:3])
    session.save(tmp_path / "b")
    assert sum(steps) == 3
    for start in (10, 20):  # others take the rows
        llm.generate([TEXT[start:]], PARAMS)
    session.save(tmp_path / "c")
    assert sum(steps) > 3 + 40
    b, c = load_file(tmp_path / "b"), load_file(tmp_path / "c")
    assert all(np.array_equal(b[name], c[name]) for name in ("token_ids", "k", "v"))


def test_a_session_may_be_loaded_where_nothing_is_kept(llm, alone, tmp_path):
    session = llm.session()
    session.extend(TEXT[:9])
    session.save(tmp_path / "a")
    expected = session.generate(PARAMS)
    assert alone.load_session(tmp_path / "a").generate(PARAMS).outputs == expected.outputs


def test_an_empty_session(llm, tmp_path):
    session = llm.session()
    session.save(tmp_path / "a")
    loaded = llm.load_session(tmp_path / "a")
    assert (loaded.token_ids, loaded.text) == ([], "")
    assert loaded.generate(PARAMS).outputs == llm.generate("", PARAMS)[0].outputs


def test_a_session_longer_than_the_model(tmp_path, small_demo):
    params = SamplingParams(max_tokens=40, ignore_eos=True, overflow="slide", stride=7, seed=0)
    with LLM(small_demo, max_model_len=24, max_num_seqs=1, prefix_cache_seqs=1) as llm:
        session = llm.session()
        session.extend(TEXT[:10])
        session.generate(params)
        session.save(tmp_path / "a")
        expected = session.generate(params)
    with LLM(small_demo, max_model_len=24, max_num_seqs=1, prefix_cache_seqs=1) as llm:
        loaded = llm.load_session(tmp_path / "a")
        output = loaded.generate(params)
        assert (output.outputs, output.num_cached_tokens > 0) == (expected.outputs, True)
        loaded = llm.load_session(tmp_path / "a")
        loaded.extend(TEXT)  # beyond the window as it was
        loaded.save(tmp_path / "b")
        assert llm.load_session(tmp_path / "b").token_ids == loaded.token_ids
    with LLM(small_demo, max_model_len=8) as llm, pytest.raises(CheckpointError, match="holds keys and values of"):
        llm.load_session(tmp_path / "a")


@pytest.fixture(scope="module")
def saved(llm, tmp_path_factory):
    path = tmp_path_factory.mktemp("sessions") / "session"
    session = llm.session()
    session.extend(TEXT[:9])
    session.save(path)
    return path


def rewritten(saved, tmp_path, arrays=(), **metadata):
    """The file with other metadata and arrays, well formed."""
    with safe_open(saved, framework="numpy") as file:
        about = file.metadata() | metadata
    save_file(load_file(saved) | dict(arrays), tmp_path / "other", {k: v for k, v in about.items() if v is not None})
    return tmp_path / "other"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": None}, "is no session that tinygpt saved"),
        ({"version": "0"}, "is in version '0' of its format and this tinygpt reads version 1"),
        ({"crc32": "00000000"}, "does not have the checksum in its header"),
        ({"first": "7"}, "does not have the checksum"),
        ({"made_by": "{"}, "does not have the checksum"),
    ],
    ids=str,
)
def test_foreign_metadata(llm, saved, tmp_path, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        llm.load_session(rewritten(saved, tmp_path, **metadata))


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_file_that_is_cut_off(llm, saved, tmp_path, cut):
    (tmp_path / "cut").write_bytes(saved.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match="cut"):
        llm.load_session(tmp_path / "cut")


def test_a_bit_that_has_changed(llm, saved, tmp_path):
    data = bytearray(saved.read_bytes())
    data[-5] ^= 1
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(CheckpointError, match="does not have the checksum"):
        llm.load_session(tmp_path / "bad")


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_file_that_cannot_be_read(llm, tmp_path, name):
    with pytest.raises(CheckpointError, match=r"cannot be read|is a folder"):
        llm.load_session(tmp_path / name)


def test_a_file_of_another_model(saved, tmp_path, small_demo):
    folder = tiny_checkpoint.write_checkpoint(tmp_path / "tiny", tiny_checkpoint.random_tensors())
    for options, message in (
        ({"model": str(folder)}, f"n_embd is {SMALL['n_embd']} there and"),
        ({"dtype": "int8"}, "dtype is 'float32' there and 'int8' here"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype is 'float32' there and 'bfloat16' here"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'float32' there and 'int8' here"),
        ({"device": "reference"}, "device is 'cpu' there and 'reference' here"),
    ):
        with LLM(**{"model": small_demo, **options}) as llm, pytest.raises(CheckpointError, match=message):
            llm.load_session(saved)


def test_a_file_of_the_same_model_with_other_weights(tmp_path):
    def llm_of(name, seed):
        tensors = tiny_checkpoint.random_tensors()
        tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"] + np.float32(seed)
        return LLM(str(tiny_checkpoint.write_checkpoint(tmp_path / name, tensors)))

    with llm_of("one", 0) as llm:
        session = llm.session()
        session.extend([1, 2, 3])
        session.save(tmp_path / "saved")
    with llm_of("other", 1) as llm, pytest.raises(CheckpointError, match=r"weights is '[0-9a-f]{8}' there and"):
        llm.load_session(tmp_path / "saved")


# --- files whose keys and values are of other tokens than they say


def lying(llm, path, change):
    """A session of TEXT[:40] whose file is right in everything but what `change` makes of its keys and values."""
    session = llm.session()
    session.extend(TEXT[:40])
    session.save(path)
    with safe_open(path, framework="numpy") as file:
        made_by, k, v = json.loads(file.metadata()["made_by"]), file.get_tensor("k"), file.get_tensor("v")
    write_session(path, SavedSession(TEXT[:40], 0, *change(k, v)), made_by)
    return path


def of_other_tokens(k, v):
    return k[:, :, ::-1].copy(), v[:, :, ::-1].copy()


def huge(k, v):
    """Finite by themselves, and of which the model makes numbers that are not."""
    return np.full_like(k, 3e38), np.full_like(v, 3e38)


@pytest.fixture(scope="module")
def roomy(small_demo):
    with LLM(small_demo, max_num_seqs=2, prefix_cache_seqs=12) as llm:
        yield llm


def test_a_file_changes_nothing_but_its_own_session(roomy, alone, tmp_path):
    """Nor do other sessions begin with what it holds, nor does anyone with what was computed upon that."""
    llm = roomy  # all stay in their slots
    path, prompt = lying(llm, tmp_path / "a", of_other_tokens), TEXT[:40]
    right = alone.generate([prompt], PARAMS)[0].outputs
    loaded = llm.load_session(path)
    fresh, honest = llm.session(), llm.session()
    fresh.extend(prompt)
    honest.extend(prompt)
    honest.save(tmp_path / "b")
    assert llm.generate([prompt], PARAMS)[0].outputs == right
    assert fresh.generate(PARAMS).outputs == right
    assert "".join(chunk.text for chunk in llm.stream(prompt, PARAMS)) == right[0].text
    (score,), (expected,) = llm.score(prompt, [[5]]), alone.score(prompt, [[5]])
    assert score == expected
    fork, wrong = loaded.fork(), loaded.generate(PARAMS).outputs
    assert wrong != right  # the file did lie
    assert fork.generate(PARAMS).outputs == wrong  # and a fork is the same session
    assert llm.generate([prompt], PARAMS)[0].outputs == right
    assert llm.load_session(tmp_path / "b").generate(PARAMS).outputs == right
    longer = [*loaded.token_ids, 1, 2, 3]
    assert llm.generate([longer], PARAMS)[0].outputs == alone.generate([longer], PARAMS)[0].outputs


def test_a_request_beside_a_loaded_session_shares_nothing_with_it(roomy, alone, tmp_path):
    llm = roomy
    loaded, longer = llm.load_session(lying(llm, tmp_path / "a", of_other_tokens)), TEXT[:60]
    loaded.extend(TEXT[40:60])
    with contextlib.closing(loaded.stream(PARAMS)) as chunks:
        next(chunks)
        (output,) = llm.generate([longer], PARAMS)
    assert output.outputs == alone.generate([longer], PARAMS)[0].outputs


def test_two_sessions_of_one_file_share_nothing(llm, steps, saved):
    one, other = llm.load_session(saved), llm.load_session(saved)
    one.extend(TEXT[9:40])
    one.generate(PARAMS)
    other.extend(TEXT[9:40])
    steps.clear()
    assert other.generate(PARAMS).num_cached_tokens == 8  # those of the file, and nothing that the first has computed
    assert sum(steps) == 1 + 31 + 5


@pytest.mark.parametrize("change", [of_other_tokens, huge])
def test_once_others_have_taken_its_place_the_model_has_read_its_tokens(llm, alone, tmp_path, change):
    loaded = llm.load_session(lying(llm, tmp_path / "a", change))
    for start in (1, 2):  # as many as slots are kept
        llm.generate([TEXT[start:]], PARAMS)
    output = loaded.generate(PARAMS)
    assert output.num_cached_tokens == 0
    assert output.outputs == alone.generate([TEXT[:40]], PARAMS)[0].outputs
    loaded.save(tmp_path / "b")
    assert np.array_equal(load_file(tmp_path / "b")["k"][:, :, :39], honest_keys(llm, tmp_path))


def honest_keys(llm, folder):
    session = llm.session()
    session.extend(TEXT[:40])
    session.save(folder / "honest")
    return load_file(folder / "honest")["k"]


def test_numbers_that_overflow_fail_their_session_alone(roomy, alone, tmp_path):
    llm, beside = roomy, [TEXT[start : start + 30] for start in range(8)]
    loaded = llm.load_session(lying(llm, tmp_path / "a", huge))
    expected = [alone.generate([prompt], PARAMS)[0].outputs for prompt in beside]
    got = [llm.submit(prompt, PARAMS) for prompt in beside]
    with pytest.raises(TinyGPTError, match="not finite"):
        loaded.generate(PARAMS)
    assert [future.result().outputs for future in got] == expected
    after = TEXT[20:60]  # in the slot where that was, which is the next to be taken
    assert llm.generate([after], PARAMS)[0].outputs == alone.generate([after], PARAMS)[0].outputs
    assert loaded.generate(PARAMS).outputs == alone.generate([TEXT[:40]], PARAMS)[0].outputs  # nothing of it was kept


def test_a_session_that_was_not_loaded_shares_as_ever(llm, steps):
    llm.generate([TEXT[:40]], PARAMS)
    session = llm.session()
    session.extend(TEXT[:40])
    steps.clear()
    assert session.generate(PARAMS).num_cached_tokens == 39
    assert sum(steps) == 1 + 5


def test_a_place_that_is_no_file(llm, tmp_path):
    session = llm.session()
    session.extend([1, 2])
    for call in (session.save, llm.load_session):
        with pytest.raises(RequestError, match="path is None and must be a text or a Path: name a file"):
            call(None)
        with pytest.raises(CheckpointError, match=f"^{tmp_path} is a folder, and a session is kept in a file"):
            call(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*none/session .*: create its folder first"):
        session.save(tmp_path / "none" / "session")
    assert list(tmp_path.iterdir()) == []


def test_the_metadata_names_what_it_was_made_by(saved):
    with safe_open(saved, framework="numpy") as file:
        about = file.metadata()
    assert (about["format"], about["version"], about["first"]) == ("tinygpt session", "1", "0")
    made_by = json.loads(about["made_by"])
    assert (made_by["n_embd"], made_by["dtype"], made_by["device"]) == (SMALL["n_embd"], "float32", "cpu")
