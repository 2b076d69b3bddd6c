"""Rows of hidden states in host memory, kept by KV slot; and the counters that tell whether any is missing.

A row belongs to the KV slot of its token: a rejected draft's row is overwritten with its slot, and a prefix hit finds
the row of whoever computed that block. So the store also knows which blocks whoever collects files has already got.
Only numpy here, so this is tested without vLLM.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np


class StepGuard:
    """Sees that each engine step with tokens gave its rows. Without it a missed step is silent: rows of right shape
    with what the slots held before."""

    def __init__(self) -> None:
        self._expected = 0  # tokens of the running step; 0: none runs, or its rows are in
        self.steps = 0
        self.captured = 0

    def begin(self, tokens: int) -> bool:
        """A step of so many tokens begins (0: a step without the model). False: the step before it gave no rows."""
        complete = self._expected == 0
        self._expected = tokens
        self.steps += tokens > 0
        return complete

    def take(self, rows: int, fewer: bool = False) -> int:
        """How many of `rows`, the first ones, belong to the running step; the others are padding. 0: take none.

        fewer: this vLLM leaves out rejected tokens.
        """
        tokens = self._expected
        if rows < tokens and not fewer:
            return 0  # begin() will tell
        self._expected = 0
        self.captured += tokens > 0
        return min(rows, tokens)


class SegmentRing:
    """Hands out contiguous ranges of `size` rows, given back in the order in which they were taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: list[tuple[int, int]] = []  # begin and end

    def take(self, rows: int) -> int | None:
        """The first row of a free range; None where there is no room."""
        if not self._taken:
            begin, limit = 0, self.size
        else:
            oldest, end = self._taken[0][0], self._taken[-1][1]
            if end <= oldest:  # wrapped
                begin, limit = end, oldest
            elif end + rows <= self.size:
                begin, limit = end, self.size
            else:
                begin, limit = 0, oldest
        if begin + rows > limit:
            return None
        self._taken.append((begin, begin + rows))
        return begin

    def give_back(self) -> None:
        """Frees the oldest range."""
        self._taken.pop(0)


@dataclass
class Loan:
    """Rows that a writer reads where they lie; nobody overwrites them until it is given back."""

    first_row: int  # of the request; those before it were exported with other requests
    places: list[int]
    whole_blocks: int  # so many of the places, the first ones, are lent with all their rows
    generation: int  # of the store's exports
    pieces: list[memoryview]  # in the order of the request, bytes

    @property
    def bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces)


