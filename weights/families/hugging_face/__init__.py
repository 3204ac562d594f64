"""The models of transformers, each by the names and the config.json that save_pretrained writes.

Belongs here: GPT-2, and a `ModelType` for each other model_type. May import all of families that is in no room.
"""
