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
    block.query_opened(2.0)
    block.query_closed(500.0)
    block.query_opened(502.0)
    block.query_opened(503.0)
    block.query_closed(600.0)
    assert block.verdict(1000.0) == "run"
    assert block.wait_s(1000.0) == 1e6 - 1000
    block.query_closed(1000.0)
    assert block.wait_s(1000.0) == 6.0
    assert (block.verdict(1005.9), block.verdict(1006.0)) == ("run", "interrupt")


def test_query_after_the_interrupt_does_not_extend_the_grace() -> None:
    block = clock()
    assert block.verdict(10.0) == "interrupt"
    block.query_opened(10.1)
    assert block.verdict(11.0) == "kill"


def test_clock_tells_the_time_until_a_change() -> None:
    """A block that is over is not waited for, and a block that is nearly over is waited for."""
    block = clock()
    assert block.wait_s(3.0) == 7.0
    assert block.wait_s(10.5) == 0.0
    assert block.verdict(12.0) == "interrupt"
    assert (block.wait_s(12.5), block.wait_s(20.0)) == (0.5, 0.0)
    waiting, nearly = clock(wall_s=10.0), clock()
    waiting.query_opened(0.0)
    nearly.burned(19.5)
    assert (waiting.wait_s(10.5), nearly.wait_s(3.0)) == (0.0, 7.0)


def test_computing_thread_is_bounded_by_cpu_time() -> None:
    block = clock()
    block.query_opened(0.0)
    for second in range(1, 20):
        block.burned(1.0)
        assert block.verdict(float(second)) == "run"
    block.burned(1.0)
    assert block.wait_s(20.0) == 0.0
    assert block.verdict(20.0) == "interrupt"


def test_waiting_has_a_limit_of_its_own() -> None:
    block = clock(wall_s=100.0)
    block.query_opened(4.0)
    assert block.wait_s(4.0) == 96.0
    assert [block.verdict(now) for now in (99.9, 100.0, 101.0)] == ["run", "interrupt", "kill"]


def test_clock_names_the_limit_reached() -> None:
    waited, computed, burned = clock(wall_s=10.0, limit_s=20.0), clock(), clock()
    burned.burned(20.0)
    assert (computed.limit, computed.over) == (None, None)
    assert [waited.verdict(10.0), computed.verdict(10.0), burned.verdict(1.0)] == ["interrupt"] * 3
    assert [(each.limit, each.over) for each in (waited, computed, burned)] == [
        ("block_wall_timeout_s", "took longer than block_wall_timeout_s = 10 s, waiting for replies included"),
        ("block_timeout_s", "ran longer than block_timeout_s = 10 s, waiting for replies not counted"),
        ("block_timeout_s", "used more CPU time than all CPUs have within block_timeout_s = 10 s"),
    ]


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
