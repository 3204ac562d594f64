"""Adapters in PEFT's layout: LoRA, which is merged into a checkpoint, and soft prompts."""
