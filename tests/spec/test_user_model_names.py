import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fake_engine import fake_spec, fake_trial

from castwise.errors import UsageError
from castwise.records.schema import Trial
from castwise.records.store import ResumePolicy, reusable_trials
from castwise.registry.workloads import find_workload
from castwise.spec.plan import ParameterGrid, parse_grid
from castwise.spec.user_model import (
    OwnKind,
    UserModel,
    UserWorkload,
    is_user_model,
    locate,
    pickle_reference,
    script_command,
    shown_name,
    slow_imports,
    with_python,
    with_ranks,
)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("train_me.py:build", "train_me.py:build"),
        ("train_me.py", "train_me.py:build"),
        ("/some/folder/train_me.py:make", "train_me.py:make"),
        ("../train_me.py:make", "train_me.py:make"),
        ("package.module:build", "package.module:build"),
        ("module:build", "module:build"),
        ("transformers:bert", "transformers:bert"),
        ("transformers:/models/small-bert/config.json", "transformers:small-bert"),
        ("transformers:small.json", "transformers:small.json"),
        ("pickle:/tmp/1234.pickle#Net", "own:Net"),
        ("own:Net", "own:Net"),
    ],
)
def test_what_is_shown_names_no_folder(written: str, shown: str) -> None:
    assert is_user_model(written)
    assert shown_name(written) == shown
    row = find_workload(written)
    assert (row.name, row.family) == (shown, "own")
    # Reports look a record's workload up by the name that stands in it.
    assert find_workload(shown) == row


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (":build", "names no function"),
        ("\udcff.py", "is not in UTF-8"),
        ("train_me.py:", "names no function"),
        ("train_me.py:not a name", "names no function"),
        ("train-me:build", "neither a Python file nor a module"),
        ("transformers:", "needs a configuration"),
    ],
)
def test_what_is_no_reference_is_refused(written: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_workload(written)


def test_a_file_is_located_from_the_present_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train_me.py").write_text("def build(): ...")
    monkeypatch.chdir(tmp_path)
    assert locate("train_me.py") == UserModel(kind="file", path=str(tmp_path / "train_me.py"), name="build")
    assert locate("./train_me.py:make").path == str(tmp_path / "train_me.py")
    assert locate("package.module:make") == UserModel(kind="module", path=str(tmp_path), name="package.module:make")


@pytest.mark.parametrize(
    ("source", "is_refused"),
    [
        ("import torch\nmodel = torch.nn.Linear(1, 1)\nprint(model)\n", True),
        ("from models import *\n", False),
        ("from models import make as build\n", False),
        ("build = dict(model=1)\n", False),
        ("class build: ...\n", False),
        ("def broken(:\n", False),  # Python says why
    ],
)
def test_a_script_by_its_name_is_told_how_to_be_measured(tmp_path: Path, source: str, is_refused: bool) -> None:
    (tmp_path / "train.py").write_text(source)
    assert locate(f"{tmp_path}/train.py:make").name == "make"
    if is_refused:
        with pytest.raises(UsageError, match=r"has no function 'build'.*: castwise run -- python .*train.py"):
            locate(f"{tmp_path}/train.py")
    else:
        assert locate(f"{tmp_path}/train.py").name == "build"


def test_a_script_that_is_misspelt_is_not_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"The script 'trian.py' does not exist. Did you mean train.py\?"):
        locate("python trian.py")
    with pytest.raises(UsageError, match=r"'sub/trian.py' does not exist.$"):
        locate("python sub/trian.py")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'.*missing.py' does not exist.*castwise init"):
        locate(f"{tmp_path}/missing.py:build")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        locate(f"{tmp_path}/folder.py:build")


def test_a_configuration_is_a_file_a_folder_or_a_type(tmp_path: Path) -> None:
    config = tmp_path / "small" / "config.json"
    config.parent.mkdir()
    config.write_text("{}")
    assert locate(f"transformers:{config}").path == str(config)
    assert locate(f"transformers:{config.parent}").path == str(config)
    assert locate("transformers:bert") == UserModel(kind="transformers", path="", name="bert")
    with pytest.raises(UsageError, match="There is no configuration"):
        locate(f"transformers:{tmp_path}/none/config.json")
    with pytest.raises(UsageError, match="object of a Python session"):
        locate("own:Net")


