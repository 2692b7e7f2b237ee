"""Causal attention of transformers' models without a matrix for its mask: `causal-attention`.

Under torch.compile transformers 5 hands over the causal mask as a matrix (huggingface/transformers#48925, not merged
in November 2026), which neither FlashAttention nor cuDNN's kernels take. With an implementation of attention for
which it knows no masks, it leaves the mask to the kernel. Measured on one H200: benchmarks/gpt2.py trains 484,607
tokens/s, without it 426,126 (2026-11-28, one run each, bf16-master, batch 16, fused-optimizer+pad-vocabulary+compile).
"""

from typing import Any

import torch
from torch import nn

from castwise.errors import TechniqueError

_NAME = "sdpa_without_mask"
_MASKS = ("attention_mask", "position_ids", "past_key_values")


def use_causal_attention(model: nn.Module) -> None:
    """Let all attention of a model's parts from transformers be causal, and nothing else."""
    found: Any = [part for part in model.modules() if hasattr(part, "set_attn_implementation")]
    outer = [part for part in found if not any(part is not other and part in other.modules() for other in found)]
    if not outer:
        raise TechniqueError("causal-attention finds no model of transformers.")
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_NAME, sdpa_attention_forward)
    for part in outer:
        config = part.config
        is_causal = {module.is_causal for module in part.modules() if hasattr(module, "is_causal")} == {True}
        window = getattr(config, "sliding_window", None)  # of all layers, if they are not listed
        kinds = set(getattr(config, "layer_types", None) or ("full_attention" if window is None else "window",))
        if config._attn_implementation == "sdpa" and is_causal and kinds == {"full_attention"}:
            part.set_attn_implementation(_NAME)
        if config._attn_implementation != _NAME:
            raise TechniqueError("causal-attention finds attention that is not merely causal, or not by sdpa.")
        part.register_forward_pre_hook(_refuse_masks, with_kwargs=True)


def _refuse_masks(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    given = [name for name in _MASKS if named.get(name) is not None]
    if given or len(args) > 1:
        _refuse(" and ".join(given) or "a mask")


# torch 2.11 cannot raise an error of castwise's in compiled code.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse(masks: str) -> None:
    raise TechniqueError(f"causal-attention is for batches without {masks}.")
