"""WikiText-2 as word numbers, from files whose checksums were verified.

Source: pytorch/examples word_language_model data.py and main.py at 0d3fe14a.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from castwise.errors import DataError
from castwise.registry.datasets import WIKITEXT2, read_verified

# Words in the three parts, and different ones in all; tests hold the real text to them.
_LENGTHS, _NUM_WORDS = (2_088_628, 217_646, 245_569), 33_278
_NUM_STEPS = 35  # Source: main.py (--bptt)


@dataclass(frozen=True)
class Corpus:
    """A text in three parts, int64 of shape (words,), each word by its number; `words` has them in that order."""

    train: Tensor
    valid: Tensor
    test: Tensor
    words: tuple[str, ...]


def load_wikitext2(data_dir: Path) -> Corpus:
    """Return WikiText-2 at word level, with `<eos>` after every line.

    Raises:
        DataError: A file is missing in the folder or is not the official one.
    """
    return make_corpus(*(read_verified(WIKITEXT2, data_dir, part).decode() for part in ("train", "valid", "test")))


def random_corpus() -> Corpus:
    """Return random words in WikiText-2's place, as many of them and as many different ones; the same every time."""
    generator = torch.Generator().manual_seed(0)
    train, valid, test = (torch.randint(_NUM_WORDS, (count,), generator=generator) for count in _LENGTHS)
    return Corpus(train, valid, test, words=tuple(map(str, range(_NUM_WORDS))))


def make_corpus(train: str, valid: str, test: str) -> Corpus:
    """Number the words of three texts in the order in which they come up: all of train's, then valid's, then test's."""
    numbers: dict[str, int] = {}

    def tokenize(text: str) -> Tensor:
        lines = io.StringIO(text, newline=None)  # lines end where they do in a file read as text
        words = (word for line in lines for word in (*line.split(), "<eos>"))
        return torch.tensor([numbers.setdefault(word, len(numbers)) for word in words], dtype=torch.int64)

    parts = [tokenize(text) for text in (train, valid, test)]
    return Corpus(parts[0], parts[1], parts[2], words=tuple(numbers))


def batchify(words: Tensor, batch_size: int) -> Tensor:
    """Cut a text into consecutive columns, shape (words // batch_size, batch_size); words left over are dropped.

    Raises:
        DataError: The columns would be shorter than two words, so that none has a successor to predict.
    """
    num_rows = len(words) // batch_size
    if num_rows < 2:
        raise DataError(f"A text of {len(words):,} words cannot be read in {batch_size:,} columns of two or more.")
    return words[: num_rows * batch_size].view(batch_size, -1).t().contiguous()


def segments(rows: Tensor, num_steps: int = _NUM_STEPS) -> Sequence[tuple[Tensor, Tensor]]:
    """Return the batches of one pass over the rows of `batchify`; the last may be shorter.

    A batch is words of shape (num_steps, batch), which is as far as gradients go back, and the words that follow them,
    of shape (num_steps * batch,).
    """
    last = len(rows) - 1
    return [
        (rows[start : min(start + num_steps, last)], rows[start + 1 : min(start + num_steps, last) + 1].flatten())
        for start in range(0, last, num_steps)
    ]
