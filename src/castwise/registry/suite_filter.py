"""What of a suite is run, and how long."""

from dataclasses import dataclass

from castwise.registry.precisions import find_precision
from castwise.registry.techniques import NONE
from castwise.registry.workloads import find_workload


@dataclass(frozen=True)
class SuiteFilter:
    """What of a suite is run, and how long; None takes all.

    Attributes:
        quick: Whether recipes take their quick form.
        epochs: Epochs to run at the most; fewer than the recipe's cut the run short and leave its schedule as it is.
        max_steps: Steps after which each epoch is cut short.
        seeds: Trials a cell, with seeds 0, 1, …
        workloads: Workload names.
        precisions: Precision names.
        world_sizes: Numbers of GPUs.
        synthetic: Whether random samples of the same shape stand in for real data.
        techniques: Loops that every cell is run in, as `castwise run --techniques` takes them.
        validate: Whether runs whose sources do not validate are followed by a pass over the validation data.
    """

    quick: bool = False
    epochs: int | None = None
    max_steps: int | None = None
    seeds: int = 1
    workloads: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    world_sizes: tuple[int, ...] | None = None
    synthetic: bool = False
    techniques: tuple[str, ...] = (NONE,)
    validate: bool = False

    def takes(self, workload: str, precision: str, world_size: int = 1) -> bool:
        """Return whether a cell is among those chosen."""
        workloads = self.workloads and {find_workload(name).name for name in self.workloads}
        precisions = self.precisions and {find_precision(name).name for name in self.precisions}
        return (
            (workloads is None or workload in workloads)
            and (precisions is None or precision in precisions)
            and (self.world_sizes is None or world_size in self.world_sizes)
        )
