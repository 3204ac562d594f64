"""tinygpt in Triton's Python backend: each request is a stream, and all requests share the engine's steps."""

import json
from concurrent.futures import Future
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tinygpt import LLM, SamplingParams
from tinygpt.errors import TinyGPTError
from tinygpt.outputs import RequestOutput, StreamChunk


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"]).get("parameters", {})
        arguments = json.loads(parameters["llm"]["string_value"]) if "llm" in parameters else {}
        # Texts come from clients: special tokens in them are plain text.
        self._llm = LLM(**{"split_special_tokens": True, **arguments})
        # Kernels compile before the first request.
        self._llm.generate([[0, 0]], SamplingParams(max_tokens=2, temperature=1.0))

    def execute(self, requests: list[Any]) -> None:
        """Return at once: the engine's thread sends the responses."""
        for request in requests:
            _Stream(request.get_response_sender()).start(self._llm, request)

    def finalize(self) -> None:
        self._llm.close()


class _Stream:
    """The replies to one request: a response for each token, and an empty final one."""

    def __init__(self, sender: Any):
        self._sender = sender
        self._future: Future[RequestOutput] | None = None

    def start(self, llm: LLM, request: Any) -> None:
        try:
            text = _text_of(request, "text_input") or ""
            params = SamplingParams(**json.loads(_text_of(request, "sampling_parameters") or "{}"))
            self._future = llm.submit(text, params, self._send)
        except (TinyGPTError, ValueError, TypeError) as error:
            self._fail(error)
        else:
            self._future.add_done_callback(self._end)

    def _send(self, chunk: StreamChunk) -> None:
        if self._sender.is_cancelled():
            if self._future is not None:  # None only for a moment after the first token
                self._future.cancel()
            return
        tensors = [
            pb_utils.Tensor("text_output", np.array([chunk.text.encode()], np.object_)),
            pb_utils.Tensor("index", np.array([chunk.index], np.int32)),
            pb_utils.Tensor("finish_reason", np.array([(chunk.finish_reason or "").encode()], np.object_)),
        ]
        self._sender.send(pb_utils.InferenceResponse(output_tensors=tensors))

    def _end(self, future: "Future[RequestOutput]") -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._fail(error)
        else:
            self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _fail(self, error: BaseException) -> None:
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _text_of(request: Any, name: str) -> str | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)[0].decode()
