"""What the techniques of a trial make of its loop: the one place that reads their names."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from castwise.errors import UsageError
from castwise.spec.recipe import Recipe

# More processes than these were not seen to help one GPU, and each holds batches in memory. Source: chosen here.
_MOST_WORKERS = 8
_BATCHES_AHEAD = 4
_VOCABULARY_MULTIPLE = 64
_LOSS_CHUNKS = 8
_WIDTH_MULTIPLE = 64
_STEPS_PER_LAUNCH = 8


@dataclass(frozen=True)
class StepConfig:
    """The settings of a training loop that techniques change; the defaults are the plain loop.

    Attributes:
        resident_data: Whether the data set lies on the device and is augmented there.
        loader_workers: Whether the loader has as many processes as help, kept from epoch to epoch.
        pinned_transfer: Whether batches are copied from page-locked memory while the host goes on.
        channels_last: Whether weights and activations of four dimensions lie with channels innermost.
        cudnn_search: Whether cuDNN tries its algorithms and takes the fastest for each shape.
        optimizer: Arguments on top of the optimizer's own: `fused`, `foreach`.
        scales_on_device: Whether dynamic loss scaling decides on the device whether a step is skipped.
        reads_loss: Whether the host may read the loss each step, where the source does.
        vocabulary_multiple: What the number of words of the decoder is brought to a multiple of.
        num_channels: The channels that images are brought to; None leaves them.
        loss_chunks: Parts that decoder and loss are computed in, without keeping logits.
        compile_mode: The mode of torch.compile; None compiles nothing.
        compiled_update: Whether what follows backward is one compiled function.
        width_multiple: What the width of a recurrent model is brought to a multiple of.
        space_to_depth: Whether the first convolution, of stride 2, reads squares of 2 by 2 pixels as channels.
        matmul_stem: Whether the first convolution, of stride 1, is a matrix product over its windows.
        max_pool_kernel: Whether max poolings of 3 by 3 with stride 2 have kernels of their own.
        batch_norm_kernel: Whether batch norms have kernels of their own, with what follows them.
        coalesced_reduce: Whether ranks average all gradients at once behind backward.
        cuda_graph: Whether the whole step is captured and replayed.
        steps_per_launch: Steps that a replay takes.
    """

    resident_data: bool = False
    loader_workers: bool = False
    pinned_transfer: bool = False
    channels_last: bool = False
    cudnn_search: bool = False
    optimizer: tuple[tuple[str, bool], ...] = ()
    scales_on_device: bool = False
    reads_loss: bool = True
    vocabulary_multiple: int = 1
    num_channels: int | None = None
    loss_chunks: int = 1
    compile_mode: str | None = None
    compiled_update: bool = False
    width_multiple: int = 1
    space_to_depth: bool = False
    matmul_stem: bool = False
    max_pool_kernel: bool = False
    batch_norm_kernel: bool = False
    coalesced_reduce: bool = False
    cuda_graph: bool = False
    steps_per_launch: int = 1

    @property
    def reads_rates_on_device(self) -> bool:
        """Return whether a learning rate that moves has to be a tensor: a number would be captured or compiled in."""
        return self.cuda_graph or self.compiled_update

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return a training run's recipe as this loop carries it out."""
        loader = recipe.loader
        if self.loader_workers:
            workers = max(loader.num_workers, min(_MOST_WORKERS, _num_cores()))
            update = {"num_workers": workers, "persistent": True, "prefetch_batches": _BATCHES_AHEAD}
            loader = loader.model_copy(update=update)
        if self.pinned_transfer:
            loader = loader.model_copy(update={"pin_memory": True, "non_blocking": True})
        reads = recipe.read_loss_every_step and self.reads_loss
        return recipe.model_copy(update={"loader": loader, "read_loss_every_step": reads})


PLAIN = StepConfig()

_GRAPH = {"cuda_graph": True, "reads_loss": False, "scales_on_device": True}

# By technique. A fused optimizer and a graph decide on the device too: the one takes the overflow flag into its kernel,
# as GradScaler hands it; the other cannot ask the host.
_SETTINGS: dict[str, dict[str, Any]] = {
    "resident-data": {"resident_data": True},
    "loader-workers": {"loader_workers": True},
    "pinned-transfer": {"pinned_transfer": True},
    "channels-last": {"channels_last": True},
    "cudnn-search": {"cudnn_search": True},
    "foreach-optimizer": {"optimizer": (("foreach", True),)},
    "fused-optimizer": {"optimizer": (("fused", True),), "scales_on_device": True},
    "no-step-sync": {"reads_loss": False, "scales_on_device": True},
    "compiled-update": {"optimizer": (("foreach", True),), "scales_on_device": True, "compiled_update": True},
    "pad-hidden": {"width_multiple": _WIDTH_MULTIPLE},
    "space-to-depth": {"space_to_depth": True},
    "matmul-stem": {"matmul_stem": True},
    "max-pool-kernel": {"max_pool_kernel": True},
    "batch-norm-kernel": {"batch_norm_kernel": True},
    "pad-vocabulary": {"vocabulary_multiple": _VOCABULARY_MULTIPLE},
    "pad-channels-4": {"num_channels": 4},
    "pad-channels-8": {"num_channels": 8},
    "chunked-loss": {"loss_chunks": _LOSS_CHUNKS},
    "compile": {"compile_mode": "default"},
    # Inductor's own graphs are left out: they would be graphs within the technique `cuda-graph`'s.
    "compile-max-autotune": {"compile_mode": "max-autotune-no-cudagraphs"},
    "coalesced-reduce": {"coalesced_reduce": True},
    "cuda-graph": _GRAPH,
    "cuda-graph-8": _GRAPH | {"steps_per_launch": _STEPS_PER_LAUNCH},
}


def step_config_of(techniques: Sequence[str]) -> StepConfig:
    """Return the loop that these techniques make.

    Raises:
        UsageError: One of them is not known.
    """
    loop = PLAIN
    for name in techniques:
        if name not in _SETTINGS:
            raise UsageError(f"The technique '{name}' does not exist in this version of castwise.")
        loop = replace(loop, **_SETTINGS[name])
    return loop


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
