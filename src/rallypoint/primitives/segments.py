"""The shared memory of one round: what the caller has of his own in it, and what he has mapped of the others of his host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rallypoint.host import memory
from rallypoint.primitives import flat
from rallypoint.primitives import pages as shared
from rallypoint.primitives.division import Division
from rallypoint.primitives.flat import Layout
from rallypoint.primitives.offers import Participant, Place, place
from rallypoint.primitives.pages import Own, Pages
from rallypoint.store.failures import of_a_handler


class Ours(NamedTuple):
    """What a caller has of his own in a round, and which bytes of his contribution he has left out."""

    pages: Pages
    contribution: Own
    result: Own
    skip: tuple[int, int]


class Segments:
    """Of one caller in one round. `places`: of the results, by participant; as offered, until others are told of."""

    def __init__(self, ours: Ours, layout: Layout, participants: Sequence[Participant], me: int, number: int) -> None:
        self.contribution, self.result = ours.contribution, ours.result
        self.final: Own | None = None  # several hosts, and I am the first of mine: the whole mean
        self.places: Mapping[int, Place | None] = {index: one.offer.result for index, one in enumerate(participants)}
        self._pages = ours.pages
        self._skip = ours.skip
        self._layout = layout
        self._participants = participants
        self._me = me
        self._number = number
        self._contributions: dict[int, memoryview] = {}  # of my host
        self._results: dict[int, memoryview] = {}
        self._finals: dict[int, memoryview] = {}

    # --- mine ---

    def complete(self, division: Division, *, all_of_it: bool) -> None:
        """Bring what was not foreseen: the bytes of my contribution that are missing, or `all_of_it`; and a result that is large enough."""
        there = self.contribution.mapped.memory
        if all_of_it:
            flat.put(self._layout, there, shared.PAGE, 0, self._layout.size)
        elif self._skip[0] < self._skip[1]:
            flat.put(self._layout, there, shared.PAGE, *self._skip)
        self._skip = (0, 0)
        room = division.room(self._me)
        if self.result.mapped.capacity < room or not self.result.unread():
            self._pages.give_result(self.result)
            self.result = self._pages.unread_result(room)
        if division.several_hosts and division.leads and self.final is None:
            self.final = self._pages.unread_result(division.head + self._layout.size)

    def take_back(self) -> None:
        """Nobody will read what was lent in this turn."""
        for own in (self.result, self.final):
            if own is not None:
                own.take_back(self._number)

    def keep_private(self) -> None:
        """Others cannot look into this process."""
        self._pages.private = True

    def leave(self, *, interrupted: bool) -> None:
        """Give the memory back. After an interruption it is dropped: the others may still read it."""
        shared.leave(self.contribution.mapped.memory, self._number, gave_up=interrupted)
        if not interrupted:
            self._pages.give_contribution(self.contribution)
            for own in (self.result, self.final):
                if own is not None:
                    self._pages.give_result(own)
        self._pages.tidy()

    # --- the others' ---

    def open(self, division: Division) -> tuple[int, ...]:
        """Map what the others of my host have; whose memory cannot be had."""
        unreadable = []
        for index in division.host:
            offer = self._participants[index].offer
            try:
                self._contributions[index] = self._mapped(index, offer.place, self.contribution)
                self._results[index] = self._mapped(index, self.places[index], self.result)
            except (OSError, memory.Unfit) as error:
                if isinstance(error, OSError) and of_a_handler(error):
                    raise
                unreadable.append(index)
        return tuple(unreadable)

    def open_final(self, index: int, there: Place | None) -> bool:
        """Map the whole mean, which the first of my host has; False when it cannot be had."""
        try:
            self._finals[index] = self._mapped(index, there, self.final)
        except (OSError, memory.Unfit) as error:
            if isinstance(error, OSError) and of_a_handler(error):
                raise
            return False  # he has just died
        return True

    def _mapped(self, index: int, there: Place | None, own: Own | None) -> memoryview:
        if index == self._me:
            assert own is not None
            return own.mapped.memory
        assert there is not None
        return self._pages.of(self._participants[index].offer.pid, there.fd, there.inode, there.capacity)

    def has_opened(self, index: int) -> bool:
        """Whether his contribution is mapped here."""
        return index in self._contributions

    def contribution_of(self, index: int) -> memoryview:
        return self._contributions[index]

    def result_of(self, index: int) -> memoryview:
        return self.result.mapped.memory if index == self._me else self._results[index]

    def final_of(self, index: int) -> memoryview:
        return self.final.mapped.memory if self.final is not None else self._finals[index]

    def told(self) -> dict[str, Place | None]:
        """Where what the others may need of mine is."""
        return {"result": place(self.result), "final": place(self.final)}

    # --- who is through with it ---

    def read(self, index: int, there: memoryview) -> None:
        """I need no more of what this rank has lent."""
        if index != self._me:
            shared.read(there, self._me, self._number)

    def has_left(self, index: int) -> bool:
        """Whether he has ended this round, without us."""
        return index in self._contributions and shared.has_left(self._contributions[index], self._number)

    def has_given_up(self, index: int) -> bool:
        """Whether he was interrupted in this round."""
        return index in self._contributions and shared.has_given_up(self._contributions[index], self._number)
