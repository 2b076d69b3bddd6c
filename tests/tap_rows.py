"""The tap's pure logic, without vLLM: row store, budget, exports, ring, guard, salt, configuration. Started by
tests/plugin.rs.

The first argument is the directory of the plugin.
"""

import random
import sys
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, sys.argv[1])
from draftsmith_vllm.config import check_modes, read_tap_config
from draftsmith_vllm.rows import RowStore, SegmentRing, StepGuard
from draftsmith_vllm.salt import other_inputs, prefix_salt

BLOCK, WIDTH = 4, 8


def store(places, kv_blocks=50):
    return RowStore(kv_blocks, BLOCK, WIDTH, places * BLOCK * WIDTH)


def rows(*values):
    return np.repeat(np.array(values, dtype=np.uint8)[:, None], WIDTH, axis=1)


def write(target, block, value, count=BLOCK):
    """`count` rows of a block, `value` in each."""
    target.write(block * BLOCK + np.arange(count), rows(*[value] * count))


def read(target, blocks, count):
    """The value of each row, or None. Nothing stays lent."""
    loan = target.lend(blocks, count)
    if loan is None:
        return None
    found = values(loan)
    target.take_back(loan)
    return found


def export(target, blocks, count, whole=False):
    """The first row of the file and its values, or None. The file is published."""
    loan = target.lend(blocks, count, whole)
    if loan is None:
        return None
    found = loan.first_row, values(loan)
    target.take_back(loan, exported=True)
    return found


def values(loan):
    return np.frombuffer(b"".join(loan.pieces), dtype=np.uint8).reshape(-1, WIDTH)[:, 0].tolist()


def test_rows_come_back_by_block_in_the_order_of_the_request():
    target = store(10)
    target.write(np.array([29, 12, 28, 13]), rows(1, 2, 3, 4))
    assert read(target, [7], 2) == [3, 1]
    assert read(target, [3, 7], 6) is None, "rows 14 and 15 were never written"
    target.write(np.array([14, 15]), rows(5, 6))
    assert read(target, [3, 7], 6) == [2, 4, 5, 6, 3, 1]
    assert read(target, [3, 7, 9], 6) == [2, 4, 5, 6, 3, 1], "block 9 holds lookahead alone"
    assert read(target, [3], 5) is None, "more rows than blocks"


def test_a_rejected_draft_is_overwritten():
    target = store(10)
    target.write(np.array([4, 5, 6]), rows(1, 99, 99))
    target.write(np.array([5, 6]), rows(2, 3))
    assert read(target, [1], 3) == [1, 2, 3]


def test_padding_and_the_null_block_are_left_out():
    target = store(10)
    target.write(np.array([-1, 4, 0, 3, -1]), rows(9, 1, 9, 9, 9))
    assert read(target, [1], 1) == [1]
    assert read(target, [0], 1) is None


def test_a_missed_step_leaves_nothing_to_read():
    target = store(10)
    write(target, 1, 1)
    target.forget_all()
    assert read(target, [1], 4) is None
    write(target, 1, 2, count=2)
    assert read(target, [1], 2) == [2, 2] and read(target, [1], 3) is None


def test_what_nobody_holds_makes_room_oldest_first():
    target = store(3)
    for block in (1, 2, 3):
        write(target, block, block)
    write(target, 1, 1)
    write(target, 4, 4)  # 2 was not written for longest
    assert [read(target, [block], 4) is not None for block in (1, 2, 3, 4)] == [True, False, True, True]
    write(target, 2, 7, count=1)
    assert read(target, [2], 2) is None, "the rows of the block that had the place before are not its own"


def test_held_blocks_stay_and_the_one_who_finds_no_room_is_over_budget():
    target = store(3)
    target.hold("a", [1, 2])
    target.hold("b", [3])
    for block in (1, 2, 3):
        write(target, block, block)
    target.hold("b", [4])
    write(target, 4, 4)
    assert read(target, [1, 2], 8) == [1] * 4 + [2] * 4
    assert read(target, [3, 4], 8) is None
    target.hold("b", [5])
    write(target, 5, 5)  # takes the place of 3, which b no longer holds
    assert read(target, [5], 4) == [5] * 4
    assert target.end("b") and not target.end("a"), "b is told to be over budget"
    assert not target.end("b"), "once"
    target.hold("b", [6])
    write(target, 6, 6)
    assert read(target, [6], 4) == [6] * 4, "a request of this name may try again"


def test_a_shared_prefix_stays_until_its_last_holder_ends():
    target = store(2)
    target.hold("a", [1])
    write(target, 1, 1)
    target.hold("b", [1, 2])
    write(target, 2, 2)
    target.end("a")
    write(target, 3, 3)
    assert read(target, [1, 2], 8) == [1] * 4 + [2] * 4
    target.end("b")
    write(target, 3, 3)
    assert read(target, [1, 2], 8) is None and read(target, [3], 4) == [3] * 4


