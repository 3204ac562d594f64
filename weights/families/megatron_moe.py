"""GPT with experts, as DeepSpeed and Megatron-LM train it: Megatron's names, and a file for each expert.

Some layers have several MLPs, of which a gate chooses for each token. Training may leave out tokens that an expert has
no room for; inference never does, so that no text depends on its neighbors in a batch.
"""

import re
from collections.abc import Iterable

from tinygpt.weights.config import ModelConfig, parameter_shapes
from tinygpt.weights.errors import listed, shown
from tinygpt.weights.families.family import NO_BIAS, Family, NamedTensor, Rule, Source, as_is
from tinygpt.weights.families.megatron import (
    check_settings,
    config_of,
    is_ignored,
    name_of,
    parts_of,
    rank_of,
    rules_of,
    settings_of,
)

_GATE = "mlp.deepspeed_moe.gate.wg.weight"
_IN_GATE = re.compile(rf"layers\.(\d{{1,6}})\.{re.escape(_GATE)}")
_IN_FILE = re.compile(
    r"layers\.(\d{1,6})\.mlp\.deepspeed_moe\.experts\.deepspeed_experts\.(\d{1,6})\.(dense_\w+)\.(weight|bias)"
)
_EXPERT = re.compile(r"h\.(\d+)\.mlp\.experts\.(\d+)\.(c_fc|c_proj)\.(weight|bias)")
_MODULES = {"c_fc": "dense_h_to_4h", "c_proj": "dense_4h_to_h"}
# DeepSpeed never adds this part of an expert's output, in training or after it.
_UNUSED_BIAS = re.compile(r"layers\.\d+\.mlp\.experts\.\d+\.dense_4h_to_h\.bias")
# Settings of experts, which check_settings would refuse.
_SETTINGS = ("num_experts", "expert_num", "topk", "mlp_type")


def _named(source: Source) -> Iterable[NamedTensor]:
    for file_name, tensor in source.container.tensors.items():
        part, _, name = rank_of(file_name)
        if found := _IN_FILE.search(name):
            layer, expert, module, kind = found.groups()
            yield NamedTensor(f"layers.{layer}.mlp.experts.{expert}.{module}.{kind}", file_name, tensor, part)
        else:
            yield NamedTensor(name_of(name, 0), file_name, tensor, part)


def _config(source: Source) -> ModelConfig:
    settings = settings_of(source)
    check_settings(source, {name: value for name, value in settings.items() if name not in _SETTINGS})
    tensors = list(_named(source))
    stages = {rank_of(name)[1] for name in source.container.tensors}
    if len(stages) > 1:
        raise source.error(f"is in {len(stages)} stages of a pipeline, which is not implemented for experts.")
    if settings.get("mlp_type") == "residual" or any(".mlp.coefficient." in one.name for one in tensors):
        raise source.error("has an MLP beside its experts (mlp_type residual), which is not implemented.")
    gates = {int(found[1]): one.tensor.shape for one in tensors if (found := _IN_GATE.fullmatch(one.name))}
    numbers = {shape[0] for shape in gates.values() if len(shape) == 2}
    if len(numbers) != 1:
        raise source.error(f"has layers of {listed(sorted(map(str, numbers)))} experts: it must be one number.")
    (num_experts,) = numbers
    per_token = settings.get("topk", 1)
    # Most experts must be there, so that the list of missing tensors is in proportion to the files.
    found = sum(".mlp.experts." in one.name for one in tensors)
    if found < num_experts * len(gates):
        raise source.error(
            f"has gates for {num_experts * len(gates)} experts and {found} tensors of experts: give the folder that "
            "holds the files of all experts."
        )
    if type(per_token) is not int or not 1 <= per_token <= num_experts:
        raise source.error(f"has topk {shown(per_token)} of {num_experts} experts.")
    structure = {
        "expert_layers": tuple(sorted(gates)),
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "norm_topk_prob": per_token > 1,
    }
    inner = f"layers.{min(gates)}.mlp.experts.0.dense_h_to_4h.weight"
    return config_of(source, settings, tensors, inner, structure)


def _rules(source: Source, config: ModelConfig) -> dict[str, Rule]:
    names = parameter_shapes(config)
    experts = {name: rule for name in names if (rule := _rule(name))}
    rules = rules_of(source, config, [name for name in names if name not in experts]) | experts
    return {name: rules[name] for name in names}


def _rule(parameter: str) -> Rule | None:
    if parameter.endswith(".mlp.gate.weight"):
        return Rule((f"layers.{parameter.split('.')[1]}.{_GATE}",))
    if not (found := _EXPERT.fullmatch(parameter)):
        return None
    layer, expert, module, kind = found.groups()
    name = f"layers.{layer}.mlp.experts.{expert}.{_MODULES[module]}.{kind}"
    if kind == "weight":
        return Rule((name,), as_is(0 if module == "c_fc" else 1))
    return NO_BIAS if module == "c_proj" else Rule((name,), as_is(0))


FAMILY = Family(
    name="Megatron-LM GPT with experts",
    described_by="its settings",
    detect=lambda source: any(".deepspeed_moe." in name for name in source.container.tensors),
    config=_config,
    rules=_rules,
    named=_named,
    is_ignored=lambda name: is_ignored(name) or bool(_UNUSED_BIAS.fullmatch(name)),
    parts=parts_of,
    quirks=lambda source, config: (
        f"each token has {config.experts_per_token} of {config.num_experts} experts, and none is left out",
        "biases of experts' outputs are left out, as in training",
    ),
)
