"""Ctrl-C: the one exception out of a user's function that is not that function's own."""

import threading


def is_ctrl_c(error: BaseException) -> bool:
    """Whether it may be the user's who presses Ctrl-C, which Python raises in the main thread, wherever that is."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
