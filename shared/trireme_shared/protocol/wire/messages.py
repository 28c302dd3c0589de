"""The messages of the data plane (shared/trireme_shared/protocol/wire/codec.py sends them as msgpack maps; a
simulated network passes the objects).

push (sync)   PushHeader(step, positions, lane_zero?)       then per block PushBlock + payload, the end map
push (async)  PushHeader(task, start, end, lane_zero)       then per block PushBlock + payload, the end map
pull          PullRequest(version | None, blocks)     ->    per block PulledBlock + payload, PullEnd
lookup        LookupRequest(version, rows) + ids      ->    rows, LookupEnd
table         TableRequest(version, table, first)     ->    ids and rows of some slots, TableEnd
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import Mode, Record
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import MOST_TABLES, Layout
from trireme_shared.protocol.records.step import LanePosition, LaneZero, NodeResult, StepRecord, StepResult

PROTOCOL_VERSION = 1
KNOWN_CHARACTERS = 300
MOST_STATED = 256  # versions of which a trainer of a collective job says what they are made of


class Verdict(StrEnum):
    """The result of pushing or pulling a block: applied, duplicate, or a code of
    trireme_shared.protocol.errors."""

    APPLIED = "APPLIED"
    DUPLICATE = "DUPLICATE"
    TOO_EARLY = "TOO_EARLY"
    GONE = "GONE"
    STALE_GENERATION = "STALE_GENERATION"
    STALE_ATTEMPT = "STALE_ATTEMPT"
    WRONG_OWNER = "WRONG_OWNER"
    MOVING = "MOVING"
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    BAD_FRAME = "BAD_FRAME"


class MessageHeader(Record):
    protocol: int = PROTOCOL_VERSION
    job: str
    term: int = 0
    generation: int


class InitHeader(MessageHeader):
    """First map of `POST /v1/init`; the initial values follow, each block as InitBlock + payload. `timeline`:
    the job's (0 before any rollback). `slots`: version of the slot map by which blocks were divided (0: not
    checked)."""

    mode: Mode
    lanes: int
    layout: Layout
    pserver: int
    record: StepRecord
    timeline: int = 0
    slots: int = 0


class InitBlock(Record):
    """`state` "": the block's values. Else, behind them, that tensor of its optimizer's state: one float32
    number, or as many elements as the block has, of its dtype."""

    block: int
    state: str = ""


class PushHeader(MessageHeader):
    """Sync: `step`, `positions` of the pushed lanes after the step, `lane_zero` if and only if lane 0 is
    among them. `claim`: a push without blocks; from now on the step accepts data of these lanes only with
    these positions. It has to reach all owners of slots, so it names the version of the slot map (`slots`; 0:
    not checked). `stored`: the metrics of steps before this one are stored, as far as lane 0's owner knows.

    Async: `epoch`, `task_id`, `attempt`, minibatches [start, end) of `minibatches`, and `lane_zero` with the
    options (and, now and then, the state of the scheduler). `keeps`: the trainer computes the next ones with
    the parameters that it has (see StalenessBound).
    """

    mode: Mode
    trainer: str
    step: int = 0
    positions: tuple[LanePosition, ...] = ()
    lane_zero: LaneZero | None = None
    claim: bool = False
    slots: int = 0
    stored: int = 0
    epoch: int = 0
    task_id: str = ""
    attempt: int = 0
    start: int = 0
    end: int = 0
    minibatches: int = 0
    keeps: bool = False


class PushBlock(Record):
    """`lanes` [first, last) and `count` samples of this node of the tree (sync); async leaves lanes at (0,
    1). `dtype`: of the payload, if it is not the block's own. An empty payload: no samples or, in a block of
    buffers, no change by these samples. The payload of an integer buffer is its value (sync) or what is added
    to it (async). `result` (sync): of these lanes, with the first of their blocks that this parameter server
    gets in a push. `rows`: block is -1, `lanes` is one lane, and the payload is the gradients of rows of
    embedding tables: so many ids of each (shared/trireme_shared/tables/payload.py), all of the lane's by slot
    map `slots` (0: not checked); `dtype` is that of the gradients, if it is not float32. `version` (async):
    the gradient was computed from the block, or from rows, of this version or newer ones; named if the
    learning rate of a late push is to be lower."""

    block: int
    lanes: tuple[int, int] = (0, 1)
    count: int = Field(le=1 << 40)
    version: int | None = None
    dtype: Narrow | None = None
    result: NodeResult | None = None
    rows: tuple[int, ...] | None = Field(default=None, max_length=MOST_TABLES)
    slots: int = 0


class Refusal(Record):
    """Why a block was refused. `version`: the block's. `code`: of trireme_shared.protocol.errors."""

    block: int
    lanes: tuple[int, int]
    code: str
    version: int
    message: str = ""


