"""tinygpt as a model of EleutherAI's lm-evaluation-harness (the extra `eval`).

    python -m tinygpt.evaluation.lm_eval_adapter run --model tinygpt --model_args pretrained=demo,dtype=int8 --tasks ...

In Python, import this module before lm_eval.simple_evaluate(model="tinygpt").
"""

from typing import Any

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    from ..errors import how_to_install

    raise SystemExit(f"tinygpt: error: {error}; install the harness: {how_to_install('eval')}") from None

from ..errors import invalid
from ..llm import LLM
from ..sampling_params import SamplingParams
from .tasks import NUM_TOGETHER, map_together

HARNESS_DEVICE = "cuda:0"  # the harness's default


@register_model("tinygpt")
class TinyGPTLM(TemplateLM):
    """A model of the harness, answered by an LLM. As with `hf`, long contexts lose their beginning.

    pretrained: LLM's `model`. max_length: its max_model_len. max_gen_toks: the default of tasks. batch_size and
        max_batch_size are ignored.
    """

    def __init__(
        self,
        pretrained: str = "demo",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str = "cpu",
        max_num_seqs: int = NUM_TOGETHER,
        **llm_arguments: Any,
    ):
        super().__init__()
        self.max_gen_toks = max_gen_toks
        device = "cpu" if device == HARNESS_DEVICE else device
        self.llm = LLM(
            pretrained, device=device, max_num_seqs=max_num_seqs, max_model_len=max_length, **llm_arguments
        )

    @property
    def max_length(self) -> int:
        return self.llm.max_model_len

    @property
    def eot_token_id(self) -> int:
        return self.llm.config.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        bos = self.llm.config.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.llm.tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return (log probability, whether it is greedy) of each continuation."""
        return list(map_together(self._score, requests, False if disable_tqdm else None, "requests"))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return texts' log probabilities, in windows without overlap."""
        windows, totals = [], [0.0] * len(requests)
        for i, request in enumerate(requests):
            (text,) = request.args
            token_ids = self.tok_encode(text)
            rolling = get_rolling_token_windows(
                token_ids, self.prefix_token_id, self.max_length, context_len=1
            )
            windows += [(i, *make_disjoint_window(window)) for window in rolling]
        for (i, *_), (logprob, _) in zip(
            windows, self._loglikelihood_tokens(windows, disable_tqdm), strict=True
        ):
            totals[i] += logprob
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return list(map_together(self._generate, requests, False if disable_tqdm else None, "requests"))

    def _score(self, request: tuple[Any, list[int], list[int]]) -> tuple[float, bool]:
        _, context, continuation = request
        room = self.max_length + 1 - len(continuation)  # the last token needs no position
        (score,) = self.llm.score(context[-max(room, 1) :], [continuation])
        return score.cumulative_logprob, score.is_greedy

    def _generate(self, request: Any) -> str:
        context, options = request.args
        fields = normalize_gen_kwargs(options, self.max_gen_toks)
        fields.pop("do_sample")  # if it is false, the temperature is 0 or not given
        stop = [text for text in fields.pop("until") if text]
        max_tokens = fields.pop("max_gen_toks")
        room = self.max_length - max_tokens
        if room < 1:
            raise invalid("max_gen_toks", max_tokens, f"below {self.max_length}, the positions of the model")
        params = SamplingParams(max_tokens=max_tokens, stop=stop, **{"temperature": 0.0, **fields})
        (output,) = self.llm.generate([self.tok_encode(context)[-room:]], params)
        return output.outputs[0].text


if __name__ == "__main__":
    cli_evaluate()
