"""Where agents run, and which contracts of other frameworks they may speak."""
