"""Files of tinygpt's own: converted checkpoints and saved sessions. May import the rest of weights but adapters."""
