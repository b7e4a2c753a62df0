"""MALMEN's rivals, each with the editor's interface: facts in, shifts out."""
