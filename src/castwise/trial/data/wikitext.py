"""WikiText-2 as word numbers, from files whose checksums were verified.

Source: pytorch/examples word_language_model data.py and main.py at 0d3fe14a.
"""

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from castwise.errors import DataError
from castwise.registry.datasets import WIKITEXT2, cache_dir, read_verified

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
    """Return WikiText-2 at word level, with `<eos>` after every line."""
    return make_corpus(*(read_verified(WIKITEXT2, data_dir, part).decode() for part in ("train", "valid", "test")))


def load_tokens(data_dir: Path, vocabulary: int) -> tuple[Tensor, str]:
    """Return WikiText-2's training text as tokens, int64 of shape (tokens,), and a note on them, which may be empty.

    Tokens are byte pairs, learned from this text, or bytes if the package tokenizers is not installed. They are kept in
    the user's cache. Token 0 never occurs: it can stand for hidden ones.
    """
    content = read_verified(WIKITEXT2, data_dir, "train")
    try:
        import tokenizers
    except ImportError:
        tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long() + 1
        return tokens, "Its tokens are bytes; for byte pairs, pip install 'castwise[text]'."
    file = cache_dir() / f"{WIKITEXT2.name}-{vocabulary}-{tokenizers.__version__}.npy"
    with suppress(OSError, ValueError, EOFError):  # it is not there, or damaged
        kept = np.load(file)
        if kept.dtype == np.int32 and kept.min() > 0 and kept.max() < vocabulary:
            return torch.from_numpy(kept).long(), ""
    numbers = np.array(learn_byte_pairs(content.decode().splitlines(keepends=True), vocabulary), np.int32)
    temporary = file.with_suffix(f".{os.getpid()}")  # other processes may write theirs
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            np.save(stream, numbers)
        temporary.replace(file)
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
    return torch.from_numpy(numbers).long(), ""


def learn_byte_pairs(lines: Sequence[str], vocabulary: int) -> list[int]:
    """Return lines as byte pairs learned from them, of which there are at most so many; 0 is none of them.

    As GPT-2's, they are of bytes and do not cross words. Source: Radford et al. 2019.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["[MASK]"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return [number for encoded in tokenizer.encode_batch(lines) for number in encoded.ids]


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
    """Cut a text into consecutive columns, shape (words // batch_size, batch_size); words left over are dropped."""
    num_rows = len(words) // batch_size
    if num_rows < 2:
        raise DataError(f"A text of {len(words):,} words cannot be read in {batch_size:,} columns of two or more.")
    return words[: num_rows * batch_size].view(batch_size, -1).t().contiguous()


def segments(rows: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
    """Return the batches of one pass over the rows of `batchify`; the last may be shorter.

    A batch is words of shape (35, batch), which is as far as gradients go back, and the words that follow them, of
    shape (35 * batch,).
    """
    words, following = (torch.split(part, _NUM_STEPS) for part in (rows[:-1], rows[1:]))
    return [(part, targets.flatten()) for part, targets in zip(words, following, strict=True)]
