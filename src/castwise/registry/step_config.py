"""The settings of a training step that techniques change; the worker carries them out, the emitter writes them."""

import os
from collections.abc import Hashable
from dataclasses import dataclass

from castwise.spec.recipe import Recipe

# More loader processes than these were not seen to help one GPU, and each holds batches in memory.
# Source: chosen here.
_MOST_WORKERS = 8
_BATCHES_AHEAD = 4


@dataclass(frozen=True)
class ModelChange:
    """A function that changes a model in place, before its precision is applied and in float32.

    Attributes:
        function: `package.module:function`; the worker imports it, the emitter copies its source.
        arguments: What it is called with after the model.
    """

    function: str
    arguments: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class StepConfig:
    """The settings of a training step that techniques change; the defaults are the plain loop.

    Attributes:
        resident_data: Whether the data set lies on the device and is augmented there.
        loader_workers: Whether the loader has as many processes as help, kept from epoch to epoch.
        pinned_transfer: Whether batches are copied from page-locked memory while the host goes on.
        channels_last: Whether weights and activations of four dimensions lie with channels innermost.
        cudnn_search: Whether cuDNN tries its algorithms and takes the fastest for each shape.
        optimizer_arguments: Arguments on top of the optimizer's own: `fused`, `foreach`.
        scales_on_device: Whether dynamic loss scaling decides on the device whether a step is skipped.
        reads_loss: Whether the host may read the loss each step, if the source does.
        model_changes: Functions that change the model, in their order.
        num_channels: The channels that images are padded to; None leaves them.
        loss_chunks: Parts that decoder and loss are computed in, without keeping logits.
        compile_mode: The mode of torch.compile; None compiles nothing.
        compiled_update: Whether what follows backward is one compiled function.
        coalesced_reduce: Whether ranks average all gradients at once after backward.
        cuda_graph: Whether the whole step is captured and replayed.
        steps_per_launch: Steps that a replay takes.
    """

    resident_data: bool = False
    loader_workers: bool = False
    pinned_transfer: bool = False
    channels_last: bool = False
    cudnn_search: bool = False
    optimizer_arguments: tuple[tuple[str, bool], ...] = ()
    scales_on_device: bool = False
    reads_loss: bool = True
    model_changes: tuple[ModelChange, ...] = ()
    num_channels: int | None = None
    loss_chunks: int = 1
    compile_mode: str | None = None
    compiled_update: bool = False
    coalesced_reduce: bool = False
    cuda_graph: bool = False
    steps_per_launch: int = 1

    @property
    def reads_rates_on_device(self) -> bool:
        """Return whether a learning rate that changes has to be a tensor: a number would be captured or compiled in."""
        return self.cuda_graph or self.compiled_update

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return a training run's recipe as this configuration carries it out."""
        loader = recipe.loader
        if self.loader_workers:
            workers = max(loader.num_workers, min(_MOST_WORKERS, len(os.sched_getaffinity(0))))
            update = {"num_workers": workers, "persistent": True, "prefetch_batches": _BATCHES_AHEAD}
            loader = loader.model_copy(update=update)
        if self.pinned_transfer:
            loader = loader.model_copy(update={"pin_memory": True, "non_blocking": True})
        reads = recipe.read_loss_every_step and self.reads_loss
        return recipe.model_copy(update={"loader": loader, "read_loss_every_step": reads})


PLAIN = StepConfig()
