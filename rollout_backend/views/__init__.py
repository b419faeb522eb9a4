"""What people look at after or during a run: the page, the terminal, tables, comparisons, replay, rescoring."""
