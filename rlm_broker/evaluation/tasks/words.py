"""Names and sentences of which contexts are made. All places and persons are invented."""

from typing import Final

from rlm_broker.evaluation.tasks.draw import Draw

TOWNS: Final = (
    "Aldmere", "Brackwell", "Corvane", "Dunholt", "Eskerby", "Fennick", "Garlow", "Hathersea", "Ivorne", "Jarnwick",
    "Keldale", "Lorrimer", "Marwick", "Nethercombe", "Osmere", "Pellham", "Quillon", "Ravensey", "Silverow", "Tarn",
    "Ulverby", "Velmora", "Westerlee", "Yarrowgate", "Zennor", "Ambleford", "Birchover", "Cranmoor", "Dovecliff",
    "Elmhurst",
)  # fmt: skip
_WHO: Final = (
    "The harbour master", "A retired teacher", "The night porter", "Her younger brother", "The miller",
    "A travelling salesman", "The librarian", "One of the gardeners", "The baker", "An old sailor", "The surveyor",
    "The choir", "A student of botany", "The ferryman", "The clockmaker", "Nearly every shopkeeper",
)  # fmt: skip
_DID: Final = (
    "counted the barrels", "repaired a wooden bench", "read the letters aloud", "waited for the morning boat",
    "sold three baskets of pears", "painted the window frames", "wrote down the weather", "looked for the lost ledger",
    "carried the parcels upstairs", "planted a row of lime trees", "tuned the piano", "measured the old wall",
    "swept the empty hall", "argued about the price of coal", "mended the nets", "drew a map of the valley",
)  # fmt: skip
_WHERE: Final = (
    "near the old mill", "behind the town hall", "on the upper floor", "by the river", "at the edge of the market",
    "under the railway bridge", "in the reading room", "outside the chapel", "along the canal", "beside the well",
)  # fmt: skip
_WHEN: Final = (
    "before noon", "after the first frost", "on a rainy Tuesday", "late in the evening", "during the long summer",
    "a week after the fair", "at the turn of the year", "while the bells rang", "as the fog lifted", "in early spring",
)  # fmt: skip


def sentence(draw: Draw) -> str:
    """Return a sentence that says no fact that any question asks for."""
    return f"{draw.pick(_WHO)} {draw.pick(_DID)} {draw.pick(_WHERE)} {draw.pick(_WHEN)}."
