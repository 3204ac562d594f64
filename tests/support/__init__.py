"""What several test files share. A helper of one file stays in that file, a fixture of one room in its conftest.py.

- checkpoints: tiny_checkpoint, golden_models (with adapters), family_models, moe_models; foreign and the *_writer
  modules write the tiny one as other programs do; torch_files stands for torch.save
- answers of transformers: oracles and recorded; parity is live; library_tokenizers
- kernels: kernel_tools; cuda_* compile CUDA, ptx_* run it; arm_machine and logit_hashes
- engine and server: engines, gate, serving, hub_server, thread_world (ranks that are threads)
- processes: apart (forked, with limits), processes (commands); examples; bench_records; paths
"""
