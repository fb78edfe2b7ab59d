"""`QueryLoad`: the weight of all connections' queries together."""

from rlm_broker.transport.load import QueryLoad


def test_connections_proceed_in_order_within_the_weight() -> None:
    load, resumed = QueryLoad(most=100), list[str]()

    def resume(name: str) -> None:
        resumed.append(name)
        load.weight += 60

    load.weight += 150
    for name in ("a", "b", "c"):
        load.wait(name, lambda name=name: resume(name))  # type: ignore[misc]
    load.lighten(40)
    assert (load.is_high, resumed) == (True, [])
    load.lighten(20)
    assert (load.weight, resumed) == (150, ["a"])
    load.forget("b")
    load.lighten(150)
    assert resumed == ["a", "c"]
