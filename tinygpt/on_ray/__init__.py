"""The engine on Ray (extra `ray`): prompts of a dataset, and replicas of the server.

`completer` is a stage of Ray Data, `application` a Ray Serve application, `metrics` shows Ray what the server counts.
"""
