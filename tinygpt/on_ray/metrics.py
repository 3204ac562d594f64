"""What a replica counts, for Ray: its dashboard, and the Prometheus that reads Ray's ports."""

from ray.util.metrics import Gauge

from tinygpt.server.metrics import Metrics


class RayMetrics:
    """Every series of /metrics as a gauge of Ray, which adds `ray_` in front and says which replica it is of.

    A histogram's buckets, sum and count are series of their own, as Prometheus has them.
    """

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._gauges: dict[str, Gauge] = {}

    def publish(self) -> None:
        """Give Ray the numbers of this moment."""
        for metric in self._metrics.collect():
            for sample in metric.samples:
                name = sample.name.replace(":", "_")  # a colon is Prometheus' own
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, metric.documentation, tuple(sample.labels))
                self._gauges[name].set(sample.value, sample.labels)
