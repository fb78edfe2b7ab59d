"""Answers that were given before, for those who ask the same again."""

from collections import defaultdict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """Answers by what was asked. Each is given once, and equal questions get theirs in the order of the answers.

    Example:
        ```python
        remembered = Remembered[str, int]()
        remembered.add("2 + 2", 4)
        remembered.take("2 + 2")  # 4
        remembered.take("2 + 2") is None  # True
        ```
    """

    def __init__(self) -> None:
        self._answers = defaultdict[K, deque[V]](deque)

    def add(self, key: K, value: V) -> None:
        """Remember one more answer."""
        self._answers[key].append(value)

    def take(self, key: K) -> V | None:
        """Return the first answer that is left, and forget it; None if there is none."""
        answers = self._answers.get(key)
        if answers is None:
            return None
        value = answers.popleft()
        if not answers:
            del self._answers[key]
        return value
