"""How good a checkpoint is: perplexity, LAMBADA, parity with transformers.

Belongs here: measurements of quality; those of speed are in bench. May import the library's front (`llm`) and below.
"""
