"The benchmark compares the same with the same, and its page says what was run."

import importlib
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from places import ROOT

sys.path.append(str(ROOT))  # `benchmarks` is no part of the package

from benchmarks import bench, by_hand, flat_prototype, ours, report, workloads  # noqa: E402

SMALL = dict(tiny=5, typical=5, cnn=2, tutorial=1, guarded=5)
VARIANTS = {**ours.VARIANTS, **flat_prototype.VARIANTS}
CASES = [(name, work) for name, works in VARIANTS.items() for work in works]


def outcome(build, work):
    "Weights in the end, and what was measured"
    model = work.model()
    row = build(work, model)()
    return list(model.state_dict().values()), row or {}


@pytest.mark.parametrize("name, work", CASES)
def test_ours_ends_with_the_weights_and_means_of_the_loop_by_hand(name, work, monkeypatch):
    small = workloads.make(work, SMALL[work])
    if "compiled" in name:
        if shutil.which("g++") is None:
            pytest.skip("the compiler needs g++")
        import torch._inductor.config as inductor

        monkeypatch.setattr(inductor.cpp, "vec_isa_ok", True)  # Or it compiles programs to ask the processor
        small = replace(small, net=workloads.convolutions([1, 4]))  # Every layer takes it seconds
    theirs, expected = outcome(by_hand.WORKS[work], small)
    mine, row = outcome(VARIANTS[name][work], small)
    far = report.TOLERANCE.get(name, 0)  # Bit for bit, but for what is compiled
    assert all(torch.allclose(a, b, rtol=0, atol=far) for a, b in zip(mine, theirs, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(mine, small.net.state_dict().values()))
    for column in set(expected) - {"epoch", "elapsed"}:
        assert row[column] == pytest.approx(expected[column], rel=1e-5)


def test_a_step_that_is_cancelled_in_the_prototype_leaves_the_rest_of_the_batch():
    class Skip:
        def before_step(self, t):
            raise flat_prototype.CancelStepException

        def after_batch(self, t):
            self.seen = t.n_updates

    model, skip = torch.nn.Linear(4, 2), Skip()
    opt, batches = torch.optim.SGD(model.parameters(), 0.1), [(torch.ones(3, 4), torch.tensor([0, 1, 1]))]
    callbacks = [skip, flat_prototype.Train(), flat_prototype.Count()]
    flat_prototype.Flat(model, batches, torch.nn.functional.cross_entropy, opt, callbacks).fit(1)
    assert skip.seen == 0 and model.weight.grad is None  # No step; `zero_grad` still came


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_what_it_takes_from_the_library_is_there(path):
    importlib.import_module(f"benchmarks.{path.stem}")


def test_ratios_are_those_of_pairs():
    runs = [[dict(seconds=1.0), dict(seconds=1.5)], [dict(seconds=2.0), dict(seconds=2.5)]]
    answers = [dict(runs=pair) for pair in runs]
    assert report.ratios(answers) == [1.5, 1.25]
    assert report.over(answers, n_batches=100) == pytest.approx(5000)


def test_the_page_of_results_names_all_that_was_run_or_why_it_was_not():
    page = (ROOT / "benchmarks/results.md").read_text()
    header = next(line for line in page.splitlines() if line.startswith("|"))
    assert all(f"| {work} |" in header for work in workloads.WORKS)
    for module in bench.LIBRARIES:
        assert f"| {bench.facts_of(module)[0]} |" in page or f"- {module}: " in page
    assert (ROOT / "benchmarks/results.svg").exists()
    assert str(ROOT) not in page