class PushAnswer(Record):
    """Blocks that were applied, or had been applied before (duplicate), are acknowledged; refused ones are
    listed. `first` (sync): the lanes whose data came to this pserver first from this trainer."""

    applied: int = 0
    duplicate: int = 0
    first: tuple[int, ...] = ()
    refused: tuple[Refusal, ...] = ()
    generation: int = 0


class StepNorm(Record):
    """The norm of the whole gradient of a step, before it is clipped. `timeline`: see InitHeader; steps
    repeat after a rollback."""

    timeline: int
    step: int
    norm: float


class StalenessBound(Record):
    """Asynchronous: `trainer` will compute with what it pulls, once no live trainer computes with parameters
    more than `versions` pushes older. None: it computes with none any more, and nobody waits for it. Who has
    not pushed for twice the longest time that a push has taken, at least `floor_s` and at most `ceiling_s`
    seconds, is not waited for."""

    trainer: str
    versions: int | None = Field(default=None, ge=0)
    floor_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    ceiling_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class PullRequest(MessageHeader):
    """`version` None: the current one. `blocks`: each once. `wait_s`: longest wait for blocks that have not
    reached the version. `dtype`: float32 parameters are cast to it. `known`: the `PullEnd.known` of the pull
    from this pserver that the caller's values come from ("": it has none); blocks of buffers that are still
    the same come without them. None: all blocks come whole. `norm`: of the step that makes the version; the
    blocks that are held for it are stepped. `results_from`: the results of steps are wanted, too, from this
    one on. `slots`: the slot map by which the rows of embedding tables have to have the version; 0: not
    checked. `versions`: the end tells that of each block. `bound`: answered when it holds. `row_means`: of a
    trainer of a collective job, the end brings the mean gradients of rows, if they are small; by this number
    those of its own slots, 0: of all."""

    version: int | None = None
    blocks: tuple[int, ...]
    norm: StepNorm | None = None
    wait_s: float = Field(default=0.0, allow_inf_nan=False)
    dtype: Narrow | None = None
    known: str | None = Field(default=None, max_length=KNOWN_CHARACTERS)
    results_from: int | None = None
    slots: int = 0
    versions: bool = False
    bound: StalenessBound | None = None
    row_means: int | None = None


class PulledBlock(Record):
    """`version`: where no wire is between; on a stream it is left out, so that the headers of all steps are
    equal. `dtype`: of the payload, if it is not the block's own. `same`: the bits are those of the pull that
    the request's `known` names; no payload."""

    block: int
    version: int | None = None
    dtype: Narrow | None = None
    same: Literal[True] | None = None


class RowMeansPart(Record):
    """Mean gradients of rows of all tables: `counts` of each, `payload` with the ids and the gradients.
    `has_data`: see TableEnd."""

    counts: tuple[int, ...] = Field(max_length=MOST_TABLES)
    payload: bytes = Field(repr=False)
    has_data: bool


