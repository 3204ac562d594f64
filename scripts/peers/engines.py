"""The engines of the benchmark. Each imports its library itself, in an environment of its own.

An engine has prefill_ms(ids), step_ms(ids, new), last_logits(ids), and, if it needs another form of the checkpoint,
make(source, folder, dtype). ids: lists of token ids (batch, prompt). Decoding is greedy, without an end of text. A new
peer is a class here and a row of PEERS in setup.py. An engine of --look has read_ms(ids), steer_ms(ids, new) and
trace_ms(ids), of a clean and a corrupted prompt.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

MAX_STEP_TOKENS = 8192  # the prompts of the largest case
LLAMA_FILE_TYPES = {"bfloat16": "MOSTLY_BF16", "int8": "MOSTLY_Q8_0", "int4": "MOSTLY_Q4_0"}
DEVICE = os.environ.get("BENCH_DEVICE", "cpu")  # of tinygpt and torch
MOST_NEW = 100  # tokens of any case
GGML_TYPES = {"float32": 0, "bfloat16": 30, "int8": 8}  # llama_cpp has no name for bfloat16's
LLAMA_BATCH = 2048  # tokens of one call; longer prompts take several


def milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


class SteppingEngine:
    """An engine with `start(ids)`, which reads the prompts, `step()`, and their `tokens`, one for each sequence."""

    def prefill_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: [self.start(ids), self.tokens.tolist()])  # which waits for a GPU

    def step_ms(self, ids: list[list[int]], new: int) -> float:
        self.prefill_ms(ids)
        return milliseconds(lambda: [[self.step() for _ in range(new - 1)], self.tokens.tolist()]) / (new - 1)


class Tinygpt:
    """LLM.generate, with scheduling and sampling; and the limits of the machine."""

    # All turns have the same prompts, which a prefix cache would hold.
    sizes: ClassVar = {"max_num_batched_tokens": MAX_STEP_TOKENS, "prefix_cache_seqs": 0}

    def __init__(self, folder: Path, dtype: str, threads: int, kv_cache_dtype: str = "auto"):
        from tinygpt import LLM

        self.dtype, self.threads = dtype, threads
        more = {"kv_cache_dtype": kv_cache_dtype, "threads": threads}
        self.llm = LLM(str(folder), dtype=dtype, device=DEVICE, **self.sizes, **more)

    def prefill_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: self._generate(ids, 1))

    def step_ms(self, ids: list[list[int]], new: int) -> float:
        """Time from the first token to the last of all sequences, whose prompts are read in one step."""
        metrics = [output.metrics for output in self._generate(ids, new)]
        return 1e3 * (max(m.finished for m in metrics) - max(m.first_token for m in metrics)) / (new - 1)

    def last_logits(self, ids: list[int]) -> list[float]:
        return self.llm.logits(ids)[-1].tolist()

    def limits(self) -> dict[str, float]:
        """Measure the bytes read a second, "bandwidth", and the operations a second of each tile of the dtype."""
        from tinygpt.bench.roofline import measure_limits

        measured = measure_limits(self.dtype, self.threads, DEVICE)
        return {"bandwidth": measured.bandwidth, **measured.tile_rates}

    def _generate(self, ids: list[list[int]], new: int, **fields: Any) -> list:
        return self.llm.generate(ids, max_tokens=new, ignore_eos=True, use_tqdm=False, **fields)


class TinygptLook(Tinygpt):
    """Looks and edits as requests of one engine, side by side."""

    sizes: ClassVar = {"max_num_seqs": 256}

    def read_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: self._read(ids))

    def steer_ms(self, ids: list[list[int]], new: int) -> float:
        from tinygpt import Edit

        edit = Edit(steered_point(self.llm.config.n_layer), value=vector_of(self.llm.config.n_embd))
        return milliseconds(lambda: self._generate(ids, new, edits=[edit]))

    def trace_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: self.trace(*ids))

    def trace(self, clean: list[int], corrupted: list[int]) -> np.ndarray:
        """Return the log probability of token 0 (L, T), if a layer's stream at a position is the clean one."""
        return self.llm.causal_trace(clean, corrupted, [0])

    def _read(self, ids: list[list[int]]) -> None:
        _, cache = self.llm.run_with_cache(ids)
        for name in cache:
            cache[name]  # some are computed here


