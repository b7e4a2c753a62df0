"""The endpoint's HTTP interface: FastAPI routes, schemas, access, problem details and Prometheus metrics.

It reaches the writer and the readers through `malmen.serve.messages` only, so it needs no torch.
"""