def test_a_writer_reads_on_while_the_block_has_a_new_owner():
    target = store(3)
    write(target, 1, 1)
    write(target, 2, 2)
    loan = target.lend([1, 2], 8)
    assert len(loan.pieces) == 1, "places side by side are one piece"
    target.hold("new", [1])
    write(target, 1, 9, count=2)
    assert values(loan) == [1] * 4 + [2] * 4 and read(target, [1], 2) == [9, 9]
    assert read(target, [1], 3) is None, "the old owner's rows are not the new one's"
    write(target, 3, 3)
    assert read(target, [3], 4) is None, "lent and held places are not taken"
    target.take_back(loan)
    write(target, 3, 3)
    assert read(target, [3], 4) == [3] * 4 and read(target, [1], 2) == [9, 9]


def test_no_row_of_another_is_ever_given_out():
    """Random traffic against a model that knows who wrote what: a read gives the last rows written, or None."""
    generator = random.Random(4)
    target, truth, missed, given, lent = store(6, 10), {}, 0, 0, []
    for turn in range(4000):
        kind = generator.random()
        block = generator.randrange(1, 10)
        if kind < 0.55:
            slots = sorted({block * BLOCK + generator.randrange(BLOCK) for _ in range(3)})
            target.write(np.array(slots), rows(*[turn % 251] * len(slots)))
            truth.update(dict.fromkeys(slots, turn % 251))
        elif kind < 0.7:
            target.hold(str(generator.randrange(5)), [block])
        elif kind < 0.8:
            target.end(str(generator.randrange(5)))
        elif kind < 0.81:
            target.forget_all()
            truth.clear()
        else:
            blocks = [block, generator.randrange(1, 10)]
            found = read(target, blocks, 2 * BLOCK)
            wanted = [truth.get(part * BLOCK + offset) for part in blocks for offset in range(BLOCK)]
            assert found is None or found == wanted, (turn, found, wanted)
            missed += found is None
            given += found is not None
            if found is not None and len(lent) < 2:
                lent.append((target.lend(blocks, 2 * BLOCK), found))
        if lent and generator.random() < 0.05:
            loan, before = lent.pop(0)
            assert values(loan) == before, "nobody wrote into what a writer reads"
            target.take_back(loan)
    assert missed > 50 and given > 50, (missed, given)


def test_a_prefix_that_was_exported_is_left_out():
    target = store(10)
    for block in (1, 2, 3):
        write(target, block, block)
    assert export(target, [1, 2], 7) == (0, [1] * 4 + [2] * 3)
    assert export(target, [1, 2, 3], 12) == (4, [2] * 4 + [3] * 4), "row 7 was in no file"
    assert export(target, [1, 2, 3], 12) == (8, [3] * 4), "one row at least"
    assert export(target, [1, 2, 3], 9) == (8, [3])
    assert export(target, [1, 2, 3], 8) == (4, [2] * 4)
    assert export(target, [1], 1) == (0, [1])
    write(target, 4, 4)
    assert export(target, [1, 4, 3], 12) == (4, [4] * 4 + [3] * 4), "what follows a new block is exported with it"
    assert export(target, [1, 2], 12) is None, "more rows than blocks"
    assert export(target, [1, 2, 3], 12, whole=True) == (0, [1] * 4 + [2] * 4 + [3] * 4)


def test_a_file_that_was_not_published_exports_nothing():
    target = store(10)
    write(target, 1, 1)
    write(target, 2, 2)
    assert read(target, [1, 2], 8) == [1] * 4 + [2] * 4
    assert export(target, [1, 2], 8) == (0, [1] * 4 + [2] * 4)


def test_a_block_that_is_written_again_is_exported_again():
    target = store(2)
    write(target, 1, 1)
    write(target, 2, 2)
    export(target, [1, 2], 8)
    write(target, 1, 9, count=2)
    assert export(target, [1, 2], 8) == (0, [9] * 2 + [1] * 2 + [2] * 4)
    target.hold("a", [1, 2])
    write(target, 3, 3)
    assert export(target, [3], 4) is None, "no room"
    target.end("a")
    write(target, 3, 3)
    write(target, 4, 4)
    export(target, [3, 4], 8)
    target.hold("b", [3, 4])
    write(target, 1, 7)
    assert export(target, [1, 4], 8) is None, "block 1 was exported once, but its new rows found no room"


