"""transformers' GPT-2 with experts in place of some of its MLPs, live or as recorded: no class of its own has them."""

import numpy as np

from support.moe_models import EXPERT_LAYERS, H, T, moe_arrays
from support.recorded import HAS_TRANSFORMERS, recorded

if HAS_TRANSFORMERS:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    class Experts(torch.nn.Module):
        """One token after another; topk's weights are probabilities, and of several experts sum to 1."""

        def __init__(self, config: GPT2Config, arrays: dict[str, np.ndarray], per_token: int):
            super().__init__()
            self.gate, self.per_token = torch.from_numpy(arrays["gate.weight"]), per_token
            self.experts = torch.nn.ModuleList(GPT2MLP(config.n_inner, config) for _ in self.gate)
            for e, expert in enumerate(self.experts):
                names = [name for name in arrays if name.startswith(f"experts.{e}.")]
                expert.load_state_dict({name.split(".", 2)[2]: torch.from_numpy(arrays[name]) for name in names})

        def forward(self, x: "torch.Tensor") -> "torch.Tensor":
            rows = x.reshape(-1, x.shape[-1])
            shares, chosen = (rows @ self.gate.T).softmax(-1).topk(self.per_token)
            shares = shares / shares.sum(-1, keepdim=True) if self.per_token > 1 else shares
            each = [
                sum(share * self.experts[e](row[None])[0] for share, e in zip(*pair, strict=True))
                for row, pair in zip(rows, zip(shares, chosen, strict=True), strict=True)
            ]
            return torch.stack(each).reshape(x.shape)


@recorded
def moe_logits_of(per_token: int, token_ids: list[int]) -> np.ndarray:
    arrays = moe_arrays()
    V, C = arrays["wte.weight"].shape
    F, L = len(arrays["h.0.mlp.c_fc.bias"]), 1 + max(int(name.split(".")[1]) for name in arrays if name[:2] == "h.")
    sizes = {"vocab_size": V, "n_positions": T, "n_embd": C, "n_head": H, "n_layer": L, "n_inner": F}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    for i in EXPERT_LAYERS:
        own = {name.removeprefix(f"h.{i}.mlp."): a for name, a in arrays.items() if name.startswith(f"h.{i}.mlp.")}
        model.transformer.h[i].mlp = Experts(config, own, per_token)
    state = {name: torch.from_numpy(array) for name, array in arrays.items() if ".gate." not in name}
    report = model.transformer.load_state_dict(state, strict=True)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    with torch.no_grad():
        return model.eval()(torch.tensor([token_ids])).logits[0].numpy()  # (T, V)
