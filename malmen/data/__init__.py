"""What is edited: facts and edit records, their formats, their tokens, and the built-in world.

`splits` reads the training and held-out records of a run, `sampling` draws the batch of each step. Nothing here runs a
language model, except `built_models`, which trains one for the built-in world and one for claims.
"""
