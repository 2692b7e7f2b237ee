"""The collector rests while records are read, and is as before behind it."""

import gc

import pytest

from castwise.records.collector import gc_disabled


def test_the_collector_rests_and_works_again() -> None:
    assert gc.isenabled()

    def fail() -> None:
        with gc_disabled():
            assert not gc.isenabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_disabled():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
