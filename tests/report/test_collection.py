"""Records put in order: what counts, what is compared, and what configurations are called."""

import pytest
from fake_engine import fake_environment, fake_run, fake_spec, fake_training, fake_trial
from fake_records import every_kind, steady

from castwise.records.schema import Trial
from castwise.registry.suites import LIMIT_STEPS, is_search
from castwise.report.collection import ComparisonGroup, collect
from castwise.spec.user_model import UserModel


def only_group(*trials: Trial) -> ComparisonGroup:
    (group,) = collect(trials).groups
    return group


def titles(*trials: Trial) -> list[str]:
    return [group.title for group in collect(trials).groups]


def test_copies_count_once_and_newer_trials_replace_older_ones() -> None:
    old = fake_trial(step_seconds=(0.2,))
    new = fake_trial(step_seconds=(0.1,)).model_copy(update={"started_at": "2001-01-01T00:00:00.000+00:00"})
    copied = collect([old, old.model_copy()])
    assert copied.trials == (old,)
    assert "1 record is a copy" in copied.notes[0]
    for order in ([old, new], [new, old]):
        collection = collect(order)
        assert collection.trials == (new,)
        assert "measured again" in collection.notes[0]


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        ({"driver": "1.2"}, ("driver 580.0", "driver 1.2")),
        ({"torch": "2.99", "driver": "1.2"}, ("torch 2.11.0", "torch 2.99")),
        ({"num_threads": 3}, ("machine ", "machine ")),
    ],
)
def test_titles_tell_machines_apart(other: dict[str, object], apart: tuple[str, str]) -> None:
    here = fake_environment(torch="2.11.0", driver="580.0")
    there = here.model_copy(update=other)
    only_here = fake_trial(fake_spec("fp32", workload="dpn92"), environment=here)
    found = titles(fake_trial(environment=here), fake_trial(environment=there), only_here)
    assert found[2] == "dpn92", "one machine needs no distinction"
    assert [title.startswith(f"resnet50, {words}") for title, words in zip(found, apart, strict=False)] == [True, True]
    assert len(set(found)) == 3
    slow = fake_trial(environment=fake_environment(gpu="Slow GPU"))
    assert titles(fake_trial(), slow) == ["resnet50 (Fake GPU)", "resnet50 (Slow GPU)"]


def test_configurations_of_a_group_are_ordered_and_named_by_what_differs() -> None:
    group = only_group(
        steady("bf16-mixed", batch_size=64),
        steady("fp32", batch_size=64),
        steady("fp32", batch_size=32),
        steady("fp32", batch_size=32, techniques=("fused",)),
        steady("fp32", batch_size=32, world_size=2, parallelism="ddp"),
    )
    assert [group.label(config) for config in group.configurations] == [
        "fp32, batch 32, 1 GPU",
        "fp32, batch 32, 1 GPU, fused",
        "fp32, batch 32, 2 GPUs, ddp",
        "fp32, batch 64, 1 GPU",
        "bf16-mixed, batch 64, 1 GPU",
    ]
    assert group.label(group.configurations[0], "batch_size", "world_size") == "fp32"
    alike = only_group(steady("bf16-mixed"), steady("fp32"))
    assert [alike.label(config) for config in alike.configurations] == ["fp32", "bf16-mixed"]


def test_a_users_model_has_its_own_data() -> None:
    own = UserModel(kind="file", path="own.py", name="build")
    assert only_group(steady("fp32", workload="own.py:build", user_model=own)).description.startswith(
        "batch 256, its own data"
    )
    assert only_group(steady("fp32")).description.startswith("batch 256, synthetic data")


def test_scripts_are_compared_with_themselves_as_written() -> None:
    paces = {"fp32": 0.2, "bf16-mixed": 0.05, "as-written": 0.1}
    specs = {name: fake_spec(name, workload="python train.py") for name in paces}
    (group,) = collect(fake_trial(specs[name], step_seconds=(pace,) * 6) for name, pace in paces.items()).groups
    assert [config.precision for config in group.configurations] == ["as-written", "fp32", "bf16-mixed"]
    assert {config.precision: group.times_reference(config) for config in group.configurations} == pytest.approx(
        {"as-written": 1.0, "fp32": 0.5, "bf16-mixed": 2.0}
    )


def test_loss_scale_is_named_if_a_precision_has_several() -> None:
    alone = only_group(steady("fp32"), steady("fp16-master", loss_scale="128.0"))
    assert [alone.label(config) for config in alone.configurations] == ["fp32", "fp16-master"]
    several = only_group(steady("fp16-master"), steady("fp16-master", loss_scale="128.0"))
    labels = {several.label(config) for config in several.configurations}
    assert labels == {"fp16-master", "fp16-master, loss scale 128.0"}


def test_groups_that_differ_in_their_protocol_get_a_number() -> None:
    assert titles(steady(), fake_trial()) == ["resnet50", "resnet50 #2"]


def test_training_runs_have_groups_of_their_own_that_name_their_length() -> None:
    whole, cut = fake_training(workload="wrn-28-10"), fake_training(recipe={"max_steps": 25})
    search = fake_run(fake_training(recipe={"max_steps": LIMIT_STEPS, "stop_after": 1}))
    groups = collect([fake_run(whole), fake_run(cut), search, fake_trial()]).groups
    assert [group.title for group in groups] == [
        "resnet50",
        "wrn-28-10: training",
        "resnet50: training, 25 steps an epoch",
        "resnet50: search for the largest batch",
    ]
    assert [group.is_training for group in groups] == [False, True, True, True]
    assert is_search(search.spec)
    assert not is_search(cut)
    assert not is_search(fake_training(recipe={"max_steps": LIMIT_STEPS}))


def test_every_trial_is_in_a_configuration() -> None:
    trials = every_kind()
    kept = [trial for config in collect(trials).configurations for trial in config.trials]
    assert sorted(trial.spec.key for trial in kept) == sorted(trial.spec.key for trial in trials)


def test_unknown_precision_comes_last() -> None:
    strange = fake_trial().model_copy(update={"spec": fake_spec().model_copy(update={"precision": "int4-mixed"})})
    group = only_group(strange, fake_trial())
    assert [config.precision for config in group.configurations] == ["fp32", "int4-mixed"]


def test_summary_names_a_few_of_many_devices() -> None:
    machines = [fake_environment(gpu=f"GPU {number}") for number in range(5)]
    trials = [fake_trial(environment=machine) for machine in machines]
    assert " on GPU 0, GPU 1, GPU 2 and 2 more, " in collect(trials).summary
