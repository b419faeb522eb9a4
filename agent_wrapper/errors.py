"""Exceptions that an agent may raise on purpose, and exceptions that the wrapper raises for its author."""


class AgentFailure(Exception):
    """Raised by an agent that knows that it failed. The rollout ends as agent_error.

    With a `reward`, the agent has scored its own failure, which may be trained; without one, it never is.
    """

    def __init__(self, message: str, reward: float | None = None) -> None:
        super().__init__(message)
        self.reward = reward


class CommandError(Exception):
    """An agent's command exited with a code other than 0. The rollout ends as agent_error, without a reward."""


class CommandNotStarted(Exception):
    """An agent's command cannot be started, for example because its image lacks it. The rollout ends as
    infra_error."""


class RewardError(Exception):
    """A command reported no reward, or one that is not a finite number. The rollout ends as agent_error."""


class VerifierError(Exception):
    """A verifier could not score the command. The rollout ends as infra_error, never with a reward."""


class EntrypointError(Exception):
    """The author's code cannot be served: it has no entrypoint, two of them, or one with the wrong signature."""
