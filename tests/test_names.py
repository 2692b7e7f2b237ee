"""Names of topics and of files."""

import pytest

from castwise.names import free_name


@pytest.mark.parametrize(
    ("taken", "name"),
    [
        ((), "resnet50"),
        (("lstm-lm",), "resnet50"),
        (("resnet50",), "resnet50 #2"),
        (("resnet50", "resnet50 #2", "resnet50 #4"), "resnet50 #3"),
    ],
)
def test_a_name_that_is_taken_gets_the_first_free_number(taken: tuple[str, ...], name: str) -> None:
    assert free_name("resnet50", taken) == name


def test_numbers_are_set_apart_as_files_names_have_them() -> None:
    assert free_name("resnet50", {"resnet50"}, "-") == "resnet50-2"
