"""What tap, connector, engine and worker extension share: they live in one worker process."""

import hashlib
import json
import logging
import os
import threading
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
class Counters:
    """What became of the requests. Written by several threads, each under `lock`."""

    exported: int = 0
    not_sampled: int = 0
    over_budget: int = 0  # host_bytes was used up while they ran
    incomplete: int = 0  # a row was missing: of an evicted prefix, or of a step that was missed
    dropped: int = 0  # no room for the file
    failed: int = 0
    bytes_written: int = 0
    skipped_rows: int = 0  # of exported requests: an earlier file has them
    missed_steps: int = 0  # steps whose rows vLLM never handed over
    overrun_steps: int = 0  # steps whose rows came while those before them still waited for the host
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **more: int) -> None:
        with self.lock:
            for name, count in more.items():
                setattr(self, name, getattr(self, name) + count)

    def values(self) -> dict:
        with self.lock:
            return {name: value for name, value in vars(self).items() if name != "lock"}


@dataclass
class Tap:
    """The tap of this process."""

    step_buffers: object = None  # rows on their way to the store (intake.StepBuffers)
    intake: object = None  # intake.Intake; None: no tap, or not rank 0
    slot_row: object = None  # V2 runner: its persistent slot row, int64
    persistent_slots: bool = False  # V2 runner
    step_tokens: int = 0  # length of that row
    counters: Counters = field(default_factory=Counters)
    ended: Drafting = field(default_factory=Drafting)  # of all requests that ended, aborted ones too

    def status(self) -> dict:
        counts = {"enabled": self.intake is not None, **self.counters.values(), "ended": asdict(self.ended)}
        guard = None if self.intake is None else self.intake.guard
        counts["steps"] = 0 if guard is None else guard.steps
        counts["captured_steps"] = 0 if guard is None else guard.captured
        counts["host_bytes"] = 0 if self.intake is None else self.intake.host_bytes()
        counts["device_bytes"] = 0 if self.step_buffers is None else self.step_buffers.device_bytes()
        return counts


@dataclass
class Head:
    """The live head: the one last loaded whole. digest and file None: not known."""

    digest: str | None = None
    file: str | None = None  # its model.safetensors
    config: dict | None = None  # config.json of the head that the server started with: no swap changes what it says
    loaded_at: float | None = None  # seconds since the epoch; None: the head that the server started with
    swaps: int = 0
    refusals: int = 0
    asked: bool = False  # whether the first head was looked at


TAP = Tap()
HEAD = Head()


def remember_first_head(vllm_config) -> None:
    """The config of the head that the server starts with, and its digest where it is one local file."""
    speculative = vllm_config.speculative_config
    if HEAD.asked or speculative is None or speculative.draft_model_config is None:
        return
    HEAD.asked = True
    directory = speculative.draft_model_config.model
    try:
        HEAD.config = read_config(directory, speculative.draft_model_config.revision)
    except Exception as error:  # a server without swaps is better than none
        logging.getLogger("vllm.draftsmith").warning("the head's config.json cannot be read, so draftsmith will swap none in: %s", error)
    path = os.path.abspath(os.path.join(directory, "model.safetensors"))
    if not os.path.isfile(path):
        return
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    HEAD.digest, HEAD.file = digest.hexdigest(), path


def read_config(model: str, revision: str | None) -> dict:
    """config.json as it is, of a directory or of a name that Hugging Face's cache knows."""
    local = os.path.join(model, "config.json")
    if not os.path.isfile(local):
        from transformers import PretrainedConfig

        return PretrainedConfig.get_config_dict(model, revision=revision)[0]
    with open(local) as file:
        return json.load(file)
