"""The paper's experiments and its rivals, each one command."""
