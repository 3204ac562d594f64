"""The engine on a simulated GPU: the reference's tokens, and errors that only a GPU raises."""

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.cuda_device import SimulatedDevice, on_a_gpu
from support.examples import daily
from support.tables import fields, rows
from support.tiny_checkpoint import write_one_layer
from tinygpt import LLM, SamplingParams
from tinygpt.cli.serve import _try_first
from tinygpt.engine.model_runner import ModelSource
from tinygpt.errors import RequestError
from tinygpt.kernels.backend import DeviceError
from tinygpt.kernels.cuda import device as devices
from tinygpt.llm_args import LLMArgs
from tinygpt.weights.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("compute_capability", "device")

POSITIONS = 40
PROMPTS = [[3, 4, 5, 3], [3, 4, 5, 9, 9, 1]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_one_layer(tmp_path_factory.mktemp("model"), POSITIONS))


def load(model: str, device: str = "cuda", **options) -> LLM:
    return LLM(model, device=device, max_num_seqs=4, max_num_batched_tokens=8, **options)


def double(prompt_token_ids, token_ids, scores):
    return 2 * scores


CASES = fields(
    """
greedy:
to the end: ignore_eos=True, max_tokens=18
drawn: temperature=1.3, seed=5, n=2
drawn to the end: temperature=1.0, seed=1, ignore_eos=True, max_tokens=18
warped: temperature=1.5, top_k=5, top_p=0.8, min_p=0.05, seed=6
rare warpers: temperature=1.1, typical_p=0.7, eta_cutoff=0.01, top_p=0.9, top_p_rule="openai"
penalties: repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2
edited: logit_bias={3: 2.0}, suppress_tokens=[4], no_repeat_ngram_size=2, bad_words_ids=[[5, 6]]
banned: logit_bias={5: -1.0}, suppress_tokens=[4], min_tokens=3, bad_words_ids=[[6]]
decaying: temperature=1.0, top_p=0.9, top_p_decay=0.8, top_p_min=0.2, seed=8
logprobs: logprobs=3, temperature=0.9, seed=7
processed logprobs: logprobs=3, temperature=0.9, seed=7, top_k=4, logprobs_mode="processed"
prompt logprobs: prompt_logprobs=2
own processor: logits_processors=[double], temperature=0.8, seed=9
beams: num_beams=2, n=2
looked up: prompt_lookup_num_tokens=3, max_tokens=9, ignore_eos=True
""",
    double=double,
)


# Each of the others has the kernels of one of these.
DAILY = ["greedy", "drawn to the end", "warped", "rare warpers", "penalties", "edited"]
DAILY += ["processed logprobs", "prompt logprobs", "beams", "looked up"]


@pytest.mark.parametrize("name", daily(CASES, DAILY))
def test_tokens_are_the_references(model, name):
    check_tokens(model, CASES[name])


# The greatest logit, and a draw after most warpers.
SMOKE = ("greedy", "warped")


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, marks=pytest.mark.smoke if name in SMOKE else (), id=name)
        for name, fields in CASES.items()
    ],
)
def test_tokens_are_the_references_on_a_gpu(model, fields):
    check_tokens(model, fields)


@on_a_gpu
@pytest.mark.gpu
def test_a_gpu_says_what_it_is():
    device = devices.the_device()
    assert "GPU" in device.name or "NVIDIA" in device.name
    assert device.capability >= (7, 5)
    assert device.shared_bytes >= 64 << 10
    assert device.multiprocessors > 0


@on_a_gpu
@pytest.mark.gpu
def test_a_gpu_has_the_memory_back_of_a_model_that_was_never_asked(model):
    """The engine's thread, which has not used the GPU, frees it, to the last array."""
    device = devices.the_device()
    load(model).close()
    free = [device.free_bytes()]
    for _ in range(2):
        load(model).close()
        device.zeros((1,), np.uint8)
        free.append(device.free_bytes())
    assert min(free[1:]) >= free[0]


@on_a_gpu
@pytest.mark.gpu
def test_two_models_run_in_two_threads_on_a_gpu():
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=1.0, seed=2)
    with (
        LLM("demo", device="cuda", dtype="bfloat16") as one,
        LLM("demo", device="cuda", dtype="int8") as other,
    ):
        alone = [llm.generate(["Once", "The king said"], params) for llm in (one, other)]
        with ThreadPoolExecutor(2) as pool:
            together = list(
                pool.map(lambda llm: llm.generate(["Once", "The king said"], params), (one, other))
            )
    for before, after in zip(alone, together, strict=True):
        assert [output.outputs[0].token_ids for output in before] == [
            output.outputs[0].token_ids for output in after
        ]


def check_tokens(model: str, fields: dict) -> None:
    params = SamplingParams(**{"max_tokens": 5, "seed": 3, **fields})
    with load(model) as ours, load(model, "reference") as oracle:
        pairs = zip(ours.generate(PROMPTS, params), oracle.generate(PROMPTS, params), strict=True)
        for found, expected in pairs:
            for a, b in zip(found.outputs, expected.outputs, strict=True):
                assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
                for mine, theirs in zip(a.logprobs or [], b.logprobs or [], strict=True):
                    assert mine == pytest.approx(theirs, abs=1e-4)
            for mine, theirs in zip(found.prompt_logprobs or [], expected.prompt_logprobs or [], strict=True):
                assert (mine is None and theirs is None) or mine == pytest.approx(theirs, abs=1e-4)


