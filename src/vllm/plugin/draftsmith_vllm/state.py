"""What tap, connector, engine and worker extension share: they live in one worker process."""

import hashlib
import os
from dataclasses import asdict, dataclass, field


@dataclass
class Drafting:
    """What requests added to vLLM's counters vllm:spec_decode_num_{drafts,draft_tokens,accepted_tokens}_total."""

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, other: "Drafting") -> None:
        self.drafts += other.drafts
        self.drafted_tokens += other.drafted_tokens
        self.accepted_tokens += other.accepted_tokens


@dataclass
class Tap:
    """The side buffer and its counters."""

    buffer: object = None  # tensor [KV slots, layers * hidden]; None: no tap, or not rank 0
    slots: object = None  # V2 runner: its persistent slot row, int64
    persistent_slots: bool = False  # V2 runner: scatter in combine_hidden_states()
    step_tokens: int = 0  # length of that row
    combined: int = 0  # steps in which vLLM gave the draft model states
    scattered: int = 0  # of these, steps whose states reached the buffer
    exported: int = 0
    refused: int = 0  # requests not exported since the two counts above differed
    dropped: int = 0  # requests not exported for lack of room (writers behind, or disk full)
    failed: int = 0
    bytes_written: int = 0
    ended: Drafting = field(default_factory=Drafting)  # of all requests that ended, aborted ones too

    def complete(self) -> bool:
        return self.combined == self.scattered

    def counters(self) -> dict:
        names = ("combined", "scattered", "exported", "refused", "dropped", "failed", "bytes_written")
        counts = {name: getattr(self, name) for name in names}
        counts["ended"] = asdict(self.ended)
        counts["enabled"] = self.buffer is not None
        counts["buffer_bytes"] = 0 if self.buffer is None else self.buffer.numel() * self.buffer.element_size()
        return counts


@dataclass
class Head:
    """The live head: the one last loaded whole. digest None: not known."""

    digest: str | None = None
    loaded_at: float | None = None  # seconds since the epoch; None: the head that the server started with
    swaps: int = 0
    refusals: int = 0


TAP = Tap()
HEAD = Head()


def remember_first_head(vllm_config) -> None:
    """The digest of the head that the server starts with, where that is one local file."""
    speculative = vllm_config.speculative_config
    if HEAD.digest is not None or speculative is None or speculative.draft_model_config is None:
        return
    path = os.path.join(speculative.draft_model_config.model, "model.safetensors")
    if not os.path.isfile(path):
        return
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    HEAD.digest = digest.hexdigest()
