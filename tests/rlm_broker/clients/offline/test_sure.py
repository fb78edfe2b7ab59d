"""Quotations that may claim high confidence, and those that may not."""

import pytest

from rlm_broker.clients.offline.sure import computing, is_sure


@pytest.mark.parametrize(
    ("question", "quote"),
    [
        ("Who is the keeper of the lighthouse?", "The keeper of the lighthouse is Bram Oduya."),
        ("Who is the custodian of the vault?", "The vault custodian is Ada Quill."),
        ("Who paid Anna?", "Bertil paid Anna."),
        ("When did the harbour freeze?", "The harbour froze in the winter of 1893."),
        ("Where is the spare key kept?", "The spare key is kept behind the panel."),
        ("Why does the clock run fast?", "The clock runs fast because the pendulum is bent."),
        ("What did the auditors ask for?", "The auditors asked for the ledger and nothing else."),
    ],
)
def test_quotation_of_words_in_a_row_is_sure(question: str, quote: str) -> None:
    """A quotation that holds the question's words in a row is sure."""
    assert is_sure(question, quote)


@pytest.mark.parametrize(
    ("question", "quote"),
    [
        ("Who paid Anna?", "Anna paid Bertil."),
        ("Who paid Anna?", "Bertil paid Anna's sister."),
        ("Who paid Anna?", "Bertil never paid Anna."),
        ("Who paid Anna?", "It paid Anna."),
        ("Who is the father of Anna?", "Anna is the father of Bertil."),
        ("Who is the father of Anna?", "The father of Bertil greeted Anna."),
        ("Who is the mayor?", "The former mayor is Bram."),
        ("Who is the mayor?", "The mayor was Bram."),
        ("Who is the keeper?", "The keeper is asleep."),
        ("What is the timeout?", "The timeout handler is broken."),
        ("When did Anna leave Paris?", "Anna would leave Paris in May 1990."),
        ("Where did the harbour freeze?", "The harbour froze in the winter."),
        ("Why did the priest ask him?", "He repaired it because the priest asked him."),
        ("Who stole the vase?", "Anna claims that Bram stole the vase."),
        ("How many paintings are there?", "There are twelve paintings."),
        ("Which product is cheaper?", "The product is cheaper."),
        ("What is the address of the shop?", "The old address of the shop is Mill Lane 4."),
        ("Is the pump broken?", "The pump is broken."),
        ("Wer ist der Wirt?", "Der Wirt ist Alois."),
        ("Who is the keeper?", "Who is the keeper?"),
        ("Who is the keeper?", 'He said "the keeper is Bram".'),
    ],
)
def test_all_words_present_is_not_sure(question: str, quote: str) -> None:
    """An answer is not sure merely because all words of the question occur in it."""
    assert not is_sure(question, quote)


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("How many errors are there?", "count"),
        ("Wie viele Fehler gibt es?", "count"),
        ("\u4e00\u5171\u6709\u591a\u5c11\u4eba", "count"),
        ("What is the average age?", "average"),
        ("What is the total?", "add up"),
        ("Who is older than Anna?", "compare"),
        ("What is the highest tower?", "rank"),
        ("List the users", "list"),
        ("Who is the mayor?", ""),
    ],
)
def test_computation_is_recognised_by_its_words(question: str, kind: str) -> None:
    """The words of a question tell that its answer must be computed."""
    assert computing(question) == kind