def test_256_sequences_at_once(model):
    """Prompts of one token and of three, in steps that decode others; each sixteenth is drawn."""
    prompts = [[i % 9 + 1] * (1 if i % 64 else 3) for i in range(256)]
    params = [
        SamplingParams(max_tokens=2, ignore_eos=True, seed=i, temperature=0 if i % 16 else 1.3)
        for i in range(256)
    ]
    found = []
    for device in ("cuda", "reference"):
        with LLM(model, device=device, max_num_seqs=256, max_num_batched_tokens=256) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert found[0] == found[1]
    assert len({tuple(token_ids) for token_ids in found[0]}) > 5


def test_a_server_has_captured_steps_of_all_rows(model, device):
    with load(model) as llm:
        _try_first(llm, Namespace(device="cuda", look=False, max_num_seqs=4))
        captured = device.num_captured
        for temperature in (0, 0.9):
            llm.generate([[3]] * 3, SamplingParams(max_tokens=9, ignore_eos=True, temperature=temperature))
    assert device.num_captured == captured


def test_steps_ahead_are_bounded_by_tokens_and_positions(model, device):
    reads, read = [], device.read
    device.read = lambda source, count, at=0: reads.append(count) or read(source, count, at)
    with load(model) as llm:
        llm.generate([[3]], SamplingParams(max_tokens=16 + 7, ignore_eos=True))
        # The history of steps of up to max_num_batched_tokens, READ_STEPS of them at a time.
        assert reads == [4 * 8] * 4 + [4 * 8, 3 * 8]
        reads.clear()
        (full,) = llm.generate([[4] * 30], SamplingParams(max_tokens=10, ignore_eos=True))
        assert reads == [1, 4 * 8, 4 * 8, 8]
        assert len(full.outputs[0].token_ids) == 10


def test_what_a_sequence_does_not_take_leaves_no_trace(model):
    """A stop in the middle of steps ahead; then the same beginning again, from the prefix cache."""
    with load(model) as ours, load(model, "reference") as oracle:
        (whole,) = oracle.generate([[7]], SamplingParams(max_tokens=20, ignore_eos=True))
        token_ids = whole.outputs[0].token_ids
        stop = token_ids[3]
        params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
        assert ours.generate([[7]], params)[0].outputs[0].token_ids == token_ids[: token_ids.index(stop) + 1]
        again = [7, *token_ids[:2]]
        (found,) = ours.generate([again], SamplingParams(max_tokens=9, ignore_eos=True))
        assert found.outputs[0].token_ids == token_ids[2:11]


def test_a_stream_and_logits(model):
    with load(model) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        streamed = [chunk.token_id for chunk in llm.stream([3, 4], params)]
        assert streamed == llm.generate([[3, 4]], params)[0].outputs[0].token_ids
        with load(model, "reference") as oracle:
            np.testing.assert_allclose(llm.logits(PROMPTS[1]), oracle.logits(PROMPTS[1]), atol=1e-4)
            np.testing.assert_allclose(llm.attentions(PROMPTS[1]), oracle.attentions(PROMPTS[1]), atol=1e-5)


def test_too_little_memory_is_refused_by_arithmetic(model, monkeypatch):
    small = SimulatedDevice(free=1 << 16)
    small.zeros = small.array = lambda *_: pytest.fail("something was allocated")
    monkeypatch.setattr(devices, "the_device", lambda: small)
    message = r"takes 0\.00 GiB of the GPU's memory \(weights .* free: lower max_num_seqs"
    with pytest.raises(RequestError, match=message):
        load(model)


def test_a_machine_without_a_gpu_is_refused(model, monkeypatch):
    def absent():
        raise DeviceError("CUDA finds no GPU.")

    monkeypatch.setattr(devices, "the_device", absent)
    message = r"device is 'cuda' and cannot be used: CUDA finds no GPU\. Or use device 'cpu'"
    with pytest.raises(RequestError, match=message):
        load(model)


def test_a_gpu_without_tensor_cores_computes_in_float32(model, device):
    device.capability = (7, 5)
    with pytest.raises(
        RequestError, match=r"'int8' needs compute capability 8\.0 or more, and the GPU has 7\.5"
    ):
        load(model, dtype="int8")
    with load(model, dtype="float32") as llm:
        assert llm.generate([[3]], SamplingParams(max_tokens=1))


def test_float16_is_to_be_asked_for(model, monkeypatch):
    """A GPU's activations are float16, too."""
    monkeypatch.setattr(Checkpoint, "auto_dtype", "float16")
    sources = ModelSource.open_all(LLMArgs(model, device="cuda"), ["auto", "float16"])
    assert [source.dtype for source in sources] == ["float32", "float16"]
    assert [source.kv_cache_dtype for source in sources] == ["float32", "float16"]


REFUSED = rows("""
{"dtype": "int4"} | dtype is 'int4' and device 'cuda' computes in 'float32', 'float16', 'bfloat16', 'int8' only
{"kv_cache_dtype": "bfloat16"} | must be one of 'auto', 'float32' for float32 weights on device 'cuda'
{"dtype": "int8", "kv_cache_dtype": "float32"} | must be one of 'auto', 'bfloat16', 'int8' for int8 weights
{"kv_cache_dtype": "int8"} | kv_cache_dtype is 'int8' and must be one of 'auto', 'float32' for float32 weights
""")


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_a_gpu_does_not_compute_is_refused(model, options, message):
    with pytest.raises(RequestError, match=message):
        load(model, **options)
