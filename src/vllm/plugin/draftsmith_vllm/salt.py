"""What names the rows of a prefix besides its token ids, so that files of the same prefix can be joined and no others.

As fine as vLLM's own prefix cache: requests that share KV blocks have one salt. Attributes alone are read, so this is
tested without vLLM.
"""

import hashlib
import json


def other_inputs(request) -> list:
    """What the request has besides token ids, and where; empty for text alone."""
    inputs = []
    for feature in getattr(request, "mm_features", None) or ():
        position = getattr(feature, "mm_position", None)
        inputs.append([
            # content that nobody names is the request's alone
            getattr(feature, "identifier", None) or request.request_id,
            getattr(position, "offset", None),
            getattr(position, "length", None),
        ])
    if getattr(request, "prompt_embeds", None) is not None:
        inputs.append(request.request_id)
    return inputs


def prefix_salt(request, inputs: list) -> str:
    """Empty where the token ids say it all, else a sha256 in hex. inputs: of other_inputs()."""
    named = {}
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        # a name may be given to another adapter
        named["lora"] = [lora.lora_name, getattr(lora, "lora_path", None)]
    cache_salt = getattr(request, "cache_salt", None)
    if cache_salt:
        named["cache_salt"] = cache_salt
    if inputs:
        named["inputs"] = inputs
    if not named:
        return ""
    # default: vLLM does not promise types, and a request must not fail here
    return hashlib.sha256(json.dumps(named, default=str).encode()).hexdigest()
