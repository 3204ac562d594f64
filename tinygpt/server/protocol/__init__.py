"""What clients send and what they get, as strict pydantic models: the names are OpenAI's, and vLLM's for what it adds.

Nothing here knows HTTP or runs a model. From these models come the checks of a request, the replies and /openapi.json.
"""
