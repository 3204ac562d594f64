"""From a step's logits to its tokens: logits processors, warpers, beam search's rules, log probabilities.

Belongs here: whatever turns logits into tokens or log probabilities. The arithmetic is the backend's.
May import execution, request and below.
"""
