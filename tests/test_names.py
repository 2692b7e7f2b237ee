"""Names of topics and of files."""

import pytest

from castwise.records.store import KEPT, free_name, slug


@pytest.mark.parametrize(
    ("text", "name", "with_points"),
    [
        ("NVIDIA H200", "nvidia-h200", "nvidia-h200"),
        ("wrn-28-10 on cifar10: training", "wrn-28-10-on-cifar10-training", "wrn-28-10-on-cifar10-training"),
        ("timm:vit_tiny.v2", "timm-vit-tiny-v2", "timm-vit_tiny.v2"),
        (".. /Größe/ ..", "gr-e", "gr-e"),
        ("→", "", ""),
    ],
)
def test_files_are_named_by_what_every_file_system_takes(text: str, name: str, with_points: str) -> None:
    assert slug(text) == name
    assert slug(text, KEPT) == with_points


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
