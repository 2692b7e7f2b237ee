# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Cross entropy and its gradient in one Triton kernel, imported on a GPU only.

Measured on one H200: gpt2 at batch 64 trains 583,816 tokens/s, without the kernel 573,677 (2026-11-28, one run each).
On another it trains 578,159, and 571,508 if each load reads 2 bytes. Records: benchmarks/records/loss_kernel/, by
`castwise run gpt2 --batch-size 64 --precision bf16-master --rounds 1 --techniques
cudnn-attention+compiled-update+pad-vocabulary+chunked-loss+compile+cuda-graph`. On a third, with short-gelu, too, it
trains 599,537 and 603,382 if the last block alone is masked, and 593,419 and 596,690 if each is and has a reduction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_BLOCK = 4096
_WARPS = 16
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cross_entropy_kernel(logits, targets, losses, num_words, num_columns, block: tl.constexpr):
    """Write a row's loss, and its gradient in place of its logits. The second pass finds the row in the GPU's cache.

    Logits are in units of log 2 here: exp2 is one instruction. The last block comes first. It alone is masked, and by
    the columns, whose number is a multiple of 16 if the vocabulary is padded: a mask by the words would make each load
    read 2 bytes. Powers are relative to its largest logit, which saves a reduction in each block; if they overflow,
    they are summed again.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    target = tl.load(targets + row)
    counts = target != -100  # NO_TARGET of the loss in chunks
    place = logits + tl.where(counts, target, 0)
    chosen = tl.load(place).to(tl.float32) * _LOG2_E
    whole = num_words // block * block
    logit = _load(logits, whole, num_words, num_columns, block)
    largest = tl.maximum(tl.max(logit), chosen)
    powers = tl.exp2(logit - largest)
    for start in range(0, whole, block):
        powers += tl.exp2(_load_whole(logits, start, block, "evict_last") - largest)
    total = tl.sum(powers)
    if not (total < float("inf")):
        largest, total = -3e38, 0.0  # finite: all logits of a block may be -inf
        for start in range(0, num_words, block):
            logit = _load(logits, start, num_words, num_columns, block)
            new = tl.maximum(largest, tl.max(logit))
            total = total * tl.exp2(largest - new) + tl.sum(tl.exp2(logit - new))
            largest = new
    log_total = largest + tl.log2(total)
    tl.store(losses + row, tl.where(counts, (log_total - chosen) / _LOG2_E, 0.0))
    shift = tl.where(counts, log_total, float("inf"))  # no gradient
    tl.debug_barrier()  # the target's logit is read before it is overwritten
    for start in range(0, whole, block):
        logit = _load_whole(logits, start, block, "evict_first")
        tl.store(logits + start + tl.arange(0, block), tl.exp2(logit - shift))
    for start in range(whole, num_columns, block):
        column = start + tl.arange(0, block)
        logit = _load(logits, start, num_words, num_columns, block)
        tl.store(logits + column, tl.exp2(logit - shift), mask=column < num_columns)
    tl.debug_barrier()
    tl.store(place, tl.exp2(chosen - log_total) - 1.0, mask=counts)


@triton.jit
def _load_whole(logits, start, block: tl.constexpr, policy: tl.constexpr):
    """Return a block of a row in float32, all words."""
    return tl.load(logits + start + tl.arange(0, block), eviction_policy=policy).to(tl.float32) * _LOG2_E


@triton.jit
def _load(logits, start, num_words, num_columns, block: tl.constexpr):
    """Return a block of a row in float32, -inf where there is no word."""
    column = start + tl.arange(0, block)
    logit = tl.load(logits + column, mask=column < num_columns, other=-float("inf")).to(tl.float32) * _LOG2_E
    if start + block > num_words:
        logit = tl.where(column < num_words, logit, -float("inf"))
    return logit


@triton_op("castwise::cross_entropy_", mutates_args={"logits"})
def cross_entropy_(logits: Tensor, targets: Tensor, num_words: int) -> Tensor:
    """Return each row's loss in float32; put the gradients of their sum in place of the logits.

    Args:
        logits: Shape (rows, columns), contiguous.
        targets: int64, shape (rows,); the loss of rows with -100 is 0.
        num_words: The columns that are words; the others get no gradient.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    wrap_triton(cross_entropy_kernel)[(len(logits),)](
        logits, targets.contiguous(), losses, num_words, logits.shape[1], block=_BLOCK, num_warps=_WARPS
    )
    return losses
