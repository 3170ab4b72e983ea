"""States of hand-off records: the tables are complete, nothing else assigns a state, and illegal moves are caught."""

import ast
import itertools
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import kvferry.handoff
from kvferry.handoff.transitions import CONSUMER, GRANT, RECEIVE, SOURCE, TABLES, ConsumerEvent, ConsumerState

HANDOFF = Path(kvferry.handoff.__path__[0])
FILES = sorted(path for path in HANDOFF.rglob("*.py") if path.name != "transitions.py")


class Record:
    """Anything that has a state."""

    def __init__(self, state: Enum) -> None:
        self.state: Any = state


def events(table: Any) -> list[Enum]:
    """Returns all events of a table, from the class of one of them."""
    kind: type[Enum] = type(next(iter(table.moves))[1])
    return list(kind)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_move_of_the_table_is_made_and_every_other_is_refused(table: Any) -> None:
    for state, event in itertools.product(table.states, events(table)):
        record = Record(state)
        if (state, event) in table.moves:
            table.move(record, event)
            assert record.state is table.moves[state, event]
        else:
            with pytest.raises(AssertionError, match=f"a {table.name} that is {state.value} cannot move on"):
                table.move(record, event)
            assert record.state is state, "a refused move changes nothing"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_state_is_reached_and_every_event_is_used(table: Any) -> None:
    reached = {next(iter(table.states))}
    for _ in table.states:
        reached |= {after for (before, _), after in table.moves.items() if before in reached}
    assert reached == set(table.states)
    assert {event for _, event in table.moves} == set(events(table))


def test_a_consumer_that_has_ended_stays_as_it_is() -> None:
    for state in (ConsumerState.DONE, ConsumerState.GONE):
        for event in ConsumerEvent:
            with pytest.raises(AssertionError, match="cannot move"):
                CONSUMER.move(Record(state), event)


def assigned_states(source: str) -> list[int]:
    """Returns the lines that set an attribute `state`, or pass one to a constructor."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
            targets = [node.target]
        elif isinstance(node, ast.Call):
            lines += [node.lineno for keyword in node.keywords if keyword.arg == "state"]
            if isinstance(node.func, ast.Name) and node.func.id == "setattr":
                lines.append(node.lineno)
        found = (one for target in targets for one in ast.walk(target) if isinstance(one, ast.Attribute))
        lines += [one.lineno for one in found if one.attr == "state"]
    return lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HANDOFF)))
def test_nothing_assigns_a_state_elsewhere(path: Path) -> None:
    assert not assigned_states(path.read_text()), "a state changes only by Transitions.move"


@pytest.mark.parametrize(
    "source", ["a.state = B", "a.x, b.state = 1, B", "a.state: X = B", "Source(state=B)", "setattr(a, name, B)"]
)
def test_the_scan_finds_assignments(source: str) -> None:
    assert assigned_states(source)
    assert not assigned_states("SOURCE.move(source, STOP)\nassert a.state is B\nstate = a.state")


@pytest.mark.parametrize("table", [GRANT, CONSUMER, RECEIVE, SOURCE], ids=lambda table: table.name)
def test_a_diagram_has_every_move(table: Any) -> None:
    text = table.diagram()
    assert text.startswith("stateDiagram-v2")
    for (before, event), after in table.moves.items():
        assert any(
            line.strip().startswith(f"{before.value} --> {after.value}: ") and event.value in line
            for line in text.splitlines()
        )
