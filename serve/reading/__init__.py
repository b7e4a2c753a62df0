"""Answering prompts: the frozen model under any version, token by token, and the streams that carry answers.

Imports the core, the ledger's `blobs` and the messages; nothing of HTTP or of the writer.
"""
