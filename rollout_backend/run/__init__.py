"""What a run does: check, plan, dispatch, collect, score, account for each rollout, clean up."""
