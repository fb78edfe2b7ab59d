"""Digests of contexts: equal for equal content and form, on any machine."""

from rlm_broker.context.digest import digest_of
from rlm_broker.context.store import store


def test_the_digest_is_the_same_everywhere() -> None:
    """Nodes of a cluster compare digests, so no release changes one unseen."""
    with store("text") as context:
        assert digest_of(context).hex() == "2dd9e1303991bb46ed054409961b01207718808cd75b663db670fbc33cc9e247"


def test_form_and_names_count() -> None:
    """A text, a list of it and dicts of it by two names have different digests; another descriptor has the same."""
    with store("x" * 9_000) as text, text.another() as same:
        assert digest_of(text) == digest_of(same)
        with store({"a": text}) as a, store({"b": text}) as b, store(["x" * 9_000]) as listed:
            assert len({digest_of(each) for each in (text, a, b, listed)}) == 4
