"""How a step on several GPUs differs from the same loop's on one: where the time between the two goes."""

import math
from dataclasses import dataclass

from castwise.analysis.step_evidence import StepEvidence


@dataclass(frozen=True)
class BesideOneGpu:
    """What the step of the slowest rank takes more than the step on one GPU; the parts add up to the difference.

    All figures are in seconds. A part is negative if it takes less than on one GPU.
    """

    rank: int  # the slowest one
    one_seconds: float  # the step on one GPU
    step_seconds: float
    communication_seconds: float  # collectives run, and no other kernel
    clock_seconds: float  # other kernels take longer, as the GPU's clock is lower
    kernel_seconds: float  # they take longer for other reasons: beside collectives, or as there are more of them
    idle_seconds: float  # no kernel runs: launches, Python, loaders
    rest_seconds: float  # the timed steps differ by more than the profiled ones
    waited_seconds: float  # that another rank waits for this one, at most
    slower_classes: dict[str, float]  # by how much the first rank's kernels take longer, by class; the most first


def beside_one_gpu(several: StepEvidence, one: StepEvidence) -> BesideOneGpu | None:
    """Return how a step differs from that of the same loop on one GPU; None if that is not known of all ranks."""
    found, alone = several.spent.communication, one.profile
    if several.on_cpu or alone is None or found is None or not len(found.rank_seconds) == len(found.rank_steps) > 1:
        return None
    slowest = min(range(len(found.rank_steps)), key=found.rank_seconds.__getitem__)
    own = found.rank_steps[slowest]
    if own.exposed_seconds is None or own.idle_seconds is None:  # an older record
        return None
    exposed, busy = own.exposed_seconds, own.compute_seconds + own.exposed_seconds
    # The profiler slows the host: a timed step idles no longer than it has time for.
    idle = min(own.idle_seconds, max(0.0, several.seconds - busy))
    idle -= min(alone.idle_seconds or 0.0, max(0.0, one.seconds - alone.busy_seconds))
    longer = own.compute_seconds - alone.busy_seconds
    clock = min(max(0.0, longer), alone.busy_seconds * _slower_by(several, one, slowest))
    more = {
        name: seconds - alone.class_seconds.get(name, 0.0)
        for name, seconds in several.spent.class_seconds.items()
        if name != "communication"
    }
    return BesideOneGpu(
        rank=slowest,
        one_seconds=one.seconds,
        step_seconds=several.seconds,
        communication_seconds=exposed,
        clock_seconds=clock,
        kernel_seconds=longer - clock,
        idle_seconds=idle,
        rest_seconds=several.seconds - one.seconds - exposed - longer - idle,
        waited_seconds=max(several.rank_waits, default=0.0) * several.seconds,
        slower_classes={name: more[name] for name in sorted(more, key=lambda each: -more[each]) if more[name] > 0},
    )


def _slower_by(several: StepEvidence, one: StepEvidence, rank: int) -> float:
    """Return by what share of it the clock on one GPU is above that of a rank's GPU; 0 if it is not, or not known."""
    clocks = [each.sm_clock_hertz for each in one.trial.readings if each.sm_clock_hertz]
    if not clocks or rank >= len(several.gpus):
        return 0.0
    return max(0.0, sum(clocks) / len(clocks) / (several.gpus[rank].sm_clock_hertz or math.inf) - 1)
