"""The simulated world of one history: the services outside the trainer, in the state that all trainers share."""

from __future__ import annotations

from tests.simulation.agent_sources import AgentSources
from tests.simulation.agents import Agents
from tests.simulation.capacity import Limits
from tests.simulation.environment import Environment
from tests.simulation.faults import Faults
from tests.simulation.gateway import Gateway
from tests.simulation.run_directory import RunDirectory
from tests.simulation.run_holder import RunHolder
from tests.simulation.runtime import Runtime
from tests.simulation.s3 import Bucket
from tests.simulation.scorer import SimScorer
from tests.simulation.session import Session
from tests.simulation.session_audit import SessionAudit
from tests.simulation.sqs import Queue
from tests.simulation.trainer import Trainer


class World(Environment):
    """The services of one seed. A trainer reaches them through its own `SimStore`, `SimQueue`, `SimRuntime`, ..."""

    def __init__(self, seed: int, faults: Faults | None = None, planned: int | None = None) -> None:
        """`planned` is the number of rollouts of a large step, whose calls fail less often; None for small steps."""
        super().__init__(seed, faults, severity=1.0 if planned is None else 0.2)
        self.trainers: dict[int, Trainer] = {}  # by number
        self.sessions: dict[str, Session] = {}  # the open ones, by id
        self.holder = RunHolder(self, self.trainers)
        self.bucket = Bucket(self, self.holder)
        self.queue = Queue(self)
        self.limits = Limits.draw(self, planned)
        self.gateway = Gateway(self, self.trainers, self.sessions)
        self.run_directory = RunDirectory()
        self.scorer = SimScorer(self)
        self.audit = SessionAudit(self, self.bucket, self.gateway, self.holder, self.sessions)
        self.sources = AgentSources(self, self.bucket)
        self.agents = Agents(self, self.bucket, self.queue, self.gateway, self.audit, self.sources, self.sessions)
        self.runtime = Runtime(self, self.limits, self.agents, self.audit, self.sources, self.sessions)

    def start_trainer(self, trainer: Trainer, weights: str = "") -> None:
        """Start the trainer's gateway, on a machine that may have lost files of the previous trainer."""
        if self.gateway.trainer is not None and self.chance("journal_lost"):
            self.gateway.lose_journal(trainer)
            if self.random.random() < 0.5:  # the whole run directory, as on another machine
                self.run_directory.lose()
                self.audit.log_lost = True
        if not self.run_directory.is_complete(self.bucket):
            self.audit.log_lost = True
        self.gateway.start(trainer, weights)
