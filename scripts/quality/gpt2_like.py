"""The demo with what is known of the weights and activations of OpenAI's GPT-2, which is what people will load.

- Two or three *rogue* channels of the residual stream lie far from zero at every position (Timkey and van Schijndel,
  "All Bark and No Bite", EMNLP 2021; in GPT-2 124M they are 138, 378 and 447). Here the columns of wte are shifted.
- The same few channels have layer norm weights and biases far larger than the rest (Kovaleva et al., "BERT Busters",
  Findings of ACL 2021; Puccetti et al., "Outliers Dimensions that Disrupt Transformers Are Driven by Frequency",
  Findings of EMNLP 2022). Dettmers et al. ("LLM.int8()", NeurIPS 2022) find activations behind layer norms up to 20
  times larger than the rest; here it is 30.
- Massive activations, hundreds of times larger than the median, stand in these channels at the first position alone
  (Sun et al., "Massive Activations in Large Language Models", COLM 2024). In GPT-2 the first MLP makes them of wpe[0];
  here they stand in wpe[0] itself. A model that was not trained with them loses its first token by that, and to which
  others attend: float32's perplexity on held-out stories rises by two thirds or more.
- Values and neurons that are some times larger than others, without a publication that counts them: 4 and 10.

No checkpoint of OpenAI's was measured for this: where a publication has no number, the sizes are ours.
"""

import numpy as np

from tinygpt.weights.checkpoint import Checkpoint

from .outliers import (
    Tensors,
    amplify_norms,
    amplify_values,
    outlier_channels,
    raise_neurons,
    raise_residual,
    residual_stds,
    typical,
)

ROGUE = np.array([8, -4, -4])  # of the std of wte
MASSIVE = np.array([100, -50, -50])  # of the residual stream's, at the first position
NORMS, VALUES, NEURONS = 30, 4, 10


def make_gpt2_like(tensors: Tensors, checkpoint: Checkpoint, token_ids: list[int]) -> None:
    config, channels = checkpoint.config, outlier_channels(checkpoint.config.n_embd)
    size = typical(residual_stds(checkpoint, token_ids))
    raise_residual(tensors, checkpoint, token_ids, ROGUE * tensors["wte.weight"].std() / size, in_wte=True)
    tensors["wpe.weight"][0, channels] += (MASSIVE * size).astype(np.float32)
    amplify_norms(tensors, config, NORMS)
    amplify_values(tensors, config, VALUES)
    raise_neurons(tensors, config, NEURONS)
