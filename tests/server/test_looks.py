"""Captures, edits and control vectors over HTTP, beside the library's."""

import base64
import threading
from dataclasses import replace

import numpy as np
import pytest

from support.engines import sample_of
from support.gate import noting
from support.serving import served
from tinygpt import LLM, ControlVector, Edit, RemoteLLM, SamplingParams
from tinygpt.errors import RequestError
from tinygpt.look.html import lens
from tinygpt.server import api, replies
from tinygpt.text.chat import PlainTemplate

CAPTURE = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z", "blocks.0.attn.hook_pattern"]
ASKED = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def llm(small_demo):
    limit = 40_000  # bytes
    with LLM(small_demo, max_num_seqs=4, split_special_tokens=True, max_capture_bytes=limit) as llm:
        yield llm


@pytest.fixture(scope="module")
def vector(llm):
    return ControlVector({1: np.random.default_rng(0).normal(size=llm.config.n_embd).astype(np.float32)})


@pytest.fixture(scope="module")
def server(llm, vector):
    template = PlainTemplate()
    with served(llm, look=True, control_vectors={"happy": vector}, chat_template=template) as server:
        yield server


@pytest.fixture(scope="module")
def closed(llm):
    with served(llm) as server:
        yield server


def arrays(choice: dict) -> dict[str, np.ndarray]:
    found = {}
    for name, each in choice["activations"].items():
        assert each["dtype"] == "float32"
        found[name] = np.frombuffer(base64.b64decode(each["data"]), "<f4").reshape(each["shape"])
    return found


def coded(array: np.ndarray) -> dict:
    data = np.ascontiguousarray(array)
    return {
        "dtype": str(data.dtype),
        "shape": [*data.shape],
        "data": base64.b64encode(data.tobytes()).decode(),
    }


def assert_equal(found: dict, expected: dict) -> None:
    assert {*found} == {*expected} != set()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name])


def test_each_choice_has_its_activations(server, llm):
    body = {**ASKED, "prompt": ["Once upon a time", "The dog"], "capture": CAPTURE}
    outputs = llm.generate(body["prompt"], replace(PARAMS, capture=CAPTURE))
    for choice, output in zip(server.complete(**body).choices, outputs, strict=True):
        assert choice["text"] == output.outputs[0].text
        assert_equal(arrays(choice), output.outputs[0].activations)
    assert "activations" not in server.complete(**ASKED).choices[0]


@pytest.mark.parametrize("streams", [False, True])
def test_arrays_are_computed_in_a_thread(server, monkeypatch, streams):
    in_loop = []
    write = replies.activations_to_json

    def noted(activations):
        in_loop.append(threading.current_thread() is server.thread)
        return write(activations)

    monkeypatch.setattr(replies, "activations_to_json", noted)
    assert server.complete(**ASKED, capture=CAPTURE, stream=streams).status == 200
    assert in_loop == [False]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_last_event_of_a_stream_has_them(server, llm, path):
    asked = {"messages": [{"role": "user", "content": "Once"}]} if "chat" in path else {"prompt": "Once"}
    body = {**asked, "max_tokens": 6, "temperature": 0, "capture": "resid_mid"}
    [whole] = server.ask(path, body).choices
    parts = server.ask(path, {**body, "stream": True}).parts
    assert [part for part in parts if "activations" in part] == parts[-1:]
    assert_equal(arrays(parts[-1]), arrays(whole))


def test_the_short_form_of_vllm_lens(server):
    short = server.complete(**ASKED, extra_args={"output_residual_stream": [1, 0]}).choices[0]
    long = server.complete(**ASKED, capture="resid_post").choices[0]
    assert_equal(arrays(short), arrays(long))


@pytest.mark.parametrize("way", ["ablation", "patch", "new", "direction"])
def test_edits_are_the_librarys(server, llm, way):
    shape = 2, llm.config.n_head, llm.config.head_size
    rows = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    halves = np.float16(rows[0, 0])
    sent, fields = {
        "ablation": [{"keep": 0, "index": 1}] * 2,
        "patch": ({"value": coded(rows), "at": [-2, -1]}, {"value": rows, "at": [-2, -1]}),
        "new": ({"value": rows[0].tolist(), "at": "new"}, {"value": rows[0], "at": "new"}),
        "direction": ({"project_out": coded(halves)}, {"project_out": halves}),
    }[way]
    name = "blocks.0.attn.hook_z"
    [choice] = server.complete(**ASKED, edits=[{"name": name, **sent}], capture=CAPTURE).choices
    made = Edit(name, **fields)
    sample = sample_of(llm, ASKED["prompt"], replace(PARAMS, edits=made, capture=CAPTURE))
    assert choice["text"] == sample.text
    assert_equal(arrays(choice), sample.activations)
    plain = server.complete(**ASKED, capture=CAPTURE).choices[0]
    assert not np.array_equal(
        arrays(plain)[CAPTURE[1]][: len(sample.token_ids)], arrays(choice)[CAPTURE[1]][:6]
    )


def test_a_named_vector_steers_and_the_log_tells_the_edits(server, llm, vector):
    server.forget()
    plain = server.complete(**ASKED).choices[0]["text"]
    steered = server.complete(**ASKED, steer={"happy": 3}).choices[0]["text"]
    again = server.complete(**ASKED, steer={"happy": 3}).choices[0]["text"]
    other = server.complete(**ASKED, steer={"happy": -3}).status
    assert steered == again == sample_of(llm, ASKED["prompt"], replace(PARAMS, edits=vector.edits(3))).text
    assert (steered != plain, other) == (True, 200)
    digests = [server.ended().get("edits") for _ in range(4)]
    assert digests[0] is None
    assert digests[1] == digests[2] != digests[3] is not None


EDIT = {"name": "blocks.0.hook_resid_pre"}


def test_the_log_tells_edits_of_new_tokens_from_edits_of_all(server):
    server.forget()
    for at in (None, "new", [-1], [3]):
        assert server.complete(**ASKED, edits=[{**EDIT, "value": 1, "at": at}]).status == 200
    assert len({server.ended()["edits"] for _ in range(4)}) == 4


@pytest.mark.parametrize("given", [{"capture": "z"}, {"edits": Edit("blocks.0.hook_resid_pre", value=1)}])
def test_a_remote_llm_refuses_them_by_name(server, given):
    with (
        RemoteLLM(server.url) as remote,
        pytest.raises(RequestError, match=f"{next(iter(given))} cannot be sent"),
    ):
        remote.generate("Once", **given)


def test_the_lens_is_the_librarys(server, llm, closed):
    ids = llm.tokenizer.encode("the king")
    found = server.ask("/lens", {"prompt": "the king"}).json
    table = lens(llm, ids, top=1)
    assert [each["token"] for each in found["layers"]] == [texts[-1][0] for texts in table.texts]
    assert np.exp([each["logprob"] for each in found["layers"]]) == pytest.approx(table.probs[:, -1, 0])
    assert np.array(found["attention"]) == pytest.approx(llm.attentions(ids)[:, :, -1], abs=1e-4)
    cards = [each.ask("/v1/models").json["data"][0] for each in (server, closed)]
    assert [card["look"] for card in cards] == [True, False]


def test_a_large_edit_is_digested_in_a_thread(server, monkeypatch):
    threads = noting(monkeypatch, api, "salt_of", lambda *given: threading.current_thread())
    edit = {"name": "hook_z", "keep": 0.5, "at": [*range(3000)]}
    assert server.complete(prompt="a", edits=[edit]).status == 400
    assert threads
    assert server.thread not in threads
