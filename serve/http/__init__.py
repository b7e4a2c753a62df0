"""The endpoint's HTTP interface: FastAPI routes, schemas, access, problem documents and Prometheus metrics.

It reads the ledger, and reaches the writer and the readers through `malmen.serve.messages` only, so it needs no torch.
"""
