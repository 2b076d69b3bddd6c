"""The plugin against a real vLLM: states, prefixes exported once, drafting counts, swaps, refusals, d2t. Started by
tests/plugin.rs.

The server runs src/demo_env/serve.sh; the Python is that environment's, since it needs transformers.
"""

import argparse
import hashlib
import json
import os
import threading
import time
import urllib.error
import urllib.request

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

arguments = argparse.ArgumentParser()
arguments.add_argument("--url", required=True)
arguments.add_argument("--model", required=True, help="directory of the verifier")
arguments.add_argument("--head", required=True, help="directory of the head that the server started with")
arguments.add_argument("--transfer", required=True, help="the server's directory for states")
arguments.add_argument("--scratch", required=True, help="an empty directory that the server can read")
options = arguments.parse_args()
os.makedirs(options.scratch)
PATIENCE = 60  # seconds; nothing that is waited for takes near so long unless it fails


def call(route, body=None, timeout=300):
    """Status and text."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(options.url + route, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def status():
    code, text = call("/collective_rpc", {"method": "draftsmith_status"})
    assert code == 200, text
    return json.loads(text)["results"][0]


def completion(prompt, tokens, **more):
    return {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def complete(prompt, tokens, **more):
    code, text = call("/v1/completions", completion(prompt, tokens, return_token_ids=True, **more))
    assert code == 200, text
    return json.loads(text)


def open_stream(prompt, tokens, request_id):
    """The open answer; each event is a line."""
    body = json.dumps(completion(prompt, tokens, stream=True)).encode()
    headers = {"content-type": "application/json", "x-request-id": request_id}
    return urllib.request.urlopen(urllib.request.Request(options.url + "/v1/completions", body, headers), timeout=300)


def exported(answer_id, count=1):
    """Files of the request; waits for them, since vLLM hands them out one engine step after the answer."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        names = [n for n in os.listdir(options.transfer) if n.endswith(".safetensors") and answer_id in n]
        if len(names) >= count:
            return sorted(os.path.join(options.transfer, name) for name in names)
        call("/health")
    raise AssertionError(f"{answer_id}: {names} of {count} files")


from transformers import AutoModelForCausalLM

verifier = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()


@torch.inference_mode()
def reference(token_ids, layers):
    last = {}
    hook = verifier.model.norm.register_forward_pre_hook(lambda _, given: last.update(states=given[0][0]))
    hidden = verifier.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.stack([last["states"] if k == verifier.config.num_hidden_layers else hidden[k][0] for k in layers], 1)


files = {}  # path to metadata, states and token ids
rows = {}  # of all files that were read, by the sha256 of all that determines a row


def row_keys(salt, token_ids):
    """A row's key: of the salt and the token ids up to its own."""
    keys, known = [], hashlib.sha256(salt.encode())
    for token in token_ids:
        known.update(b"%d," % token)
        keys.append(known.digest())
    return keys


def read_file(path):
    """Checks the file by itself, and keeps its rows."""
    with safe_open(path, "pt") as file:
        meta = file.metadata()
        states, ids = file.get_tensor("hidden_states"), file.get_tensor("token_ids")
    assert os.stat(path).st_mode & 0o777 == 0o600
    raw = states.numpy().tobytes() + ids.numpy().tobytes()
    assert meta["sha256"] == hashlib.sha256(raw).hexdigest() and meta["format"] == "draftsmith-states-2"
    first_row = int(meta["first_row"])
    assert states.shape[0] == len(ids) - 1 - first_row > 0
    files[path] = meta, states, ids.tolist()
    keys = row_keys(meta["prefix_salt"], ids.tolist()[:-1])
    rows.update(zip(keys[first_row:], states))


def check_file(path):
    """Largest relative error of a row; rows that the file lacks are those of the other files."""
    for name in os.listdir(options.transfer):
        found = os.path.join(options.transfer, name)
        if name.endswith(".safetensors") and found not in files:
            read_file(found)
    meta, states, ids = files[path]
    first_row = int(meta["first_row"])
    keys = row_keys(meta["prefix_salt"], ids[:-1])
    states = torch.cat([*(rows[key][None] for key in keys[:first_row]), states])
    want = reference(ids[:-1], json.loads(meta["layer_ids"]))
    error = (states - want).norm(dim=-1) / want.norm(dim=-1)
    # float32 noise of another order of summation is 1e-6 to 1e-4; a wrong or stale row is near 1
    assert error.max() <= 1e-3, (path, error.max())
    return float(error.max()), ids, meta


