"""The command `malmen`: one module per group of commands, what they print, and the quickstart.

`main` is the entry point. `options` and `output` serve the commands of `tune` and `serve` too; those rooms add their
commands by the entry-point group `malmen.commands`, so nothing here imports them.
"""
