"""What a backend raises; its callers turn it into the error that a user sees."""


class DeviceError(Exception):
    """This machine cannot run a backend, or not the model that is asked for. The message says why, in a sentence."""
