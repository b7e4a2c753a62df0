"""Other ways to edit a language model, each behind the interface of `malmen.edit_method`: facts in, shifts out.

`registry` lists them all; a new one is a module here and an entry there. May import the rest of `malmen`; the core
imports nothing from here.
"""
