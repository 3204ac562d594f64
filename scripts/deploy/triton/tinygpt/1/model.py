"""tinygpt in Triton's Python backend: each request is a stream, and all requests share the engine's steps."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tinygpt import LLM, SamplingParams
from tinygpt.errors import TinyGPTError
from tinygpt.llm import WARMUP_REQUESTS
from tinygpt.outputs import StreamChunk


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"]).get("parameters", {})
        arguments = json.loads(parameters["llm"]["string_value"]) if "llm" in parameters else {}
        # Texts come from clients: special tokens in them are plain text.
        self._llm = LLM(**{"split_special_tokens": True, **arguments})
        for fields in WARMUP_REQUESTS:  # kernels compile before the first request
            self._llm.generate([[0, 0]], max_tokens=2, **fields)

    def execute(self, requests: list[Any]) -> None:
        """Return at once: the engine's thread sends the responses."""
        for request in requests:
            self._start(request, request.get_response_sender())

    def finalize(self) -> None:
        self._llm.close()

    def _start(self, request: Any, sender: Any) -> None:
        future = None

        def send(chunk: StreamChunk) -> None:
            if sender.is_cancelled():
                if future is not None:  # None only for a moment after the first token
                    future.cancel()
                return
            tensors = [
                pb_utils.Tensor("text_output", np.array([chunk.text.encode()], np.object_)),
                pb_utils.Tensor("index", np.array([chunk.index], np.int32)),
                pb_utils.Tensor(
                    "finish_reason", np.array([(chunk.finish_reason or "").encode()], np.object_)
                ),
            ]
            sender.send(pb_utils.InferenceResponse(output_tensors=tensors))

        def end(error: BaseException | None) -> None:
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if error is None:
                sender.send(flags=final)
            else:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), flags=final)

        try:
            text = _text_of(request, "text_input") or ""
            params = SamplingParams(**json.loads(_text_of(request, "sampling_parameters") or "{}"))
            future = self._llm.submit(text, params, send)
        except (TinyGPTError, ValueError, TypeError) as error:
            end(error)
        else:
            future.add_done_callback(lambda done: end(None if done.cancelled() else done.exception()))


def _text_of(request: Any, name: str) -> str | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)[0].decode()