class PullEnd(Record):
    """`code`: OK, TOO_EARLY (the wait ran out), GONE, NOT_READY, WRONG_OWNER (a block went to another
    parameter server meanwhile), OVERFLOW (values do not fit the requested dtype) or HELD (all data of the
    missing blocks is there; to clip, they wait for the norm of the whole gradient). `record`: of the version,
    if OK and sync. `known`: names the values that came, for `PullRequest.known`; the same in all requests
    that one pull was made of, or it names none of them. `squares`: (block, sum of the squares of its
    gradient), of the blocks of parameters that are held; if OK, of those that came, if the step was measured.
    `timeline`: of the blocks. `results`: the first of those that were asked for and are kept. `versions`:
    (block, version), of those that came, if OK and asked for. `row_means`: if OK, asked for and small, mean
    gradients of rows as a TableRequest finds them, all of them."""

    code: Literal["OK", "TOO_EARLY", "GONE", "NOT_READY", "WRONG_OWNER", "OVERFLOW", "HELD"]
    message: str = ""
    record: StepRecord | None = None
    known: str | None = None
    squares: tuple[tuple[int, float], ...] = ()
    timeline: int = 0
    results: tuple[StepResult, ...] | None = None
    versions: tuple[tuple[int, int], ...] = ()
    row_means: RowMeansPart | None = None


class LookupRequest(MessageHeader):
    """Rows of embedding tables at `version` (None: the newest one, whichever it is); a payload with the ids
    follows (shared/trireme_shared/tables/payload.py), `rows` of each table. `wait_s`: longest wait for the
    version. `dtype`: the rows are cast to it."""

    version: int | None = None
    rows: tuple[int, ...] = Field(max_length=MOST_TABLES)
    wait_s: float = Field(default=0.0, allow_inf_nan=False)
    dtype: Narrow | None = None


class LookupIds(Record):
    """The header of the payload of ids, and of that of rows."""

    lookup: Literal[True] = True


class LookupEnd(Record):
    """After the payload of rows; or without it. `code`: OK, TOO_EARLY (the wait ran out), GONE, NOT_READY,
    WRONG_OWNER (an id belongs to another parameter server), OVERFLOW (values do not fit the requested dtype).
    `version` (async): of the rows, if OK."""

    code: Literal["OK", "TOO_EARLY", "GONE", "NOT_READY", "WRONG_OWNER", "OVERFLOW"]
    message: str = ""
    version: int | None = None


class TableRequest(MessageHeader):
    """All rows of the `table`th embedding table at `version`, the newest one (None: whichever that is): those
    of slots from `first` on, as many as go into one answer; of the first one those whose hash is at least
    `part` (shared/trireme_shared/tables/memory.py). `first` = slot_count: only how many rows there are.
    `slots`: version of the slot map that the asker goes by; 0: not checked.

    Of a trainer of a collective job: the mean gradients of rows that made `version`, of all tables one after
    the other, from the `first`th of all on; by `slots` those of its own slots, 0: of all."""

    version: int | None = None
    table: int = Field(ge=0, lt=MOST_TABLES)
    first: int = Field(default=0, ge=0)
    part: int = Field(default=0, ge=0, lt=1 << 32)
    slots: int = 0


class TableEnd(Record):
    """After a payload of `rows` ids, ascending, and their rows; expired rows are left out. `next`: the first
    slot that is not whole in it, and `part`, from which hash on it is not; slot_count: that was all. `total`:
    rows of the table at this parameter server, expired ones included.

    Of mean gradients: `counts` of each table, `total` of all, `next` is the first that is not in it.
    `has_data`: whether any lane had records in the step."""

    rows: int = Field(ge=0)
    counts: tuple[int, ...] = Field(default=(), max_length=MOST_TABLES)
    next: int = Field(ge=0)
    part: int = Field(default=0, ge=0, lt=1 << 32)
    total: int = Field(ge=0)
    has_data: bool = True


class LedgerQuery(Record):
    """`slots`: version of the slot map that the asker goes by; 0: not checked."""

    epoch: int
    task_id: str
    slots: int = 0


class LedgerAnswer(Record):
    """`next`: the lowest minibatch that a block of this pserver still expects. `closed`: all blocks have all
    minibatches."""

    next: int = 0
    closed: bool = False


class EpochLedger(Record):
    """Counts of the ledger of one epoch at one pserver: minibatches applied per block (lowest and highest),
    tasks closed."""

    epoch: int
    applied_lowest: int
    applied_highest: int
    tasks_closed: int
    tasks_open: int
    duplicates: int


