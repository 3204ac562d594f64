"""The checkpoint's names for the parts of a layer, which all backends read."""

KINDS = ("weight", "bias")
# Our name for each linear layer, and the checkpoint's.
LINEARS = {"c_attn": "attn.c_attn", "attn_proj": "attn.c_proj", "c_fc": "mlp.c_fc", "mlp_proj": "mlp.c_proj"}
# The layer norm in front of a linear layer, where there is one.
NORM_BEFORE = {"c_attn": "ln_1", "c_fc": "ln_2"}
NORMS = tuple(NORM_BEFORE.values())


def linear_names(config, layer: int) -> list[str]:
    """The checkpoint's names of a layer's linear layers; an expert's are its own."""
    names = [f"h.{layer}.{name}" for name in LINEARS.values()]
    if layer not in config.expert_layers:
        return names
    experts = range(config.num_experts)
    return names[:2] + [f"h.{layer}.mlp.experts.{e}.{part}" for e in experts for part in ("c_fc", "c_proj")]
