"""A small convolutional network on handwritten digits."""

from torch import Tensor, nn
from torch.nn import functional

_NUM_DIGITS = 10


class MnistCnn(nn.Module):
    """Two convolutions and two linear layers.

    Source: leolui2004/tensorcore mnist_0_512.py at 1a05f6bb.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.4)
        self.dropout2 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, _NUM_DIGITS)

    def forward(self, images: Tensor) -> Tensor:
        """Return log-probabilities, shape (batch, 10), of images, shape (batch, 1, 28, 28).

        The source takes the cross entropy of these, so log-softmax is applied twice.
        """
        x = functional.relu(self.conv1(images))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)
