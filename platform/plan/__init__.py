"""`malmen plan`: memory, transfers and time of a run, before anything runs.

`planner` puts a plan together from rehearsals of the step's own code on torch's meta device. Only the command line
imports this package.
"""
