"""Which changes are open, by what was tried before."""

from fake_engine import fake_environment, fake_spec

from castwise.analysis.statistics import Estimate
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import Change, SearchSpace, TriedChange, may_enable
from castwise.tune.measurements import Outcome


def space_of(precisions: tuple[str, ...], techniques: tuple[str, ...]) -> SearchSpace:
    return SearchSpace(fake_spec(), precisions, techniques, fake_environment())


SPACE = space_of(("fp32", "tf32", "bf16-mixed"), ("channels-last", "cudnn-search", "compile", "cuda-graph"))


def attempt(stage: int, change: Change, below: TrialSpec, outcome: Outcome, ratio: float = 1.0) -> TriedChange:
    return TriedChange(stage, change, below, change.on(below), Estimate(ratio, ratio, ratio, 3), outcome)


def names(space: SearchSpace, current: TrialSpec, *tried: TriedChange) -> set[str]:
    return {change.name for change in space.candidates(current, tried)}


def all_of(
    stage: int, below: TrialSpec, ratio: float, *, taken: Change | None = None, space: SearchSpace = SPACE
) -> list[TriedChange]:
    """Return tried at every change open at the start of its rank; one is taken at twice the speed."""
    return [
        attempt(stage, change, below, "accepted" if change == taken else "slower", 2.0 if change == taken else ratio)
        for change in space.candidates(below, [])
    ]


def test_precisions_come_first_each_with_channels_last() -> None:
    start = fake_spec()
    both = {"tf32 + channels-last", "bf16-mixed + channels-last"}
    assert names(SPACE, start) == both
    in_vain = [attempt(0, change, start, "slower", 0.5) for change in SPACE.candidates(start, [])]
    assert names(SPACE, start, *in_vain) == {"tf32", "bf16-mixed"}, "without it where that was slower"
    words = fake_spec(workload="lstm-lm")
    assert names(SPACE, words) == {"tf32", "bf16-mixed"}


def test_what_is_cheap_comes_before_what_compiles() -> None:
    start = fake_spec()
    tried = all_of(0, start, 0.5)
    tried += [attempt(0, change, start, "slower", 0.5) for change in SPACE.candidates(start, tried)]
    cheap = {"channels-last", "cudnn-search", "cuda-graph", "channels-last + cudnn-search"}
    assert names(SPACE, start, *tried) == cheap
    tried += [attempt(0, change, start, "slower", 0.5) for change in SPACE.candidates(start, tried)]
    assert names(SPACE, start, *tried) == {"compile", "compile + cuda-graph"}
    tried += [attempt(0, change, start, "slower", 0.5) for change in SPACE.candidates(start, tried)]
    assert names(SPACE, start, *tried) == set(), "nothing is left"


def test_what_did_not_pay_is_tried_again_once_its_partner_is_taken() -> None:
    start, graph = fake_spec(), Change(techniques=("cuda-graph",))
    tried = [attempt(0, change, start, "slower", 0.99) for change in SPACE.candidates(start, [])]
    tried += [attempt(0, change, start, "slower", 0.99) for change in SPACE.candidates(start, tried)]
    assert "bf16-mixed" not in names(SPACE, start, *tried)
    tried.append(attempt(0, graph, start, "accepted", 3.0))
    both = {"tf32 + channels-last", "bf16-mixed + channels-last"}
    assert both <= names(SPACE, graph.on(start), *tried), "launches no longer hide it"
    search = attempt(0, Change(techniques=("cudnn-search",)), start, "accepted", 3.0)
    assert "bf16-mixed" not in names(SPACE, search.spec, *tried[:-1], search)


def test_a_precision_far_behind_the_one_taken_is_not_tried_again() -> None:
    start, bf16 = fake_spec(), Change(precision="bf16-mixed", techniques=("channels-last",))
    rival = Change(precision="tf32", techniques=("channels-last",))
    graph = attempt(1, Change(techniques=("cuda-graph",)), bf16.on(start), "accepted", 1.5)
    tried = [attempt(0, rival, start, "second best", 1.9), attempt(0, bf16, start, "accepted", 2.0)]
    assert "tf32" not in names(SPACE, bf16.on(start), *tried), "nothing since acts on it"
    assert "tf32" in names(SPACE, graph.spec, *tried, graph)
    tried[0] = attempt(0, rival, start, "second best", 1.1)
    assert "tf32" not in names(SPACE, graph.spec, *tried, graph)


def test_a_precision_far_behind_has_another_go_once_the_launches_that_hid_its_gain_are_gone() -> None:
    """The LSTM of 200 on an H200: bf16 is 0.8 times TF32 from the host, and 1.5 times TF32 as one graph."""
    start, tf32 = fake_spec(workload="lstm-lm"), Change(precision="tf32")
    below = tf32.on(start)
    tried = [
        attempt(0, Change(precision="bf16-mixed"), start, "slower", 1.04),
        attempt(0, tf32, start, "accepted", 1.27),
    ]
    graph = attempt(1, Change(techniques=("cuda-graph",)), below, "accepted", 2.5)
    assert "bf16-mixed" in names(SPACE, graph.spec, *tried, graph)
    # Far behind by more than casts explain, or without casts, it is by what the graph bought.
    for lost, won in ((Change(precision="bf16-mixed"), tf32), (tf32, Change(precision="bf16-mixed"))):
        ratio = 0.5 if won == tf32 else 1.0
        tried = [attempt(0, lost, start, "slower", ratio), attempt(0, won, start, "accepted", 1.27)]
        for bought, is_open in ((2.5, True), (1.05, False)):
            graph = attempt(1, Change(techniques=("cuda-graph",)), won.on(start), "accepted", bought)
            assert (lost.name in names(SPACE, graph.spec, *tried, graph)) is is_open


