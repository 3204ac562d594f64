"""The engine on Ray (extra `ray`): prompts of a file or a dataset, and replicas of the server.

`batch` is for `generate --ray`, `completer` for `map_batches`, `application` for Ray Serve.
"""