def test_a_pickle_has_a_reference(tmp_path: Path) -> None:
    file = tmp_path / "0123.pickle"
    file.write_bytes(b"")
    reference = pickle_reference(file, "Net")
    assert shown_name(reference) == "own:Net"
    assert locate(reference) == UserModel(kind="pickle", path=str(file), name="Net")


def test_a_plan_has_the_models_digest_and_own_batch_size() -> None:
    model = UserModel(kind="file", path="/train_me.py", name="build", digest="0123456789ab")
    known = {"/train_me.py:build": UserWorkload(model=model, batch_size=48)}
    axes = ParameterGrid(workloads=("/train_me.py:build",), precisions=("fp32",))
    (spec,) = parse_grid(axes).specs("cpu", user_workloads=known)
    assert (spec.workload, spec.user_model, spec.batch_size) == ("train_me.py:build", model, 48)
    edited = {"/train_me.py:build": UserWorkload(model=model.model_copy(update={"digest": "ba9876543210"}))}
    (other,) = parse_grid(axes).specs("cpu", user_workloads=edited)
    assert other.key != spec.key
    assert other.batch_size == find_workload("train_me.py:build").cpu_batch_size
    (asked,) = parse_grid(ParameterGrid(**{**vars(axes), "batch_sizes": (7,)})).specs("cpu", user_workloads=known)
    assert asked.batch_size == 7


@pytest.mark.parametrize(
    ("kind", "path", "name", "has_place"),
    [
        ("file", "/home/ann/secret/train_me.py", "train_me.py", True),
        ("module", "/home/ann/secret", "", True),
        ("transformers", "/home/ann/secret/config.json", "config.json", True),
        ("transformers", "", "", False),
        ("pickle", "/home/ann/secret/0123.pickle", "0123.pickle", False),
    ],
)
def test_records_name_no_folder(kind: OwnKind, path: str, name: str, has_place: bool) -> None:
    own = UserModel(kind=kind, path=path, name="build", digest="d")
    spec = fake_spec().model_copy(update={"user_model": own})
    trial = Trial(**{**dict(fake_trial()), "spec": spec})
    kept = trial.spec.user_model
    assert kept is not None
    assert (kept.path, len(kept.folder_digest)) == (name, 12 if has_place else 0)
    assert "ann" not in trial.model_dump_json()
    # It answers the question that was asked, whether it was read or has just been measured.
    assert trial.spec.key == spec.key
    assert trial.spec.configuration == spec.configuration
    again = Trial.model_validate_json(trial.model_dump_json())
    assert reusable_trials([spec], {spec.key: again}, ResumePolicy()) == {spec.key: again}


def test_a_record_of_before_with_a_folder_in_it_still_answers() -> None:
    own = UserModel(kind="file", path="/home/ann/train_me.py", name="build", digest="d")
    spec = fake_spec().model_copy(update={"user_model": own})
    document = json.loads(fake_trial().model_dump_json())
    document["spec"] = json.loads(spec.model_dump_json())
    del document["spec"]["own"]["place"]
    trial = Trial.model_validate(document)
    assert reusable_trials([spec], {spec.key: trial}, ResumePolicy())
    assert trial.spec.key == spec.key


def test_files_of_one_name_and_content_in_two_folders_are_two_questions() -> None:
    one, two = (UserModel(kind="file", path=f"/{folder}/a.py", name="build", digest="d") for folder in "xy")
    first, second = (fake_spec().model_copy(update={"user_model": own}) for own in (one, two))
    assert first.key != second.key
    assert first.comparison != second.comparison


