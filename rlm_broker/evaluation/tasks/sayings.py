"""Messages of customers, whose kind is plain to a reader and not to a search for single words."""

from typing import Final

from rlm_broker.evaluation.tasks.draw import Draw

LABELS: Final = ("complaint", "question", "order", "thanks")
"""Kinds of messages."""
EXPLAINED: Final = (
    "Each message is of one of four kinds: complaint (the customer is not satisfied), question (the customer wants to "
    "know about goods), order (the customer buys), thanks (the customer praises goods or service)."
)
_GOODS: Final = (
    "kettle", "lamp", "desk", "bicycle", "raincoat", "radio", "tent", "sofa", "toaster", "camera", "backpack", "clock",
)  # fmt: skip
_SAYINGS: Final = {
    "complaint": (
        "The {} arrived broken, and I want my money back.",
        "My {} gave up after two days.",
        "You promised the {} for Monday, and I am still waiting.",
        "The {} that I got is scratched on all sides.",
        "Thanks for nothing: the {} fell apart in my hands.",
        "This is the third {} in a row that does not work.",
        "I would not even wish this {} on my worst enemy.",
        "For that price I did not expect a {} with a crack in it.",
        "The {} smells of burnt plastic as soon as I use it.",
        "Is it a joke to sell a {} with half of its parts missing?",
    ),
    "question": (
        "Does the {} come with a warranty?",
        "Can the {} be carried to the second floor?",
        "Which colours does the {} come in?",
        "I wonder how heavy the {} is with its box.",
        "Before I order: is the {} made of steel or of aluminium?",
        "Please tell me whether the {} is suited for children.",
        "Could you explain how the {} is cleaned?",
        "I would like to know from when on the {} is in stock again.",
        "Is there a larger {} than the one in the window?",
        "Thank you in advance for telling me where the {} is made.",
    ),
    "order": (
        "I would like two of the {}, please.",
        "Please send me one {} to my usual address.",
        "Put one more {} on my next delivery.",
        "One {} for me, and the bill goes to my office.",
        "My sister wants a {} as well: charge it to my account.",
        "I take the {} from page nine of the catalogue.",
        "Yes, I am sure about the {}: ship it this week.",
        "Reserve the {} in blue, I pay when I fetch it.",
        "We need four more of the {} for our new rooms by May.",
        "No further questions: I will have the {}.",
    ),
    "thanks": (
        "The {} is wonderful, and we use it each day.",
        "The quick delivery of the {} has saved our weekend.",
        "I am delighted with my {}.",
        "Your team was so kind when I fetched the {}.",
        "Never had a better {} than this one.",
        "My complaint about the {} was solved within an hour: great service!",
        "We were not sure about the {}, and now we love it.",
        "What a beautiful {}!",
        "The {} has even survived my children, well done.",
        "I did not think that I would ever write this, but the {} is perfect.",
    ),
}
_MORE: Final = (
    "", "", "", "Kind regards.", "I ordered it in March.", "My customer number is on the letter.", "Thank you.",
    "I have been a customer for years.", "My neighbour has the same one.", "You can call me on weekdays.",
)  # fmt: skip
"""Sentences that may follow. They fit to each kind, so a search for "order" or "thank" finds all kinds."""


def saying(draw: Draw, label: str) -> str:
    """Return a message of a kind."""
    return f"{draw.pick(_SAYINGS[label]).format(draw.pick(_GOODS))} {draw.pick(_MORE)}".rstrip()