def counted():
    """vLLM's counters: drafts, drafted tokens, accepted tokens."""
    names = {}
    for line in call("/metrics")[1].splitlines():
        if line.startswith("vllm:spec_decode_num_") and "_total{" in line and "per_pos" not in line:
            names[line.split("{")[0].removeprefix("vllm:spec_decode_num_")] = int(float(line.rsplit(" ", 1)[1]))
    return [names[name] for name in ("drafts_total", "draft_tokens_total", "accepted_tokens_total")]


def running():
    """Requests that vLLM works on."""
    [line] = [line for line in call("/metrics")[1].splitlines() if line.startswith("vllm:num_requests_running{")]
    return int(float(line.rsplit(" ", 1)[1]))


COUNTS = ("drafts", "drafted_tokens", "accepted_tokens")


def exported_counts(paths):
    """The same, summed over files."""
    sums = [0, 0, 0]
    for path in paths:
        with safe_open(path, "pt") as file:
            meta = file.metadata()
        sums = [total + int(meta[name]) for total, name in zip(sums, COUNTS)]
    return sums


def ended_counts():
    """The same of all requests that ended, aborted ones too."""
    ended = status()["tap"]["ended"]
    return [ended[name] for name in COUNTS]


def difference(after, before):
    return [later - earlier for later, earlier in zip(after, before)]


def swap(path, **more):
    code, text = call("/start_draft_weight_update", {})
    assert code == 200, text
    code, text = call("/update_weights", {"update_info": {"path": path, **more}})
    if code != 200:
        return text
    code, text = call("/finish_weight_update", {"weight_version": "test"})
    assert code == 200, text
    return None


def digest(path):
    return hashlib.sha256(open(path, "rb").read()).hexdigest()


def variant(name, change):
    tensors = load_file(live)
    tensors = change(tensors) or tensors
    out = os.path.join(options.scratch, name + ".safetensors")
    save_file(tensors, out)
    return out


live = os.path.join(options.head, "model.safetensors")
first = status()
print("start", first)
assert first["digest"] == digest(live) and first["file"] == live
with open(os.path.join(options.head, "config.json")) as file:
    assert first["config"] == json.load(file)

# states: generated tokens with rejected drafts, a prefix hit, n = 2, several at once
text = "The history of the city begins with a small harbour. " * 40
before = counted()
answers = [complete(text, 40), complete(text, 40), complete(text + " Later", 30)]
for answer in answers:
    [path] = exported(answer["id"])
    error, ids, meta = check_file(path)
    choice = answer["choices"][0]
    assert ids == choice["prompt_token_ids"] + choice["token_ids"], "prompt and all output ids"
    assert int(meta["prompt_tokens"]) == len(choice["prompt_token_ids"])
    assert meta["head_digest"] == first["digest"] and meta["head_swapped"] == "false"
    assert answer.get("kv_transfer_params") is None and answer.get("metrics") is None
    print("states", len(ids), "tokens, largest relative error", error)
drafting = difference(counted(), before)
assert drafting == exported_counts(exported(answer["id"])[0] for answer in answers)
assert drafting[0] > 0
print("drafts, drafted, accepted", drafting)
[hits] = [line for line in call("/metrics")[1].splitlines() if line.startswith("vllm:prefix_cache_hits_total{")]
assert float(hits.rsplit(" ", 1)[1]) > 0
print(hits)
before = counted()
two = complete("Once upon a time", 24, n=2, temperature=0.9, seed=1)
for path in exported(two["id"], 2):
    print("n=2", check_file(path)[0])
assert difference(counted(), before) == exported_counts(exported(two["id"], 2))

# a conversation: each turn exports what is new; what the collector asks for again comes whole
def ask_for_all_again():
    temporary = os.path.join(options.transfer, ".resend.tmp")
    with open(temporary, "w"):
        pass
    os.rename(temporary, os.path.join(options.transfer, ".resend"))

def turn(earlier, question, **more):
    """The conversation after the answer, and the first row of its file."""
    code, answered = call("/tokenize", {"model": "smollm2", "prompt": question})
    assert code == 200, answered
    answer = complete(earlier + json.loads(answered)["tokens"], 60, **more)
    error, after, meta = check_file(exported(answer["id"])[0])
    print("turn of", len(after), "tokens, first row", meta["first_row"], "largest relative error", error)
    assert (meta["prefix_salt"] == "") == ("cache_salt" not in more)
    return after, int(meta["first_row"])

