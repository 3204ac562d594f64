"""From a step's logits to its tokens: logits processors, warpers, beam search's rules, log probabilities.

Belongs here: whatever chooses a token. The arithmetic is the backend's. May import execution, request and below.
"""
