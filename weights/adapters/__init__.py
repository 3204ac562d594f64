"""What is trained beside a checkpoint, in PEFT's layout: LoRA adapters and soft prompts.

Belongs here: reading an adapter's folder, and what it changes in a model. May import all of weights but `open`.
"""