class RowStore:
    """Rows by KV slot, at most `budget_bytes` of them, a KV block at a time.

    Blocks of running requests that are to be exported are held, and blocks that a writer reads are lent. The others
    stay, as in vLLM's prefix cache, until their room is needed; those not written for longest go first. A row that was
    not written since its block got its room is never given out.

    A KV block is `exported` once all its rows were in a file that was published, until one of them is written again. It
    stays so where its room here is lost: whoever collects files has the rows.
    """

    def __init__(self, kv_blocks: int, block_size: int, row_bytes: int, budget_bytes: int) -> None:
        self.block_size = block_size
        # twice the KV cache: while a block of the past is lent, the KV block has new rows elsewhere
        self.capacity = min(budget_bytes // (block_size * row_bytes), 2 * kv_blocks)
        if self.capacity < 1:
            raise ValueError(f"a budget of {budget_bytes} bytes holds no KV block of {block_size} rows of {row_bytes} bytes")
        self._rows = np.zeros((self.capacity * block_size, row_bytes), dtype=np.uint8)
        self._written = np.zeros(self.capacity * block_size, dtype=bool)
        self._place = np.full(kv_blocks, -1, dtype=np.int64)  # KV block to its room here
        self._block = np.full(self.capacity, -1, dtype=np.int64)  # the other way; -1: lent rows of a block of the past
        self._loans = np.zeros(self.capacity, dtype=np.int64)  # by place
        self._exported = np.zeros(kv_blocks, dtype=bool)
        self._generation = 0  # of what is exported: a loan from before the last forget_exports() says nothing
        # the next free place is last: a request's blocks get places side by side
        self._free = list(range(self.capacity - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # KV blocks neither held nor lent, oldest first
        self._holders: dict[int, set[str]] = {}  # KV block to request ids
        self._held: dict[str, dict[int, None]] = {}  # request id to KV blocks, in order
        self._over_budget: set[str] = set()

    @property
    def bytes(self) -> int:
        return self._rows.nbytes

    def touch_memory(self) -> None:
        """Has the system give all pages now, rather than in the middle of serving."""
        self._rows.fill(0)

    def hold(self, request_id: str, blocks: list[int]) -> None:
        """These KV blocks are the request's, besides those that it has."""
        if request_id in self._over_budget:
            return
        held = self._held.setdefault(request_id, {})
        for block in blocks:
            held[block] = None
            self._holders.setdefault(block, set()).add(request_id)
            self._idle.pop(block, None)

    def end(self, request_id: str) -> bool:
        """The request is over; what it wrote stays for now. True: it lost its holds since the budget was used up.
        Unknown ids are fine."""
        self._release(request_id)
        over = request_id in self._over_budget
        self._over_budget.discard(request_id)
        return over

    def _release(self, request_id: str) -> None:
        for block in self._held.pop(request_id, ()):
            holders = self._holders[block]
            holders.discard(request_id)
            if not holders:
                del self._holders[block]
                self._set_idle(block)

    def _set_idle(self, block: int) -> None:
        """If it is: nobody holds it, and no writer reads it."""
        place = self._place[block]
        if place >= 0 and block not in self._holders and self._loans[place] == 0:
            self._idle[block] = None

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """rows [n, row_bytes] to `slots` [n]. Slots of vLLM's null block 0, and padding (-1), are left out."""
        blocks = slots // self.block_size
        for block in np.unique(blocks).tolist():
            if block >= 1:
                self._exported[block] = False
                self._prepare(block)
        usable = blocks >= 1
        places = np.where(usable, self._place[np.where(usable, blocks, 0)], -1)
        usable &= places >= 0
        targets = places * self.block_size + slots % self.block_size
        if usable.all():
            self._rows[targets] = rows
        else:
            targets = targets[usable]
            self._rows[targets] = rows[usable]
        self._written[targets] = True

    def _prepare(self, block: int) -> None:
        """Room for a KV block that is about to be written."""
        place = self._place[block]
        if block in self._idle:
            self._idle.move_to_end(block)
        elif place >= 0 and self._loans[place] > 0:
            # vLLM gave the block to another request, while a writer still reads the rows of the one before
            self._place[block] = self._block[place] = -1
            self._make_room(block)
        elif place < 0:
            self._make_room(block)

    def _make_room(self, block: int) -> None:
        """A place for a KV block, where there is one. Else the requests that hold it are not exported."""
        if self._free:
            place = self._free.pop()
        elif self._idle:
            oldest, _ = self._idle.popitem(last=False)
            place = int(self._place[oldest])
            self._place[oldest] = -1
        else:
            for request_id in list(self._holders.get(block, ())):
                self._over_budget.add(request_id)
                self._release(request_id)
            return
        self._written[place * self.block_size : (place + 1) * self.block_size] = False
        self._place[block], self._block[place] = place, block
        self._set_idle(block)

    def forget_all(self) -> None:
        """A step was missed, nobody knows which slots it wrote: no row from before it is given out."""
        self._written[:] = False
        self.forget_exports()

    def forget_exports(self) -> None:
        """Nothing counts as exported, also not what is lent just now."""
        self._exported[:] = False
        self._generation += 1

    def lend(self, blocks: list[int], count: int, whole: bool = False) -> Loan | None:
        """The first `count` rows of these KV blocks, without the blocks at their begin that were exported. None where any
        of them is missing. whole: all `count` rows, whatever was exported.
        """
        needed = -(-count // self.block_size)
        if len(blocks) < needed:
            return None
        skipped = 0 if whole else self._exported_blocks(blocks, count)
        first_row = skipped * self.block_size
        places = self._place[np.asarray(blocks[skipped:needed], dtype=np.int64)]
        if (places < 0).any():
            return None
        sources = (places[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)[: count - first_row]
        if not self._written[sources].all():
            return None
        loan = Loan(first_row, places.tolist(), count // self.block_size - skipped, self._generation, [])
        for block, place in zip(blocks[skipped:], loan.places):
            self._loans[place] += 1
            self._idle.pop(block, None)
        for run in np.split(sources, np.flatnonzero(np.diff(sources) != 1) + 1):
            loan.pieces.append(memoryview(self._rows[run[0] : run[-1] + 1]).cast("B"))
        return loan

    def _exported_blocks(self, blocks: list[int], count: int) -> int:
        """How many KV blocks at the begin were exported; one row at least stays for the file."""
        most = (count - 1) // self.block_size
        for index, block in enumerate(blocks[:most]):
            if not self._exported[block]:
                return index
        return most

    def take_back(self, loan: Loan, exported: bool = False) -> None:
        """exported: the rows are in a file that was published, for all who have the same KV blocks."""
        if exported and loan.generation == self._generation:
            for place in loan.places[: loan.whole_blocks]:
                # a KV block that was written again meanwhile has its rows elsewhere
                if self._block[place] >= 0:
                    self._exported[self._block[place]] = True
        for place in loan.places:
            self._loans[place] -= 1
            if self._loans[place] > 0:
                continue
            if self._block[place] < 0:
                self._free.append(place)
            else:
                self._set_idle(int(self._block[place]))
