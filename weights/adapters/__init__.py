"""What is trained beside a checkpoint, in PEFT's layout: LoRA and soft prompts. May import the rest of weights."""
