"""Turn nanoGPT's checkpoint into transformers' folder and a GGUF: python nanogpt_export.py out/ckpt.pt exported"""

import sys
from pathlib import Path

from tinygpt import LLM
from tinygpt.__main__ import main

if len(sys.argv) != 3:
    sys.exit(__doc__)
source = Path(sys.argv[1])
target = Path(sys.argv[2])
target.mkdir()
made = [source]
for form in ("safetensors", "gguf"):  # on the command line: tinygpt convert SRC DST --to gguf
    is_done = main(["convert", str(source), str(target / form), "--to", form]) == 0
    # llama.cpp computes gelu_new, so a checkpoint with the exact GELU is refused as GGUF, and says so.
    made += [target / form] if is_done and form == "safetensors" else target.glob(f"{form}/*.gguf")
prompt = [1, 2, 3]  # token ids: nanoGPT keeps no tokenizer next to ckpt.pt
for model in made:
    with LLM(str(model)) as llm:
        [output] = llm.generate([prompt], max_tokens=3, ignore_eos=True)
    print(output.outputs[0].token_ids, model.name)
try:
    import torch
    from transformers import AutoModelForCausalLM
except ImportError:
    sys.exit()
theirs = AutoModelForCausalLM.from_pretrained(target / "safetensors")
ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False, eos_token_id=None)[
    0, len(prompt) :
]
print(ids.tolist(), "transformers")
