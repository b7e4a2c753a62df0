"""Sweeps over editors with Ray Tune: the space, the search, trials, the champion and the report.

`sweep` runs one; `experiments/` compares methods. May import `malmen.platform` and the core; nobody imports it.
"""
