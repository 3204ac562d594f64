"""Hashes of the demo's logits of one and three tokens, by dtype: the same on every CPU, save bfloat16 on AMX.

python tests/support/logit_hashes.py [DTYPE ...]
"""

import hashlib
import sys

from tinygpt import LLM
from tinygpt.kernels import cpu

TOKENS = [464, 1110, 257]


def main(dtypes: list[str]) -> None:
    for dtype in dtypes or cpu.DTYPES:
        with LLM("demo", dtype=dtype, threads=2, max_num_seqs=1) as llm:
            several = llm.logits(TOKENS)
            one = llm.logits(TOKENS[:1])  # (T, V)
        for logits in (several, one):
            print(dtype, len(logits), hashlib.sha256(logits.tobytes()).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