def steered_point(num_layers: int) -> str:
    return f"blocks.{num_layers // 2}.hook_resid_post"


def vector_of(size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(size).astype(np.float32)


class TransformerLens:
    """TransformerBridge over transformers' eager GPT-2."""

    def __init__(self, folder: Path, dtype: str, threads: int):
        import torch
        from transformer_lens.model_bridge import TransformerBridge
        from transformers import GPT2LMHeadModel

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch = torch
        model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
        options = {"hf_model": model, "device": "cpu", "tokenizer": None}
        self.bridge = TransformerBridge.boot_transformers(str(folder), **options)
        self.bridge.enable_compatibility_mode(disable_warnings=True, no_processing=True)

    def read_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: self.bridge.run_with_cache(self.torch.tensor(ids)))

    def steer_ms(self, ids: list[list[int]], new: int) -> float:
        return milliseconds(lambda: self._steer(ids, new))

    def trace_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: self.trace(*ids))

    def last_logits(self, ids: list[int]) -> list[float]:
        return self.bridge(self.torch.tensor([ids]))[0, -1].tolist()

    def trace(self, clean: list[int], corrupted: list[int]) -> np.ndarray:
        """Return what TinygptLook's does, by a run for each layer and position."""
        names = [f"blocks.{layer}.hook_resid_pre" for layer in range(self.bridge.cfg.n_layers)]
        _, cache = self.bridge.run_with_cache(self.torch.tensor([clean]), names_filter=names)
        logprobs = np.empty((len(names), len(clean)), np.float32)
        for i, t in np.ndindex(*logprobs.shape):

            def restore(x, hook, at=t):
                x[:, at] = cache[hook.name][:, at]
                return x

            hooks = [(names[i], restore)]
            logits = self.bridge.run_with_hooks(self.torch.tensor([corrupted]), fwd_hooks=hooks)
            logprobs[i, t] = logits[0, -1].log_softmax(-1)[0]
        return logprobs

    def _steer(self, ids: list[list[int]], new: int) -> None:
        cfg = self.bridge.cfg
        vector = self.torch.from_numpy(vector_of(cfg.d_model))
        options = {"do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
        with self.bridge.hooks(fwd_hooks=[(steered_point(cfg.n_layers), lambda x, hook: x + vector)]):
            self.bridge.generate(self.torch.tensor(ids), max_new_tokens=new, **options)


class Transformers(SteppingEngine):
    """The forward pass with a KV cache and an argmax, without `generate`."""

    def __init__(self, folder: Path, dtype: str, threads: int):
        import torch
        from transformers import GPT2LMHeadModel

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch = torch
        self.model = GPT2LMHeadModel.from_pretrained(folder, dtype=getattr(torch, dtype)).to(DEVICE).eval()

    def start(self, ids: list[list[int]]) -> None:
        self.tokens = self.torch.tensor(ids, device=DEVICE)
        self.cache = None
        self.step()

    def step(self) -> None:
        out = self._forward(self.tokens)
        self.tokens = out.logits[:, -1:].argmax(-1)
        self.cache = out.past_key_values

    def last_logits(self, ids: list[int]) -> list[float]:
        self.cache = None
        return self._forward(self.torch.tensor([ids], device=DEVICE)).logits[0, -1].float().tolist()

    def _forward(self, tokens: Any) -> Any:
        return self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)


