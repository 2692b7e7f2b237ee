"""Words by number, in columns and segments; the published counts where the real text is."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from castwise.errors import DataError, MissingDataError
from castwise.registry.datasets import WIKITEXT2, default_data_dir, find_file, verify
from castwise.trial.data import wikitext
from castwise.trial.data.wikitext import (
    Corpus,
    batchify,
    load_tokens,
    load_wikitext2,
    make_corpus,
    random_corpus,
    segments,
)


def test_make_corpus() -> None:
    corpus = make_corpus(" \n = a b = \n", "c a\n", "d\u00a0a\r\nb")
    assert corpus.words == ("<eos>", "=", "a", "b", "c", "d")
    assert corpus.train.tolist() == [0, 1, 2, 3, 1, 0]
    assert corpus.valid.tolist() == [4, 2, 0]
    assert corpus.test.tolist() == [5, 2, 0, 3, 0]
    assert corpus.train.dtype == torch.int64


def test_batchify() -> None:
    assert batchify(torch.arange(14), 4).tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_batchify_refuses_short_text() -> None:
    assert len(batchify(torch.arange(8), 4)) == 2
    with pytest.raises(DataError, match="7 words cannot be read in 4 columns"):
        batchify(torch.arange(7), 4)


@pytest.mark.parametrize(("num_rows", "lengths"), [(2, [1]), (36, [35]), (37, [35, 1]), (71, [35, 35])])
def test_segments(num_rows: int, lengths: list[int]) -> None:
    rows = batchify(torch.arange(num_rows * 3), 3)
    cut = segments(rows)
    assert [len(words) for words, _ in cut] == lengths
    assert torch.cat([words for words, _ in cut]).equal(rows[:-1])
    assert torch.cat([targets for _, targets in cut]).equal(rows[1:].flatten())


LINES = [f" the cat and the dog number {n} sat on the mat \n" for n in range(200)]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let these lines be the training text, and a folder of the test's be the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(wikitext, "read_verified", lambda *_: "".join(LINES).encode())
    return tmp_path


def test_byte_pairs_are_learned_from_the_text_and_kept(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    tokens, note = load_tokens(text, 300)
    assert note == ""
    assert tokens.dtype == torch.int64
    assert 0 < tokens.min() < tokens.max() < 300
    assert 9 * len(LINES) < len(tokens) < sum(map(len, LINES)) / 2
    (file,) = (text / "castwise").iterdir()
    content = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(wikitext, "learn_byte_pairs", lambda *_: pytest.fail("they are kept"))
        assert load_tokens(text, 300)[0].equal(tokens)
    for damaged in (b"", content[:-5], b"no tokens"):
        file.write_bytes(damaged)
        assert load_tokens(text, 300)[0].max() < 300
        assert len(file.read_bytes()) == len(content), "made anew"
    assert load_tokens(text, 280)[0].max() < 280, "another model has its own"


def test_text_is_read_as_bytes_without_the_tokenizer(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokens, note = load_tokens(text, 300)
    assert bytes((tokens - 1).tolist()).decode() == "".join(LINES)
    assert "pip install 'castwise[text]'" in note


def test_missing_text_is_named_in_both_forms(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"no train\.txt\[\.gz\] or wiki\.train\.tokens\[\.gz\] in "):
        load_wikitext2(tmp_path)


def test_random_corpus() -> None:
    corpus = random_corpus()
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (2_088_628, 217_646, 245_569)
    assert len(corpus.words) == corpus.train.max() + 1 == 33_278
    assert corpus.train.equal(random_corpus().train)


# The real text


@pytest.fixture(scope="module")
def real() -> Corpus:
    try:
        return load_wikitext2(default_data_dir())
    except MissingDataError as missing:
        pytest.skip(str(missing))


def test_the_published_counts(real: Corpus) -> None:
    assert (len(real.train), len(real.valid), len(real.test)) == (2_088_628, 217_646, 245_569)
    assert len(real.words) == 33_278


def test_the_published_number_of_iterations(real: Corpus) -> None:
    rows = batchify(real.train, 20)
    assert rows.shape == (104_431, 20)
    assert len(segments(rows)) == 2984
    assert real.train.max() == len(real.words) - 1


def test_the_official_names_are_found_too(real: Corpus, tmp_path: Path) -> None:
    for file in WIKITEXT2.files:
        shutil.copy(find_file(WIKITEXT2, default_data_dir(), file.part), tmp_path / file.aliases[0])
    verify(WIKITEXT2, tmp_path)
    assert load_wikitext2(tmp_path).test.equal(real.test)
