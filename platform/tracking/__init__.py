"""MLflow: a training's run (`tracker`), the store it is in (`store`) and the registry of editors (`registry`).

Training imports it; it imports nothing of the cluster.
"""
