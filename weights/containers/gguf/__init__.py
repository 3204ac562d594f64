"""GGUF's files, and ggml's block formats, which `convert --to gguf` writes as well.

Belongs here: what ggml defines. May import `container`, `mapped_file` and `peek`.
"""
