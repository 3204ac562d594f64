"""How good a checkpoint is: perplexity, LAMBADA, parity with transformers.

Belongs here: measurements of quality (those of speed are in `bench`), the `texts` they are made on, and `golden`, what
another engine computes. May import the library's front (`llm`) and whatever lies below it.
"""
