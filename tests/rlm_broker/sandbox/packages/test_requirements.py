"""Lists of packages: those that are accepted, and those that are equal."""

from typing import Any

import pytest

from rlm_broker import ConfigurationError
from rlm_broker.sandbox.packages.requirements import MAX_CHARS, MAX_REQUIREMENTS, Requirements


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ([], ()),
        (["six"], ("six",)),
        (["numpy>=2", "six==1.16.0"], ("numpy>=2", "six==1.16.0")),
        (["six==1.16.0", "NumPy >= 2", "numpy>=2"], ("numpy>=2", "six==1.16.0")),
        (["Typing_Extensions ~= 4.0, != 4.1"], ("typing-extensions!=4.1,~=4.0",)),
        (["httpx[socks, HTTP2]==0.28.*"], ("httpx[http2,socks]==0.28.*",)),
        (["a===1!2.0.post1+local.7"], ("a===1!2.0.post1+local.7",)),
        (("  b<2  ",), ("b<2",)),
    ],
)
def test_requirement_lists_are_normalised(given: Any, texts: tuple[str, ...]) -> None:
    assert Requirements.of(given).texts == texts


def test_equal_lists_have_equal_names() -> None:
    """Lists that say the same have one name, and others have another name."""
    one = Requirements.of(["numpy>=2", "six"])
    assert one.digest == Requirements.of(["Six", "numpy >=2"]).digest
    assert one.digest != Requirements.of(["numpy>=2"]).digest


@pytest.mark.parametrize(
    "text",
    [
        *("-r other.txt", "--index-url=https://elsewhere", "-e .", "./folder", "/folder/a.whl", "a.whl/../b", ""),
        *("six @ https://elsewhere/six.whl", "https://elsewhere/six.whl", "git+https://elsewhere/six", "file:six"),
        *("six; python_version > '3'", "six\n--index-url=x", "six==", "six=1", "six==1 2", "six>=1,", "six[", "six[]"),
        *("six # comment", "${KEY}", "sїx", "a" * (MAX_CHARS + 1), "six==1.0\\", "six -r x", "six --hash=sha256:0"),
    ],
)
def test_invalid_requirement_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigurationError, match="not a name with versions") as why:
        Requirements.of(["numpy", text])
    assert len(str(why.value)) < 300


@pytest.mark.parametrize("given", ["numpy", {"numpy"}, {"numpy": "2"}, 7, b"numpy"])
def test_list_of_other_than_texts_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="packages"):
        Requirements.of(given)


def test_item_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="each must be text such as 'numpy>=2', not NoneType"):
        Requirements.of([None])


def test_list_is_bounded() -> None:
    assert len(Requirements.of([f"p{number}" for number in range(MAX_REQUIREMENTS)]).texts) == MAX_REQUIREMENTS
    with pytest.raises(ConfigurationError, match=f"more than {MAX_REQUIREMENTS}"):
        Requirements.of([f"p{number}" for number in range(MAX_REQUIREMENTS + 1)])
