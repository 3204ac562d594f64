"""What becomes of one chat completion: messages to a prompt by the checkpoint's own template, and the replies."""
