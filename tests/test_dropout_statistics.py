"""The benchmark of running statistics that are taken without dropout, on models whose statistics are known."""

import dropout_statistics
import pytest
import torch
from torch import Tensor, nn


class Dropped(nn.Sequential):
    """Dropout before a batch norm: variances in training are 1 / (1 - p) of the images' own and more."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.5), nn.BatchNorm2d(2))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(3 + torch.randn(64, 2, 4, 4, generator=generator), torch.zeros(64, dtype=torch.int64))] * count


def test_statistics_are_the_mean_over_all_batches_without_dropout() -> None:
    model = Dropped()
    for images, _ in batches(50):
        model(images)
    anew = dropout_statistics.with_statistics_anew(model, batches(3), dropout=False)
    images = batches(1)[0][0]
    norm, old = anew[1], model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert isinstance(old, nn.BatchNorm2d)
    torch.testing.assert_close(norm.running_mean, images.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, images.var((0, 2, 3)))
    assert old.running_var is not None
    assert old.running_var.min() > 5  # with it; the model itself is as it was


def test_dropout_s_variances_stand_beside_those_without() -> None:
    anew, trained = (
        dropout_statistics.with_statistics_anew(Dropped(), batches(50), dropout=dropout) for dropout in (False, True)
    )
    # Of images with mean 3 and variance 1, half are 0 and the others twice as large: E[x²] doubles, the mean stays.
    assert dropout_statistics.variance_ratios(trained, anew)["1"] == pytest.approx(2 * (9 + 1) - 9, rel=0.1)


def test_accuracy_is_that_of_all_images() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(2))
        model[1].bias.zero_()
    images = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).reshape(3, 2, 1, 1)
    found = dropout_statistics.accuracy_of(model, [(images[:2], torch.tensor([0, 0])), (images[2:], torch.tensor([0]))])
    assert found == pytest.approx(2 / 3)