def test_what_takes_seconds_to_import_is_known_before_the_code_runs(tmp_path: Path) -> None:
    file = tmp_path / "train_me.py"
    file.write_text("import torch\n# import lightning\nfrom transformers import GPT2Config\n")
    assert slow_imports([f"{file}:build", "timm:vit_tiny_patch16_224", "torchvision:alexnet"]) == [
        "timm",
        "transformers.modeling_utils",
    ]
    assert slow_imports([str(file), "transformers:bert"]) == ["transformers.modeling_utils"]
    assert slow_imports([str(tmp_path / "missing.py"), "package.module:build"]) == []
    file.write_text("import transformers, torchao\n")
    assert slow_imports([str(file)]) == [], "torchao would open the GPU before the fork"


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        (
            '"Trains."\nfrom datasets import load_dataset, Dataset\nimport os, my.trl\ndef f(): import diffusers.utils',
            ["datasets", "diffusers", "datasets:Dataset", "datasets:load_dataset"],
        ),
        ("import os, peft\nos.environ['HF_HOME'] = '/x'\nimport datasets", ["peft"]),
        ("import dotenv\ndotenv.load_dotenv()\nimport datasets", []),
        ("from .trl import x\nfrom datasets import *", ["datasets"]),
        ("import datasets, torchao", []),
        ("import datasets\nno python", []),
    ],
)
def test_a_script_s_imports_are_known_in_the_environment_that_it_finds(
    tmp_path: Path, text: str, imported: list[str]
) -> None:
    (tmp_path / "train.py").write_text(text)
    assert slow_imports([f"python {tmp_path}/train.py"]) == imported


def test_a_script_is_named_by_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").touch()
    command = script_command(["python3", "my train.py", "--data", "/home/me/images", "--out=/home/me/x", "--lr", "1"])
    assert command == "python 'my train.py' --data /home/me/images --out=/home/me/x --lr 1"
    assert shown_name(command) == shown_name(shown_name(command)) == "python 'my train.py' --data images --out=x --lr 1"
    model = locate(command)
    assert (model.kind, model.arguments[-1]) == ("script", "1")
    redacted = model.redacted
    assert "/home/me" not in redacted.model_dump_json()
    assert redacted.redacted == redacted
    others = [model.model_copy(update={"arguments": each}).redacted for each in ((), ("--data", "/b/images"))]
    assert len({each.folder_digest for each in (redacted, *others)}) == 3


