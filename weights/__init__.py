"""File formats only: from a folder or a Hub id to named float32 tensors. Computes no token."""
