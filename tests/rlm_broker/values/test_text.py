from rlm_broker.values.text import clip, encodable, label, printable, shorten


def test_long_text_keeps_both_ends() -> None:
    assert shorten("a" * 8 + "b" * 92, 8) == "aaaaaa\n... [92 characters cut] ...\nbb"
    assert shorten("a" * 8 + "b" * 92, 8, end=0) == "aaaaaaaa\n... [92 characters cut]"
    assert shorten("a" * 8 + "b" * 92, 8, gap="") == "aaaaaa... [92 characters cut] ...bb"
    assert shorten("a" * 8, 8) == "a" * 8


def test_text_cut_again_counts_all_omissions() -> None:
    once = shorten("x" * 30_000, 10_000)
    assert "[20,000 characters cut]" in once
    assert "[29,000 characters cut]" in shorten(once, 1_000)


def test_name_is_clipped_and_a_label_is_one_line() -> None:
    assert (clip("a" * 9, 8), clip("a" * 8, 8)) == ("a" * 8 + "...", "a" * 8)
    assert [label(" a\n\tb ", 8), label("a " * 100, 3), label("a" + " " * 100 + "b", 8)] == ["a b", "a a...", "a..."]


def test_text_steers_no_terminal() -> None:
    assert printable("a\x1b[2J\u202e\ud800\n") == r"a\x1b[2J\u202e\ud800\n"
    assert printable("a\x1b\n\t", keep="\n\t") == "a\\x1b\n\t"
    assert encodable("straße \ud800") == "straße \\ud800"
