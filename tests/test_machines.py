"""Machines made of records and of published figures."""

from fake_engine import fake_environment, fake_run, fake_spec, fake_training, fake_trial
from fake_records import other_machine, steady

from castwise.records.schema import Trial
from castwise.registry.published import find_published
from castwise.report.machines import ComparedMachine, Entry, Origin, measured_machines, published_machine
from castwise.spec.trial import MeasurementProtocol, TrialSpec


def only(*trials: Trial) -> ComparedMachine:
    ((machine,),) = measured_machines([Origin("here", trials)])
    return machine


def test_records_of_two_machines_are_never_mixed() -> None:
    ((first, second),) = measured_machines([Origin("both", [steady(), other_machine(steady())])])
    assert [first.name, second.name] == ["Fake GPU", "Slow GPU"]
    assert first.entries.keys() == second.entries.keys()


def test_other_software_is_another_machine_and_names_tell_them_apart() -> None:
    newer = steady().model_copy(update={"environment": fake_environment(torch="9.9")})
    ((first,), (second,)) = measured_machines([Origin("x/before", [steady()]), Origin("x/after", [newer])])
    assert [first.name, second.name] == ["Fake GPU (before)", "Fake GPU (after)"]
    ((first, second),) = measured_machines([Origin("both", [steady(), newer])])
    assert first.name.startswith("Fake GPU (both, ")
    assert first.name != second.name


def test_one_name_for_the_same_machine_twice_gets_a_number() -> None:
    names = [machine.name for (machine,) in measured_machines([Origin("a", [steady()]), Origin("a", [steady()])])]
    assert len(set(names)) == 2


def test_what_a_cell_asks_is_the_same_whichever_device_answers_and_however_long() -> None:
    plain = Entry(fake_spec(), "ok")
    assert (
        Entry(fake_spec(device="cuda:1", protocol=MeasurementProtocol(num_blocks=3), repeat=4), "ok").question
        == plain.question
    )
    for changes in ({"batch_size": 8}, {"seed": 1}, {"world_size": 2, "parallelism": "ddp"}, {"loss_scale": "8.0"}):
        assert Entry(fake_spec(**changes), "ok").question != plain.question
    whole, cut = fake_training(), fake_training(recipe={"max_steps": 3, "stop_after": 1})
    assert Entry(whole, "ok").question == Entry(cut, "ok").question
    assert Entry(fake_training(recipe={"validate_each_epoch": True}), "ok").question != Entry(whole, "ok").question
    assert Entry(fake_training(seed=1), "ok").question == Entry(whole, "ok").question, "seeds are repetitions"
    synthetic_like = fake_training(data_set="synthetic:mnist")
    assert Entry(synthetic_like, "ok").question == Entry(fake_training(data_set="mnist"), "ok").question


def test_no_field_of_a_spec_is_overlooked() -> None:
    asked = {"workload", "precision", "loss_scale", "batch_size", "data_set", "techniques", "world_size", "parallelism"}
    asked |= {"kind", "recipe", "seed"}
    beside_it = {"device", "weights", "protocol", "repeat", "user_model", "memory_limit_bytes"}
    assert asked | beside_it == set(TrialSpec.model_fields), "does the new field tell questions apart? See ASKED"


def test_a_process_gives_a_value() -> None:
    (entry,) = only(steady(), steady(repeat=1), steady(repeat=2)).entries.values()
    assert len(entry.unit_seconds) == 3
    assert entry.run_seconds == ()


def test_seeds_of_a_whole_run_are_values_too_and_whole_runs_go_before_short_ones() -> None:
    limits = [MeasurementProtocol(timeout_seconds=seconds) for seconds in (60.0, 600.0, 600.0)]
    seeds = [fake_run(fake_training(seed=seed, protocol=limit)) for seed, limit in enumerate(limits)]
    short = fake_run(fake_training(recipe={"stop_after": 1}))
    machine = only(short, *seeds)
    (entry,) = machine.entries.values()
    assert len(entry.run_seconds) == 3
    assert entry.cut == ""
    assert any("measured in several ways" in note for note in machine.notes)


def test_a_run_that_was_cut_short_has_no_wall_time_to_compare() -> None:
    (entry,) = only(fake_run(fake_training(recipe={"stop_after": 1}))).entries.values()
    assert entry.run_seconds == ()
    assert entry.unit_seconds
    assert entry.cut == "1 of 2 epochs"


def test_what_was_not_timed_has_its_status() -> None:
    (entry,) = only(fake_trial(status="oom", message="too large", step_seconds=())).entries.values()
    assert (entry.status, entry.message, entry.is_timed) == ("oom", "too large", False)


def test_published_figures_are_whole_runs() -> None:
    machine = published_machine(find_published("T4"))
    assert machine.is_published
    assert machine.name == "Tesla T4 (published)"
    by_cell = {(e.spec.workload, e.spec.precision, e.spec.batch_size): e for e in machine.entries.values()}
    assert by_cell["wrn-28-10", "fp32", 128].run_seconds == (3437.0,)
    assert by_cell["mnist-cnn", "fp16-mixed", 1024].baseline_batch == 512
    assert by_cell["wrn-28-10", "fp16-true", 128].status == "diverged"


def test_published_figures_can_be_narrowed_down() -> None:
    machine = published_machine(find_published("T4"), ["mlp-4096"], ["fp32"])
    assert [entry.spec.label for entry in machine.entries.values()] == ["mlp-4096 fp32 batch 512"]


def test_a_run_of_the_suite_asks_what_its_published_figure_answers() -> None:
    figure = find_published("P100").figures[1]
    assert figure.spec is not None
    quick = figure.spec.model_copy(update={"device": "cuda:3", "seed": 5, "data_set": "synthetic:cifar10"})
    (entry,) = only(fake_run(quick)).entries.values()
    assert entry.question in published_machine(find_published("P100")).entries
