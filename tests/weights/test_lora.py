"""LoRA adapters: what PEFT writes is read to the logits of the model that PEFT itself makes of the same files."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.golden_models import NEED_PEFT
from support.recorded import MISSING
from tinygpt.errors import CheckpointError
from tinygpt.kernels import cpu, reference
from tinygpt.kernels.batch import Batch
from tinygpt.weights.adapters.lora import merge_lora
from tinygpt.weights.open import open_checkpoint

peft = pytest.importorskip("peft", reason=NEED_PEFT)
torch = pytest.importorskip("torch", reason=MISSING)
transformers = pytest.importorskip("transformers", reason=MISSING)

# PEFT warns of tied embeddings and of Conv1D, transformers of what PEFT calls.
pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore:::transformers")
TOLERANCE = 1e-4  # on logits with a standard deviation of 3
SIZES = {"vocab_size": 23, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 20}


@dataclass(frozen=True)
class Variant:
    """One adapter: the fields of its LoraConfig, and of the base model's config."""

    name: str
    lora: dict
    tied: bool = True
    fields: dict = field(default_factory=dict)


VARIANTS = (
    Variant("c_attn", {"target_modules": ["c_attn"]}),
    Variant("c_proj-is-two-modules", {"target_modules": ["c_proj", "mlp.c_fc"]}),
    Variant("all-linear", {"target_modules": "all-linear"}),
    Variant("rslora", {"target_modules": ["c_attn", "c_fc"], "use_rslora": True, "lora_alpha": 3}),
    Variant(
        "patterns",
        {
            "target_modules": ["c_attn", "c_proj"],
            # The first that matches counts, and PEFT writes them in alphabetical order.
            "rank_pattern": {r"attn\.c_proj": 2, "c_proj": 5},
            "alpha_pattern": {r".*\.0\..*": 5, "transformer.h.1.mlp.c_proj": 7},
        },
    ),
    Variant("regular-expression", {"target_modules": r".*h\.1\.mlp\.c_(fc|proj)"}),
    Variant("exclude-pattern", {"target_modules": ["c_attn", "c_proj"], "exclude_modules": r".*\.0\..*"}),
    Variant("layers", {"target_modules": ["c_attn", "c_proj"], "layers_to_transform": [1]}),
    Variant("layers-pattern", {"target_modules": ["c_fc"], "layers_to_transform": 1, "layers_pattern": "h"}),
    Variant("bias-all", {"target_modules": ["c_attn"], "bias": "all"}),
    Variant("bias-lora_only", {"target_modules": ["c_attn", "attn.c_proj"], "bias": "lora_only"}),
    Variant("wte-of-tied", {"target_modules": ["wte"]}),
    Variant("lm_head-of-tied", {"target_modules": ["lm_head", "c_attn"]}),
    Variant("wte-and-lm_head", {"target_modules": ["wte", "lm_head"]}, tied=False),
    Variant("wpe", {"target_modules": ["wpe", "c_fc"]}),
    Variant("save-wte-of-tied", {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}),
    Variant("save-lm_head-of-tied", {"target_modules": ["wte"], "modules_to_save": ["lm_head"]}),
    Variant("save-both-of-tied", {"target_modules": ["c_fc"], "modules_to_save": ["wte", "lm_head"]}),
    Variant("save-wins", {"target_modules": ["c_fc", "lm_head"], "modules_to_save": ["lm_head"]}, tied=False),
    Variant("save-a-layers-mlp", {"target_modules": ["c_attn", "c_fc"], "modules_to_save": ["h.0.mlp"]}),
    *(
        Variant(f"begun-{how}", {"target_modules": ["c_attn"], "init_lora_weights": how})
        for how in ("gaussian", "eva", "mica")
    ),
    Variant("begun-orthogonal", {"target_modules": ["c_attn"], "init_lora_weights": "orthogonal", "r": 4}),
)