class Compiled(Transformers):
    """torch.compile with transformers' static cache, and on a GPU with CUDA graphs, as in its documentation."""

    def __init__(self, folder: Path, dtype: str, threads: int):
        super().__init__(folder, dtype, threads)
        mode = "reduce-overhead" if DEVICE == "cuda" else "default"
        self.next = self.torch.compile(self._next, mode=mode, dynamic=False)
        self.size = None

    def start(self, ids: list[list[int]]) -> None:
        from transformers import StaticCache

        tokens = self.torch.tensor(ids, device=DEVICE)
        size = len(tokens), tokens.shape[1] + MOST_NEW
        if size != self.size:
            self.cache = StaticCache(config=self.model.config, max_cache_len=size[1])
            self.size = size
            self._next(tokens[:, :1])  # allocates the cache before anything is compiled for it
        self.cache.reset()
        self._take(tokens)

    def step(self) -> None:
        self._take(self.tokens)

    def last_logits(self, ids: list[int]) -> list[float]:
        self.start([ids[:-1]])
        return self._forward(self.torch.tensor([ids[-1:]], device=DEVICE)).logits[0, -1].float().tolist()

    def _take(self, tokens: Any) -> None:
        self.torch.compiler.cudagraph_mark_step_begin()
        self.tokens = self.next(tokens).clone()  # the next run overwrites this output

    def _next(self, tokens: Any) -> Any:
        return self._forward(tokens).logits[:, -1:].argmax(-1)


