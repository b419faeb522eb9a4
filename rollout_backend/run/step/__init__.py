"""One training step: plan, dispatch, collect, report, and resume after a restart."""
