"""Changing the set of facts: the one writer, its service, plans, guards, jobs and exports.

Imports the core, `malmen.serve.ledger` and the messages; nothing of HTTP or of the readers.
"""
