"""A fake engine that records the order of blocks, lead-in steps and readings of the GPU."""

from fake_engine import FakeEngine, FakeSession, Fault, fake_environment
from fake_gpu import UUID, FakeMonitor, fake_sample

from castwise.orchestrator.runner import NullListener, TrialRunner
from castwise.records.schema import Block
from castwise.telemetry.sampler import Telemetry


class NotingEngine(FakeEngine):
    """Starts sessions that record what they do in `order`: `look`, `lead PRECISION` and `block PRECISION`."""

    def __init__(self, **faults: Fault) -> None:
        environment = fake_environment(gpu_uuid=UUID)
        super().__init__(faults=faults, environment=environment, session_class=_NotingSession, exclusive=False)
        self.order: list[str] = []

    def runner(self) -> TrialRunner:
        """Return a runner whose readings of the GPU are recorded, too."""
        monitor = FakeMonitor(lambda _: self.order.append("look") or fake_sample())
        return TrialRunner(
            self, None, self.environment, NullListener(), telemetry=Telemetry(lambda _: monitor, 30.0, 30.0)
        )


class _NotingSession(FakeSession):
    def lead_in(self) -> None:
        self._note("lead")
        super().lead_in()

    def run_block(self, length: int = 1) -> Block:
        self._note("block")
        return super().run_block(length)

    def _note(self, what: str) -> None:
        assert isinstance(self._engine, NotingEngine)
        self._engine.order.append(f"{what} {self.spec.precision}")
