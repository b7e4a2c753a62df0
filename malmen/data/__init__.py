"""What is edited: facts and edit records, their formats, their tokens, and the built-in world.

`splits` reads the training and held-out records of a run, `sampling` draws the batch of each step. Nothing here runs a
language model, except `world_model` and `claims_model`, which train one for the built-in world and for claims.
"""
