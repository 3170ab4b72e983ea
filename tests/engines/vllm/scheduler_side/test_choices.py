"""One of the choices of a prompt (`n` above 1) carries the hand-off."""

from kvferry.engines.vllm.scheduler_side.choices import Choices

PARENT = "cmpl-x-0-0123abcd"


def test_the_first_choice_carries_and_the_others_stand_back() -> None:
    choices = Choices()
    assert choices.arrived(f"0_{PARENT}") is None
    assert choices.arrived(f"1_{PARENT}") == f"0_{PARENT}"
    assert choices.arrived(f"2_{PARENT}") == choices.carrier_of(f"2_{PARENT}") == f"0_{PARENT}"
    assert choices.carrier_of(f"0_{PARENT}") is None


def test_requests_that_are_no_choices_are_independent() -> None:
    choices = Choices()
    for name in (PARENT, "cmpl-x-1-0123abcd", "0_other", "chatcmpl-x-0123abcd"):
        assert choices.arrived(name) is None
        assert choices.carrier_of(name) is None
        choices.carrier_returned(name, {"a": 1})
        assert choices.returned_for(name) is None


def test_every_choice_returns_the_carriers_parameters() -> None:
    choices = Choices()
    choices.arrived(f"0_{PARENT}")
    choices.arrived(f"1_{PARENT}")
    choices.carrier_returned(f"1_{PARENT}", {"wrong": 1})
    assert choices.returned_for(f"1_{PARENT}") is None
    choices.carrier_returned(f"0_{PARENT}", {"transfer_id": "t"})
    assert choices.returned_for(f"1_{PARENT}") == {"transfer_id": "t"}


def test_what_is_remembered_is_bounded() -> None:
    choices = Choices()
    for number in range(2000):
        choices.arrived(f"0_cmpl-{number}-0-0123abcd")
    assert choices.arrived("1_cmpl-0-0-0123abcd") is None, "forgotten"
    assert choices.arrived("1_cmpl-1999-0-0123abcd") is not None
