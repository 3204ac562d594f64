"""A backend's sampling as a runner has it, without a model."""

from types import ModuleType, SimpleNamespace

from tinygpt.kernels import host


class BareRunner:
    """As much of a ModelRunner as the sampler needs."""

    def __init__(self, backend: ModuleType, vocab_size: int):
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.sample, self.process_logits = backend.sample, backend.process_logits
        self.filter_logits, self.top_logprobs = backend.filter_logits, backend.top_logprobs
        self.log_softmax = host.log_softmax
