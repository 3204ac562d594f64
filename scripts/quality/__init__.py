"""What quality.py measures, and the checkpoints with outliers that it makes."""
