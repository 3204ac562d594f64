"""The one error of the kernels that users see."""


class DeviceError(Exception):
    """This machine cannot run a backend, or not what is asked of it. The message says what is missing."""
