"""What a mailbox should do, written down a second time as plainly as possible: lists, dictionaries, no disk, no events.

It shares no code with the machine, so that the two are wrong in the same way only by misfortune.
"""

from dataclasses import dataclass, field


class No(Exception):
    """Refused, with this code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


Result = tuple[str, str]  # status and text


@dataclass(kw_only=True)
class Piece:
    """A task."""

    id: str
    content: str
    key: str | None
    deadline_ms: int | None
    timeout_ms: int | None
    state: str = "queued"
    turn: int = 1
    attempt: int = 0
    lease: str | None = None
    """The newest lease of this turn."""
    turn_started_ms: int | None = None
    generation: int = 1
    update_no: int = 0
    update_generation: int = 0
    hold: tuple[int, int] | None = None
    """Since when its work is interrupted, and for how long an operator may decide; 0: without a bound."""
    written: set[str] = field(default_factory=set)
    artifacts: dict[str, str] = field(default_factory=dict)
    open: bool = False
    """Whether its holder has written a text: whatever ends the attempt closes that first."""
    said: dict[str, int] = field(default_factory=dict)
    """The last messages to it, and the generation of each."""
    kept: int = 0
    """Messages that came while it was at work: they are its next turn."""
    turned_by: set[str] = field(default_factory=set)
    """Leases whose last word ended a turn, and not the task."""
    result: Result | None = None
    cause: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ("result_pending", "resolved")


class Model:
    """One sender, one recipient."""

    def __init__(self) -> None:
        self.pieces: dict[str, Piece] = {}
        self.queue: list[str] = []
        self.results: list[str] = []
        self.held_longest: list[str] = []
        """What is in flight, the longest untouched first."""
        self.cache: dict[str, Result] = {}
        self.leaders: dict[str, str] = {}
        self.followers: dict[str, list[str]] = {}
        self.takes: dict[str, list[tuple[str, str]]] = {}
        self.drains: dict[str, list[str]] = {}

    def send(self, piece: Piece, now_ms: int) -> str:
        """How it was accepted: new, duplicate, replayed or following."""
        known = self.pieces.get(piece.id)
        if known is not None and known.content == piece.content:
            return "duplicate"
        if piece.deadline_ms is not None and piece.deadline_ms <= now_ms:
            raise No("deadline_past")
        if known is not None:
            raise No("duplicate_task_id")
        self.pieces[piece.id] = piece
        key = piece.key
        if key is not None and key in self.cache:
            self._settle(piece, self.cache[key], "replayed")
            return "replayed"
        if key is not None and key in self.leaders:
            piece.state = "following"
            self.followers.setdefault(key, []).append(piece.id)
            return "following"
        if key is not None:
            self.leaders[key] = piece.id
        self.queue.append(piece.id)
        return "new"

    def takes_again(self, request: str) -> list[tuple[str, str]] | None:
        """What a repeated receive gives: the same leases, as far as they live."""
        given = self.takes.get(request)
        if given is None:
            return None
        return [(id_, lease) for id_, lease in given if self._is_live(self.pieces[id_], lease)]

    def next(self, count: int, now_ms: int) -> list[str]:
        """Who is next, after what is past its deadline has been ended."""
        taken: list[str] = []
        for id_ in list(self.queue):
            if len(taken) == count:
                break
            piece = self.pieces[id_]
            if piece.deadline_ms is not None and piece.deadline_ms <= now_ms:
                self.end(piece, ("error", "deadline_exceeded"), "deadline_exceeded")
            else:
                taken.append(id_)
        return taken

    def lease(self, id_: str, lease: str, now_ms: int) -> None:
        piece = self.pieces[id_]
        assert piece.state == "queued"
        self.queue.remove(id_)
        self.held_longest.append(id_)
        if piece.attempt == 0 and piece.turn == 1:
            piece.generation += 1
        piece.state = "in_flight"
        piece.attempt += 1
        piece.lease = lease
        piece.turn_started_ms = now_ms if piece.turn_started_ms is None else piece.turn_started_ms
        piece.update_no = 0
        piece.hold = None
        piece.written, piece.open = set(), False

    def held(self, id_: str, lease: str) -> Piece:
        piece = self.pieces[id_]
        if piece.ended:
            raise No(self._over(piece))
        if piece.lease is not None and piece.lease != lease:
            raise No("stale_lease")
        if piece.state != "in_flight":
            raise No("not_leased")
        return piece

    def renew(self, id_: str, lease: str) -> None:
        self.held(id_, lease).hold = None
        self.held_longest.remove(id_)
        self.held_longest.append(id_)

    def release(self, id_: str, lease: str) -> None:
        self._back(self.held(id_, lease))

    def interrupt(self, id_: str, lease: str, now_ms: int, hold_ms: int) -> None:
        piece = self.held(id_, lease)
        if piece.hold is None:  # told once, and not prolonged
            piece.hold = now_ms, hold_ms
            piece.generation += 1

    def report(self, id_: str, lease: str, number: int, chunk: tuple[str, str, bool] | None) -> tuple[int, bool]:
        """The generation it became, and whether it had become that before."""
        piece = self.pieces[id_]
        if piece.state == "parked" and piece.lease == lease and number and number == piece.update_no:
            return piece.update_generation, True
        piece = self.held(id_, lease)
        if number and number == piece.update_no:
            return piece.update_generation, True
        if number and number != piece.update_no + 1:
            raise No("update_out_of_order")
        piece.generation += 1
        if number:
            piece.update_no, piece.update_generation = number, piece.generation
        if chunk is not None:
            name, text, append = chunk
            before = piece.artifacts.get(name, "") if append and name in piece.written else ""
            piece.artifacts[name] = before + text
            piece.written.add(name)
            piece.open = True
        return piece.generation, False

    def park(self, id_: str, lease: str) -> None:
        piece = self.held(id_, lease)
        self._close(piece)
        piece.generation += 1
        self.held_longest.remove(id_)
        piece.state = "parked"
        piece.turn_started_ms = None
        if piece.kept:
            self._turn(piece)

    def say(self, id_: str, message: str) -> tuple[int, bool]:
        piece = self.pieces[id_]
        if piece.ended:
            raise No(self._over(piece))
        if message in piece.said:
            return piece.said[message], True
        if piece.state == "following":
            raise No("following")
        piece.generation += 1
        piece.said = dict([*piece.said.items(), (message, piece.generation)][-16:])
        if piece.state == "parked":
            self._turn(piece)
        else:
            piece.kept += 1
        return piece.generation, False

    def _turn(self, piece: Piece) -> None:
        """The next turn begins: at the back of the queue, unless it was back in the queue already."""
        if piece.kept and piece.lease is not None:
            piece.turned_by.add(piece.lease)
        if piece.id in self.held_longest:
            self.held_longest.remove(piece.id)
        if piece.id not in self.queue:
            self.queue.append(piece.id)
        piece.state = "queued"
        piece.turn += 1
        piece.attempt = 0
        piece.lease = None
        piece.turn_started_ms = None
        piece.kept = 0

    def answer(self, id_: str, lease: str | None, result: Result) -> bool:
        """Whether this result was known already."""
        piece = self.pieces[id_]
        if piece.ended:
            if piece.lease is None:
                raise No("not_lessee")
            if piece.result == result and piece.cause == "result":
                return True
            raise No(self._over(piece))
        if piece.lease is None or piece.state not in ("in_flight", "queued"):
            raise No("not_leased")
        if lease is None and piece.attempt != 1:
            raise No("lease_id_required")
        if lease is not None and lease != piece.lease:
            raise No("stale_lease")
        self._close(piece)
        if piece.kept and result[0] != "error":
            piece.generation += 1  # what it came to is a message of the task
            self._turn(piece)
        else:
            self.end(piece, result, "result")
        return False

    def cancel(self, id_: str) -> bool:
        """Whether it is canceled (now or before), rather than ended otherwise."""
        piece = self.pieces[id_]
        if not piece.ended:
            self.end(piece, ("error", "canceled: not wanted"), "cancel")
        return piece.cause == "cancel"

    def requeue(self, id_: str) -> None:
        self._back(self._leased(id_))

    def force_error(self, id_: str) -> None:
        self.end(self._leased(id_), ("error", "given up"), "force_error")

    def drain(self, count: int, request: str | None) -> list[str]:
        if request is not None and request in self.drains:
            return self.drains[request]
        drained, self.results = self.results[:count], self.results[count:]
        for id_ in drained:
            self.pieces[id_].state = "resolved"
        if request is not None and drained:
            self.drains[request] = drained
        return drained

    def due(self, now_ms: int) -> dict[str, str]:
        """What a sweep must end, and why."""
        due = {}
        for piece in self.pieces.values():
            if piece.ended:
                continue
            started, timeout, deadline = piece.turn_started_ms, piece.timeout_ms, piece.deadline_ms
            if started is not None and timeout is not None and started + timeout <= now_ms:
                due[piece.id] = "timeout"
            elif piece.state == "in_flight" and piece.hold is not None and 0 < piece.hold[1] <= now_ms - piece.hold[0]:
                due[piece.id] = "interrupted"
            elif deadline is not None and deadline <= now_ms and piece.state != "in_flight":
                due[piece.id] = "deadline_exceeded"
        return due

    def expire(self, id_: str, now_ms: int) -> None:
        cause = self.due(now_ms)[id_]
        text = {
            "timeout": "Task timed out",
            "interrupted": "interrupted: stopping; no operator decided within 1 s",
        }.get(cause, cause)
        self.end(self.pieces[id_], ("error", text), cause)

    def end(self, piece: Piece, result: Result, cause: str) -> None:
        key = piece.key
        leads = key is not None and self.leaders.get(key) == piece.id
        self._close(piece)
        self._settle(piece, result, cause)
        if key is None:
            return
        if not leads:
            self.followers[key].remove(piece.id)
            return
        del self.leaders[key]
        waiting = self.followers.pop(key, [])
        if cause == "result":
            for follower in waiting:
                self._settle(self.pieces[follower], result, "leader")
            if result[0] == "ok":
                self.cache[key] = result
        elif waiting:
            first, *rest = waiting
            self.leaders[key] = first
            self.pieces[first].state = "queued"
            self.queue.append(first)
            self.followers[key] = rest

    def _settle(self, piece: Piece, result: Result, cause: str) -> None:
        if piece.id in self.queue:
            self.queue.remove(piece.id)
        if piece.id in self.held_longest:
            self.held_longest.remove(piece.id)
        piece.state, piece.result, piece.cause = "result_pending", result, cause
        piece.generation += 1
        self.results.append(piece.id)

    def _close(self, piece: Piece) -> None:
        if piece.open and piece.state == "in_flight":
            piece.generation += 1
            piece.open = False

    def _back(self, piece: Piece) -> None:
        self.held_longest.remove(piece.id)
        piece.state = "queued"
        self.queue.append(piece.id)

    def _leased(self, id_: str) -> Piece:
        piece = self.pieces[id_]
        if piece.state != "in_flight":
            raise No("not_leased")
        return piece

    def _is_live(self, piece: Piece, lease: str) -> bool:
        return piece.state == "in_flight" and piece.lease == lease

    def _over(self, piece: Piece) -> str:
        return "canceled" if piece.cause == "cancel" else "already_settled"
