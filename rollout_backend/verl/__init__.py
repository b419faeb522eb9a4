"""The verl integration. Add these two settings to verl's command line:

+actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollout_backend.verl.CloudAgentLoopManager
+actor_rollout_ref.rollout.custom.rollout_backend=config.yaml
"""

# Importing the module registers the estimators.
from rollout_backend.verl import advantage as advantage
from rollout_backend.verl.manager import CloudAgentLoopManager

__all__ = ["CloudAgentLoopManager"]
