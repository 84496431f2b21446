"""When a run counts as hung, and whom the others are said to wait for."""

import os
import threading

import pytest

from megappo.distributed.stacks import last_collective, stacks
from megappo.distributed.watchdog import Judge, Whereabouts


def told(rank, *, moves, pulse, phase="update_actor", phases=7, step=3):
    return Whereabouts(
        rank=rank, step=step, phase=phase, phases=phases, moves=moves, pulse=pulse,
        pid=100 + rank, host="node", created=0.0,
    )  # fmt: skip


def watch(*, until, every=5.0, timeout_s=100.0, **ranks):
    """A judge that was told so every few seconds; whether it ever saw a hang, and when."""
    judge, now, count = Judge(timeout_s=timeout_s, period_s=5.0), 0.0, 0
    while now <= until:
        count += 1
        whereabouts = [make(now, count) for make in ranks.values()]
        if judge.is_hung(whereabouts, now):
            return judge, now, whereabouts
        now += every
    return judge, None, whereabouts


def moving(rank, **fixed):
    return lambda now, count: told(rank, moves=count, pulse=count, **fixed)


def stuck(rank, *, since=0.0, **fixed):
    return lambda now, count: told(rank, moves=count if now < since else -1, pulse=count, **fixed)


def silent(rank, *, since=0.0, **fixed):
    return lambda now, count: told(
        rank, moves=count if now < since else -1, pulse=count if now < since else -1, **fixed
    )


def test_ranks_that_move_never_hang():
    assert watch(until=1000, a=moving(0), b=moving(1))[1] is None


def test_a_rank_that_does_not_move_for_the_timeout_is_a_hang():
    judge, when, whereabouts = watch(until=1000, a=stuck(0), b=stuck(1, phases=6, phase="values"))
    assert when == 105.0
    report = judge.report(whereabouts, {0: "the stack"})
    assert report.ranks == (1,)
    assert report.summary == (
        "the run hangs (watchdog.timeout_s 100): the others wait for rank 1 in step 3, phase "
        "values, which has not moved for 105 s"
    )
    assert "== rank 0\nthe stack" in report.text
    assert "rank 1 (pid 101 on node): step 3, phase values; moved 105 s ago" in report.text


def test_ranks_at_one_place_are_said_to_be_there_together():
    judge, _, whereabouts = watch(until=1000, a=stuck(0), b=stuck(1))
    report = judge.report(whereabouts, {})
    assert report.ranks == ()
    assert report.summary.endswith("all ranks stand in step 3, phase update_actor")


@pytest.mark.parametrize("phase", ["generate", "score", "sync", "validate", "start"])
def test_a_rank_that_waits_for_engines_or_rewards_excuses_the_others(phase):
    assert watch(until=1000, a=stuck(0), b=stuck(1, phase=phase))[1] is None


def test_a_rank_that_is_ahead_is_no_excuse_for_the_one_that_it_waits_for():
    judge, when, whereabouts = watch(
        until=1000, a=stuck(0, phase="sync", phases=8), b=stuck(1, phase="update_actor", phases=7)
    )
    assert when == 105.0
    assert judge.report(whereabouts, {}).ranks == (1,)


def test_a_rank_that_waits_for_its_engine_is_no_hang_while_another_moves_behind_it():
    ahead = stuck(0, phase="generate", phases=8)
    assert watch(until=1000, a=ahead, b=moving(1, phases=7))[1] is None


def test_a_stopped_rank_is_no_excuse_in_any_phase_and_is_named():
    judge, when, whereabouts = watch(
        until=1000, a=stuck(0, since=50.0), b=silent(1, since=50.0, phase="generate")
    )
    assert when == 155.0
    assert judge.silent == (1,)
    report = judge.report(whereabouts, {})
    assert report.ranks == (1,)
    assert "phase generate, which does not answer for 105 s (stopped, or lost)" in report.summary


def test_a_pause_of_the_judge_itself_makes_nobody_late():
    assert watch(until=1000, every=99.0, a=stuck(0), b=stuck(1))[1] is None


def test_stacks_show_every_other_thread_the_main_one_first():
    ready, done = threading.Event(), threading.Event()

    def wait_here():
        ready.set()
        done.wait()

    other = threading.Thread(target=wait_here, name="the other")
    other.start()
    ready.wait()
    found = []
    asker = threading.Thread(target=lambda: found.append(stacks()))
    asker.start()
    asker.join()
    done.set()
    other.join()
    assert found[0].startswith("thread MainThread:")
    assert "thread the other:" in found[0]
    assert "in wait_here" in found[0]


def test_the_last_collective_comes_from_pytorchs_flight_recorder():
    import torch
    import torch.distributed as dist

    assert "RANK" not in os.environ
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        found = last_collective()
    finally:
        dist.destroy_process_group()
    assert found.startswith(
        "last collective: gloo:all_reduce number 1 of group ['0', 'default_pg']"
    )
    assert "inputs [[3]] ['Float']" in found
