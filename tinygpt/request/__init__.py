"""What a caller asks for: prompts, a request and its sequences, and what ends them.

Belongs here: the bookkeeping of one request, which knows no array of the model. May import tokenizer, weights and the
plain records beside this folder.
"""
