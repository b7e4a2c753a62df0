"""Live edits on Ray Serve: facts are added to a model and removed from it, exactly, while it serves.

`http/` is the interface, `writing/` the one writer, `reading/` the readers, `ledger/` what is kept on disk. `app`
deploys them on Ray Serve. The first three know each other only by `messages`; all of them may import the ledger.
"""
