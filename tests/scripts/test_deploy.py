"""The templates under scripts/deploy without Docker or Kubernetes, and the Triton model without its server."""

import importlib.util
import json
import math
import re
import shlex
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from support.paths import ROOT
from tinygpt import LLM
from tinygpt.cli.main import parse
from tinygpt.kernels.kernel_cache import open_cache
from tinygpt.outputs import RequestOutput

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

DEPLOY = ROOT / "scripts" / "deploy"
COMPOSE, DEPLOYMENT, SERVICE, KSERVE, PROMETHEUS = (
    document
    for name in ("compose.yaml", "kubernetes.yaml", "kserve.yaml", "prometheus.yml")
    for document in yaml.safe_load_all((DEPLOY / name).read_text())
)
DASHBOARD = json.loads((DEPLOY / "grafana" / "tinygpt.json").read_text())
PODS = {"kubernetes": DEPLOYMENT["spec"]["template"]["spec"], "kserve": KSERVE["spec"]["predictor"]}


TEXT = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
STEPS = [line.strip().partition(" ")[::2] for line in TEXT.splitlines() if line.strip() and line[0] != "#"]
IMAGE = dict(STEPS)  # instruction -> what its last one is given
ENVIRONMENT = dict(item.split("=") for item in shlex.split(IMAGE["ENV"]))
# What each template gives the server: words, seconds to end, port, and the folder that outlives it.
COMPOSED = COMPOSE["services"]["tinygpt"]
TEMPLATES = {
    "image": (json.loads(IMAGE["CMD"]), math.inf, int(IMAGE["EXPOSE"]), IMAGE["VOLUME"]),
    "compose": (
        COMPOSED["command"],
        float(COMPOSED["stop_grace_period"].removesuffix("s")),
        int(COMPOSED["ports"][0].split(":")[-1]),
        COMPOSED["volumes"][0].removeprefix("cache:"),
    ),
}
for name, pod in PODS.items():
    [container] = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    port = container["ports"][0]["containerPort"]
    TEMPLATES[name] = container["args"], pod["terminationGracePeriodSeconds"], port, mounts["cache"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_starts_the_server_with_flags_that_it_has(name):
    """It may end in its own time, at the image's port, and what it makes once is kept."""
    words, seconds, port, folder = TEMPLATES[name]
    program, module, *entry = json.loads(IMAGE["ENTRYPOINT"])[1:]
    assert (program, module) == ("-m", "tinygpt")
    args = parse([*entry, *words])  # ends the test for an unknown flag
    assert (args.host, args.port, folder) == ("0.0.0.0", port, IMAGE["VOLUME"])
    assert seconds > args.drain_seconds
    if name in PODS:
        [container] = PODS[name]["containers"]
        assert container["resources"]["limits"]["cpu"] == str(args.threads)
        assert PODS[name]["securityContext"]["runAsUser"] == int(IMAGE["USER"]) > 0
        paths = {value["httpGet"]["path"] for key, value in container.items() if key.endswith("Probe")}
        assert paths <= {"/health", "/version"}
        assert PODS[name]["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {"cache", "tmp"}
        [key] = container["env"]
        assert (key["name"], [*key["valueFrom"]]) == ("TINYGPT_API_KEY", ["secretKeyRef"])
    assert COMPOSED["read_only"]


def test_the_image_is_made_of_what_the_package_needs():
    names = {name for step, rest in STEPS if step == "COPY" for name in shlex.split(rest)[:-1]}
    assert all((ROOT / name).exists() for name in names)
    let_in = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in let_in if line[:1] == "!"} == names
    assert all(ENVIRONMENT[name].startswith("/cache/") for name in ("HF_HOME", "TINYGPT_CACHE_DIR"))


def test_the_server_is_found_by_prometheus_and_the_pods_by_their_service():
    [job] = PROMETHEUS["scrape_configs"]
    assert (job["static_configs"], job["metrics_path"]) == ([{"targets": ["tinygpt:8000"]}], "/metrics")
    [source] = yaml.safe_load((DEPLOY / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    template = DEPLOYMENT["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels == SERVICE["spec"]["selector"]
    [port], [container] = SERVICE["spec"]["ports"], PODS["kubernetes"]["containers"]
    assert port["targetPort"] == container["ports"][0]["name"]


def test_the_dashboard_shows_metrics_that_the_server_has():
    pytest.importorskip(
        "prometheus_client", reason="prometheus-client, of the extra `serve`, is not installed"
    )
    from prometheus_client.parser import text_string_to_metric_families

    from tinygpt.server.monitoring import Metrics

    with LLM("demo", device="reference") as llm:
        future = llm.submit("Once", max_tokens=2)
        future.result()
        metrics = Metrics(llm, "demo")
        metrics.observe([(future.request.progress(), ["length"])], [])
        metrics.count_http("/v1/completions", 200)
        families = [*text_string_to_metric_families(metrics.text().decode())]
    known = {sample.name: {*sample.labels} for family in families for sample in family.samples}
    [variable] = DASHBOARD["templating"]["list"]
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    names = {*re.findall(r"tinygpt:\w+|process_\w+", " ".join([*expressions, variable["query"]]))}
    assert names <= known.keys()
    shown = ("num_requests_running", "time_to_first_token_seconds_bucket", "generation_tokens_total")
    assert names >= {f"tinygpt:{name}" for name in shown}
    for expression in expressions:
        labels = {*re.findall(r"sum by \((\w+)\)", expression)}
        [name, *_] = re.findall(r"tinygpt:\w+|process_\w+", expression)
        assert labels <= known[name], expression
        assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("name", PODS)
def test_compiled_kernels_outlive_a_pods_container(name, tmp_path, monkeypatch):
    """Others may write to an emptyDir; what the init container makes in it is mounted in its place."""
    pod = PODS[name]
    [maker], [container] = pod["initContainers"], pod["containers"]
    [made_at] = [mount["mountPath"] for mount in maker["volumeMounts"] if mount["name"] == "cache"]
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "cache"]
    assert maker["image"] == container["image"]
    assert maker["securityContext"] == container["securityContext"]
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    command = [word.replace(made_at, str(volume)) for word in maker["command"]]
    for _ in range(2):  # a pod may make it anew
        subprocess.run(command, check=True)
    # In the container the folder is the mount point itself, so nothing of the volume lies above it.
    seen = tmp_path / "cache"
    (volume / mount["subPath"]).rename(seen)
    monkeypatch.setenv("TINYGPT_CACHE_DIR", ENVIRONMENT["TINYGPT_CACHE_DIR"].replace("/cache", str(seen), 1))
    assert open_cache("kernels").folder == seen / "kernels" / "kernels"


def test_probes_need_no_key():
    pytest.importorskip("fastapi", reason="fastapi, of the extra `serve`, is not installed")
    from tinygpt.server.app import OPEN_PATHS

    assert {"/health", "/version", "/metrics"} <= OPEN_PATHS


FINAL = 1
CONFIG = (DEPLOY / "triton" / "tinygpt" / "config.pbtxt").read_text()


class Sender:
    """Of the replies to one request. `told` are dicts of outputs; an error is a text."""

    def __init__(self):
        self.told = []
        self.num_final = 0
        self._is_cancelled = False
        self._changed = threading.Condition()

    def is_cancelled(self):
        return self._is_cancelled

    def cancel(self):
        self._is_cancelled = True

    def send(self, response=None, flags=0):
        with self._changed:
            assert not self.num_final, "sent behind the end"
            if response is not None:
                self.told.append(
                    response.error or {tensor.name: tensor.value[0] for tensor in response.tensors}
                )
            self.num_final += flags == FINAL
            self._changed.notify_all()

    def wait(self, count=None):
        """Until so much has been told, or the end is."""
        with self._changed:
            is_there = lambda: self.num_final == 1 if count is None else len(self.told) >= count  # noqa: E731
            assert self._changed.wait_for(is_there, timeout=60)


class Request:
    def __init__(self, **texts):
        self.tensors = {name: np.array([text.encode()], np.object_) for name, text in texts.items()}
        self.sender = Sender()

    def get_response_sender(self):
        return self.sender


def backend_utils():
    """As much of Triton's own module as a decoupled model uses."""
    module = ModuleType("triton_python_backend_utils")
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    module.Tensor = lambda name, value: SimpleNamespace(name=name, value=value)
    module.TritonError = str
    module.InferenceResponse = lambda output_tensors=(), error=None: SimpleNamespace(
        tensors=output_tensors, error=error
    )
    module.get_input_tensor_by_name = lambda request, name: (
        SimpleNamespace(as_numpy=lambda: request.tensors[name]) if name in request.tensors else None
    )
    return module


@pytest.fixture(scope="module")
def triton():
    path = DEPLOY / "triton" / "tinygpt" / "1" / "model.py"
    spec = importlib.util.spec_from_file_location("triton_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["triton_python_backend_utils"] = backend_utils()
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["triton_python_backend_utils"]
    model = module.TritonPythonModel()
    config = {"parameters": {"llm": {"string_value": '{"model": "demo", "max_num_seqs": 4}'}}}
    model.initialize({"model_config": json.dumps(config)})
    yield model
    model.finalize()


def test_a_triton_model_streams_what_the_library_writes(triton):
    asked = [{"max_tokens": 6, "temperature": 0.9, "seed": seed, "n": 1 + seed} for seed in range(2)]
    requests = [Request(text_input="Once upon", sampling_parameters=json.dumps(params)) for params in asked]
    assert triton.execute(requests) is None
    for request, params in zip(requests, asked, strict=True):
        request.sender.wait()
        [output] = triton._llm.generate("Once upon", **params)
        check_stream(request.sender.told, output)
        assert len(request.sender.told) == 6 * params["n"]


def check_stream(told: list[dict], output: RequestOutput) -> None:
    for sample in output.outputs:
        mine = [each for each in told if each["index"] == sample.index]
        assert b"".join(each["text_output"] for each in mine).decode() == sample.text
        assert [each["finish_reason"].decode() for each in mine] == [""] * (len(mine) - 1) + [
            sample.finish_reason
        ]
        assert len(mine) > 1  # token by token


def test_tritons_config_is_the_models(triton):
    declared = re.findall(r'\{ name: "(\w+)" data_type: TYPE_(\w+)', CONFIG)
    request = Request(text_input="Once", sampling_parameters='{"max_tokens": 1}')
    triton.execute([request])
    request.sender.wait()
    types = {bytes: "STRING", np.int32: "INT32"}
    made = {name: types[type(value)] for name, value in request.sender.told[0].items()}
    assert dict(declared) == dict.fromkeys(request.tensors, "STRING") | made
    assert "decoupled: true" in CONFIG
    arguments = re.search(r'string_value: (".*")', CONFIG)[1]
    LLM(device="reference", **json.loads(json.loads(arguments))).close()


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [('{"top_k": -5}', "top_k is -5 and must be"), ("{", "Expecting property name"), ("[1]", "mapping")],
)
def test_a_triton_model_tells_what_is_wrong(triton, parameters, sentence):
    request = Request(text_input="Once", sampling_parameters=parameters)
    triton.execute([request])
    [error] = request.sender.told
    assert sentence in error
    assert request.sender.num_final == 1


def test_a_triton_model_frees_what_was_cancelled(triton):
    request = Request(text_input="Once", sampling_parameters='{"max_tokens": 400, "ignore_eos": true}')
    triton.execute([request])
    request.sender.wait(2)
    request.sender.cancel()
    request.sender.wait()
    assert len(request.sender.told) < 400
    assert request.sender.num_final == 1
