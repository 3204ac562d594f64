"""A Ray Serve application: replicas of the server, scaled with the load.

serve run tinygpt.on_ray.application:build model=gpt2 dtype=int8 threads=4 max_replicas=8
"""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, PositiveInt
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig
from ray.util.metrics import Gauge

from ..llm import LLM
from ..server.app import create_app
from ..server.config import ServerConfig
from ..server.monitoring import configure_logging


class Arguments(BaseModel):
    """The arguments of `build`; pydantic converts the texts of `serve run`.

    target_ongoing_requests: of a replica, above which Ray starts another; None is max_num_seqs.
    max_queue: of a replica, which refuses more with status 429.
    autoscaling: other fields of AutoscalingConfig. llm: other arguments of LLM.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = "demo"
    dtype: str = "auto"
    threads: PositiveInt = 1
    max_num_seqs: PositiveInt = 32
    max_queue: PositiveInt = 512
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 1
    target_ongoing_requests: PositiveInt | None = None
    served_model_name: str | None = None
    api_key: str | None = None
    autoscaling: dict[str, Any] = {}
    llm: dict[str, Any] = {}


@serve.deployment(health_check_period_s=5, graceful_shutdown_timeout_s=30)
@serve.ingress()
class Replica:
    def __init__(self, arguments: Arguments):
        configure_logging("json")
        self._arguments = arguments
        own = arguments.model_dump(include={"model", "dtype", "threads", "max_num_seqs", "max_queue"})
        self._llm = LLM(**own, **{"split_special_tokens": True, **arguments.llm})  # as `tinygpt serve`

    def __serve_build_asgi_app__(self) -> FastAPI:
        a = self._arguments
        config = ServerConfig(
            served_model_names=(a.served_model_name or a.model,),
            api_keys=() if a.api_key is None else (a.api_key,),
        )
        app = create_app(self._llm, config)
        self._metrics = app.state.api.metrics
        self._gauges = {}
        return app

    def check_health(self) -> None:
        """Raise if the engine has failed: Ray replaces the replica. Publish the metrics as Ray's gauges."""
        self._llm.check_health()
        for metric in self._metrics.own.collect():
            for sample in metric.samples:  # of a histogram: buckets, sum and count
                name = sample.name.replace(":", "_")  # Prometheus reserves the colon
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, metric.documentation, tuple(sample.labels))
                self._gauges[name].set(sample.value, sample.labels)


def build(arguments: Arguments) -> Application:
    scaling = AutoscalingConfig(
        min_replicas=arguments.min_replicas,
        max_replicas=arguments.max_replicas,
        target_ongoing_requests=arguments.target_ongoing_requests or arguments.max_num_seqs,
        **arguments.autoscaling,
    )
    room = arguments.max_num_seqs + arguments.max_queue + 1  # the replica refuses one more, in OpenAI's form
    options = {"num_cpus": arguments.threads}
    deployment = Replica.options(
        max_ongoing_requests=room, autoscaling_config=scaling, ray_actor_options=options
    )
    return deployment.bind(arguments)
