"""From a checkpoint's matrices to panels in each dtype, once, at load."""
