"""Quality of a checkpoint: perplexity, LAMBADA, ROUGE, parity with transformers, calibration, lm-evaluation-harness.

Belongs here: measurements of quality and the `texts` they are made on. Speed is measured in `bench`.
"""