questions = ["A lighthouse keeper writes a long letter to his sister about the storm. " * 20,
             "She answers with news of the town, the market and the mill. " * 12, "He asks how the harvest was. " * 12,
             "She tells of the wheat and of the apples. " * 12, "They say farewell. " * 12]
conversation, first_rows = [], []
skipped = status()["tap"]["skipped_rows"]
for question in questions[:3]:
    conversation, first_row = turn(conversation, question)
    first_rows.append(first_row)
assert 0 == first_rows[0] < first_rows[1] < first_rows[2], first_rows
assert status()["tap"]["skipped_rows"] - skipped == sum(first_rows)
ask_for_all_again()
conversation, first_row = turn(conversation, questions[3])
assert first_row == 0
conversation, first_row = turn(conversation, questions[4])
assert first_row > first_rows[2]
# vLLM shares no block with a request of another salt
salted, first_row = turn([], questions[0], cache_salt="tenant")
assert first_row == 0
_, first_row = turn(salted, questions[1], cache_salt="tenant")
assert first_row == first_rows[1]

# cut at the token limit, ended by a token, and drafts that a grammar trims
before = counted()
short = [complete("Count: one, two,", tokens) for tokens in (1, 2, 3, 4, 5)]
assert exported_counts(exported(short[0]["id"])) == [0, 0, 0]
tenth = answers[0]["choices"][0]["token_ids"][9]
short.append(complete(text, 40, stop_token_ids=[tenth], ignore_eos=False))
assert len(short[-1]["choices"][0]["token_ids"]) <= 10
schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
short.append(complete("A person as JSON: ", 60, structured_outputs={"json": schema}, ignore_eos=False))
drafting = difference(counted(), before)
assert drafting == exported_counts(exported(answer["id"])[0] for answer in short)
print("short answers: drafts, drafted, accepted", drafting)
results = []
threads = [threading.Thread(target=lambda i=i: results.append(complete(f"Story number {i}: " + "once " * i * 9, 32)))
           for i in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(results) == len(threads)
print("six at once", max(check_file(exported(answer["id"])[0])[0] for answer in results))

# an aborted request leaves nothing
with open_stream("Go on", 900, "left-early") as answer:
    assert answer.readline()
deadline = time.monotonic() + PATIENCE
while running() != 0:
    assert time.monotonic() < deadline
before = counted()
last = complete("One more", 4)
assert difference(counted(), before) == exported_counts(exported(last["id"])), "the aborted one ended before"
assert ended_counts() == counted(), "aborted requests too"
assert not [name for name in os.listdir(options.transfer) if "left-early" in name]
print("aborted request: no file")

# a client's request id cannot leave the directory
open_stream("Go on", 4, "../../up").read()
[path] = exported("..%2F..%2Fup")
print("odd id", os.path.basename(path))

# refusals, each for its own reason: the live head stays
cases = {
    "wrong shape": variant("shape", lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:4096].clone()})),
    "missing": variant("missing", lambda t: {n: v for n, v in t.items() if n != "norm.weight"}),
    "f16": variant("f16", lambda t: t.update({"fc.weight": t["fc.weight"].half()})),
    "unknown": variant("unknown", lambda t: t.update({"layers.1.x.weight": torch.zeros(3)})),
    "bad d2t": variant("d2t", lambda t: t.update({"d2t": t["d2t"] - 1})),
    "absent": os.path.join(options.scratch, "no-such-file"),
}
cut = os.path.join(options.scratch, "cut.safetensors")
open(cut, "wb").write(open(live, "rb").read()[:-100])
cases["cut"] = cut
reasons = {
    "wrong shape": "lm_head.weight: the file has shape [4096,", "missing": "norm.weight: missing from the file",
    "f16": "fc.weight: the file has torch.float16", "unknown": "layers.1.x.weight: the live head has no such tensor",
    "bad d2t": "d2t: target ids must be distinct", "absent": "No such file or directory", "cut": "not a whole safetensors file",
}
for name, path in cases.items():
    refusal = swap(path)
    assert refusal is not None and reasons[name] in refusal, (name, refusal)
    assert status()["digest"] == first["digest"], name
    print("refused", name, "->", json.loads(refusal)["error"]["message"][:260])
