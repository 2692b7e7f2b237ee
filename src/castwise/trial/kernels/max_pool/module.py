"""Max pooling of 3 by 3 with stride 2 by castwise's own Triton kernels.

The reference is `torch.nn.functional.max_pool2d`, to which `tests/trial/test_max_pool.py` compares the kernels.
Measured on one H200: training steps 1.06 times as fast as without (docs/climbs.md of castwise 77838da).
"""

from importlib.util import find_spec

import torch
from torch import Tensor, nn

from castwise.apply.techniques.blocks import has_hooks
from castwise.errors import TechniqueError

_SIDE = 3
_STRIDE = 2
_PADDINGS = (0, 1)


class KernelMaxPool(nn.MaxPool2d):
    """A max pooling whose forward and backward are castwise's kernels for channels-last images."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as nn.MaxPool2d names it
        """Return the pooled images; torch pools those on a CPU and those that are not channels last."""
        if input.device.type != "cuda" or not input.is_contiguous(memory_format=torch.channels_last):
            return nn.functional.max_pool2d(input, _SIDE, _STRIDE, self.padding)
        from castwise.trial.kernels.max_pool.triton_kernels import max_pool

        assert isinstance(self.padding, int)
        pooled, _ = max_pool(input, self.padding)
        assert isinstance(pooled, Tensor)
        return pooled


def use_max_pool_kernel(model: nn.Module) -> None:
    """Let a model's max poolings of 3 by 3 with stride 2 run by castwise's own kernels."""
    poolings = [(name, module) for name, module in model.named_modules() if _is_supported(module)]
    if not poolings:
        raise TechniqueError("max-pool-kernel finds no max pooling of 3 by 3 with stride 2 in this model.")
    if find_spec("triton") is None:
        raise TechniqueError("max-pool-kernel needs Triton, and it is not installed. pip install triton")
    for name, module in poolings:
        model.set_submodule(name, KernelMaxPool(_SIDE, _STRIDE, module.padding))


def _is_supported(module: nn.Module) -> bool:
    if type(module) is not nn.MaxPool2d or module.ceil_mode or module.return_indices or has_hooks(module):
        return False
    sizes = (module.kernel_size, module.stride, module.dilation)
    return sizes == (_SIDE, _STRIDE, 1) and module.padding in _PADDINGS
