from rlm_broker.sandbox.blocks.block_clock import BlockClock


def clock(limit_s: float = 10.0, cpus: int = 2, wall_s: float = 1e6) -> BlockClock:
    return BlockClock(limit_s, wall_s, grace_s=1.0, now=0.0, cpus=cpus)


def test_clock_interrupts_once_and_kills_after_the_grace() -> None:
    """A block runs until its limit, is interrupted once and killed after the grace."""
    block = clock()
    assert [block.verdict(now) for now in (0.0, 9.9, 10.0, 10.5, 10.99, 11.0)] == [
        "run", "run", "interrupt", "run", "run", "kill"
    ]  # fmt: skip


def test_clock_stands_while_a_query_is_open() -> None:
    block = clock()
    block.query_opened(4.0)
    block.query_opened(5.0)
    block.query_closed(50.0)
    assert block.verdict(1000.0) == "run"
    assert block.wait_s(1000.0) == 1e6 - 1000
    block.query_closed(1000.0)
    assert block.verdict(1005.9) == "run"
    assert block.verdict(1006.0) == "interrupt"


def test_query_after_the_interrupt_does_not_extend_the_grace() -> None:
    block = clock()
    assert block.verdict(10.0) == "interrupt"
    block.query_opened(10.1)
    assert block.verdict(11.0) == "kill"


def test_clock_tells_the_time_until_a_change() -> None:
    block = clock()
    assert block.wait_s(3.0) == 7.0
    assert block.verdict(12.0) == "interrupt"
    assert block.wait_s(12.5) == 0.5
    assert block.wait_s(20.0) == 0.0


def test_computing_thread_is_bounded_by_cpu_time() -> None:
    block = clock(limit_s=10.0, cpus=2)
    block.query_opened(0.0)
    for second in range(1, 20):
        block.burned(1.0)
        assert block.verdict(float(second)) == "run"
    block.burned(1.0)
    assert block.wait_s(20.0) == 0.0
    assert block.verdict(20.0) == "interrupt"


def test_cpu_time_within_the_limit_is_harmless() -> None:
    block = clock(limit_s=10.0, cpus=4)
    block.burned(39.0)
    assert block.verdict(9.9) == "run"


def test_waiting_has_a_limit_of_its_own() -> None:
    block = clock(limit_s=10.0, wall_s=100.0)
    block.query_opened(4.0)
    assert block.wait_s(4.0) == 96.0
    assert block.verdict(99.9) == "run"
    assert block.verdict(100.0) == "interrupt"
    assert block.over == "took longer than block_wall_timeout_s = 100 s, waiting for replies included"
    assert block.verdict(101.0) == "kill"


def test_clock_names_the_limit_reached() -> None:
    computed, burned = clock(), clock()
    assert computed.over is None
    computed.verdict(10.0)
    assert computed.over == "ran longer than block_timeout_s = 10 s, waiting for replies not counted"
    burned.burned(20.0)
    burned.verdict(1.0)
    assert burned.over == "used more CPU time than all CPUs have within block_timeout_s = 10 s"


def test_interrupt_request_is_heeded_once() -> None:
    block = clock()
    assert block.verdict(1.0) == "run"
    block.wish("was interrupted")
    assert block.wait_s(2.0) == 0.0
    assert [block.verdict(now) for now in (2.0, 2.1, 3.0)] == ["interrupt", "run", "kill"]
    assert (block.limit, block.over) == (None, "was interrupted")


def test_wish_after_a_limit_was_reached_changes_nothing() -> None:
    block = clock()
    assert block.verdict(10.0) == "interrupt"
    block.wish("was interrupted")
    assert block.verdict(10.5) == "run"
    assert block.limit == "block_timeout_s"


def test_clock_runs_between_queries() -> None:
    block = clock(limit_s=10.0)
    block.query_opened(4.0)
    block.query_closed(1000.0)
    block.query_opened(1002.0)
    block.query_closed(2000.0)
    assert block.wait_s(2000.0) == 4.0
    assert block.verdict(2003.9) == "run"
    assert block.verdict(2004.0) == "interrupt"


def test_clock_waits_no_longer_than_needed() -> None:
    """A block that is over is not waited for, and a block that is nearly over is waited for."""
    assert clock(limit_s=10.0).wait_s(10.5) == 0.0
    waiting = clock(wall_s=10.0)
    waiting.query_opened(0.0)
    assert waiting.wait_s(10.5) == 0.0
    nearly = clock(limit_s=10.0, cpus=2)
    nearly.burned(19.5)
    assert nearly.wait_s(3.0) == 7.0


def test_each_limit_is_named() -> None:
    waited, burned = clock(wall_s=10.0, limit_s=20.0), clock(limit_s=10.0, cpus=2)
    assert waited.verdict(10.0) == "interrupt"
    assert waited.limit == "block_wall_timeout_s"
    burned.burned(20.0)
    assert burned.verdict(1.0) == "interrupt"
    assert burned.limit == "block_timeout_s"
