import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_engine import fake_environment, fake_spec, fake_trial

from castwise.errors import StoreError
from castwise.records.schema import SCHEMA_VERSION
from castwise.records.store import KEPT, Store, free_name, load_folder, slug

RECORD = fake_trial().model_dump_json()
NO_JSON = "not a castwise record: no JSON, or cut off"
NO_STAMP = "not a castwise record: it has no schema_version"

# Files that are no records of ours: their content and what the user is told of them.
NO_RECORDS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", NO_JSON),
    "cut-off": (RECORD[: len(RECORD) // 2].encode(), NO_JSON),
    "not-text": (b"\xff\xfe\x00\x80", NO_JSON),
    "alien": (b'{"name": "package", "version": "1.0"}', NO_STAMP),
    "a-list": (b"[1, 2, 3]", NO_STAMP),
    "too-deep": (b"[" * 100_000 + b"]" * 100_000, NO_JSON),
    "newer": (RECORD.replace('"schema_version":1', '"schema_version":2').encode(), "a record of schema 2"),
    "no-trial": (b'{"schema_version": 1}', "not a record of schema 1 (spec: Field required)"),
    "a-long-number": (RECORD.replace('"seed":0', f'"seed":{"9" * 400}').encode(), "a number has more than 19 digits"),
    "unstamped": (RECORD.replace('"schema_version":1', '"schema_version":null').encode(), NO_STAMP),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, hidden ones too, with its content."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_record_comes_back_as_it_was_saved(store: Store) -> None:
    trial = fake_trial(losses=(float("nan"),))
    path = store.save(trial)
    trials, problems = store.load(trial.environment)
    assert problems == []
    assert repr(trials) == repr({trial.spec.key: trial})
    assert json.loads(path.read_bytes())["schema_version"] == SCHEMA_VERSION == 1
    assert [str(store.folder / name) for name in tree(store.folder)] == [str(path)]


def test_a_store_leaves_no_folder_before_its_first_record(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for folder in (tmp_path / "a" / "b", tmp_path / "kept" / "c"):
        Store(folder)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["kept"]


def test_file_names_say_what_is_inside(store: Store) -> None:
    trial = fake_trial(fake_spec("bf16-mixed", workload="timm:ViT Größe/16|x", batch_size=64))
    path = store.save(trial)
    assert path.parent.name == f"fake-gpu-{trial.environment.fingerprint}"
    assert path.name == f"timm-vit-gr-e-16-x-bf16-mixed-b64-{trial.spec.key}.json"
    assert path.parent.parent == store.folder


def test_a_name_stays_short_and_inside_the_folder(store: Store) -> None:
    path = store.save(fake_trial(fake_spec(workload="../../" + "x" * 500), environment=fake_environment(gpu="../..")))
    assert store.folder in path.parents
    assert len(path.name) < 120


def test_others_may_read_a_record_as_far_as_the_user_lets_them(store: Store) -> None:
    before = os.umask(0o027)
    try:
        path = store.save(fake_trial())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_second_answer_stands_beside_the_first_and_the_newest_counts(store: Store) -> None:
    old = fake_trial(step_seconds=(1.0,))
    new = old.model_copy(update={"started_at": "2000-01-02T00:00:00.000+00:00", "status": "oom"})
    newest = old.model_copy(update={"started_at": "2000-01-03T00:00:00.000+00:00", "status": "timeout"})
    paths = [store.save(trial) for trial in (new, newest, old)]
    assert len(set(paths)) == 3
    assert paths[0].stem + "-2.json" == paths[1].name
    assert {trial.status for trial in load_folder(store.folder)[0]} == {"ok", "oom", "timeout"}
    assert store.load(old.environment)[0][old.spec.key].status == "timeout"


def test_a_file_that_is_there_is_never_written_over(store: Store) -> None:
    path = store.save(fake_trial())
    path.write_text("the user's own")
    again = store.save(fake_trial())
    assert again != path
    assert path.read_text() == "the user's own"


def test_writers_of_the_same_record_do_not_take_each_others_names(store: Store) -> None:
    trials = [fake_trial(message=str(number)) for number in range(8)]
    threads = [threading.Thread(target=store.save, args=(trial,)) for trial in trials]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, problems = load_folder(store.folder)
    assert sorted(trial.message for trial in found) == sorted(trial.message for trial in trials)
    assert problems == []


@pytest.mark.parametrize("name", list(NO_RECORDS))
def test_a_file_that_is_no_record_is_named_and_left_alone(store: Store, name: str) -> None:
    content, reason = NO_RECORDS[name]
    trial = fake_trial()
    path = store.save(trial).with_name(f"{name}.json")
    path.write_bytes(content)
    trials, problems = store.load(trial.environment)
    assert list(trials) == [trial.spec.key]
    assert [problem.path for problem in problems] == [path]
    assert problems[0].reason.startswith(reason)
    assert "\n" not in problems[0].reason
    assert len(problems[0].reason) < 200
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", ["pipe", "endless", "large"])
def test_a_file_that_might_never_end_is_refused(store: Store, kind: str) -> None:
    store.save(fake_trial())
    path = store.folder / "x.json"
    reason = "not a regular file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(2**40)
        reason = "larger than a record can be (64.0 MiB)"
    trials, problems = load_folder(store.folder)
    assert len(trials) == 1
    assert [(problem.path, problem.reason) for problem in problems] == [(path, reason)]


def test_another_machines_record_is_not_taken_even_where_it_was_copied_into_the_folder(store: Store) -> None:
    here, there = fake_environment(), fake_environment(host="another-host")
    mine = store.save(fake_trial(fake_spec("fp32"), environment=here))
    copied = mine.with_name("copied.json")
    copied.write_text(fake_trial(fake_spec("tf32"), environment=there).model_dump_json())
    assert [trial.spec.precision for trial in store.load(here)[0].values()] == ["fp32"]
    assert copied.exists()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(unwritable: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be written to '.*a-file/results': Not a directory\. Name another"):
        Store(unwritable)


def test_a_file_in_the_machine_folders_place_is_a_store_error(store: Store) -> None:
    trial = fake_trial()
    store.folder.mkdir()
    store.machine_folder(trial.environment).write_text("in the way")
    assert store.load(trial.environment) == ({}, [])
    with pytest.raises(StoreError, match="The record of resnet50 fp32 batch 256 cannot be written"):
        store.save(trial)
    assert store.machine_folder(trial.environment).read_text() == "in the way"


def fail(number: int) -> Any:
    def failing(*arguments: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    return failing


def test_a_record_that_cannot_be_written_whole_is_not_written_at_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store.save(fake_trial(fake_spec("tf32")))
    before = tree(store.folder)
    monkeypatch.setattr(os, "fsync", fail(errno.ENOSPC))
    with pytest.raises(StoreError, match="No space left"):
        store.save(fake_trial())
    monkeypatch.undo()
    assert tree(store.folder) == before
    assert kept.exists()


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_ctrl_c_while_writing_leaves_nothing_behind(store: Store, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(fake_trial())
    assert tree(store.folder) == {}


def test_a_file_system_without_hard_links_will_do(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", fail(errno.EPERM))
    first, second = store.save(fake_trial(message="first")), store.save(fake_trial(message="second"))
    assert first != second
    assert json.loads(first.read_text())["message"] == "first"
    assert len(tree(store.folder)) == 2


@pytest.mark.parametrize(
    ("text", "name", "with_points"),
    [
        ("NVIDIA H200", "nvidia-h200", "nvidia-h200"),
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
        (("resnet50",), "resnet50 #2"),
        (("resnet50", "resnet50 #2", "resnet50 #4"), "resnet50 #3"),
    ],
)
def test_a_name_that_is_taken_gets_the_first_free_number(taken: tuple[str, ...], name: str) -> None:
    assert free_name("resnet50", taken) == name
    assert free_name("resnet50", [each.replace(" #", "-") for each in taken], "-") == name.replace(" #", "-")
