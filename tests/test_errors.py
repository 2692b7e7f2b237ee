import pytest

import castwise
from castwise.errors import (
    CastwiseError,
    DataError,
    EngineError,
    MissingDataError,
    StoreError,
    UsageError,
    unknown_name,
)


@pytest.mark.parametrize(
    ("error", "parent", "exit_code"),
    [
        (CastwiseError, Exception, 1),
        (UsageError, CastwiseError, 2),
        (DataError, UsageError, 2),
        (MissingDataError, DataError, 2),
        (StoreError, CastwiseError, 3),
        (EngineError, CastwiseError, 1),
    ],
)
def test_tree_and_exit_codes(error: type[CastwiseError], parent: type[Exception], exit_code: int) -> None:
    assert error.__base__ is parent
    assert error.exit_code == exit_code
    assert error.__doc__


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp23", "No precision named 'fp23'. Did you mean fp32?"),
        ("FP23", "No precision named 'FP23'. Did you mean fp32?"),
        ("bf", "No precision named 'bf'. Did you mean bf-mixed or bf-true?"),
        ("?", "No precision named '?'. Known: fp32, bf-mixed, bf-true."),
    ],
)
def test_unknown_name_offers_the_nearest(name: str, message: str) -> None:
    error = unknown_name("precision", name, ["fp32", "bf-mixed", "bf-true"])
    assert isinstance(error, UsageError)
    assert str(error) == message


def test_unknown_name_gives_the_hint_only_where_nothing_is_near() -> None:
    assert str(unknown_name("dog", "rec", ["rex"], "See the kennel.")) == "No dog named 'rec'. Did you mean rex?"
    assert str(unknown_name("dog", "zzz", ["rex"], "See the kennel.")) == "No dog named 'zzz'. See the kennel."


def test_unknown_name_offers_three_at_most() -> None:
    message = str(unknown_name("net", "net", [f"net-{index}" for index in range(9)]))
    assert message == "No net named 'net'. Did you mean net-8, net-7 or net-6?"


def test_every_public_name_resolves() -> None:
    assert len(set(castwise.__all__)) == len(castwise.__all__)
    for name in castwise.__all__:
        assert getattr(castwise, name) is not None
    assert set(castwise.__all__) <= set(dir(castwise))


def test_public_names_are_the_same_objects_as_their_modules() -> None:
    from castwise import api, errors
    from castwise.records import schema
    from castwise.spec import trial

    assert castwise.run is api.run
    assert castwise.TrialSpec is trial.TrialSpec
    assert castwise.Trial is schema.Trial
    assert castwise.Environment is schema.Environment
    public_errors = [name for name in castwise.__all__ if name.endswith("Error")]
    assert sorted(public_errors) == ["CastwiseError", "DataError", "EngineError", "StoreError", "UsageError"]
    for name in public_errors:
        assert getattr(castwise, name) is getattr(errors, name)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'castwise' has no attribute 'train'"):
        castwise.train  # noqa: B018
