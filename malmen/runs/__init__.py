"""What a run leaves on disk, or at any URL that fsspec reads: run folders, checkpoints, caches of the LM's work.

Files and folders appear complete or not at all, and nothing is ever unpickled. `checkpoint` needs the editor and
`fact_cache` the tokens of `malmen.data`; the other modules import only `malmen.config` and `malmen.errors`.
"""
