"""Live edits on Ray Serve: a durable set of facts, exact to take back."""
