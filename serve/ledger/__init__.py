"""What the endpoint keeps: the ledger of edits with its tables and hash chain, jobs, tensors, the copy of the editor.

A change is recorded here before it is acknowledged. Imports the messages, problems and settings, and torch only in
`blobs`; nothing of HTTP, of the writer or of the readers.
"""
