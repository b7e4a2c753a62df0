"""What is edited: facts and edit records, the formats they come in, their tokens, and the built-in world.

`sampling` decides which records a step uses. Nothing here runs a language model, except the two modules that build
one for the built-in world and for claims.
"""
