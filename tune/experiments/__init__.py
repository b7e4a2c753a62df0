"""The paper's experiments and its rivals, one command each.

`variants` says what is compared, `cells` what is measured; `work` measures, `runner` spreads the work over Ray;
`results`, `figures`, `findings` and `report` show it. May import `malmen` and `malmen.platform`.
"""
