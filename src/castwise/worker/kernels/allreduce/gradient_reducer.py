"""Gradients averaged over ranks all at once behind backward, in DistributedDataParallel's place."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from castwise.errors import TechniqueError
from castwise.worker.distributed import Peers
from castwise.worker.kernels.allreduce.reducer import CollectiveMean, SymmetricMean, make_allreducer


class CoalescedReduce:
    """Averages the gradients that backward has left in a model over the ranks, all of a dtype at once.

    DistributedDataParallel does so while backward runs, by a hook on every weight, and broadcasts rank 0's buffers
    before each forward pass. That is the host's work, which a compiled step can wait for; it cuts what torch.compile
    fuses in pieces; and a CUDA graph wants no hooks. Here the host starts a copy and a collective, or, where the GPUs
    see each other's memory, two kernels in their place.

    Afterwards the gradients are views of the buffers that were averaged: nothing is copied back.

    Attributes:
        mean: How the mean is taken, which all ranks agree on in the first step; None before.
    """

    def __init__(self, model: nn.Module, peers: Peers) -> None:
        """Take the model, on its device and in its precision.

        Args:
            model: The same in all ranks.
            peers: The ranks.
        """
        self._model, self._peers = model, peers
        # Frozen ones as well: one that is thawed later must not go unnoticed.
        self._names, self._parameters = zip(*model.named_parameters(), strict=True)
        self._groups: list[list[nn.Parameter]] = []
        self.mean: CollectiveMean | SymmetricMean | None = None
        self._has_gradient: list[bool] | None = None
        self._versions: list[tuple[nn.Module, str, Tensor, int]] = []

    @torch.no_grad()
    def __call__(self) -> None:
        """Replace the gradients by their means over the ranks.

        Raises:
            TechniqueError: Ranks have gradients of different weights, or a gradient is sparse, or the model writes what
                ranks would have to share: other buffers than running statistics.
        """
        has_gradient = [parameter.grad is not None for parameter in self._parameters]
        if self._has_gradient is None:
            self._begin(has_gradient)
        self._check(has_gradient)
        assert self.mean is not None, "the first step makes it"
        self.mean([[_gradient(parameter) for parameter in group] for group in self._groups])
        for group, places in zip(self._groups, self.mean.outputs, strict=True):
            for parameter, place in zip(group, places, strict=True):
                parameter.grad = place

    def share_statistics(self) -> None:
        """Give all ranks rank 0's running statistics: each moves its own, and evaluation alone reads them."""
        norms = (module for module in self._model.modules() if isinstance(module, _NormBase))
        self._peers.broadcast(buffer for norm in norms for buffer in norm.buffers(recurse=False))

    def _begin(self, has_gradient: list[bool]) -> None:
        """Agree on which weights have gradients, once: a rank that waits for another's would wait for ever."""
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
        self._groups = [[each for each in trained if each.dtype == dtype] for dtype in dtypes]
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


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "only weights with gradients are in a group"
    return parameter.grad
