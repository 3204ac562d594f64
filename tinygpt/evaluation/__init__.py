"""Quality of a checkpoint: perplexity, LAMBADA, ROUGE, parity with transformers, calibration, lm-evaluation-harness."""