class Onnxruntime(SteppingEngine):
    """The fused graph of onnxruntime's converter, which computes the logits of every position of a prompt."""

    @staticmethod
    def make(source: Path, folder: Path, dtype: str) -> None:
        converter = "onnxruntime.transformers.models.gpt2.convert_to_onnx"
        precision = {"float32": "fp32", "int8": "int8"}[dtype]
        flags = ["-o", "-p", precision, "--overwrite", "--test_cases", "1", "--test_runs", "1"]
        command = [
            sys.executable,
            "-m",
            converter,
            "-m",
            str(source),
            *flags,
            "--output",
            str(folder / "model.onnx"),
        ]
        subprocess.run(command, check=True, cwd=folder)  # it leaves files in the working directory
        for exported in folder.glob(f"{source.name}_past*"):  # its first forms, each as large as the result
            if exported.is_dir():
                shutil.rmtree(exported)
            else:
                exported.unlink()
        shutil.copy(source / "config.json", folder)

    def __init__(self, folder: Path, dtype: str, threads: int):
        import onnxruntime

        config = json.loads((folder / "config.json").read_text())
        self.layers = config["n_layer"]
        self.heads = config["n_head"]
        self.head_size = config["n_embd"] // self.heads
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        model = str(folder / "model.onnx")
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        types = {"tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(float)": np.float32}
        self.types = {i.name: types[i.type] for i in self.session.get_inputs()}
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.value = onnxruntime.OrtValue.ortvalue_from_numpy

    def start(self, ids: list[list[int]]) -> None:
        empty = np.zeros((2, len(ids), self.heads, 0, self.head_size), np.float32)
        self.past = [self.value(empty)] * self.layers
        self.length = 0
        self.tokens = np.array(ids)
        self.step()

    def step(self) -> None:
        self.tokens = self._forward(self.tokens)[:, -1:].argmax(-1)

    def last_logits(self, ids: list[int]) -> list[float]:
        self.start([ids[:-1]])
        return self._forward(np.array([ids[-1:]]))[0, -1].tolist()

    def _forward(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits (batch, new, vocabulary) of tokens (batch, new), and append these to the past."""
        batch, new = tokens.shape
        positions = np.broadcast_to(np.arange(self.length, self.length + new), (batch, new))
        self.length += new
        arrays = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": np.ones((batch, self.length)),
        }
        inputs = {f"past_{i}": past for i, past in enumerate(self.past)}
        for name, array in arrays.items():
            inputs[name] = self.value(np.ascontiguousarray(array, self.types[name]))
        logits, *self.past = self.session.run_with_ort_values(self.outputs, inputs)
        return logits.numpy()


class OnnxruntimeGenai(SteppingEngine):
    """The generation loop of onnxruntime-genai over the same graph: its own builder does not know GPT-2."""

    @staticmethod
    def make(source: Path, folder: Path, dtype: str) -> None:
        Onnxruntime.make(source, folder, dtype)
        config = json.loads((folder / "config.json").read_text())
        heads, size = config["n_head"], config["n_embd"]
        inputs = {name: name for name in ("input_ids", "attention_mask", "position_ids")}
        decoder = {
            "filename": "model.onnx",
            "session_options": {},
            "hidden_size": size,
            "head_size": size // heads,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "num_hidden_layers": config["n_layer"],
            "inputs": {**inputs, "past_names": "past_%d"},
            "outputs": {"logits": "logits", "present_names": "present_%d"},
        }
        context = {"context_length": config["n_positions"], "vocab_size": config["vocab_size"]}
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), config["vocab_size"] - 1)
        model = {"type": "gpt2", **context, **ends, "decoder": decoder}
        search = {"max_length": config["n_positions"], "past_present_share_buffer": False}
        (folder / "genai_config.json").write_text(json.dumps({"model": model, "search": search}))

    def __init__(self, folder: Path, dtype: str, threads: int):
        import onnxruntime_genai

        self.library = onnxruntime_genai
        config = onnxruntime_genai.Config(str(folder))
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self.model = onnxruntime_genai.Model(config)
        self.context = json.loads((folder / "config.json").read_text())["n_positions"]

    def start(self, ids: list[list[int]]) -> None:
        self._append(ids)
        self.step()

    def step(self) -> None:
        self.generator.generate_next_token()
        self.tokens = self.generator.get_next_tokens()

    def last_logits(self, ids: list[int]) -> list[float]:
        self._append([ids])
        return self.generator.get_logits()[0, -1].tolist()

    def _append(self, ids: list[list[int]]) -> None:
        length = min(len(ids[0]) + MOST_NEW, self.context)
        params = self.library.GeneratorParams(self.model)
        params.set_search_options(batch_size=len(ids), min_length=length, max_length=length, do_sample=False)
        self.generator = self.library.Generator(self.model, params)
        self.generator.append_tokens(np.array(ids, np.int32))


class Openvino(SteppingEngine):
    """Optimum's stateful export, whose head takes the last position alone. INT8 and INT4: weights, by NNCF."""

    @staticmethod
    def make(source: Path, folder: Path, dtype: str) -> None:
        import nncf
        import openvino
        from openvino import opset15
        from optimum.intel import OVModelForCausalLM

        exported = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, load_in_8bit=False)
        exported.save_pretrained(folder)  # a model that was read again compiles to other fusions
        model = openvino.Core().read_model(folder / "openvino_model.xml")
        head = model.output("logits").get_node().input_value(0).get_node()
        end = np.iinfo(np.int64).max
        last = opset15.slice(head.input_value(0), [-1], [end], [1], [1])  # (batch, 1, n_embd)
        head.input(0).replace_source_output(last.output(0))
        model.validate_nodes_and_infer_types()
        if dtype == "int8":
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
        elif dtype == "int4":
            every = {"group_size": 32, "ratio": 1.0, "all_layers": True}
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT4_SYM, **every)
        openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)

    def __init__(self, folder: Path, dtype: str, threads: int):
        import openvino

        precision = "bf16" if dtype == "bfloat16" else "f32"
        # Next to int8 and int4 weights its KV cache stays as it chooses: float16.
        caches = {"KV_CACHE_PRECISION": precision} if dtype in ("float32", "bfloat16") else {}
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, **caches}
        settings["INFERENCE_PRECISION_HINT"] = precision
        model = openvino.Core().compile_model(folder / "model.xml", "CPU", settings)
        self.request = model.create_infer_request()

    def start(self, ids: list[list[int]]) -> None:
        self.request.reset_state()
        self.length, self.tokens = 0, np.array(ids)
        self.step()

    def step(self) -> None:
        self.tokens = self._forward(self.tokens).argmax(-1)[:, None]

    def last_logits(self, ids: list[int]) -> list[float]:
        self.request.reset_state()
        self.length = 0
        return self._forward(np.array([ids]))[0].tolist()

    def _forward(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits (batch, vocabulary) of the last of tokens (batch, new), which join the state."""
        batch, new = tokens.shape
        positions = np.tile(np.arange(self.length, self.length + new), (batch, 1))
        self.length += new
        mask = np.ones((batch, self.length), np.int64)
        beams = np.arange(batch, dtype=np.int32)
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "beam_idx": beams}
        self.request.infer(inputs, share_inputs=True, share_outputs=True)
        return self.request.get_tensor("logits").data[:, -1]


class Ctranslate2:
    """CTranslate2's generation loop, timed by a callback for each token."""

    @staticmethod
    def make(source: Path, folder: Path, dtype: str) -> None:
        from ctranslate2.specs import Activation, TransformerDecoderModelSpec
        from safetensors.numpy import load_file

        config = json.loads((source / "config.json").read_text())
        activations = {"gelu": Activation.GELU, "relu": Activation.RELU}
        activation = activations.get(config["activation_function"], Activation.GELUTanh)
        sizes = config["n_layer"], config["n_head"]
        spec = TransformerDecoderModelSpec.from_config(*sizes, pre_norm=True, activation=activation)
        fill_ctranslate2(spec.decoder, load_file(source / "model.safetensors"))
        spec.register_vocabulary([str(i) for i in range(config["vocab_size"])])
        for role in ("bos_token", "eos_token", "unk_token"):
            setattr(spec.config, role, "0")
        spec.validate()
        spec.optimize(quantization=dtype)
        spec.save(str(folder))

    def __init__(self, folder: Path, dtype: str, threads: int):
        if dtype == "float32":
            os.environ["CT2_USE_MKL"] = "1"
        from ctranslate2 import Generator

        self.generator = Generator(str(folder), compute_type=dtype, inter_threads=1, intra_threads=threads)

    def prefill_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: self._generate(ids, 1))

    def step_ms(self, ids: list[list[int]], new: int) -> float:
        """Time from the last sequence's first token to its last."""
        stamps: list[float] = []
        self._generate(ids, new, callback=lambda result: stamps.append(time.perf_counter()))
        if len(stamps) != new * len(ids):
            raise RuntimeError(f"{len(stamps)} tokens instead of {new} x {len(ids)}")
        return 1e3 * (stamps[-1] - stamps[len(ids) - 1]) / (new - 1)

    def last_logits(self, ids: list[int]) -> list[float]:
        return np.array(self.generator.forward_batch([ids]))[0, -1].tolist()

    def _generate(self, ids: list[list[int]], new: int, **options: Any) -> None:
        tokens = [[str(i) for i in row] for row in ids]
        lengths = {"min_length": new, "max_length": new}
        self.generator.generate_batch(tokens, **lengths, include_prompt_in_result=False, **options)


