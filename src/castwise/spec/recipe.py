"""A whole training run: its loader, length, optimizer, schedule and validation."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from castwise.spec.frozen import FrozenModel

Number = float | int | bool | tuple[float, float]
Rate = Annotated[float, Field(gt=0)]


class Loader(FrozenModel):
    """How batches reach the training loop.

    Attributes:
        num_workers: Processes of the DataLoader.
        pin_memory: Whether batches are put into page-locked memory.
        drop_last: Whether an incomplete last batch is left out.
        shuffle: Whether samples are drawn in a new order each epoch.
        resident: Whether the data lies on the device from the start, without a loader.
        persistent: Whether the processes live on from epoch to epoch.
        prefetch_batches: Batches that each process makes in advance; None takes torch's default.
        non_blocking: Whether a batch is copied to the device asynchronously.
    """

    num_workers: int = Field(default=2, ge=0)
    pin_memory: bool = False
    drop_last: bool = False
    shuffle: bool = True
    resident: bool = False
    persistent: bool = False
    prefetch_batches: int | None = Field(default=None, ge=1)
    non_blocking: bool = False


class Schedule(FrozenModel):
    """How the learning rate changes.

    Attributes:
        kind: `constant`; `step` (times `gamma` after each epoch); `triangular` (warm-up to the full rate, linear
            back); `one_cycle` (fastai's, momentum falls while the rate rises); `plateau` (divided if the validation
            loss does not improve).
        arguments: The kind's numbers, by name.
    """

    kind: Literal["constant", "step", "triangular", "one_cycle", "plateau"] = "constant"
    arguments: dict[str, Number] = Field(default_factory=dict)


class Optimizer(FrozenModel):
    """An optimizer of `torch.optim` by class name, with its arguments."""

    name: str
    arguments: dict[str, Number] = Field(default_factory=dict)


class Recipe(FrozenModel):
    """A training run, as its source's code does it.

    Attributes:
        epochs: Passes over the training data.
        transform: What is done to a sample on the CPU: a name of `worker/data/transforms.py`.
        loader: How batches reach the loop.
        optimizer: The optimizer; None takes the workload's own.
        group_rates: The learning rate of each of the workload's layer groups, the highest if the schedule changes
            it; empty gives every weight the optimizer's.
        schedule: How the learning rate changes.
        first_cycle_epochs: First epochs that have a one-cycle schedule of their own, after which the optimizer's
            state is reset and the schedule of the others begins; they count among `epochs`.
        first_cycle_rates: The highest rates of that first cycle, as in `group_rates`; empty takes those.
        samples_per_epoch: Length of an epoch of synthetic data; real data has its own.
        pooled_split: Whether training and test data are pooled and split again, 80 to 20, as fastai's
            `valid_pct=0.2` did.
        validate_each_epoch: Whether every epoch ends with a pass over the validation data.
        validate_at_end: Whether the run is followed by such a pass if its epochs have none, for the accuracy. Its time
            and memory do not count for the run; energy by the driver's counter does.
        validation_batch_size: Samples per step of a pass.
        validation_workers: DataLoader processes of a pass.
        read_loss_every_step: Whether the host reads the loss after every step, which synchronises.
        skip_batches: First batches of an epoch that its throughput does not count.
        skip_epochs: First epochs that the mean throughput does not count.
        cudnn_benchmark: Whether cuDNN times its algorithms and takes the fastest for each shape.
        stop_after: Epochs after which the run is cut short; its schedule is still that of the whole run. None runs all.
        max_steps: Steps after which an epoch is cut short; its schedule is still that of whole epochs. None runs all.
    """

    epochs: int = Field(ge=1)
    transform: str | None = None
    loader: Loader = Loader()
    optimizer: Optimizer | None = None
    group_rates: tuple[Rate, ...] = ()
    schedule: Schedule = Schedule()
    first_cycle_epochs: int = Field(default=0, ge=0)
    first_cycle_rates: tuple[Rate, ...] = ()
    samples_per_epoch: int | None = Field(default=None, ge=1)
    pooled_split: bool = False
    validate_each_epoch: bool = False
    validate_at_end: bool = False
    validation_batch_size: int = Field(default=256, ge=1)
    validation_workers: int = Field(default=1, ge=0)
    read_loss_every_step: bool = False
    skip_batches: int = Field(default=0, ge=0)
    skip_epochs: int = Field(default=0, ge=0)
    cudnn_benchmark: bool = False
    stop_after: int | None = Field(default=None, ge=1)
    max_steps: int | None = Field(default=None, ge=1)

    @property
    def num_epochs(self) -> int:
        """Return the epochs that are run."""
        return min(self.epochs, self.stop_after or self.epochs)

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
