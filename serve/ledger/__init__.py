"""The durable side of the endpoint: the ledger of edits, its tables and hash chain, jobs, tensors, the editor's copy.

What is acknowledged is recorded here first. Imports no torch except in `blobs`, and nothing of `malmen.serve.http`.
"""
