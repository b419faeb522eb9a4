"""Train with a training service: sample, forward and backward passes, optimizer steps and checkpoints over HTTP."""