class Vllm:
    """vLLM's LLM class in this process, with scheduling and sampling, as tinygpt's is measured."""

    def __init__(self, folder: Path, dtype: str, threads: int):
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ.update(own | {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"})
        from vllm import LLM

        sizes = {"max_num_batched_tokens": MAX_STEP_TOKENS, "max_num_seqs": 32}
        logits = {"max_logprobs": -1, "logprobs_mode": "raw_logits"}
        more = {"enable_prefix_caching": False, "skip_tokenizer_init": True, "disable_log_stats": False}
        self.llm = LLM(str(folder), dtype=dtype, **sizes, **logits, **more)

    def prefill_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: self._generate(ids, 1))

    def step_ms(self, ids: list[list[int]], new: int) -> float:
        """Time from the last sequence's first token to its last."""
        metrics = [output.metrics for output in self._generate(ids, new)]
        return (
            1e3 * (max(m.last_token_ts for m in metrics) - max(m.first_token_ts for m in metrics)) / (new - 1)
        )

    def last_logits(self, ids: list[int]) -> list[float]:
        (output,) = self._generate([ids], 1, logprobs=-1)
        (logits,) = output.outputs[0].logprobs
        return [logits[i].logprob for i in range(len(logits))]

    def _generate(self, ids: list[list[int]], new: int, **options: Any) -> list:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **options)
        return self.llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)


