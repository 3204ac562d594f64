"""What becomes of one completion: what runs for it, and how its replies are written, whole or as events."""
