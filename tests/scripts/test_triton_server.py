"""The Triton model repository behind a real `tritonserver`: the one in nvidia-pytriton's wheel, which needs no Docker.

To run it: an environment with nvidia-pytriton, tritonclient[grpc] and what tinygpt's tests need, with a NumPy before
2.0, for that server reads texts wrongly with later ones.
"""

import importlib.util
import os
import queue
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc", reason="tritonclient, with gRPC, is not installed")
if importlib.util.find_spec("pytriton") is None:
    pytest.skip("nvidia-pytriton, whose wheel has a tritonserver, is not installed", allow_module_level=True)

import numpy as np
from tritonclient import grpc

from support.paths import ROOT
from tinygpt import LLM, SamplingParams

SECONDS = 120
WHEEL = Path(importlib.util.find_spec("pytriton").origin).parent / "tritonserver"
SITE = WHEEL.parent.parent
PROMPTS = ["Once upon a time", "A wolf 🐺", ""]
ASKED = '{"max_tokens": 12, "temperature": 0.9, "seed": 5, "n": 2}'
PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=5, n=2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a server that has the model, as `tritonserver --model-repository scripts/deploy/triton` starts it."""
    folder, version = tmp_path_factory.mktemp("triton"), f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(WHEEL / "backends" / "python", folder / "backends" / "python")
    stub = WHEEL / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, folder / "backends" / "python")
    address, log = f"127.0.0.1:{free_port()}", folder / "log"
    command = [WHEEL / "bin" / "tritonserver", "--model-repository", ROOT / "scripts" / "deploy" / "triton"]
    command += ["--backend-directory", folder / "backends", "--grpc-address", "127.0.0.1"]
    command += ["--grpc-port", address.rpartition(":")[2], "--allow-http", "false", "--allow-metrics", "false"]
    # The stub's Python reads no PYTHONPATH: its modules are those of the first `python` in PATH, and the folder's.
    libraries, paths = [SITE / "nvidia_pytriton.libs", Path(sys.base_prefix) / "lib"], [Path(sys.executable).parent]
    environment = {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "PATH": os.pathsep.join([*map(str, paths), os.environ["PATH"]]),
    }
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, **environment})
    try:
        wait_for(address, server, log)
        yield address
    finally:
        server.terminate()
        server.wait(SECONDS)


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(SECONDS * 5):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with grpc.InferenceServerClient(address) as client:
                if client.is_model_ready("tinygpt"):
                    return
        except grpc.InferenceServerException:  # it does not listen yet
            pass
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


def text_input(name: str, text: str) -> grpc.InferInput:
    made = grpc.InferInput(name, [1], "BYTES")
    made.set_data_from_numpy(np.array([text.encode()], np.object_))
    return made


def ask(address: str, prompts: list[str], parameters: str) -> dict[str, list]:
    """All at once on one stream: of each prompt its responses, or the errors that it got, until its final one."""
    came, found = queue.SimpleQueue(), {prompt: [] for prompt in prompts}
    with grpc.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        for i, prompt in enumerate(prompts):
            inputs = [text_input("text_input", prompt), text_input("sampling_parameters", parameters)]
            client.async_stream_infer("tinygpt", inputs, request_id=str(i + 1), enable_empty_final_response=True)
        num_ended = 0
        while num_ended < len(prompts):
            result, error = came.get(timeout=SECONDS)
            if error is not None:
                found[prompts[0]].append(str(error))
                return found
            response = result.get_response()
            if response.outputs:
                values = {name: result.as_numpy(name)[0] for name in ("index", "text_output", "finish_reason")}
                found[prompts[int(response.id) - 1]].append(values)
            num_ended += response.parameters["triton_final_response"].bool_param
    return found


def test_streams_are_the_librarys_texts(address):
    found = ask(address, PROMPTS, ASKED)
    with LLM("demo", split_special_tokens=True) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        for sample in output.outputs:
            mine = [each for each in found[prompt] if each["index"] == sample.index]
            assert b"".join(each["text_output"] for each in mine).decode() == sample.text
            assert [each["finish_reason"].decode() for each in mine] == [""] * (len(mine) - 1) + [sample.finish_reason]
            assert len(mine) > 1  # token by token