def fill_ctranslate2(decoder: Any, tensors: dict[str, np.ndarray]) -> None:
    """Copy Hugging Face's tensors, whose matrices of a block are (in, out), into a decoder of (out, in)."""

    def norm(target: Any, name: str) -> None:
        target.gamma = tensors[f"{name}.weight"]
        target.beta = tensors[f"{name}.bias"]

    def linear(target: Any, name: str) -> None:
        target.weight = np.ascontiguousarray(tensors[f"{name}.weight"].T)  # (out, in)
        target.bias = tensors[f"{name}.bias"]

    decoder.scale_embeddings = False
    decoder.embeddings.weight = tensors["transformer.wte.weight"]
    decoder.position_encodings.encodings = tensors["transformer.wpe.weight"]
    decoder.projection.weight = tensors.get("lm_head.weight", tensors["transformer.wte.weight"])
    norm(decoder.layer_norm, "transformer.ln_f")
    for i, layer in enumerate(decoder.layer):
        name = f"transformer.h.{i}"
        norm(layer.self_attention.layer_norm, f"{name}.ln_1")
        linear(layer.self_attention.linear[0], f"{name}.attn.c_attn")
        linear(layer.self_attention.linear[1], f"{name}.attn.c_proj")
        norm(layer.ffn.layer_norm, f"{name}.ln_2")
        linear(layer.ffn.linear_0, f"{name}.mlp.c_fc")
        linear(layer.ffn.linear_1, f"{name}.mlp.c_proj")


class LlamaCpp(SteppingEngine):
    """llama.cpp's C interface: one llama_batch a step, with a token of every sequence.

    tinygpt converts the float32 GGUF file, and llama.cpp quantizes it.
    """

    @staticmethod
    def make(source: Path, folder: Path, dtype: str) -> None:
        if dtype == "float32":
            shutil.copy(source / "model.gguf", folder)
            return
        import llama_cpp

        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{LLAMA_FILE_TYPES[dtype]}")
        paths = [str(place / "model.gguf").encode() for place in (source, folder)]
        if llama_cpp.llama_model_quantize(*paths, ctypes.byref(params)):
            raise RuntimeError(f"llama_model_quantize could not make {dtype}")

    def __init__(self, folder: Path, dtype: str, threads: int, kv_cache_dtype: str | None = None):
        import llama_cpp

        self.cpp = llama_cpp
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(folder / "model.gguf").encode(), params)
        if not self.model:
            raise RuntimeError("llama.cpp could not load the model")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.threads = threads
        self.kv_cache_dtype = kv_cache_dtype
        self.sequences = None
        self.context = None
        self.batch = llama_cpp.llama_batch_init(LLAMA_BATCH, 0, 1)

    def start(self, ids: list[list[int]]) -> None:
        if self.sequences != len(ids):
            self._make_context(len(ids))
        self.cpp.llama_memory_clear(self.cpp.llama_get_memory(self.context), False)
        self.position = 0
        self._forward(ids)

    def step(self) -> None:
        self._forward(self.tokens[:, None])

    def last_logits(self, ids: list[int]) -> list[float]:
        self.start([ids])
        return self._logits(len(ids) - 1).tolist()

    def _make_context(self, sequences: int) -> None:
        if self.context:
            self.cpp.llama_free(self.context)
        params = self.cpp.llama_context_default_params()
        params.n_ctx = sequences * self.cpp.llama_model_n_ctx_train(self.model)
        params.n_seq_max = sequences
        params.n_batch = LLAMA_BATCH
        params.n_threads = params.n_threads_batch = self.threads
        if self.kv_cache_dtype:  # quantized values need its flash attention
            params.type_k = params.type_v = GGML_TYPES[self.kv_cache_dtype]
        self.context = self.cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not make a context for {sequences} sequences")
        self.sequences = sequences

    def _forward(self, ids) -> None:
        """Take the next tokens (sequences, new) of every sequence, and choose the following ones."""
        count, new = np.shape(ids)
        per_call = max(1, LLAMA_BATCH // new)  # whole sequences
        self.tokens = np.empty(count, np.int64)
        for first in range(0, count, per_call):
            sequences = range(first, min(first + per_call, count))
            batch = self.batch
            batch.n_tokens = len(sequences) * new
            for i in range(batch.n_tokens):
                s, t = divmod(i, new)
                batch.token[i] = int(ids[sequences[s]][t])
                batch.pos[i] = self.position + t
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequences[s]
                batch.logits[i] = t == new - 1
            if status := self.cpp.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            for i, s in enumerate(sequences):
                self.tokens[s] = self._logits((i + 1) * new - 1).argmax()
        self.position += new

    def _logits(self, i: int) -> np.ndarray:
        pointer = self.cpp.llama_get_logits_ith(self.context, i)
        return np.ctypeslib.as_array(pointer, (self.vocabulary,))
