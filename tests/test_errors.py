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
    ("name", "hint", "offer"),
    [
        ("fp23", "", "Did you mean fp32?"),
        ("FP23", "See the list.", "Did you mean fp32?"),
        ("bf", "", "Did you mean bf-mixed, bf-true or bf-quick?"),
        ("?", "", "Known: fp32, bf-mixed, bf-true, bf-quick, bf-three."),
        ("?", "See the list.", "See the list."),
    ],
)
def test_unknown_name_offers_the_three_nearest_or_a_hint(name: str, hint: str, offer: str) -> None:
    known = ["fp32", "bf-mixed", "bf-true", "bf-quick", "bf-three"]
    error = unknown_name("precision", name, known, hint)
    assert isinstance(error, UsageError)
    assert str(error) == f"No precision named '{name}'. {offer}"


def test_every_public_name_resolves() -> None:
    assert len(set(castwise.__all__)) == len(castwise.__all__)
    for name in castwise.__all__:
        assert getattr(castwise, name) is not None
    assert set(castwise.__all__) <= set(dir(castwise))


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'castwise' has no attribute 'train'"):
        castwise.train  # noqa: B018
