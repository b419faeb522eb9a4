"""Render the report of a run as one HTML file that needs no network. Pure, except for `report`.

Invariants:

- The template engine escapes the text of agents, models, tasks and errors, or the script inserts it as text.
- A missing reward is hatched in charts and `null` in data, and excluded from means.
- The numbers of a step come from its records and its report; they require no decoding of results.
- Results are decoded only for embedded conversations, which are limited in number and size.
"""
