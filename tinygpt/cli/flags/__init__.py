"""The flags that several commands share: of LLM in `model`, of SamplingParams in `sampling`; their `types`."""