refusal = swap(live, digest="0" * 64)
assert refusal is not None and "the caller expects" in refusal and status()["digest"] == first["digest"]
code, refusal = call("/start_weight_update", {})
assert code != 200 and "draft heads alone" in refusal, (code, refusal)

# swap in the middle of a stream, with layers.0 names, f32 and an embed_tokens that must be ignored
def other(t):
    renamed = {n.replace("midlayer.", "layers.0."): (v.float() if v.is_floating_point() else v) for n, v in t.items()}
    renamed["fc.weight"] = renamed["fc.weight"].flip(0).contiguous()
    renamed["embed_tokens.weight"] = torch.zeros(verifier.config.vocab_size, verifier.config.hidden_size)
    return renamed
second = variant("second", other)
quiet = complete("Rivers of Europe:", 120)["choices"][0]["text"]
with open_stream("Rivers of Europe:", 120, "swapped") as answer:
    lines = [answer.readline()]
    begun = time.monotonic()
    for path in (second, live, second):
        assert swap(path, digest=digest(path)) is None
    print("three swaps in", round(time.monotonic() - begun, 3), "s")
    assert running() == 1, "the stream ended before the swaps"
    lines += answer.readlines()
events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
assert "".join(event["choices"][0]["text"] for event in events) == quiet, "text is the same over swaps"
now = status()
assert now["digest"] == digest(second) and now["file"] == second and now["swaps"] == 3
assert now["config"] == first["config"], "no swap changes what the head's config says"
error, _, meta = check_file(exported("swapped")[0])
assert meta["head_swapped"] == "true"
print("states over swaps", error)
print("after swaps", now)

# staged while a request runs, then committed
def stage(path, name):
    code, text = call("/collective_rpc", {"method": "draftsmith_stage", "args": [path, name]})
    assert code == 200, text
    while (staging := status()["staging"])["state"] == "running":
        assert staging["digest"] == name
    return staging
started = os.path.join(options.head, "model.safetensors")
stream = {}
thread = threading.Thread(target=lambda: stream.update(complete("Rivers of Europe:", 120)))
thread.start()
staging = stage(started, digest(started))
assert staging["state"] == "ready" and status()["digest"] == digest(second), "staging alone changes nothing"
assert swap(started, digest=digest(started)) is None
thread.join()
assert stream["choices"][0]["text"] == quiet
assert status()["digest"] == digest(started) and status()["staging"]["state"] == "none"
for path in cases.values():
    staging = stage(path, digest(path) if os.path.exists(path) else "0")
    assert staging["state"] == "failed" and staging["error"], staging
assert stage(second, "0" * 64)["state"] == "failed", "the digest of another file"
assert status()["digest"] == digest(started)
print("staged, committed, refused:", staging["error"][:80])

# d2t: with a zero lm_head all logits tie and the head drafts the lowest target id, which d2t alone decides
def always(token):
    def change(t):
        t["lm_head.weight"].zero_()
        t["d2t"].fill_(token)
    return variant(f"always{token}", change)
probe = complete("Count: one, two, three, four,", 100)
produced = probe["choices"][0]["token_ids"]
vocabulary = verifier.config.vocab_size
fits = [token for token in set(produced) if token < vocabulary - 8192]
common = max(fits, key=produced.count)
never = next(token for token in range(5000, 9000) if token not in produced)
for token in (common, never, common):
    assert swap(always(token)) is None
    call("/reset_prefix_cache", {})
    before = counted()
    answer = complete("Count: one, two, three, four,", 100)
    again = answer["choices"][0]["token_ids"]
    _, drafted, accepted = difference(counted(), before)
    assert again == produced
    print("d2t", token, "occurs", produced.count(token), "accepted", accepted, "of", drafted)
    assert drafted > 0 and (accepted > 0) == (token == common)
    print("states with drafts accepted and rejected", check_file(exported(answer["id"])[0])[0])

# the head that it began with, again
assert swap(live) is None
final = status()
assert final["digest"] == first["digest"]
tap = final["tap"]
assert ended_counts() == counted()
assert tap["steps"] == tap["captured_steps"] > 0
for reason in ("missed_steps", "overrun_steps", "not_sampled", "over_budget", "incomplete", "dropped", "failed"):
    assert tap[reason] == 0, reason
print("end", final)
assert [name for name in os.listdir(options.transfer) if name.startswith(".")] == [".resend"]
