"""What a command reads: the `text` of a file or of stdin, and the prompts of a JSONL file."""
