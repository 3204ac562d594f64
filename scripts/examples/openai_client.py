"""Start a server and ask it with OpenAI's client: pip install "tinygpt[serve]" openai, python openai_client.py"""

import socket
import subprocess
import sys

from openai import OpenAI

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
serve = f"-m tinygpt serve --model demo --chat-template plain --port {port}"
with subprocess.Popen([sys.executable, *serve.split()], stderr=subprocess.DEVNULL) as server:
    # Retries until the server has started.
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=12)
    try:
        stream = client.completions.create(
            model="demo", prompt="The little dog", max_tokens=12, seed=7, stream=True
        )
        for chunk in stream:
            print(chunk.choices[0].text, end="", flush=True)
        messages = [{"role": "user", "content": "Once upon a time"}]
        reply = client.chat.completions.create(model="demo", messages=messages, max_tokens=12, temperature=0)
        print("", reply.choices[0].message.content, sep="\n")
    finally:
        server.terminate()
