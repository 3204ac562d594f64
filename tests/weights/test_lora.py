"""LoRA adapters: what PEFT writes is read to the logits of the model that PEFT itself makes of the same files."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.family_models import T, V, write_family
from support.golden_models import (
    NEED_PEFT,
    change_config,
    change_tensors,
    golden_array,
    golden_ids,
    write_golden,
)
from support.oracles import TOLERANCE, read_model
from support.paths import VOCAB_SIZE
from support.recorded import MISSING
from support.tables import rows
from support.tiny_checkpoint import convert, copy_tokenizer
from tinygpt import LLM, SamplingParams
from tinygpt.engine.model_runner import load_tokenizer
from tinygpt.errors import CheckpointError
from tinygpt.kernels import cpu, reference
from tinygpt.kernels.backend import Batch
from tinygpt.weights.adapters.lora import PREFIX, merge_lora, read_lora
from tinygpt.weights.open import open_checkpoint

# PEFT warns of tied embeddings and of Conv1D, transformers of what PEFT calls.
pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore:::transformers")
R = 3
ALPHA = 5
GPT2 = {"gpt2": "plain", "gpt2-untied": "untied"}
# By base model, fields of PEFT's LoraConfig. GPT-2 has two modules c_proj. Of patterns the first that matches counts.
VARIANTS = rows(r"""
gpt2 | {"target_modules": ["c_attn"]}
gpt2 | {"target_modules": ["c_proj", "mlp.c_fc"]}
gpt2 | {"target_modules": "all-linear"}
gpt2 | {"target_modules": ["c_attn", "c_fc"], "use_rslora": true, "lora_alpha": 3}
gpt2 | {"target_modules": ["c_attn", "c_proj"], "rank_pattern": {"attn\\.c_proj": 2, "c_proj": 5},
  "alpha_pattern": {".*\\.0\\..*": 5, "transformer.h.1.mlp.c_proj": 7}}