def test_secret_arguments_of_a_script_are_hidden_and_still_tell_runs_apart(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    secrets = "--token s1 --api-key=s2 --db_password s3 wandb.key=s4 --client-secret s5 --api-key -s7 --token --T0k"
    secrets += " --wandb-key 0a1b2c3d4e5f6a7b8c --access-key s8"
    others = "--tokenizer bpe --max-tokens 8 --keypoints 4 --no-auth --csv-img-key filepath --key-dim=64 --pad_token x"
    command = f"python {tmp_path}/train.py {secrets} {others}"
    shown = "--token HIDDEN --api-key=HIDDEN --db_password HIDDEN wandb.key=HIDDEN --client-secret HIDDEN"
    shown += " --api-key HIDDEN --token HIDDEN --wandb-key HIDDEN --access-key HIDDEN"
    assert shown_name(command) == f"python train.py {shown} {others}"
    redacted, other = (locate(each).redacted for each in (command, command.replace("s3", "s6")))
    assert " ".join(redacted.arguments) == f"{shown} {others}"
    assert redacted.folder_digest != other.folder_digest


@pytest.mark.parametrize(
    "start", ["torchrun --nproc-per-node 2", "accelerate launch", "python -m torch.distributed.run --nnodes 1"]
)
def test_a_launcher_is_part_of_the_command(start: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.touch()
    command = script_command([*start.split(), str(file), "--lr", "1"])
    assert command is not None
    assert shown_name(command) == f"{start} train.py --lr 1"
    model = locate(command)
    assert (model.path, model.launcher, model.arguments) == (str(file), tuple(start.split()), ("--lr", "1"))
    more = with_ranks(command, 4)
    assert (locate(more).num_ranks, locate(more).arguments) == (4, ("--lr", "1"))
    assert with_ranks(more, model.num_ranks) in (command, with_ranks(command, 1))


@pytest.mark.parametrize(
    ("written", "on_four"),
    [
        (
            "torchrun --nproc_per_node=gpu train.py --num_processes 2",
            "torchrun --nproc_per_node=4 train.py --num_processes 2",
        ),
        ("torchrun --standalone -m my.train", "torchrun --nproc-per-node 4 --standalone -m my.train"),
        ("accelerate launch train.py", "accelerate launch --num_processes 4 train.py"),
    ],
)
def test_a_script_is_started_on_other_numbers_of_gpus(written: str, on_four: str) -> None:
    assert with_ranks(written, 4) == on_four
    with pytest.raises(UsageError, match="a script on several GPUs, and 'python train"):
        with_ranks("python train.py", 2)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["deepspeed", "train.py"], "cannot start 'deepspeed'"),
        (["uv", "run", "train.py"], "cannot start 'uv'"),
        (["./train.py", "--lr", "1"], "cannot start './train.py'"),
        (["accelerate", "config"], "cannot start 'accelerate'"),
        (["torchrun", "--nproc-per-node", "2"], "names no script"),
        (["torchrun", "--nnodes=2", "train.py"], "on this host alone: '--nnodes=2'"),
        (["torchrun", "--nnodes", "1:2", "train.py"], "on this host alone: '--nnodes 1:2'"),
        (["torchrun", "--no-python", "train.py"], "'--no-python' is not possible"),
        (["torchrun", "--run-path", "train.py"], "'--run-path' is not possible"),
        (["python"], "names no script"),
        (["python", "-m"], "names no script"),
        (["python", "-O", "train.py"], "'-O' is no script"),
        (["/no/such/python3", "train.py"], "by its own Python"),
    ],
)
def test_what_runs_no_script_is_refused(words: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        script_command(words)


@pytest.mark.parametrize(
    "first",
    [
        f"#!{sys.executable}",
        f"#!{sys.executable} -s",
        "#!/usr/bin/env python3",
        f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''",
    ],
)
def test_a_console_script_of_this_python_is_a_script(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "my-train"
    program.parent.mkdir()
    program.write_text(f"{first}\nimport my_package\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{Path(sys.executable).parent}")
    command = script_command(with_python(["my-train", "--lr", "1"]))
    assert command == "python my-train --lr 1" == shown_name(command)
    assert locate(command).path == str(program)
    assert script_command(with_python([str(program)])) == f"python {program}"


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("", "no program 'my-train' on the PATH, and no workload"),
        ("#!/bin/sh", "'my-train' is none of its scripts"),
        ("#!/other/bin/python3", "'my-train' is none of its scripts"),
    ],
)
def test_a_program_that_this_python_does_not_run_is_refused(
    first: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if first:
        (tmp_path / "my-train").write_text(f"{first}\n")
        (tmp_path / "my-train").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=why):
        with_python(["my-train", "--lr", "1"])
    for words in (["python", "x.py"], ["torchrun", "x.py"], ["deepspeed", "x.py"], ["x.py:build"]):
        assert with_python(words) == words


@pytest.mark.parametrize("start", [["python", "-m"], ["torchrun", "--nproc-per-node", "2", "-m"]])
@pytest.mark.parametrize("name", ["package.train", "package"])
def test_a_module_is_found_and_not_imported(
    start: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for file in ("__init__", "train", "__main__"):
        (tmp_path / "package" / f"{file}.py").write_text("raise AssertionError\nimport timm\n")
    command = script_command([*start, name, "--lr", "1"])
    assert command is not None
    assert slow_imports([command]) == ["timm"]
    assert command == f"{' '.join(start)} {name} --lr 1" == shown_name(command)
    model = locate(command)
    file = "train.py" if name == "package.train" else "__main__.py"
    assert (Path(model.path), model.name) == (tmp_path / "package" / file, name)
    assert (model.arguments, model.launcher) == (("--lr", "1"), tuple(start[:-1] if start[0] == "torchrun" else []))


@pytest.mark.parametrize("name", ["no_such_module", "json.no_such_part", "json", "not-a-name", "sys", "of_no_file"])
def test_a_module_that_cannot_be_run_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "of_no_file", ModuleType("of_no_file"))
    with pytest.raises(UsageError, match=f"The module '{name}' does not exist"):
        locate(f"python -m {name}")


def test_options_of_python_that_change_nothing_are_left_out() -> None:
    words = ["python3", "-u", "-W", "ignore", "-Wdefault", "-B", "train.py", "-u"]
    assert script_command(words) == "python train.py -u"


def test_names_of_workloads_are_no_command() -> None:
    assert script_command(["resnet50", "gpt2"]) is None
