"""Quality of a checkpoint: perplexity, LAMBADA, ROUGE, parity with transformers, calibration, lm-evaluation-harness.

Belongs here: measurements of quality, and reading the `texts` for them.
"""
