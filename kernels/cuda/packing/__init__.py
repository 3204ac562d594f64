"""The order in which weights lie on the device. May import runtime."""
