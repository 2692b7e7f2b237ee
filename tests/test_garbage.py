"""The collector rests while records are read, and is as before behind it."""

import gc

import pytest

from castwise.records.collector import without_collector


def test_the_collector_rests_and_works_again() -> None:
    assert gc.isenabled()

    def fail() -> None:
        with without_collector():
            assert not gc.isenabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
