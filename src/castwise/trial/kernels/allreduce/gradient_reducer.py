"""Gradients averaged over ranks at once after backward."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from castwise.errors import TechniqueError
from castwise.trial.distributed import Peers
from castwise.trial.kernels.allreduce.reducer import CollectiveMean, SymmetricMean, make_allreducer


class CoalescedReduce:
    """Averages a model's gradients over the ranks after backward, all of one dtype at once.

    DistributedDataParallel averages while backward runs, by a hook on every weight, and broadcasts rank 0's buffers
    before each forward pass. That is work for the host, on which a compiled step may wait; it splits the graphs of
    torch.compile; and a CUDA graph must have no hooks. Here the host starts a copy and a collective, or two kernels if
    the GPUs can access each other's memory.

    Afterwards the gradients are views of the averaged buffers: nothing is copied back.
    """

    def __init__(self, model: nn.Module, peers: Peers) -> None:
        """Prepare to average a model that is the same in all ranks, on its device and in its precision."""
        self._model, self._peers = model, peers
        # Frozen weights too: a weight that is trained later must be noticed.
        self._names, self._parameters = zip(*model.named_parameters(), strict=True)
        self._groups: list[list[nn.Parameter]] = []
        self.mean: CollectiveMean | SymmetricMean | None = None  # all ranks agree on one in the first step
        self._has_gradient: list[bool] | None = None
        self._versions: list[tuple[nn.Module, str, Tensor, int]] = []

    @torch.no_grad()
    def __call__(self) -> None:
        """Replace the gradients by their means over the ranks.

        Raises:
            TechniqueError: Ranks have gradients of different weights, a gradient is sparse, or the model writes buffers
                other than running statistics, which ranks would have to share.
        """
        has_gradient = [parameter.grad is not None for parameter in self._parameters]
        if self._has_gradient is None:
            self._begin(has_gradient)
        self._check(has_gradient)
        assert self.mean is not None, "the first step makes it"
        self.mean([[cast("Tensor", parameter.grad) for parameter in group] for group in self._groups])
        for group, means in zip(self._groups, self.mean.outputs, strict=True):
            for parameter, mean in zip(group, means, strict=True):
                parameter.grad = mean

    def share_statistics(self) -> None:
        """Give all ranks rank 0's running statistics: each updates its own, and only evaluation reads them."""
        norms = (module for module in self._model.modules() if isinstance(module, _NormBase))
        self._peers.broadcast(buffer for norm in norms for buffer in norm.buffers(recurse=False))

    def _begin(self, has_gradient: list[bool]) -> None:
        """Check once that all ranks have the same gradients; a rank without one would make the others wait forever."""
        for number, others in enumerate(self._peers.gather_objects(has_gradient)):
            for name, here, there in zip(self._names, has_gradient, others, strict=True):
                if here != there:
                    raise TechniqueError(
                        f"coalesced-reduce finds a gradient of {name} in some ranks, and in others, such as rank "
                        f"{number if here else self._peers.rank}, none. All have to train the same weights."
                    )
        self._has_gradient = has_gradient
        trained = [parameter for parameter, has in zip(self._parameters, has_gradient, strict=True) if has]
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise TechniqueError(
                    f"coalesced-reduce cannot average the sparse gradient of {name}. Make it a dense one."
                )
        dtypes = dict.fromkeys(parameter.dtype for parameter in trained)
        self._groups = [[parameter for parameter in trained if parameter.dtype == dtype] for dtype in dtypes]
        self.mean = make_allreducer(self._peers, self._groups)
        self._versions = [
            (module, name, buffer, buffer._version)
            for module in self._model.modules()
            if not isinstance(module, _NormBase)
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def _check(self, has_gradient: list[bool]) -> None:
        if has_gradient != self._has_gradient:
            assert self._has_gradient is not None, "the first step says which weights have gradients"
            pairs = zip(self._names, has_gradient, self._has_gradient, strict=True)
            name = next(name for name, now, before in pairs if now != before)
            raise TechniqueError(
                f"coalesced-reduce finds that {name} has a gradient in some steps only. "
                "All steps have to train the same weights, as DistributedDataParallel's have."
            )
        for module, name, buffer, version in self._versions:
            if module._buffers.get(name) is not buffer or buffer._version != version:
                raise TechniqueError(
                    f"coalesced-reduce finds that {type(module).__name__} writes its buffer {name} as it trains. "
                    "DistributedDataParallel gives all ranks rank 0's in every step, and this technique does not."
                )
