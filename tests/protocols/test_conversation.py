"""Conversations: messages are played first in, first out, and silence is an error."""

from collections.abc import Sequence

import pytest

from apfed_protocols.conversation import Conversation, Outgoing, converse
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError


class Script:
    """Sends its opening, answers each message by a table, and waits for so many messages."""

    def __init__(
        self,
        opening: Sequence[tuple[str, bytes]] = (),
        answers: dict[bytes, list[tuple[str, bytes]]] | None = None,
        *,
        waits_for: int = 0,
    ) -> None:
        self._opening, self._answers, self._waits_for = opening, answers or {}, waits_for
        self.got: list[tuple[str, bytes]] = []

    def start(self) -> Sequence[Outgoing]:
        return [Outgoing(*message) for message in self._opening]

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        if body == b"nonsense":
            raise RemoteProtocolError(f"{sender} sent nonsense")
        self.got.append((sender, body))
        return [Outgoing(*message) for message in self._answers.get(body, [])]

    @property
    def finished(self) -> bool:
        return len(self.got) >= self._waits_for


def test_messages_are_delivered_in_order_with_their_senders() -> None:
    a = Script([("b", b"1"), ("b", b"2")], waits_for=1)
    b = Script([("a", b"hello")], {b"1": [("c", b"3"), ("b", b"to myself")]}, waits_for=3)
    c = Script(waits_for=1)
    converse({"a": a, "b": b, "c": c})
    assert a.got == [("b", b"hello")]
    assert b.got == [("a", b"1"), ("a", b"2"), ("b", b"to myself")]
    assert c.got == [("b", b"3")]


def test_roles_without_messages_are_done_at_once() -> None:
    converse({"a": Script(), "b": Script()})
    converse({})


def test_a_message_to_nobody_is_named() -> None:
    with pytest.raises(LocalProtocolError, match=r"a wrote to 'ghost'.*the parties are a, b"):
        converse({"a": Script([("ghost", b"")]), "b": Script()})


def test_silence_names_who_still_waits() -> None:
    roles = {"a": Script(waits_for=1), "b": Script([("c", b"x")]), "c": Script(waits_for=2)}
    with pytest.raises(LocalProtocolError, match="while a, c still expected"):
        converse(roles)


def test_what_a_role_raises_comes_through() -> None:
    with pytest.raises(RemoteProtocolError, match="a sent nonsense"):
        converse({"a": Script([("b", b"nonsense")]), "b": Script()})


def test_a_body_is_absent_from_repr() -> None:
    assert "secret" not in repr(Outgoing("b", b"secret"))


def test_the_protocol_is_checked_by_its_methods() -> None:
    assert isinstance(Script(), Conversation)
    assert not isinstance(object(), Conversation)
