"""What time and memory are measured by: the host's clock, or a GPU's events, as it works while the host goes on."""

import time
from typing import Any

from tinygpt.hardware.memory import forget_peak, peak_memory


class HostMeter:
    """The clock of the host, and the memory of this process."""

    has_multi_step = False  # a run of several steps would be one pass to the clock: each is to be seen
    warmups = 1
    gpu = ""  # its name

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks."""
        return last - first

    def forget_peak(self) -> None:
        forget_peak()

    def peak_memory(self) -> int:
        """Bytes; 0 where the system does not say."""
        return peak_memory()


class DeviceMeter:
    """Events on the stream of the GPU, and its memory: make it before the model is loaded.

    A mark does not wait for the GPU. Several decode steps that are queued at once are several passes, which have one
    mark before them and one behind: that is how a GPU decodes, and the choice of tokens between them is in their time.
    """

    has_multi_step = True
    warmups = 2  # kernels compile in the first run of a kind of step, and a graph is captured in the second

    def __init__(self):
        from tinygpt.kernels.cuda.runtime.device import the_device

        self._device = the_device()
        self.gpu, self._free = self._device.name, self._device.free_bytes()

    def mark(self) -> Any:
        return self._device.mark()

    def seconds(self, first: Any, last: Any) -> float:
        return self._device.seconds(first, last)

    def forget_peak(self) -> None:
        """Buffers are reserved with the model, and never grow."""

    def peak_memory(self) -> int:
        """Bytes of the GPU that have gone since this was made."""
        return max(self._free - self._device.free_bytes(), 0)


Meter = HostMeter | DeviceMeter


def meter_of(device: str) -> Meter:
    return DeviceMeter() if device == "cuda" else HostMeter()
