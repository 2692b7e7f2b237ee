"""What holds a trial's memory, part by part, and how far memory fell short where it did."""

from typing import Annotated

from pydantic import Field

from castwise.spec.frozen import FrozenModel

_Bytes = Annotated[int, Field(ge=0)]


class MemoryParts(FrozenModel):
    """What held memory at the peak of one training step after the timed ones, taken apart operation by operation.

    A tensor counts once, by its storage; what is saved for backward and lies in a weight or a batch is a weight or a
    batch.

    Attributes:
        weights_bytes: The model's parameters and buffers.
        masters_bytes: Float32 masters of lower-precision weights.
        gradients_bytes: Gradients of parameters and masters, as many as there were at that moment.
        optimizer_bytes: The optimizer's state: momentum, Adam's moments.
        batches_bytes: Batches that lie on the device all the time.
        saved_bytes: Activations saved for backward.
        weight_casts_bytes: Lower-precision copies of weights that autocast makes and keeps for backward.
        temporaries_bytes: All other tensors alive at that moment: outputs in flight, gradients of activations.
        workspace_bytes: What the allocator had given out besides: workspaces within operations, those that cuBLAS
            keeps, rounding. None on a CPU, where nobody knows.
        outside_bytes: In use on the device outside the allocator: the CUDA context, libraries, other processes. None
            on a CPU.
        missing: Why the step was not taken apart; all else is 0 then.
    """

    weights_bytes: _Bytes = 0
    masters_bytes: _Bytes = 0
    gradients_bytes: _Bytes = 0
    optimizer_bytes: _Bytes = 0
    batches_bytes: _Bytes = 0
    saved_bytes: _Bytes = 0
    weight_casts_bytes: _Bytes = 0
    temporaries_bytes: _Bytes = 0
    workspace_bytes: _Bytes | None = None
    outside_bytes: _Bytes | None = None
    missing: str = ""

    @property
    def tensors_bytes(self) -> int:
        """Return what tensors held at that moment."""
        return (
            self.weights_bytes
            + self.masters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.batches_bytes
            + self.saved_bytes
            + self.weight_casts_bytes
            + self.temporaries_bytes
        )

    @property
    def peak_bytes(self) -> int:
        """Return the step's peak: what tensors held, and workspaces."""
        return self.tensors_bytes + (self.workspace_bytes or 0)


class Shortfall(FrozenModel):
    """How far memory fell short where a trial ran out of it.

    Attributes:
        needed_bytes: What was held, and what was asked for on top: so much is needed at the least.
        free_bytes: What there was for the trial: its limit, or what other processes left of the device.
    """

    needed_bytes: _Bytes
    free_bytes: _Bytes
