"""Show live progress, print rollouts and reports, and write the run directory."""
