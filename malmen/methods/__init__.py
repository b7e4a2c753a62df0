"""Other ways to edit a language model, each behind the interface of `malmen.edit_method`: facts in, shifts out.

`registry` lists them all. A new method is a module here, an entry there and a section of `malmen.config`. These modules
may import the rest of `malmen`; the core imports nothing from here.
"""