@dataclass(frozen=True)
class Case:
    base: Path
    adapter: Path

    def model(self):
        model = transformers.GPT2LMHeadModel.from_pretrained(self.base)
        return peft.PeftModel.from_pretrained(model, self.adapter).eval()


def make_adapter(folder: Path, variant: Variant) -> Case:
    from support.parity import Recipe, make_case

    fields = {**SIZES, "tie_word_embeddings": variant.tied, **variant.fields}
    make_case(Recipe(variant.name, fields), folder / "base")
    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "base")
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 3, **variant.lora}))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder / "adapter")
    return Case(folder / "base", folder / "adapter")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Case:
    return make_adapter(tmp_path_factory.mktemp("plain"), Variant("plain", {"target_modules": ["c_attn", "wte"]}))


def logits(checkpoint, ids: list[int], backend=reference) -> np.ndarray:
    params = backend.load_params(checkpoint)
    cache = backend.new_kv_cache(checkpoint.config, 1, len(ids))
    workspace = backend.new_workspace(checkpoint.config, len(ids), len(ids))
    return np.array(backend.forward(params, Batch.of([ids], [0], [0], "all"), cache, workspace))


def peft_logits(case: Case, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return case.model()(torch.tensor([ids])).logits[0].numpy()


IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 22]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_logits_equal_those_of_peft(variant, tmp_path):
    case = make_adapter(tmp_path, variant)
    base = open_checkpoint(case.base)
    merged = merge_lora(base, case.adapter)
    expected = peft_logits(case, IDS)
    assert np.abs(logits(base, IDS) - expected).max() > 0.1  # the adapter does something
    np.testing.assert_allclose(logits(merged, IDS), expected, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(logits(merged, IDS, cpu), expected, atol=TOLERANCE, rtol=0)


def test_an_adapter_of_a_model_without_a_head(tmp_path):
    case = make_adapter(tmp_path, Variant("base", {"target_modules": ["c_attn"]}))
    model = transformers.GPT2Model.from_pretrained(case.base)
    lora = peft.LoraConfig(r=3, target_modules=r"h\.1\..*c_proj", init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "headless")
    base = open_checkpoint(case.base)
    merged = merge_lora(base, tmp_path / "headless")
    changed = [name for name in base.stored if merged.stored[name] != base.stored[name]]
    assert sorted(changed) == ["h.1.attn.c_proj.weight", "h.1.mlp.c_proj.weight"]
    headless = peft.PeftModel.from_pretrained(transformers.GPT2Model.from_pretrained(case.base), tmp_path / "headless")
    with torch.no_grad():
        hidden = headless.eval()(torch.tensor([IDS])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(logits(merged, IDS), hidden @ merged.tensor("lm_head.weight").T, atol=TOLERANCE, rtol=0)


def test_a_model_stays_tied_unless_the_adapter_unties_it(tmp_path):
    def tied(name: str, lora: dict) -> bool:
        case = make_adapter(tmp_path / name, Variant(name, lora))
        return merge_lora(open_checkpoint(case.base), case.adapter).tied

    assert tied("layers", {"target_modules": ["c_attn"]})
    assert not tied("wte", {"target_modules": ["wte"]})
    assert not tied("head", {"target_modules": ["lm_head"]})
    assert not tied("saved", {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]})


@pytest.mark.parametrize("saved", [None, ["lm_head"]])
def test_an_embedding_that_came_along_is_both_of_a_tied_pair_unless_one_was_trained(saved, tmp_path):
    case = make_adapter(tmp_path, Variant("layers", {"target_modules": ["c_attn"], "modules_to_save": saved}))
    wte = np.random.default_rng(0).standard_normal((SIZES["vocab_size"], SIZES["n_embd"]), np.float32)
    change_tensors(case.adapter, **{"base_model.model.transformer.wte.weight": wte})
    merged = merge_lora(open_checkpoint(case.base), case.adapter)
    assert merged.tied == (saved is None)
    np.testing.assert_allclose(logits(merged, IDS), peft_logits(case, IDS), atol=TOLERANCE, rtol=0)


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
    tensors = load_file(plain.adapter / "adapter_model.safetensors")
    config = (plain.adapter / "adapter_config.json").read_text()
    halves = {name: torch.tensor(tensor).bfloat16() for name, tensor in tensors.items()}
    (tmp_path / "adapter_config.json").write_text(config)
    torch.save(halves, tmp_path / "adapter_model.bin")
    expected = peft_logits(Case(plain.base, tmp_path), IDS)
    merged = merge_lora(open_checkpoint(plain.base), tmp_path)
    np.testing.assert_allclose(logits(merged, IDS), expected, atol=TOLERANCE, rtol=0)


def copied(case: Case, folder: Path) -> Path:
    for path in case.adapter.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def change_tensors(folder: Path, remove: str = "", **changes: np.ndarray) -> None:
    tensors = load_file(folder / "adapter_model.safetensors") | changes
    tensors.pop(remove, None)
    save_file(tensors, folder / "adapter_model.safetensors")


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"use_dora": True}, "use_dora is True and not implemented"),
        ({"invented_next_year": {"a": 1}}, "invented_next_year"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"r": 0}, "r is 0 and must be a whole number from 1 up"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"bias": "some"}, "bias is 'some' and must be one of none, all, lora_only"),
        ({"use_rslora": 1}, "use_rslora is 1"),
        ({"target_modules": None}, "target_modules is empty"),
        ({"rank_pattern": {"c_attn": 0}}, "rank_pattern"),
        ({"modules_to_save": ["a)(b"]}, "modules_to_save"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform"),
        ({"target_modules": "(?i)c_attn"}, "without flags"),
        ({"target_modules": "c_attn", "layers_to_transform": [1]}, "layers_to_transform"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_config_that_cannot_be_used_is_refused_by_name(plain, tmp_path, changes, named):
    change_config(copied(plain, tmp_path), **changes)
    with pytest.raises(CheckpointError) as refusal:
        merge_lora(open_checkpoint(plain.base), tmp_path)
    assert named in str(refusal.value)


A = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
B = "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: change_tensors(folder, A), "missing: transformer.h.0.attn.c_attn.lora_A.weight"),
        (lambda folder: change_config(folder, target_modules=["wte"]), "unexpected: transformer.h.0.attn.c_attn.lora"),
        (lambda folder: change_config(folder, r=2), "lora_A.weight is (3, 12) and should be (2, 12)"),
        (lambda folder: change_config(folder, target_modules=["c_attn", "wte", "wpe"]), "transformer.wpe.lora_embedd"),
        (lambda folder: change_config(folder, bias="lora_only"), "missing: h.0.attn.c_attn.bias, h.1.attn.c_attn.bias"),
        (lambda folder: change_config(folder, modules_to_save=["ln_f"]), "missing: ln_f.bias, ln_f.weight"),
        (lambda folder: change_tensors(folder, odd=np.zeros(1, np.float32)), "unexpected: odd"),
        (lambda folder: change_tensors(folder, **{B: np.zeros((36, 3), np.int32)}), f"{B} is I32"),
        (lambda folder: save_file({}, folder / "adapter_model.safetensors"), "missing: wte.lora_embedding_B"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "it holds README.md, adapter_config.json"),
        (
            lambda folder: (folder / "adapter_config.json").unlink(),
            "holds no adapter_config.json: give the folder that the adapter was saved into",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678"), "download it again"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(plain, tmp_path, change, named):
    change(copied(plain, tmp_path))
    with pytest.raises(CheckpointError) as refusal:
        merge_lora(open_checkpoint(plain.base), tmp_path)
    assert named in str(refusal.value)


def test_a_converted_checkpoint_is_refused(plain, tmp_path):
    from tinygpt.cli.main import main

    assert main(["convert", str(plain.base), str(tmp_path / "packed"), "--dtype", "float32"]) == 0
    with pytest.raises(CheckpointError, match="is converted"):
        merge_lora(open_checkpoint(tmp_path / "packed"), plain.adapter)
