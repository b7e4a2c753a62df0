"""Answering prompts: the frozen model under any version, token by token, and the streams that carry answers.

Imports the ledger's `blobs` and the core; nothing of HTTP.
"""
