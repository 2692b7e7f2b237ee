"""A whole training run: its loader, length, optimizer, schedule and validation."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from castwise.spec.frozen import FrozenModel

Number = float | int | bool | tuple[float, float]
Rate = Annotated[float, Field(gt=0)]


class Loader(FrozenModel):
    """How batches reach the training loop: the arguments of a DataLoader, by torch's names where it has one."""

    num_workers: int = Field(default=2, ge=0)
    pin_memory: bool = False
    drop_last: bool = False
    shuffle: bool = True
    resident: bool = False  # the data lies on the device from the start, without a loader
    persistent: bool = False  # the workers live on from epoch to epoch
    prefetch_batches: int | None = Field(default=None, ge=1)  # per worker; None takes torch's default
    non_blocking: bool = False  # batches are copied to the device asynchronously


class Schedule(FrozenModel):
    """How the learning rate changes.

    `step`: times `gamma` after each epoch. `triangular`: up to the full rate, linear back. `one_cycle`: fastai's,
    momentum falls while the rate rises. `plateau`: divided if the validation loss does not improve.
    """

    kind: Literal["constant", "step", "triangular", "one_cycle", "plateau"] = "constant"
    arguments: dict[str, Number] = Field(default_factory=dict)


class Optimizer(FrozenModel):
    """An optimizer of `torch.optim` by class name, with its arguments."""

    name: str
    arguments: dict[str, Number] = Field(default_factory=dict)


class Recipe(FrozenModel):
    """A training run, as its source's code does it."""

    epochs: int = Field(ge=1)
    transform: str | None = None  # of a sample on the CPU: a name of `trial/data/transforms.py`
    loader: Loader = Loader()
    optimizer: Optimizer | None = None  # None takes the workload's own
    # Of the workload's layer groups, the highest if the schedule changes them; empty gives all the optimizer's rate.
    group_rates: tuple[Rate, ...] = ()
    schedule: Schedule = Schedule()
    # The first epochs, counted in `epochs`, that have a one-cycle schedule of their own; then the optimizer's state is
    # reset.
    first_cycle_epochs: int = Field(default=0, ge=0)
    first_cycle_rates: tuple[Rate, ...] = ()  # of that cycle, as `group_rates`; empty takes those
    samples_per_epoch: int | None = Field(default=None, ge=1)  # of synthetic data; real data has its own
    pooled_split: bool = False  # training and test data are split again, 80 to 20, as fastai's `valid_pct=0.2` did
    validate_each_epoch: bool = False
    # One pass after the run if its epochs have none. Its time and memory do not count, its energy does.
    validate_at_end: bool = False
    validation_batch_size: int = Field(default=256, ge=1)
    validation_workers: int = Field(default=1, ge=0)
    read_loss_every_step: bool = False  # by the host, which synchronises
    skip_batches: int = Field(default=0, ge=0)  # first batches of an epoch that its throughput does not count
    skip_epochs: int = Field(default=0, ge=0)  # first epochs that the mean throughput does not count
    cudnn_benchmark: bool = False
    # Where the run and its epochs are cut short; the schedule is still that of the whole. None: not at all.
    stop_after: int | None = Field(default=None, ge=1)  # epochs
    max_steps: int | None = Field(default=None, ge=1)  # of an epoch

    @property
    def num_epochs(self) -> int:
        return min(self.epochs, self.stop_after or self.epochs)

    @property
    def is_shortened(self) -> bool:
        """Return whether fewer epochs or steps are run than the source's code does."""
        return self.num_epochs < self.epochs or self.max_steps is not None

    @property
    def validates(self) -> bool:
        """Return whether the validation data is read at all."""
        return self.validate_each_epoch or self.validate_at_end

    @model_validator(mode="after")
    def _first_cycle_fits(self) -> Self:
        if self.first_cycle_epochs and self.schedule.kind != "one_cycle":
            raise ValueError(f"a first cycle needs a schedule of kind one_cycle, not '{self.schedule.kind}'")
        wanted, given = max(1, len(self.group_rates)), len(self.first_cycle_rates)
        if given not in (0, wanted):
            raise ValueError(f"first_cycle_rates has {given} rates where the run has {wanted}")
        return self