def test_16_bits_behind_float32_have_another_go_as_a_graph_whatever_it_bought_there() -> None:
    """mlp-4096 on an H200: a graph bought TF32 1.07; bf16-master is 0.82 times it without graphs, 1.26 with them."""
    start, tf32 = fake_spec(workload="mlp-4096"), Change(precision="tf32")
    bf16 = Change(precision="bf16-mixed")
    tried = [attempt(0, bf16, start, "second best", 2.9), attempt(0, tf32, start, "accepted", 3.5)]
    graph = attempt(1, Change(techniques=("cuda-graph",)), tf32.on(start), "accepted", 1.03)
    assert "bf16-mixed" in names(SPACE, graph.spec, *tried, graph)
    tried[0] = attempt(0, bf16, start, "second best", 1.6)
    assert "bf16-mixed" not in names(SPACE, graph.spec, *tried, graph), "its products cannot make up for that"
    # The other way about there are no casts to lessen.
    tried = [attempt(0, tf32, start, "second best", 2.9), attempt(0, bf16, start, "accepted", 3.5)]
    graph = attempt(1, Change(techniques=("cuda-graph",)), bf16.on(start), "accepted", 1.03)
    assert "tf32" not in names(SPACE, graph.spec, *tried, graph)


def test_what_was_second_best_is_tried_on_the_next_stage() -> None:
    start, search = fake_spec(), Change(techniques=("cudnn-search",))
    space = space_of(("fp32",), ("fused-optimizer", "cudnn-search", "chunked-loss"))
    tried = [
        attempt(0, search, start, "accepted", 1.2),
        attempt(0, Change(techniques=("fused-optimizer",)), start, "second best", 1.1),
        attempt(0, Change(techniques=("chunked-loss",)), start, "slower", 0.9),
    ]
    assert names(space, search.on(start), *tried) == {"fused-optimizer"}


def test_what_failed_is_not_tried_again_and_what_lacked_something_is() -> None:
    start, search = fake_spec(), Change(techniques=("cudnn-search",))
    space = space_of(("fp32",), ("channels-last", "no-step-sync", "cudnn-search"))
    no_sync = Change(techniques=("no-step-sync",))
    lacking = TriedChange(0, no_sync, start, no_sync.on(start), None, "unsupported")
    failed = TriedChange(0, Change(techniques=("channels-last",)), start, start, None, "failed", "oom: (fake)")
    pair = TriedChange(0, Change(techniques=("channels-last", "cudnn-search")), start, start, None, "failed")
    taken = attempt(0, search, start, "accepted", 1.5)
    assert names(space, search.on(start), lacking, failed, pair, taken) == {"no-step-sync"}


def test_a_move_brings_the_precisions_own_loss_scale_and_replaces_what_it_excludes() -> None:
    spec = fake_spec(techniques=("channels-last", "compile"))
    assert Change(precision="fp16-mixed").on(spec).loss_scale == "dynamic"
    better = Change(techniques=("compile-max-autotune",)).on(spec)
    assert better.techniques == ("channels-last", "compile-max-autotune")


def test_what_waited_for_skipped_steps_is_tried_if_none_are_skipped() -> None:
    below = fake_spec("fp16-mixed", loss_scale="dynamic")
    refused = Change(techniques=("no-step-sync",))
    fp32 = below.model_copy(update={"precision": "fp32"})
    assert may_enable(Change(precision="bf16-mixed"), below, refused, "it waits")
    assert not may_enable(Change(precision="fp16-master"), fp32, refused, "")
    assert not may_enable(
        Change(precision="bf16-mixed"), below, Change(techniques=("space-to-depth",)), "finds nothing"
    )
    assert not may_enable(Change(techniques=("cudnn-search",)), below, refused, "it waits")


def test_kernels_that_pay_in_a_compiled_loop_are_tried_with_compilation() -> None:
    space = space_of(("fp32",), ("compile", "batch-norm-kernel"))
    loop = fake_spec(device="cuda:0", techniques=("channels-last",))
    alone, both = space.candidates(loop, [])
    assert [alone.name, both.name] == ["compile", "compile + batch-norm-kernel"]
    assert alone.is_within(both)
    assert not both.is_within(alone)
    (later,) = space.candidates(alone.on(loop), [])
    assert later.name == "batch-norm-kernel"
    assert later.on(alone.on(loop)) == both.on(loop)
    assert not space.candidates(both.on(loop), [])
    assert not space_of(("fp32",), ("batch-norm-kernel",)).candidates(loop, [])
