"""What an edit does to a model, beyond the paper's ES, GS and LS (`malmen.evaluate`): drift along the unedited model's
own words, whether edits hold behind other text, the answers that a user gets, what lies next to an edit, and how many
facts an editor holds.

May import everything in `malmen` but `malmen.training`, which measures with it.
"""
