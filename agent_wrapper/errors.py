"""What an agent may raise on purpose, and what the wrapper raises at its author."""


class AgentFailure(Exception):
    """Raised by an agent that failed and knows it: the rollout ends as agent_error.

    With a `reward` the agent has scored its own failure and the rollout may be trained; without one it never is.
    """

    def __init__(self, message: str, reward: float | None = None) -> None:
        super().__init__(message)
        self.reward = reward


class CommandError(Exception):
    """The command of an agent exited with a code other than 0: the rollout ends as agent_error, without a reward."""


class CommandNotStarted(Exception):
    """The command of an agent cannot be started, for example because its image lacks it: the rollout ends as
    infra_error."""


class RewardError(Exception):
    """A command reported no reward, or one that is not a finite number: the rollout ends as agent_error."""


class VerifierError(Exception):
    """A verifier could not score the command: the rollout ends as infra_error, never with a reward."""


class EntrypointError(Exception):
    """The author's code cannot be served: no entrypoint, two of them, or one of the wrong shape."""