class PserverInfo(Record):
    """`ready`: initialised. `lowest`/`highest`: block versions. `missing` (sync): the lanes [first, last) of
    step `lowest` that some block still lacks. `updates`: optimizer steps over all blocks. `timeline`: of its
    parameters (0: never rolled back). `checkpoint_error`: why its last part could not be written. `slots`:
    version of the slot map by which it has its blocks. `kept`: of a trainer of a collective job, the first
    version whose mean gradients it can give to others, up to `highest`. `made_of`: of a trainer of a
    collective job, by version, the last ones: a digest of which records its step was made of. `schedules`: of
    an asynchronous job, states of its scheduler, ascending."""

    job: str
    index: int
    incarnation: str
    generation: int
    term: int = 0
    ready: bool
    mode: Mode | None = None
    digest: str = ""
    blocks: int = 0
    bytes: int = 0
    lowest: int = 0
    highest: int = 0
    missing: tuple[tuple[int, int], ...] = ()
    updates: int = 0
    ledger: tuple[EpochLedger, ...] = ()
    timeline: int = 0
    checkpoint_error: str = ""
    slots: int = 0
    kept: int | None = None
    made_of: tuple[tuple[int, str], ...] = Field(default=(), max_length=MOST_STATED)
    schedules: tuple[LaneZero, ...] = ()


class HandedNotes(Record):
    """Of a step under way: by which records its blocks have data (`positions`) or may get data (`claimed`) of
    some lanes, and the results of some nodes."""

    step: int
    positions: tuple[LanePosition, ...] = ()
    claimed: tuple[LanePosition, ...] = ()
    lane_zero: LaneZero | None = None
    grad_norm: float | None = None
    results: tuple[tuple[Interval, NodeResult], ...] = ()


class HandedHistory(Record):
    """Of the last versions, of steps under way, and the results that may not be stored yet."""

    records: tuple[StepRecord, ...] = ()
    notes: tuple[HandedNotes, ...] = ()
    results: tuple[StepResult, ...] = ()


class MovedBlock(Record):
    """A block as it is when it moves. `since`: the version that it was initialised or loaded at."""

    block: int
    version: int
    updates: int
    since: int = 0


class MovedTable(Record):
    """Of an embedding table, the rows of slots as they are when they move. `updates`: see
    trireme_shared.tables.table.Table. `rows`: how many. `before`: whether the version before is known."""

    updates: int
    rows: int
    before: bool


class HandoffPart(Record):
    """`name`: "" for the values at `version`, else a tensor of the optimizer's state. `scalar`: it has no
    dimensions. Rows of the `table`th embedding table (block -1): see RowPart; `first`: where the part belongs
    among those of its name. Pieces of a ledger that is too large for the header (block -2): `first`: where
    the piece belongs in the text, whose pieces come in their order."""

    block: int
    name: str = ""
    version: int = 0
    dtype: str
    scalar: bool = False
    table: int = Field(default=0, ge=0, lt=MOST_TABLES)
    first: int = Field(default=0, ge=0)


class HandoffHeader(MessageHeader):
    """First map of `POST /v1/handoffs`: a parameter server (`source`) gives blocks of group `group` of
    migration `migration` to another one. Parts follow, each as HandoffPart + payload.

    `coming`: parts that will follow in later requests, so that the target has memory for them before anything
    freezes. `whole`: with these parts the target has everything: `blocks` tells what each of them is,
    `history` what it knows of versions and steps, `ledger` (asynchronous) which minibatches the blocks have,
    empty if it came in pieces. `tables`: of each embedding table of the model, at `rows_version`."""

    migration: str
    group: int
    source: int
    timeline: int
    coming: tuple[HandoffPart, ...] = ()
    whole: bool = False
    blocks: tuple[MovedBlock, ...] = ()
    history: HandedHistory = HandedHistory()
    ledger: str = ""
    tables: tuple[MovedTable, ...] = ()
    rows_version: int = 0


class HandoffAnswer(Record):
    """`have`: the target has everything of the group."""

    have: bool = False