def test_a_block_that_is_written_while_its_file_is_does_not_count_as_exported():
    target = store(4, kv_blocks=4)
    for block in (1, 2, 3):
        write(target, block, block)
    loan = target.lend([1, 2], 8)
    write(target, 1, 9)
    target.take_back(loan, exported=True)
    assert export(target, [1, 2], 8) == (0, [9] * 4 + [2] * 4)
    assert export(target, [3, 2], 8) == (0, [3] * 4 + [2] * 4), "nor does another"


def test_an_exported_prefix_needs_no_room():
    target = store(2)
    write(target, 1, 1)
    write(target, 2, 2)
    export(target, [1, 2], 8)
    write(target, 3, 3)
    write(target, 4, 4)
    assert export(target, [1, 2, 3, 4], 16) == (8, [3] * 4 + [4] * 4)
    assert export(target, [1, 2], 8, whole=True) is None and export(target, [1, 2], 8) is None


def test_after_a_missed_step_nothing_is_exported():
    target = store(10)
    for block in (1, 2, 3):
        write(target, block, block)
    export(target, [1], 4)
    loan = target.lend([2], 4)
    target.forget_all()
    target.take_back(loan, exported=True)
    write(target, 3, 3)
    assert export(target, [1, 3], 8) is None and export(target, [2, 3], 8) is None
    write(target, 1, 4)
    assert export(target, [1, 3], 8) == (0, [4] * 4 + [3] * 4)


def test_files_that_are_asked_for_again_come_whole():
    target = store(10)
    for block in (1, 2, 3):
        write(target, block, block)
    export(target, [1, 3], 8)
    loan = target.lend([2, 3], 8)
    target.forget_exports()
    assert export(target, [1, 3], 8) == (0, [1] * 4 + [3] * 4)
    target.take_back(loan, exported=True)
    assert export(target, [2, 3], 8) == (0, [2] * 4 + [3] * 4), "a file that was on its way counts for nothing"
    assert export(target, [1, 3], 8) == export(target, [2, 3], 8) == (4, [3] * 4)


def test_what_is_left_out_is_always_in_a_file():
    """Random traffic: the rows of all files so far, by what was written, against those that are left out."""
    generator = random.Random(6)
    target, truth, published, lent, left_out, resends = store(6, 10), {}, {}, [], 0, 0
    for turn in range(12000):
        kind = generator.random()
        blocks = generator.sample(range(1, 5), 2)
        if kind < 0.3:
            slots = sorted({blocks[0] * BLOCK + generator.randrange(BLOCK) for _ in range(3)})
            target.write(np.array(slots), rows(*[turn % 251] * len(slots)))
            # which write it was, since its value comes again
            truth.update(dict.fromkeys(slots, turn))
        elif kind < 0.35:
            # of other requests, which take the room
            write(target, generator.randrange(5, 10), 0)
        elif kind < 0.36:
            target.forget_all()
        elif kind < 0.37:
            target.forget_exports()
            published.clear()
            resends += 1
        elif kind < 0.45:
            target.hold(str(generator.randrange(3)), blocks)
        elif kind < 0.5:
            target.end(str(generator.randrange(3)))
        elif kind < 0.8 and len(lent) < 3:
            count = generator.randrange(1, 2 * BLOCK + 1)
            asked = [block * BLOCK + offset for block in blocks for offset in range(BLOCK)][:count]
            loan = target.lend(blocks, count)
            if loan is None:
                continue
            wanted = [truth.get(slot) for slot in asked]
            assert values(loan) == [writing % 251 for writing in wanted[loan.first_row :]]
            assert 0 <= loan.first_row < count
            for slot, value in zip(asked[: loan.first_row], wanted):
                assert value in published[slot], (turn, blocks, slot)
                left_out += 1
            lent.append((loan, dict(zip(asked[loan.first_row :], wanted[loan.first_row :])), resends))
        elif lent:
            loan, content, resends_before = lent.pop(0)
            success = generator.random() < 0.8
            if success and resends_before == resends:
                for slot, value in content.items():
                    published.setdefault(slot, set()).add(value)
            target.take_back(loan, exported=success)
    assert left_out > 300 and resends > 50, (left_out, resends)


def request(**inputs):
    return SimpleNamespace(request_id="a", **inputs)


def salt(**inputs):
    return prefix_salt(request(**inputs), other_inputs(request(**inputs)))


