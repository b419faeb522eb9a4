"""The report of a run: one HTML file that needs no network. Pure but for `run_data` and `files`: data in, HTML out.

Invariants:

- Text of agents, models, tasks and errors is escaped by the template engine, or set as text by the script.
- A missing reward is hatched in pictures and `null` in data, and no mean counts it.
- The numbers of a step come from its records and its report; no result is decoded for them.
- Results are decoded only for the conversations that are embedded, which are bounded in number and size.
"""
