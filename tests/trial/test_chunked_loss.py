"""The loss in chunks, or of tokens with a target alone: loss and gradients of the plain way, in every precision."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from interpreted import interpreted, run_interpreted
from torch import Tensor, nn

from castwise.apply.techniques.padding import pad_decoder
from castwise.trial.flops import ProductCounter
from castwise.trial.models.chunked_loss import chunked_loss
from castwise.trial.models.transformer import Architecture, Transformer, compute_loss, to_batch

NUM_WORDS, WIDTH = 500, 16
KERNEL_COMPARED = """
    import torch
    from castwise.trial.kernels import cross_entropy
    from castwise.trial.models import chunked_loss

    torch.manual_seed(0)
    cross_entropy._BLOCK = 32
    for num_columns in (20, 32, 96, 100):  # less than a block, one, and several
        for num_words in (num_columns, num_columns - 9):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                logits = (8 * torch.randn(7, num_columns)).to(dtype)
                logits[0, :-10] = -torch.inf
                logits[1, 3] = 300  # its power relative to the last block's logits overflows
                targets = torch.tensor([num_words - 1, num_words - 1, 5, -100, 7, -100, 2]).repeat_interleave(2)[::2]
                expected = chunked_loss._cross_entropy(logits, targets, num_words)
                losses = cross_entropy.cross_entropy_(logits, targets, num_words)
                for one, other in zip((losses, logits), expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-5 if one.dtype == torch.float32 else 1e-2, atol=1e-6)
    print("same")
"""


def model_of(head: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(NUM_WORDS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_WORDS, bias=head == "bias"))
    if head != "bias":
        model[2].weight = model[0].weight
    if head == "padded":
        pad_decoder(model, 64)
    return model


def tokens_and_targets() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(NUM_WORDS, (2, 4, 33), generator=generator)  # not a multiple of the parts
    return tokens, targets.masked_fill(targets % 5 == 0, -100)


def loss_of(model: nn.Sequential, num_chunks: int) -> Tensor:
    tokens, targets = tokens_and_targets()
    x = model[1](model[0](tokens))
    if num_chunks:
        return chunked_loss(x, model[2], targets, num_chunks)
    return nn.functional.cross_entropy(model[2](x).flatten(0, 1).float(), targets.flatten())


def gradients_of(head: str, num_chunks: int, dtype: torch.dtype, autocast: bool, scale: float) -> tuple[float, Any]:
    model = model_of(head).to(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype=dtype) if autocast else nullcontext():
        loss = loss_of(model, num_chunks)
    (loss * scale).backward()
    return loss.item(), [parameter.grad / scale for parameter in model.parameters()]


@pytest.mark.parametrize("head", ["bias", "tied", "padded"])
@pytest.mark.parametrize(
    ("dtype", "autocast", "scale"),
    [
        (torch.float32, False, 1.0),
        (torch.bfloat16, True, 1.0),
        (torch.bfloat16, False, 1.0),
        (torch.float16, True, 2.0**16),
        (torch.float16, False, 2.0**10),
    ],
)
def test_loss_and_gradients_equal_the_plain_ones(head: str, dtype: torch.dtype, autocast: bool, scale: float) -> None:
    loss, found = gradients_of(head, 8, dtype, autocast, scale)
    expected, plain = gradients_of(head, 0, dtype, autocast, scale)
    assert loss == pytest.approx(expected, rel=1e-5)
    for one, other in zip(found, plain, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() < 4 * torch.finfo(dtype).eps * other.norm()


def test_logits_are_not_kept_and_no_product_is_computed_twice() -> None:
    counters = []
    for num_chunks in (0, 8):
        model = model_of("bias")
        counter = ProductCounter(torch.device("cpu"), model.parameters())
        with counter:
            loss_of(model, num_chunks).backward()
        counters.append(counter)
    logits_bytes = 4 * 4 * 33 * NUM_WORDS
    plain, chunked = counters
    assert plain.saved_bytes > logits_bytes > 3 * chunked.saved_bytes
    assert (chunked.products, chunked.recomputed_flops) == (plain.products, 0)


@interpreted
def test_the_kernel_computes_the_same() -> None:
    out, err = run_interpreted(KERNEL_COMPARED)
    assert out == "same\n", err


def test_gradients_can_be_used_once() -> None:
    loss = loss_of(model_of("tied"), 8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.slow
def test_compiled_gradients(autocast: bool, request: pytest.FixtureRequest) -> None:
    if not autocast:
        request.getfixturevalue("traced")
    dtype = torch.bfloat16 if autocast else torch.float32
    num_chunks = 2 if autocast else 5  # 5 leave a remainder; each chunk is compiled
    _, expected = gradients_of("padded", num_chunks, dtype, autocast, 1.0)
    model = model_of("padded")
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        torch.compile(loss_of, dynamic=False)(model, num_chunks).backward()
    for one, other in zip(model.parameters(), expected, strict=True):
        assert one.grad is not None
        assert (one.grad - other).norm() < 4 * torch.finfo(dtype).eps * other.norm()


def bert() -> Transformer:
    torch.manual_seed(0)
    return Transformer(Architecture("bert", 32, 2, 4, length=16, vocabulary=50)).eval()


def test_a_sparse_loss_and_its_gradients_equal_the_plain_ones() -> None:
    model, tokens, generator = bert(), torch.randint(50, (32, 16)), torch.Generator().manual_seed(2)
    batch = to_batch(tokens, generator, is_causal=False)
    found, products = [], []
    for is_sparse in (False, True):
        with ProductCounter(torch.device("cpu"), model.parameters()) as counter:
            loss = compute_loss(model, batch, is_sparse=is_sparse)
            loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        products.append(counter.products["linear"]["fp32"])
        model.zero_grad()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    # There is room for 192 of 512 tokens: the decoder and the layer before it leave out the others.
    assert products[0] - products[1] == 320 * 3 * 2 * 32 * (50 + 32)


def test_more_targets_than_there_is_room_for_are_not_left_out_silently() -> None:
    model, tokens = bert(), torch.randint(50, (32, 16))
    assert compute_loss(model, (tokens, tokens), is_sparse=True).isnan()
    assert compute_loss(model, (tokens[:2], tokens[:2]), is_sparse=True).isfinite(), "there is room for all of a few"
