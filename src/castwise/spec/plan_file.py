"""A plan as a file, and its shards: parts that machines measure independently of each other."""

import heapq
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from castwise._version import __version__
from castwise.errors import UsageError, shortened
from castwise.spec.frozen import FrozenModel
from castwise.spec.grouping import grouped
from castwise.spec.options import OF_MACHINE, RunOptions, options_of
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserModel


class PlanFile(FrozenModel):
    """What `castwise run --plan-only` writes: a request, and the trials that it asks for."""

    castwise: str = __version__  # another version refuses it
    options: dict[str, Any]  # the request, by the options' keywords; without those of `OF_MACHINE`
    models: dict[str, UserModel] = Field(default_factory=dict)  # by their names in the request
    specs: tuple[TrialSpec, ...]  # one with repeat 0 for each configuration

    @property
    def device(self) -> str:
        """Return the device that it is for: "cpu" or "cuda:N"."""
        return self.specs[0].device

    @property
    def num_nodes(self) -> int:
        """Return how many nodes share its largest trials."""
        return max(spec.num_nodes for spec in self.specs)

    @property
    def num_gpus(self) -> int:
        """Return how many GPUs a node needs; 0 on a CPU."""
        return 0 if self.device == "cpu" else max(spec.world_size // spec.num_nodes for spec in self.specs)

    @property
    def comparisons(self) -> list[tuple[TrialSpec, ...]]:
        """Return the comparisons, the one with most configurations first.

        Ratios are taken within a comparison, so that all of it is measured on one machine.
        """
        found = grouped(self.specs, lambda spec: spec.comparison).values()
        return sorted(map(tuple, found), key=len, reverse=True)

    def shards(self, count: int) -> list[tuple[TrialSpec, ...]]:
        """Return the trials of each shard, the largest shards first; some are empty if there are fewer comparisons.

        The largest comparison that is left goes to the shard with the fewest configurations.
        """
        shards: list[list[TrialSpec]] = [[] for _ in range(count)]
        smallest = [(0, number) for number in range(count)]
        for comparison in self.comparisons:
            size, number = heapq.heappop(smallest)
            shards[number].extend(comparison)
            heapq.heappush(smallest, (size + len(comparison), number))
        return list(map(tuple, shards))


def planned_options(options: RunOptions) -> dict[str, Any]:
    given = (
        (option.keyword, getattr(options, option.name))
        for option in options_of(RunOptions)
        if option.name not in OF_MACHINE
    )
    return {
        keyword: list(value) if isinstance(value, tuple) else value for keyword, value in given if value is not None
    }


def read_plan(path: Path) -> PlanFile:
    """Return the plan in a file.

    Raises:
        UsageError: There is none, or another castwise made it.
    """
    try:
        plan = PlanFile.model_validate_json(path.read_bytes())
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
        raise UsageError(f"'{path}' {why}. `castwise run WORKLOAD --plan-only {path}` writes one.") from None
    except ValidationError as error:
        first = error.errors()[0]
        why = f"is no plan of castwise ({shortened('.'.join(map(str, first['loc'])) or 'the file')}: {first['msg']})"
        raise UsageError(f"'{path}' {why}. `castwise run WORKLOAD --plan-only {path}` writes one.") from None
    if plan.castwise != __version__:
        raise UsageError(
            f"The plan '{path}' was made by castwise {plan.castwise}, and this is castwise {__version__}: their "
            "figures cannot be compared. Install one version everywhere, or make the plan anew."
        )
    if not plan.specs:
        raise UsageError(f"The plan '{path}' has no trials. Make it anew.")
    return plan


def parse_shard(text: str) -> tuple[int, int]:
    """Return number and count of `2/8`; raise a UsageError if a text is nothing like it."""
    first, _, second = text.partition("/")
    if first.strip().isdecimal() and second.strip().isdecimal() and 1 <= int(first) <= int(second) <= 1_000_000:
        return int(first), int(second)
    raise UsageError(f"--shard takes a part of the plan as i/n, from 1/n to n/n, such as 2/8, not '{text}'.")
