"""Trial processes whose steps are slowed down by 1 or 2 %, for `aa.py` to find."""

import time
from multiprocessing.connection import Connection

from castwise.trial import entry


def _serve_slower(share: float, connection: Connection, log_path: str) -> None:
    entry.init_process(log_path)
    import torch

    from castwise.trial import server
    from castwise.trial.steady_run import SteadyRun

    class Slower(SteadyRun):
        def warm_up(self, step_seconds=None):  # type: ignore[no-untyped-def]
            facts = super().warm_up(step_seconds)
            count = max(2, int(0.1 / (self._time_steps(2)[0] / 2)))
            seconds = min(self._time_steps(count)[0] / count for _ in range(3))
            cycles = _cycles(share * seconds) if self._device.type == "cuda" else 0
            plain = self._step._run

            def slower(batch):  # type: ignore[no-untyped-def]
                started = time.perf_counter()
                loss = plain(batch)
                if cycles:
                    torch.cuda._sleep(cycles)
                until = time.perf_counter() + share * min(seconds, time.perf_counter() - started)
                while time.perf_counter() < until:
                    pass
                return loss

            self._step._run = slower
            return facts

    assert hasattr(server, "SteadyRun"), "the class that is replaced has another name"
    server.SteadyRun = Slower  # type: ignore[misc]
    server.serve(connection)


def _cycles(seconds: float) -> int:
    """Return how many cycles the device spins in this time, as measured."""
    import torch

    trial = 20_000_000
    torch.cuda._sleep(trial)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(trial)
    end.record()
    torch.cuda.synchronize()
    return int(trial * seconds / (start.elapsed_time(end) / 1e3))


def by_1_percent(connection: Connection, log_path: str) -> None:
    """Serve a trial whose steps take 1 % longer."""
    _serve_slower(0.01, connection, log_path)


def by_2_percent(connection: Connection, log_path: str) -> None:
    """Serve a trial whose steps take 2 % longer."""
    _serve_slower(0.02, connection, log_path)
