"""Choice of the client: by name, by route, by depth, and by the policy for model code."""

import re
from typing import Any

import pytest

from rlm_broker.broker.clients.base import Client
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.broker.routing import Route, Routing
from rlm_broker.errors import ConfigurationError, UnknownModel
from tests.support.tables import table

ROOT, SUB, EXTRA = (ScriptedClient([], name) for name in ("root", "sub", "extra"))


def routing(**options: Any) -> Routing:
    made = Routing(ROOT, SUB, **options)
    made.register("extra", EXTRA)
    made.register("alias", EXTRA)
    return made


def test_a_known_name_wins_and_else_the_depth_decides() -> None:
    by_depth: dict[tuple[str | None, int], Client] = {
        (None, -1): ROOT,
        (None, 0): ROOT,
        (None, 1): SUB,
        (None, 2): SUB,
        (None, 7): SUB,
        ("", 1): SUB,
    }
    by_name: dict[tuple[str | None, int], Client] = {
        ("root", 1): ROOT,
        ("sub", 0): SUB,
        ("extra", 0): EXTRA,
        ("extra", 3): EXTRA,
        ("alias", 1): EXTRA,
    }
    client_of = by_depth | by_name
    assert {call: routing().pick(*call) for call in client_of} == client_of
    for depth in (0, 1, 2):  # without a sub client
        assert Routing(ROOT).pick(None, depth) is ROOT
        assert Routing(ROOT).pick_for_code(None, depth) is ROOT


def test_unknown_name_lists_the_known_names() -> None:
    with pytest.raises(UnknownModel) as unknown:
        routing().pick("nobody", 0)
    assert str(unknown.value) == "no client for model 'nobody'; known: root, sub, extra, alias"


def test_name_of_a_megabyte_is_cut_in_the_error() -> None:
    for pick in (routing().pick, routing().pick_for_code):
        with pytest.raises(UnknownModel) as unknown:
            pick("n" * 1_000_000, 1)
        assert len(str(unknown.value)) < 200


def test_policy_decides_what_code_may_call() -> None:
    served_by: dict[str, dict[str | None, Client | None]] = {
        "allow": {None: SUB, "": SUB, "sub": SUB, "extra": EXTRA, "alias": EXTRA, "root": None, "nobody": None},
        "pinned": {None: SUB, "extra": SUB, "root": SUB, "nobody": SUB},
        "open": {None: SUB, "extra": EXTRA, "root": ROOT, "nobody": SUB},
    }
    for policy, models in served_by.items():
        router = routing(model_policy=policy)
        for model, served in models.items():
            if served is not None:
                assert router.pick_for_code(model, 1) is served, (policy, model)
                continue
            with pytest.raises(UnknownModel) as refused:
                router.pick_for_code(model, 1)
            assert str(refused.value) == f"code may not call model {model!r}; allowed: sub, extra, alias"


def test_root_model_is_open_as_the_sub_model() -> None:
    assert Routing(ROOT).pick_for_code("root", 1) is ROOT
    namesake = ScriptedClient([], "root")
    assert Routing(ROOT, namesake).pick_for_code("root", 1) is namesake


def test_registering_the_root_client_keeps_it_closed() -> None:
    router = Routing(ROOT, SUB)
    router.register("root", ROOT)
    with pytest.raises(UnknownModel, match=r"allowed: sub$"):
        router.pick_for_code("root", 1)


def test_equal_root_and_sub_names_differ_by_depth() -> None:
    namesake = ScriptedClient([], "root")
    router = Routing(ROOT, namesake)
    assert [router.pick("root", depth) for depth in (0, 1, 2)] == [ROOT, namesake, namesake]
    assert router.clients == (ROOT, namesake)


def test_open_name_gets_its_own_client_once() -> None:
    asked: list[str] = []

    def open_client(name: str) -> ScriptedClient:
        asked.append(name)
        if name == "nobody":
            raise UnknownModel("no such model")
        return ScriptedClient([], name)

    router = routing(model_policy="open", open_client=open_client)
    opened = router.pick_for_code("elsewhere", 1)
    assert opened.model_name == "elsewhere"
    assert router.pick_for_code("elsewhere", 2) is opened
    assert router.pick_for_code("sub", 1) is SUB
    with pytest.raises(UnknownModel, match="no such model"):
        router.pick_for_code("nobody", 1)
    assert asked == ["elsewhere", "nobody"]
    assert router.clients == (ROOT, SUB, EXTRA, opened)


def test_each_client_object_is_listed_once() -> None:
    assert routing().clients == (ROOT, SUB, EXTRA)
    assert Routing(ROOT, ROOT).clients == (ROOT,)


def test_a_name_that_is_taken_or_empty_is_refused() -> None:
    router = routing()
    router.register("extra", EXTRA)
    with pytest.raises(ConfigurationError, match="'extra' is taken"):
        router.register("extra", ScriptedClient([], "extra"))
    with pytest.raises(ConfigurationError, match="empty"):
        router.register("", EXTRA)
    assert router.pick("extra", 0) is EXTRA


def test_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="must be one of allow, pinned, open, not 'alow'"):
        routing(model_policy="alow")


# -- routes


def routed(*routes: Route, **options: Any) -> Routing:
    routing = Routing(ROOT, SUB, **options)
    routing.register("fast", EXTRA)
    for route in routes:
        routing.add(route)
    return routing


