"""The results of runs: records, accounts, run directories, metrics, tables, comparisons, reports."""
