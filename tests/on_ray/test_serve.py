"""The Ray Serve application: the server's replies from any of its replicas, which come back when they are killed."""

import gc
import os
import re
import signal
import socket
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray, of the extra of that name, is not installed")
pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

import ray
from ray import serve

from support.paths import ROOT
from support.processes import SECONDS, ray_processes, until
from support.serving import RawRequest, ask
from tinygpt import LLM
from tinygpt.on_ray.application import Arguments, build

KILLS = Path(os.environ.get("TINYGPT_KILLS") or tempfile.mktemp())  # the same in processes of Ray
OF_RAY = {"TINYGPT_KILLS": str(KILLS), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
BODY = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.9, "seed": 5, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 400, "n": 4}  # which takes the demo a second, and fills a replica
QUICK = {"upscale_delay_s": 0, "downscale_delay_s": 600, "metrics_interval_s": 0.1, "look_back_period_s": 0.2}


def obey():
    """In each process of Ray's: let all steps of the engine fail, once the file KILLS has the process's id."""

    def fail(batch):
        raise MemoryError

    def watch():
        while True:
            time.sleep(0.02)
            if KILLS.exists() and KILLS.read_text() == str(os.getpid()):
                for engine in (each for each in gc.get_objects() if type(each).__name__ == "Engine"):
                    engine.runner.forward = fail
                KILLS.unlink()

    threading.Thread(target=watch, daemon=True).start()


@pytest.fixture(scope="module")
def port():
    """Ray and its proxy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(
        "local", num_cpus=3, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False,
        logging_level="ERROR", runtime_env={"worker_process_setup_hook": obey, "env_vars": OF_RAY},
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def two(port):
    """Two replicas."""
    run(min_replicas=2, max_replicas=2)
    return port


def run(**fields):
    """In place of what has run before: an app that is changed would keep its replicas."""
    serve.delete("tinygpt")
    arguments = {"model": "demo", "max_num_seqs": 4, "max_queue": 64, **fields}
    serve.run(build(Arguments(**arguments)), name="tinygpt", route_prefix="/")


def replicas():
    return ray_processes(os.getpid(), "ServeReplica:")


def test_replies_are_the_librarys_whole_and_streamed(two):
    with LLM("demo", threads=1, split_special_tokens=True) as llm:
        fields = {name: BODY[name] for name in ("max_tokens", "temperature", "seed", "ignore_eos")}
        expected = llm.generate([BODY["prompt"]], **fields, top_k=0, top_p=1.0)[0].outputs[0].text
    for _ in range(4):
        assert ask(two, "/v1/completions", BODY).choices[0]["text"] == expected
    parts = ask(two, "/v1/completions", {**BODY, "stream": True}).parts
    assert "".join(part["text"] for part in parts) == expected
    assert len(parts) > 6


def test_refusals_are_the_servers(two):
    reply = ask(two, "/v1/completions", {"prompt": "x", "wisdom": 3})
    assert (reply.status, reply.error["param"]) == (400, "wisdom")
    assert ask(two, "/health").status == 200


def test_a_client_that_leaves_is_an_abort(two):
    clients = [RawRequest(two, "/v1/completions", {**LONG, "stream": True}) for _ in range(2)]
    for client in clients:
        assert next(client.events())["choices"]
        client.close()
    pattern = r'tinygpt:request_success_total\{finished_reason="abort",model_name="demo"\} [1-9]'
    until(lambda: re.search(pattern, ask(two, "/metrics").body.decode()))
    until(lambda: 'tinygpt:num_requests_running{model_name="demo"} 0.0' in ask(two, "/metrics").body.decode())


def test_ray_sees_what_is_counted(two):
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def is_seen():
        with urllib.request.urlopen(address, timeout=SECONDS) as reply:
            return re.search(r"ray_tinygpt_generation_tokens_total\{.*\} [1-9]", reply.read().decode())

    until(is_seen)


def test_a_replica_that_is_killed_comes_back_and_the_other_answers(two):
    before = replicas()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    until(lambda: before[0] not in replicas())
    replies = [ask(two, "/v1/completions", BODY) for _ in range(20)]
    assert {reply.status for reply in replies} == {200}
    assert len({reply.choices[0]["text"] for reply in replies}) == 1
    until(lambda: len(replicas()) == 2)


def test_a_replica_whose_engine_fails_is_replaced(two):
    ill = replicas()[0]
    KILLS.write_text(str(ill))
    while ill in replicas():
        assert ask(two, "/v1/completions", BODY).status in (200, 500)
    until(lambda: len(replicas()) == 2)
    assert {ask(two, "/v1/completions", BODY).status for _ in range(8)} == {200}


def test_requests_that_wait_bring_another_replica(port):
    run(max_replicas=2, target_ongoing_requests=1, autoscaling=QUICK)
    until(lambda: len(replicas()) == 1)
    ended = threading.Event()

    def ask_again() -> None:
        while not ended.is_set():
            ask(port, "/v1/completions", LONG)

    clients = [threading.Thread(target=ask_again) for _ in range(4)]
    for client in clients:
        client.start()
    until(lambda: len(replicas()) == 2)
    ended.set()
    for client in clients:
        client.join()
