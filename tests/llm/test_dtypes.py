"""bfloat16, int8 and int4 as a whole: what they cost in quality, on odd shapes too, and how they are chosen."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scripts.quality import EXTREMES, INT8_CACHE, OUTLIERS, figures_of, measure, summary, write_outliers
from support.golden_models import write_model
from support.kernel_tools import same_bits
from support.tables import fields
from support.tiny_checkpoint import random_tensors, write_checkpoint
from tinygpt import LLM, SamplingParams
from tinygpt.cli import main as cli
from tinygpt.errors import RequestError
from tinygpt.outputs import CompletionOutput

QUANTISED = ("bfloat16", "int8", "int4", INT8_CACHE)
WINDOW = 400  # tokens


# In % of perplexity, on a text that the float32 model has written itself. Over a few hundred tokens the change of
# perplexity is mostly chance (for int8, 0.5 % either way), so the mean KL divergence from float32 is held to these
# limits: it is the logarithm of what the perplexity would grow by on a long one.
LIMITS = {"bfloat16": 0.05, "int8": 0.15, "int4": 2.0, INT8_CACHE: 0.05}
OUTLIER_LIMITS = {"bfloat16": 0.05, "int8": 0.3, "int4": 3.0, INT8_CACHE: 0.1}
CALIBRATED_LIMITS = {"int8": 1.0, "int4": 5.0}


@pytest.fixture(scope="module")
def written() -> list[CompletionOutput]:
    """Two texts by the demo in float32, which it goes on with past their ends."""
    params = [
        SamplingParams(max_tokens=WINDOW, temperature=1.0, seed=seed, ignore_eos=True) for seed in (0, 1)
    ]
    with LLM("demo", max_num_seqs=2) as llm:
        return [output.outputs[0] for output in llm.generate(["", ""], params)]


@pytest.fixture(scope="module")
def window(written) -> list[int]:
    return written[0].token_ids


def check_quality(model: str, window: list[int], limits: dict[str, float], converted=None, sane=100) -> None:
    results = measure(model, [window], () if converted else QUANTISED, converted or {})
    assert results["float32"].mean_kl == 0
    assert results["float32"].perplexity < sane  # the model is in its senses
    for dtype, limit in limits.items():
        # A thousandth of it, or the dtype was not used at all.
        assert np.log1p(limit / 100) / 1000 < results[dtype].mean_kl < np.log1p(limit / 100), dtype


def test_quality(window):
    check_quality("demo", window, LIMITS)


def test_a_position_that_is_not_finite_spoils_every_mean():
    exact = np.random.default_rng(0).standard_normal((4, 7), np.float32)
    logits = exact.copy()
    logits[1, 3] = np.nan
    quality = summary([figures_of(logits, exact, [3, 1, 2, 0])])
    assert np.isnan(
        [quality.perplexity, quality.mean_kl, quality.mean_difference, quality.largest_difference]
    ).all()
    assert summary([figures_of(exact, exact, [3, 1, 2, 0])]).mean_kl == 0


def each_of(versions, everyday: set[str]) -> list:
    """Names of versions of the demo; the others take as long, and run with --slow."""
    return [pytest.param(name, marks=[] if name in everyday else pytest.mark.slow) for name in versions]


@pytest.mark.parametrize("name", each_of(OUTLIERS, {"like GPT-2"}))
def test_quality_with_outliers(window, name, tmp_path):
    model = write_outliers("demo", OUTLIERS[name], window, tmp_path / "demo")
    # Massive activations at the first position cost the model its first token, which others attend to.
    check_quality(model, window, OUTLIER_LIMITS, sane=200 if name == "like GPT-2" else 100)


@pytest.mark.parametrize("name", each_of(EXTREMES, {"values x 100"}))
def test_quality_with_extreme_outliers_and_a_calibration(written, window, name, tmp_path):
    model = write_outliers("demo", EXTREMES[name], window, tmp_path / "demo")
    text = tmp_path / "text"
    converted = {}
    text.write_text(written[1].text, encoding="utf-8", newline="")
    for dtype in CALIBRATED_LIMITS:
        converted[dtype] = str(tmp_path / dtype)
        assert cli.main(["convert", model, converted[dtype], "--dtype", dtype, "--calibrate", str(text)]) == 0
    check_quality(model, window, CALIBRATED_LIMITS, converted)


@pytest.mark.parametrize("name", ["layer norms x 30", "values x 30", "values x 100"])
def test_outliers_leave_the_function_as_it_is(window, name, tmp_path):
    changed = write_outliers("demo", (OUTLIERS | EXTREMES)[name], window, tmp_path / "demo")
    with LLM("demo", max_num_seqs=1) as before, LLM(changed, max_num_seqs=1) as after:
        np.testing.assert_allclose(after.logits(window), before.logits(window), atol=1e-3)


SHAPES = fields("""
heads of 5, inner 83: n_embd=35, n_head=7, n_inner=83
heads of 22, inner 131: n_embd=66, n_head=3, n_inner=131
heads of 20: n_embd=60, n_head=3
heads of 65, untied: n_embd=130, n_head=2, n_inner=200, tie_word_embeddings=False
heads of 80, untied: n_embd=80, n_head=1, tie_word_embeddings=False
four segments: n_embd=320, n_head=5, n_inner=384
""")
# Of the logits: the root of the mean squared error, over their standard deviation. Measured on these random weights:
# up to 0.006, 0.017 and 0.12; a trained model's are smaller.
ERRORS = {"bfloat16": 0.007, "int8": 0.023, "int4": 0.17}


@pytest.fixture(scope="module")
def shape_folders(tmp_path_factory) -> dict[str, Path]:
    sizes = {"vocab_size": 97, "n_positions": 90}
    folders = {name: tmp_path_factory.mktemp("shape") for name in SHAPES}
    for name, folder in folders.items():
        path = write_model(folder, **sizes, **SHAPES[name]) / "model.safetensors"
        # Smaller scores leave attention spread over tokens, as in trained models.
        tamed = {key: array / 2 if "c_attn.w" in key else array for key, array in load_file(path).items()}
        save_file(tamed, path)
    return folders


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_near_the_reference(shape, shape_folders):
    folder = str(shape_folders[shape])
    token_ids = np.random.default_rng(0).integers(97, size=90).tolist()
    with LLM(folder, device="reference") as llm:
        exact = llm.logits(token_ids)  # (T, V)
    for dtype, limit in ERRORS.items():
        with LLM(folder, dtype=dtype) as llm:
            error = np.sqrt(((llm.logits(token_ids) - exact) ** 2).mean()) / exact.std()
        assert limit / 1000 < error < limit, dtype


def logits_of(token_ids: list[int], **choices: str) -> np.ndarray:
    with LLM("demo", max_num_seqs=1, **choices) as llm:
        return llm.logits(token_ids)


@pytest.mark.parametrize(("dtype", "same"), [("float32", "float32"), ("int8", "bfloat16")])
def test_the_cache_follows_the_weights(dtype, same, window):
    same_bits(logits_of(window, dtype=dtype, kv_cache_dtype=same), logits_of(window, dtype=dtype))


@pytest.mark.slow  # each compiles a step of its own
@pytest.mark.parametrize(("dtype", "other"), [("float32", "bfloat16"), ("int8", "float32"), ("int4", "int8")])
def test_a_cache_that_is_chosen_is_near(dtype, other, window):
    chosen = logits_of(window, dtype=dtype, kv_cache_dtype=other)
    auto = logits_of(window, dtype=dtype)
    assert 0 < np.abs(chosen - auto).mean() < 0.1  # one rounds keys and values to 8 bits, the other does not


def test_an_int8_cache_is_the_references(small_demo):
    """What the kernels round otherwise than float64 does is far less than what the cache rounds."""

    def logits(device: str, cache: str) -> np.ndarray:
        with LLM(small_demo, device=device, kv_cache_dtype=cache, max_num_seqs=1) as llm:
            return llm.logits(range(5, 205))

    found = logits("cpu", "int8")
    expected = logits("reference", "int8")
    exact = logits("reference", "float32")
    assert 0 < np.abs(found - expected).mean() < np.abs(expected - exact).mean() / 10


def test_attention_maps_of_an_int8_cache_are_near(small_demo):
    maps, exact = (
        LLM(small_demo, device="reference", kv_cache_dtype=cache).attentions(range(5, 75))
        for cache in ("int8", "float32")
    )
    assert 0 < np.abs(maps - exact).max() < 0.05


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> Path:
    """A checkpoint in float16, of uneven sizes."""
    folder = tmp_path_factory.mktemp("halves")
    source = write_model(folder / "source", n_embd=35, n_head=5, n_positions=70, n_inner=83)
    command = ["convert", str(source), str(folder / "float16"), "--to", "safetensors", "--dtype", "float16"]
    assert cli.main(command) == 0
    return folder / "float16"


def test_a_checkpoint_in_float16_has_the_bits_of_float32_in_half_the_bytes(halves, tmp_path):
    """Nothing is rounded again, converted or not; greedy tokens and adapters follow."""
    assert cli.main(["convert", str(halves), str(tmp_path / "packed"), "--dtype", "half"]) == 0
    found = []
    models = [(halves, {"dtype": "float32"}), (halves, {"dtype": "fp16"}), (tmp_path / "packed", {})]
    for model, choice in models:
        with LLM(model, max_num_seqs=1, **choice) as llm:
            found.append(llm.logits(range(2, 70)))
            assert choice.get("dtype") == "float32" or llm.dtype == "float16"
    same_bits(found[1], found[0])
    same_bits(found[2], found[0])


def test_a_checkpoint_in_float16_runs_in_float32_unless_it_is_asked_for(halves):
    with LLM(halves, max_num_seqs=1) as llm:
        assert llm.dtype == "float32"


@pytest.mark.parametrize("beside", [0, np.nan, -np.inf])
def test_a_weight_beyond_float16_is_refused_by_name(tmp_path, capsys, beside):
    tensors = random_tensors()
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 2:4] = -70_000, beside
    source = str(write_checkpoint(tmp_path / "source", tensors))
    wanted = (
        "dtype is 'float16', whose largest number is 65504, and h.1.mlp.c_fc.weight has 70000: use 'bfloat16'"
    )
    with pytest.raises(RequestError, match=wanted):
        LLM(source, dtype="float16")
    assert cli.main(["convert", source, str(tmp_path / "packed"), "--dtype", "float16"]) == 2
    assert wanted in capsys.readouterr().err


def test_a_cpu_without_f16c_says_so_before_any_work(monkeypatch):
    from tinygpt.kernels import cpu

    monkeypatch.setattr(cpu, "DTYPES", tuple(name for name in cpu.DTYPES if name != "float16"))
    with pytest.raises(RequestError, match="'int4' only, as this CPU lacks F16C; the nearest are 'bfloat16'"):
        LLM("no such model", dtype="float16")
