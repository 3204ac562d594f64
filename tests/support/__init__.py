"""What several test files share, and what stands in for something that is absent.

Checkpoints and models (tiny_checkpoint, golden_models, family_models, moe_models, golden_adapters, library_tokenizers;
by torch factory, recipes), what transformers answers or once answered (oracles, oracles, oracles,
recorded, record), files as torch.save writes them (torch_files), the tiny checkpoint as other programs write it
(foreign, and a writer for each: tf, gguf, onnx, megatron), kernels called alone (kernel_tools, logit_rows, cuda_linear,
cuda_model), how many random examples are tried (examples), what a second run may leave out (settled), stand-ins
(hub_server, cuda_simulator, cuda_device), a compiler without a GPU (cuda_compile), comparisons (bits, parity), the
command line (commands), processes that have the libraries already, or limits (apart, limits), the demo's tokenizer made
once (demo_tokenizer), records (bench_records), what compiles (compiled), ranks that are threads (thread_world), memory
processes that a test has started (processes, ray_processes), an emulated ARM CPU
(arm_machine) and what it must compute (logit_hashes), the HTTP server with its clients and an engine that steps as it
is told (serving, http_client, gate), and the public contract (contract). A helper of one file stays in that file; one
of a single room, if it is a fixture, is in the room's conftest.py. No test file imports another.
"""