def test_the_salt_names_all_that_vllm_tells_apart():
    assert salt() == salt(lora_request=None, cache_salt=None, mm_features=[], prompt_embeds=None) == ""
    adapter = SimpleNamespace(lora_name="law", lora_path="/one")
    image = SimpleNamespace(identifier="f00d", mm_position=SimpleNamespace(offset=3, length=9))
    moved = SimpleNamespace(identifier="f00d", mm_position=SimpleNamespace(offset=4, length=9))
    unnamed = SimpleNamespace(mm_position=None)
    salts = [
        salt(lora_request=adapter),
        salt(lora_request=SimpleNamespace(lora_name="law", lora_path="/two")),
        salt(cache_salt="tenant"),
        salt(cache_salt="tenant", lora_request=adapter),
        salt(mm_features=[image]),
        salt(mm_features=[moved]),
        salt(mm_features=[image, moved]),
        salt(mm_features=[unnamed]),
        salt(prompt_embeds=object()),
    ]
    assert len(set(salts)) == len(salts) and all(len(found) == 64 for found in salts)
    assert salts[0] == salt(lora_request=SimpleNamespace(lora_name="law", lora_path="/one"))
    assert other_inputs(request(cache_salt="tenant", lora_request=adapter)) == []
    assert other_inputs(request(mm_features=[image])) and other_inputs(request(prompt_embeds=object()))


def test_a_budget_below_one_block_is_refused():
    try:
        store(0)
    except ValueError as error:
        assert "budget" in str(error)
    else:
        raise AssertionError("taken")


def test_the_ring_hands_out_no_range_twice():
    generator = random.Random(5)
    ring, taken, refused = SegmentRing(100), [], 0
    for _ in range(5000):
        if taken and generator.random() < 0.5:
            taken.pop(0)
            ring.give_back()
            continue
        count = generator.randrange(1, 60)
        begin = ring.take(count)
        if begin is None:
            refused += 1
            assert taken, "an empty ring has room for all that fits"
            continue
        new = range(begin, begin + count)
        assert new.stop <= 100
        assert all(new.stop <= old.start or old.stop <= new.start for old in taken), (new, taken)
        taken.append(new)
    assert refused > 0 and SegmentRing(10).take(11) is None


def test_the_guard_tells_a_step_that_gave_no_rows():
    guard = StepGuard()
    assert guard.take(8) == 0, "no step runs: graph capture"
    assert guard.begin(5) and guard.take(8) == 5, "padding is left out"
    assert guard.take(8) == 0, "once a step"
    assert guard.begin(0) and guard.begin(3), "a step without the model owes nothing"
    assert not guard.begin(4), "the step of 3 gave nothing"
    assert guard.take(3) == 0 and not guard.begin(4), "too few rows are none"
    assert guard.take(3, fewer=True) == 3 and guard.begin(0)
    assert (guard.steps, guard.captured) == (4, 2)


def configuration(extra=None, **changes):
    head = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [2, 4, 6], **changes.get("head", {})}
    speculative = {"method": "eagle3", "draft_model_config": SimpleNamespace(hf_config=SimpleNamespace(**head)),
                   **changes.get("speculative", {})}
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, **changes.get("parallel", {})}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"transfer_dir": "/t", **(extra or {})}),
        speculative_config=SimpleNamespace(**speculative),
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 6),
        use_v2_model_runner=True,
    )


def refusal(check):
    try:
        check()
    except ValueError as error:
        return str(error)
    return None


def test_modes_that_cannot_work_are_refused_by_the_name_of_their_flag():
    one_group = SimpleNamespace(kv_cache_groups=[0])
    assert refusal(lambda: check_modes(configuration(), one_group)) is None
    cases = {
        "--pipeline-parallel-size": dict(parallel={"pipeline_parallel_size": 2}),
        "--decode-context-parallel-size": dict(parallel={"decode_context_parallel_size": 2}),
        "parallel_drafting": dict(speculative={"parallel_drafting": True}),
        "--speculative-config": dict(speculative={"method": "ngram"}),
        "VLLM_USE_V2_MODEL_RUNNER": dict(head={"eagle_aux_hidden_state_layer_ids": None,
                                               "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6]}}),
        "the last layer": dict(head={"eagle_aux_hidden_state_layer_ids": [2, 4]}),
        "Eagle3Qwen3ForCausalLM": dict(head={"architectures": ["Eagle3Qwen3ForCausalLM"]}),
    }
    for words, changes in cases.items():
        assert words in (refusal(lambda: check_modes(configuration(**changes), one_group)) or ""), words
    two_groups = SimpleNamespace(kv_cache_groups=[0, 1])
    assert "--disable-hybrid-kv-cache-manager" in refusal(lambda: check_modes(configuration(), two_groups))


def test_settings_are_checked_by_name():
    assert read_tap_config(configuration({"sample_rate": 0.5})).sample_rate == 0.5
    for extra, words in (({"transfer_dir": ""}, "transfer_dir"), ({"host_byte": 1}, "host_byte"),
                         ({"sample_rate": 2}, "sample_rate"), ({"host_bytes": 0}, "host_bytes")):
        assert words in (refusal(lambda: read_tap_config(configuration(extra))) or ""), extra


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print("ok", name)