gpt2 | {"target_modules": ".*h\\.1\\.mlp\\.c_(fc|proj)"}
gpt2 | {"target_modules": ["c_attn", "c_proj"], "exclude_modules": ".*\\.0\\..*"}
gpt2 | {"target_modules": ["c_attn", "c_proj"], "layers_to_transform": [1]}
gpt2 | {"target_modules": ["c_fc"], "layers_to_transform": 1, "layers_pattern": "h"}
gpt2 | {"target_modules": ["c_attn"], "bias": "all"}
gpt2 | {"target_modules": ["c_attn", "attn.c_proj"], "bias": "lora_only"}
gpt2 | {"target_modules": ["wte"]}
gpt2 | {"target_modules": ["lm_head", "c_attn"]}
gpt2-untied | {"target_modules": ["wte", "lm_head"]}
gpt2 | {"target_modules": ["wpe", "c_fc"]}
gpt2 | {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}
gpt2 | {"target_modules": ["wte"], "modules_to_save": ["lm_head"]}
gpt2 | {"target_modules": ["c_fc"], "modules_to_save": ["wte", "lm_head"]}
gpt2-untied | {"target_modules": ["c_fc", "lm_head"], "modules_to_save": ["lm_head"]}
gpt2 | {"target_modules": ["c_attn", "c_fc"], "modules_to_save": ["h.0.mlp"]}
gpt2 | {"target_modules": ["c_attn", "mlp.c_proj"], "use_dora": true}
gpt2 | {"target_modules": "all-linear", "use_dora": true, "use_rslora": true, "bias": "all"}
opt | {"target_modules": ["q_proj", "fc1"], "use_dora": true}
mpt-6 | {"target_modules": ["Wqkv"], "use_dora": true}
gpt2 | {"target_modules": ["c_attn", "c_proj"], "lora_bias": true}
opt | {"target_modules": ["k_proj", "fc2"], "lora_bias": true, "bias": "lora_only"}
gpt2 | {"target_modules": ["c_attn"], "trainable_token_indices": [1, 5]}
gpt2 | {"target_modules": ["c_attn"], "trainable_token_indices": {"wte": [3, 4, 9]}}
gpt2-untied | {"target_modules": ["c_fc"], "trainable_token_indices": [7]}
gpt2-untied | {"target_modules": ["c_fc"], "trainable_token_indices": {"wte": [7, 2], "lm_head": [1]}}
opt | {"target_modules": ["q_proj"], "trainable_token_indices": [0, 2]}
gpt2 | {"target_modules": ["c_attn"], "init_lora_weights": "gaussian"}
gpt2 | {"target_modules": ["c_attn"], "init_lora_weights": "eva"}
gpt2 | {"target_modules": ["c_attn"], "init_lora_weights": "mica"}
gpt2 | {"target_modules": ["c_attn"], "init_lora_weights": "orthogonal", "r": 4}
opt | {"target_modules": ["q_proj", "v_proj"]}
opt | {"target_modules": "all-linear", "bias": "all"}
opt | {"target_modules": ["k_proj", "fc2"], "bias": "lora_only", "layers_to_transform": [1]}
opt | {"target_modules": ["embed_tokens", "out_proj"]}
opt | {"target_modules": ["fc1"], "modules_to_save": ["embed_tokens", "embed_positions", "final_layer_norm"]}
opt | {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["v_proj"]}
opt-350m | {"target_modules": ["project_in", "project_out", "fc1"], "use_rslora": true}
opt-350m | {"target_modules": ["embed_tokens"]}
opt-odd | {"target_modules": ["embed_tokens", "lm_head", "fc1"]}
opt-plain-norms | {"target_modules": ["q_proj", "k_proj"], "bias": "all"}
galactica | {"target_modules": ["q_proj", "fc1"], "bias": "all"}
bloom-6 | {"target_modules": ["query_key_value"]}
bloom-6 | {"target_modules": "all-linear", "bias": "all", "rank_pattern": {"dense": 2}}
bloom-14 | {"target_modules": ["word_embeddings", "dense"], "modules_to_save": ["word_embeddings_layernorm"]}
bloom-untied | {"target_modules": ["lm_head"], "modules_to_save": ["query_key_value"]}
mpt-6 | {"target_modules": ["Wqkv", "down_proj"]}
mpt-6 | {"target_modules": ".*blocks\\.1\\..*_proj", "modules_to_save": ["norm_f"]}
gpt-1 | {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": true, "bias": "all"}
gpt-1 | {"target_modules": ["tokens_embed", "positions_embed"]}
xglm | {"target_modules": "all-linear", "bias": "all"}
xglm | {"target_modules": ["embed_tokens", "fc2"]}
biogpt | {"target_modules": ["embed_tokens", "k_proj"]}
gpt-neo | {"target_modules": ["q_proj", "v_proj"]}
gpt-neo-odd | {"target_modules": "all-linear", "bias": "all", "rank_pattern": {"k_proj": 2}}
gpt-neo-local | {"target_modules": ["q_proj", "k_proj", "out_proj", "c_fc", "c_proj"], "modules_to_save": ["lm_head"]}
biogpt-odd | {"target_modules": ["output_projection", "fc1"], "modules_to_save": ["layer_norm"]}
""")


@dataclass(frozen=True)
class Case:
    """A checkpoint, and an adapter that PEFT has made of it."""

    base: Path
    adapter: Path

    def model(self):
        import peft

        return peft.PeftModel.from_pretrained(read_model(self.base), self.adapter).eval()

    def peft_logits(self) -> np.ndarray:
        import torch

        with torch.no_grad():
            return self.model()(torch.tensor([IDS])).logits[0].numpy()

    def merged(self):
        return merge_lora(open_checkpoint(self.base), self.adapter)


IDS = golden_ids(T, vocab_size=V)


def make_case(folder: Path, name: str, fields: dict) -> Case:
    peft = pytest.importorskip("peft", reason=NEED_PEFT)
    torch = pytest.importorskip("torch", reason=MISSING)
    folder.mkdir(exist_ok=True)
    base = write_golden(folder / "base", GPT2[name]) if name in GPT2 else write_family(folder / "base", name)
    model = peft.get_peft_model(
        read_model(base), peft.LoraConfig(task_type="CAUSAL_LM", **{"r": R, **fields})
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder / "adapter")
    return Case(base, folder / "adapter")


def logits(checkpoint, backend=reference, token_ids=IDS) -> np.ndarray:
    params = backend.load_params(checkpoint)
    cache = backend.new_kv_cache(checkpoint.config, 1, len(token_ids))
    workspace = backend.new_workspace(checkpoint.config, len(token_ids), len(token_ids))
    return np.array(backend.forward(params, Batch.of([token_ids], [0], [0], "all"), cache, workspace))


@pytest.mark.parametrize(("name", "fields"), VARIANTS, ids=str)
def test_logits_are_those_of_peft(name, fields, tmp_path):
    case = make_case(tmp_path, name, fields)
    expected = case.peft_logits()
    merged = case.merged()
    assert np.abs(logits(open_checkpoint(case.base)) - expected).max() > 0.1  # the adapter does something
    for backend in (reference, cpu) if name in GPT2 else (reference,):
        np.testing.assert_allclose(logits(merged, backend), expected, atol=TOLERANCE, rtol=0)


# Of a model with more tokens than its checkpoint, which only the adapter's files hold.

MORE = 5
RESIZED = rows("""
gpt2 | {"target_modules": ["c_attn"]}
gpt2 | {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}
gpt2 | {"target_modules": ["c_attn"], "modules_to_save": ["wte", "lm_head"]}
gpt2 | {"target_modules": ["c_attn", "wte"]}
gpt2 | {"target_modules": ["c_fc"], "trainable_token_indices": [3, 81]}
gpt2-untied | {"target_modules": ["c_attn"]}
gpt2-untied | {"target_modules": ["c_attn"], "modules_to_save": ["wte", "lm_head"]}
opt | {"target_modules": ["q_proj"]}
""")


@pytest.mark.parametrize(("name", "fields"), RESIZED, ids=str)
def test_rows_of_added_tokens_and_their_tokenizer_are_the_adapters(name, fields, tmp_path):
    peft = pytest.importorskip("peft", reason=NEED_PEFT)
    import torch

    base = (
        write_golden(tmp_path / "base", GPT2[name]) if name in GPT2 else write_family(tmp_path / "base", name)
    )
    V = open_checkpoint(base).config.vocab_size
    fields = json.loads(json.dumps(fields).replace("81", str(V + 1)))

    def resized():
        model = read_model(base)
        model.resize_token_embeddings(V + MORE, mean_resizing=False)
        return model

    model = peft.get_peft_model(resized(), peft.LoraConfig(task_type="CAUSAL_LM", r=R, **fields))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad or len(parameter) == V + MORE:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    theirs = peft.PeftModel.from_pretrained(resized(), tmp_path / "adapter").eval()
    added = [V + 1, *IDS[1:-1], V + MORE - 1]
    with torch.no_grad():
        expected = theirs(torch.tensor([added])).logits[0].numpy()
    (copy_tokenizer(tmp_path / "adapter") / "added_tokens.json").write_text(json.dumps({"<new>": VOCAB_SIZE}))
    merged = merge_lora(open_checkpoint(base), tmp_path / "adapter")
    assert load_tokenizer(merged).encode("<new>") == [VOCAB_SIZE]
    found = logits(merged, token_ids=added)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    with pytest.raises(CheckpointError, match="in lora_modules, only attention's"):
        read_lora(open_checkpoint(base), tmp_path / "adapter")


def test_a_head_without_rows_for_added_tokens_is_refused(tmp_path):
    case = make_case(tmp_path, "gpt2-untied", {"target_modules": ["c_attn"]})
    V, C = open_checkpoint(case.base).tensor("wte.weight").shape
    change_tensors(case.adapter, **{f"{PREFIX}transformer.wte.weight": np.zeros((V + 1, C), np.float32)})
    with pytest.raises(CheckpointError, match=rf"wte.weight is \({V + 1}, {C}\) and should be \({V}, {C}\)"):
        case.merged()


# Other families.


def write_lora(folder, tensors, targets, **fields):
    """By the names of modules in transformers' models."""
    config = {
        "peft_type": "LORA",
        "r": R,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": targets,
        **fields,
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {f"base_model.model.{name}": a for name, a in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def factors(module, out, inner):
    a, b = (golden_array(f"{module} {part}", shape) for part, shape in (("a", (R, inner)), ("b", (out, R))))
    return np.float32(0.3) * a, np.float32(0.3) * b


@pytest.mark.parametrize(
    ("name", "place", "targets"),
    rows("""
gpt-neo | transformer.h.1 | ["attn.attention.q_proj", "attn.attention.v_proj"]
gpt-neo | transformer.h.0 | ["attn.attention.k_proj", "attn.attention.out_proj", "mlp.c_fc", "mlp.c_proj"]
opt | model.decoder.layers.1 | ["self_attn.v_proj", "self_attn.q_proj", "fc1"]
bloom-6 | transformer.h.1 | ["self_attention.query_key_value", "mlp.dense_h_to_4h"]
mpt-6 | transformer.blocks.0 | ["attn.Wqkv", "ffn.down_proj"]
"""),
)
def test_an_adapter_of_joined_matrices_by_request_is_its_merged_weights(name, place, targets, tmp_path):
    base = write_family(tmp_path / "base", name)
    files = {}
    for module in (f"{place}.{target}" for target in targets):
        out, inner = load_file(base / "model.safetensors")[f"{module}.weight"].shape
        a, b = factors(module, out, inner)
        files |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    modules = [target.rpartition(".")[2] for target in targets]
    adapter = write_lora(tmp_path / "adapter", files, modules, layers_to_transform=[int(place[-1])])
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, ignore_eos=True)

    def logprobs(llm, **fields):
        (output,) = llm.generate([IDS[:-1]], replace(params, **fields))
        return [row[i] for i, row in zip(IDS[1:-1], output.prompt_logprobs[1:], strict=True)]

    with LLM(str(base), device="reference", lora_modules={"it": str(adapter)}) as llm:
        found, bare = logprobs(llm, lora_request="it"), logprobs(llm)
    with LLM(str(base), device="reference", lora=str(adapter)) as llm:
        np.testing.assert_allclose(found, logprobs(llm), rtol=0, atol=TOLERANCE)
    assert np.abs(np.subtract(found, bare)).max() > 0.1


@pytest.mark.parametrize(
    ("name", "module"),
    [("bloom-6", "transformer.h.0.self_attention.query_key_value"), ("gpt-1", "transformer.h.1.mlp.c_fc")],
)
def test_a_matrix_that_is_merged_by_hand(name, module, tmp_path):
    """Into the tensor that transformers has: BLOOM's rows have another order, and GPT-1's matrices are (in, out)."""
    base, merged = (write_family(tmp_path / folder, name) for folder in ("base", "merged"))
    tensors = load_file(merged / "model.safetensors")
    weight = tensors[f"{module}.weight"]
    is_in_out = name == "gpt-1"
    a, b = factors(module, *(weight.shape[::-1] if is_in_out else weight.shape))
    update = np.float32(ALPHA / R) * (b @ a)
    tensors[f"{module}.weight"] = np.ascontiguousarray(weight + (update.T if is_in_out else update))
    save_file(tensors, merged / "model.safetensors")
    files = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    found = merge_lora(open_checkpoint(base), write_lora(tmp_path / "adapter", files, [module]))
    expected = open_checkpoint(merged)
    for key in expected.stored:
        np.testing.assert_allclose(found.tensor(key), expected.tensor(key), rtol=0, atol=1e-5, err_msg=key)


def test_a_file_that_does_not_fit_is_refused_by_the_names_of_its_model(tmp_path):
    base = write_family(tmp_path / "base", "opt")
    module = "model.decoder.layers.0.self_attn.v_proj"
    a, b = factors(module, 24, 24)
    files = {f"{module}.lora_A.weight": a[:, 1:], "transformer.h.0.attn.c_attn.lora_B.weight": b}
    with pytest.raises(CheckpointError) as error:
        merge_lora(open_checkpoint(base), write_lora(tmp_path / "adapter", files, [module]))
    assert f"missing: {module}.lora_B.weight" in str(error.value)
    assert f"{module}.lora_A.weight is (3, 23) and should be (3, 24)" in str(error.value)
    assert "unexpected: transformer.h.0.attn.c_attn.lora_B.weight" in str(error.value)


def test_positions_of_opt_are_not_computed_as_they_are_merged(tmp_path):
    base = write_family(tmp_path / "base", "opt")
    module = "model.decoder.embed_positions"
    a, b = factors(module, 24, T + 2)
    files = {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
    with pytest.raises(
        CheckpointError, match=f"adapts {module}, whose rows PEFT looks up by the attention mask"
    ):
        merge_lora(open_checkpoint(base), write_lora(tmp_path / "adapter", files, ["embed_positions"]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Case:
    return make_case(tmp_path_factory.mktemp("plain"), "gpt2", {"target_modules": ["c_attn", "wte"]})


def test_an_adapter_of_a_model_without_a_head(tmp_path):
    case = make_case(tmp_path, "gpt2", {"target_modules": ["c_attn"]})
    import peft
    import torch
    import transformers

    model = transformers.GPT2Model.from_pretrained(case.base)
    lora = peft.LoraConfig(r=3, target_modules=r"h\.1\..*c_proj", init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "headless")
    base = open_checkpoint(case.base)
    merged = merge_lora(base, tmp_path / "headless")
    changed = [name for name in base.stored if merged.stored[name] != base.stored[name]]
    assert sorted(changed) == ["h.1.attn.c_proj.weight", "h.1.mlp.c_proj.weight"]
    headless = peft.PeftModel.from_pretrained(
        transformers.GPT2Model.from_pretrained(case.base), tmp_path / "headless"
    )
    with torch.no_grad():
        hidden = headless.eval()(torch.tensor([IDS])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(
        logits(merged), hidden @ merged.tensor("lm_head.weight").T, atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize(
    ("fields", "is_tied"),
    rows("""
{"target_modules": ["c_attn"]} | true
{"target_modules": ["wte"]} | false
{"target_modules": ["lm_head"]} | false
{"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]} | false
"""),
)
def test_a_model_stays_tied_unless_the_adapter_unties_it(fields, is_tied, tmp_path):
    assert make_case(tmp_path, "gpt2", fields).merged().tied == is_tied


@pytest.mark.parametrize("saved", [None, ["lm_head"]])
def test_an_embedding_that_came_along_is_both_of_a_tied_pair_unless_one_was_trained(saved, tmp_path):
    case = make_case(tmp_path, "gpt2", {"target_modules": ["c_attn"], "modules_to_save": saved})
    wte = golden_array("another wte", open_checkpoint(case.base).tensor("wte.weight").shape)
    change_tensors(case.adapter, **{"base_model.model.transformer.wte.weight": wte})
    merged = case.merged()
    assert merged.tied == (saved is None)
    np.testing.assert_allclose(logits(merged), case.peft_logits(), atol=TOLERANCE, rtol=0)


def test_the_bits_of_a_merged_matrix_are_those_of_a_sum_in_rank_order(plain):
    base = open_checkpoint(plain.base)
    merged = merge_lora(base, plain.adapter)
    transposed, _ = merged.stored["h.0.attn.c_attn.weight"].sources
    (update,) = transposed.sources
    a, b = (factor.float32() for factor in update.sources)
    rows = np.concatenate([np.einsum("or,ri->oi", b[i : i + 1], a) for i in range(len(b))])
    expected = rows * np.float32(8 / 3) + base.tensor("h.0.attn.c_attn.weight")
    np.testing.assert_array_equal(merged.tensor("h.0.attn.c_attn.weight"), expected)


def test_adapters_in_half_precision_and_in_a_bin_file(plain, tmp_path):
    import torch

    tensors = load_file(plain.adapter / "adapter_model.safetensors")
    halves = {name: torch.tensor(tensor).bfloat16() for name, tensor in tensors.items()}
    shutil.copy(plain.adapter / "adapter_config.json", tmp_path)
    torch.save(halves, tmp_path / "adapter_model.bin")
    case = Case(plain.base, tmp_path)
    np.testing.assert_allclose(logits(case.merged()), case.peft_logits(), atol=TOLERANCE, rtol=0)


A = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
B = "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"


REFUSED = rows("""
{"peft_type": "LOHA"} | LOHA
{"use_dora": true} | use_dora for transformer.wte, which is not implemented
{"lora_bias": true} | lora_bias for transformer.wte, which is not implemented
{"trainable_token_indices": ["1"]} | trainable_token_indices is
{"trainable_token_indices": [1, 5, 1]} | trainable_token_indices is [1, 5, 1] and must be token ids, each once
{"trainable_token_indices": {"wte": [2, 2]}} | is {'wte': [2, 2]} and must be token ids, each once
{"trainable_token_indices": [1000]} | trainable_token_indices has the token 1000
{"trainable_token_indices": {"ln_f": [1]}} | modules that are no embedding: ln_f
{"trainable_token_indices": [1]} | missing: transformer.wte.token_adapter.trainable_tokens_delta
{"invented_next_year": {"a": 1}} | invented_next_year
{"init_lora_weights": "pissa_niter_4"} | pissa_niter_4
{"r": 0} | r is 0 and must be a whole number from 1 up
{"lora_alpha": "8"} | lora_alpha is '8'
{"bias": "some"} | bias is 'some' and must be one of none, all, lora_only
{"use_rslora": 1} | use_rslora is 1
{"target_modules": null} | target_modules is empty
{"rank_pattern": {"c_attn": 0}} | rank_pattern
{"modules_to_save": ["a)(b"]} | modules_to_save
{"lora_alpha": NaN} | lora_alpha is nan
{"layers_to_transform": ["1"]} | layers_to_transform
{"target_modules": "(?i)c_attn"} | without flags
{"target_modules": "c_attn", "layers_to_transform": [1]} | layers_to_transform
{"target_modules": ["wte"]} | unexpected: transformer.h.0.attn.c_attn.lora
{"r": 2} | lora_A.weight is (3, 36) and should be (2, 36)
{"target_modules": ["c_attn", "wte", "wpe"]} | transformer.wpe.lora_embedd
{"bias": "lora_only"} | missing: h.0.attn.c_attn.bias, h.1.attn.c_attn.bias
{"modules_to_save": ["ln_f"]} | missing: ln_f.bias, ln_f.weight
adapter_model.safetensors | it holds README.md, adapter_config.json
adapter_config.json | holds no adapter_config.json: give the folder that the adapter was saved into
""")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *REFUSED,
        (lambda folder: change_tensors(folder, A), "missing: transformer.h.0.attn.c_attn.lora_A.weight"),
        (lambda folder: change_tensors(folder, odd=np.zeros(1, np.float32)), "unexpected: odd"),
        (lambda folder: change_tensors(folder, **{B: np.zeros((108, 3), np.int32)}), f"{B} is I32"),
        (lambda folder: save_file({}, folder / "adapter_model.safetensors"), "missing: wte.lora_embedding_B"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678"), "download it again"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(plain, tmp_path, change, named):
    """By fields of adapter_config.json, or whole files."""
    shutil.copytree(plain.adapter, tmp_path, dirs_exist_ok=True)
    if isinstance(change, dict):
        change_config(tmp_path, **change)
    else:
        (tmp_path / change).unlink() if isinstance(change, str) else change(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        merge_lora(open_checkpoint(plain.base), tmp_path)
    assert named in str(refusal.value)


def test_a_converted_checkpoint_is_refused(plain, tmp_path):
    packed = convert(plain.base, tmp_path / "packed", "--dtype", "float32")
    with pytest.raises(CheckpointError, match="is converted"):
        merge_lora(open_checkpoint(packed), plain.adapter)
