"""GPT-2 as programs with names of their own write it: OpenAI's, nanoGPT and minGPT, llama.cpp, ONNX's exporters.

Belongs here: a family whose names are one program's, and a tokenizer that only it has. May import `hugging_face` and
below.
"""