def test_route_matches_name_alias_pattern_or_depths() -> None:
    routing = routed(
        Route("fast", "alias"),
        Route("fast", "openai/*"),
        Route("fast", depths="2-3"),
        Route("fast", "only-deep", "2-"),
        Route("fast", "a[b]?*"),
    )
    named = [("fast", 0), ("alias", 1), ("alias", 9), ("openai/gpt", 1), ("openai/", 1), ("only-deep", 2)]
    client_of: dict[tuple[str | None, int], Client] = {
        **dict.fromkeys([*named, ("a[b]?c", 1), (None, 2), (None, 3), ("", 2)], EXTRA),
        **{(None, 0): ROOT, (None, 1): SUB, (None, 4): SUB},
    }
    assert {call: routing.pick_for_code(*call) for call in client_of} == client_of
    assert {call: routing.pick(*call) for call in client_of} == client_of


def test_unrouted_name_is_unknown_and_lists_routes() -> None:
    routing = routed(Route("fast", "openai/*"), Route("fast", "only-deep", "2-"))
    with pytest.raises(
        UnknownModel, match=r"^code may not call model 'only-deep'; allowed: sub, fast, openai/\*, only-"
    ):
        routing.pick_for_code("only-deep", 1)
    with pytest.raises(UnknownModel, match=r"^no client for model 'xopenai/gpt'; known: root, sub, fast, openai/\*"):
        routing.pick("xopenai/gpt", 1)


def test_pinned_code_uses_only_routes_of_its_depth() -> None:
    routing = routed(Route("fast", "alias"), Route("fast", depths="2-"), model_policy="pinned")
    assert routing.pick_for_code("alias", 1) is SUB
    assert routing.pick_for_code("anything", 2) is EXTRA


def test_first_matching_route_has_the_call() -> None:
    routing = routed(Route("root", "x", "1"), Route("fast", "x"), Route("sub", "*"))
    assert [routing.pick_for_code(*call) for call in (("x", 1), ("x", 2), ("y", 1))] == [ROOT, EXTRA, SUB]


@table(
    "routes why",
    [
        ([Route("nowhere", "x")], "route x at depth 0- to nowhere leads to no client: choose one of fast, root, sub"),
        ([Route("root", "fast")], "is never taken: a client is registered under that very name"),
        (
            [Route("fast", "a*"), Route("root", "ab")],
            "route ab at depth 0- to root is never taken: route a* at depth 0- to",
        ),
        ([Route("fast", "a*"), Route("root", "ab*", "1")], "is never taken: route a*"),
        ([Route("fast"), Route("root", depths="3")], "is never taken: route (no model named) at depth 0- to fast"),
    ],
)
def test_unreachable_or_dangling_route_is_refused(routes: list[Route], why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        routed(*routes)


def test_routes_that_overlap_in_part_are_both_of_use() -> None:
    routed(Route("fast", "a*", "1-3"), Route("root", "ab", "2-5"), Route("sub", "a*"))


def test_why_a_client_serves_is_told() -> None:
    routing = routed(Route("fast", "openai/*", "1-"), Route("fast", depths="3-"))
    assert [routing.explain(*call)[1] for call in ((None, 0), (None, 1), ("fast", 1), ("openai/x", 1), (None, 3))] == [
        "depth 0 goes to the root model",
        "depth 1 goes to the sub model",
        "it is registered under that name",
        "route openai/* at depth 1- to fast",
        "route (no model named) at depth 3- to fast",
    ]


def test_a_route_of_another_form_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"to": 5}, "a route's to must be"),
        ({"to": "root", "match": 5}, "a route's match must be"),
        ({"to": "root", "depths": 5}, "a route's depths must be"),
        ({"to": "root", "match": ""}, "a route's match must be a name or a pattern, not empty; leave it out"),
        *(({"to": "root", "depths": each}, ".*depth") for each in ("", "-", "3-1", "a", "-2", "1-2-3", "1,2", " 1")),
    ]
    for given, why in cases:
        with pytest.raises(ConfigurationError, match=f"^{why}"):
            Route(**given)


def test_a_route_hides_what_lies_within_its_depths() -> None:
    hidden = [("0-", "2"), ("2-", "2-999999999"), ("1-3", "1-3")]
    others = [("1-3", "0-3"), ("1-3", "0-2"), ("1-3", "2-4"), ("1", "1-"), ("0-2", "3")]
    found = [
        depths for depths in (*hidden, *others) if Route("extra", "a", depths[0]).hides(Route("root", "a", depths[1]))
    ]
    assert found == hidden
    assert not any(Route("extra", "a", one).hides(Route("root", "b", other)) for one, other in hidden)


def test_signs_of_patterns_but_the_star_stand_for_themselves() -> None:
    assert Route("extra", "a?*").takes("a?b", 0)
    assert not Route("extra", "a?*").takes("axb", 0)
    assert Route("extra", "[a]*").takes("[a]b", 0)
    assert not Route("extra", "[a]*").takes("ab", 0)


def test_another_root_or_sub_client_leaves_everything_else() -> None:
    other = ScriptedClient([], "other")
    routed = routing()
    routed.add(Route("extra", "fast"))
    for default, sub, expected in (
        (other, None, (other, SUB)),
        (None, other, (ROOT, other)),
        (None, None, (ROOT, SUB)),
    ):
        changed = routed.instead(default, sub)
        assert (changed.pick(None, 0), changed.pick(None, 1)) == expected
        assert changed.names == ("extra", "alias")
        assert changed.pick("alias", 0) is EXTRA
        assert changed.routes == routed.routes
        assert changed.pick("fast", 0) is EXTRA


def test_error_cuts_the_name_and_suggests_another() -> None:
    for name, shown in (("x" * 80, "x" * 80), ("x" * 81, "x" * 80 + "...")):
        with pytest.raises(UnknownModel, match=f"^code may not call model '{re.escape(shown)}'; "):
            routing().pick_for_code(name, 1)
    with pytest.raises(UnknownModel, match=r"did you mean 'extra'|did you mean extra"):
        routing().pick_for_code("extraa", 1)
