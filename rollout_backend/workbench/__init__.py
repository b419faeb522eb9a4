"""What people use around a run: deployment of agents, and a cloud on this machine."""
